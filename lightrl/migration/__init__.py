"""Configurations of other libraries, converted to ours: `lightrl convert` for AReaL.

Reading order:
    convert.py      reads the file, applies the rules, prints the YAML and what has no counterpart
    areal_keys.py   a row for each key of AReaL: its name here, a rule, or why it has no counterpart

May import: everything but commands. To convert one more key: its row in areal_keys.py.
"""
