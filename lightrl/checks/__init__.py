"""Checks of what a configuration says, each with an error that names the setting.

Reading order:
    bounds.py       numbers within their bounds
    choices.py      words from a list
    dotted_path.py  functions that a configuration names
    disk_errors.py  why a file could not be written

May import: nothing of lightrl but errors. To add one: a function that raises ValueError and says how to fix it.
"""
