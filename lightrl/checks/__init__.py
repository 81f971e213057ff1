"""Checks on a configuration, with errors that name the setting; readable errors for user code and failed writes.

Reading order:
    annotations.py  annotations that type checkers and jsonargparse read differently
    bounds.py       numbers within bounds, choices from a list, settings without effect, equal shapes, format strings
    user_code.py    finds functions that a configuration names; translates exceptions raised by user code
    entry_points.py optional parts that the core loads by name
    files.py        why a write failed; atomic publishing and checksums; the file names that `lightrl status` reads
    printable.py    text without terminal control codes; counts and durations in words
    secret_settings.py  finds and removes secrets in settings

May import: only lightrl.errors. To add a check, write a function that raises ValueError and says how to fix it.
"""
