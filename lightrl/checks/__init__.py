"""Checks of a configuration, whose errors name the setting, and errors of user code and disks, made readable.

Reading order:
    bounds.py       numbers within bounds, words from a list, settings without effect; equal shapes
    user_code.py    functions that a configuration names; exceptions of user code become ours
    disk_errors.py  why a file could not be written
    publish.py      files and folders that get their name when they are complete, and the sums of their bytes
    printable.py    text of programs, without codes for the terminal; durations
    status_files.py names of the files that `lightrl status` reads

May import: nothing of lightrl but errors. To add one: a function that raises ValueError and says how to fix it.
"""
