"""Checks of a configuration, whose errors name the setting, and errors of user code and disks, made readable.

Reading order:
    bounds.py       numbers within their bounds; equal shapes
    choices.py      words from a list
    dotted_path.py  functions that a configuration names
    user_code.py    exceptions of user code become ours
    disk_errors.py  why a file could not be written
    file_sums.py    whether files still have the bytes that they were given
    publish.py      files and folders that get their name when they are complete
    printable.py    text of programs, without codes for the terminal; durations
    status_files.py names of the files that `lightrl status` reads

May import: nothing of lightrl but errors. To add one: a function that raises ValueError and says how to fix it.
"""
