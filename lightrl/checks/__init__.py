"""Checks of a configuration, whose errors name the setting, and errors of user code and disks, made readable.

Reading order:
    bounds.py       numbers within bounds, words from a list, settings without effect; equal shapes
    user_code.py    functions that a configuration names; exceptions of user code become ours
    templates.py    format strings
    entry_points.py  leaves that the core finds by name
    files.py        why one could not be written; names that appear when a file is complete; those of `lightrl status`
    printable.py    text of programs, without codes for the terminal; durations
    secret_settings.py  names of secrets; settings without their values

May import: nothing of lightrl but errors. To add one: a function that raises ValueError and says how to fix it.
"""
