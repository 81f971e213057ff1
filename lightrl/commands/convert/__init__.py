"""Configurations of other libraries, converted to ours: `lightrl convert` for AReaL.

Reading order:
    command.py      reads the file, applies the rules, prints the YAML and what has no counterpart
    areal_keys.py   a row for each key of AReaL: its name here, a rule, or why it has no counterpart

May import: what commands/ may. To convert one more key: its row in areal_keys.py.
"""

from lightrl.commands.convert.command import convert, run

__all__ = ["convert", "run"]
