"""lightrl convert: turns configurations from other libraries (currently only AReaL) into lightrl's.

Reading order:
    command.py      reads the file, applies the rules, prints the YAML and what has no counterpart
    areal_keys.py   a row for each AReaL key: its name in lightrl, a rule, or why it has no counterpart

May import whatever commands/ may. To convert one more key, add its row to areal_keys.py.
"""

from lightrl.commands.convert.command import convert, run

__all__ = ["convert", "run"]
