"""What travels with tokens, from the engine to the loss. Each column has one file with one declaration.

    engine ──► Completion ──► draft, Conversation ──► Trajectory ──► Experience ──► forward and loss
               columns=       extended, joined, cut    columns=      fields of [B, T]

Whatever handles tokens on this way handles their columns in loops, and knows none of them by name.

Reading order:
    token_array.py  TokenArray: the values of one column
    column.py       Column: dtype, fill, and how its values are joined and cut; `register`; columns in loops
    supports.py, routes.py, gaps.py, rewards.py  one column each

May import: errors. Reward workers import this package: neither torch nor numpy at the level of a module.

A further column is one file with one declaration, and `register` at its end. An engine returns it in
`Completion.columns`, and a loss reads `experience["its name"]`. strategies/model_inputs.py is for one that models read.
"""

from lightrl.columns.column import (
    TOKENS,
    Column,
    Columns,
    Values,
    as_columns,
    column_named,
    column_of,
    cut,
    extended,
    joined,
    register,
    registered,
)
from lightrl.columns.gaps import GAPS
from lightrl.columns.rewards import REWARDS
from lightrl.columns.routes import NATIVE, ROUTES
from lightrl.columns.supports import EVERY_TOKEN, SUPPORTS, support_ends
from lightrl.columns.token_array import TokenArray

for _column in (REWARDS, SUPPORTS, ROUTES, GAPS):
    register(_column)

__all__ = [
    "EVERY_TOKEN", "GAPS", "NATIVE", "REWARDS", "ROUTES", "SUPPORTS", "TOKENS", "Column", "Columns", "TokenArray",
    "Values", "as_columns", "column_named", "column_of", "cut", "extended", "joined", "register",
    "registered", "support_ends",
]  # fmt: skip
