"""Checks of a configuration, whose errors name the setting, and errors of user code and disks, made readable.

Reading order:
    bounds.py       numbers within bounds, choices from a list, settings without effect, equal shapes
    user_code.py    functions that a configuration names; translates the exceptions of user code
    templates.py    format strings
    entry_points.py leaves that the core finds by name
    files.py        why a file could not be written; publishing complete files; the names that `lightrl status` reads
    printable.py    output of programs without terminal control codes; durations
    secret_settings.py  which settings are secrets; settings without secrets

May import: only lightrl.errors. To add a check, write a function that raises ValueError and says how to fix it.
"""
