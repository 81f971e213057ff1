"""Columns: data that travels with tokens from the engine to the loss. Each column is declared in one file.

    engine ──► Completion ──► draft, Conversation ──► Trajectory ──► Experience ──► forward and loss
               columns=       extended, joined, cut    columns=      fields of [B, T]

All code on this path loops over the columns and never names one.

Reading order:
    column.py       Column: dtype, fill value, how to join and cut its values (TokenArrays); functions for all columns
    supports.py, routes.py, gaps.py, rewards.py, agents.py  declare one column each; topk.py and turns.py, two each

May import: errors. Reward workers import this package, so modules must not import torch or numpy at the top level.

To add a column, declare it in a separate file and call `register`. An engine returns it in `Completion.columns`, and a
loss reads `experience["its name"]`. If models read it, see strategies/single.py.
"""

from lightrl.columns.agents import AGENTS, COPIES
from lightrl.columns.column import (
    TOKENS,
    Column,
    Columns,
    TokenArray,
    Values,
    as_columns,
    column_named,
    column_of,
    cut,
    extended,
    joined,
    register,
    registered,
    reserve,
)
from lightrl.columns.gaps import GAPS
from lightrl.columns.rewards import REWARDS
from lightrl.columns.routes import NATIVE, ROUTES
from lightrl.columns.supports import EVERY_TOKEN, SUPPORTS, support_ends
from lightrl.columns.topk import NO_TOKEN, TOPK_IDS, TOPK_LOGPROBS, TOPK_NAMES, topk_columns, topk_parts
from lightrl.columns.turns import TURN_INDICES, TURN_STATES, turn_columns

for _column in (REWARDS, SUPPORTS, ROUTES, GAPS, AGENTS, TOPK_IDS, TOPK_LOGPROBS, TURN_INDICES, TURN_STATES):
    register(_column)

__all__ = [
    "AGENTS", "COPIES", "EVERY_TOKEN", "GAPS", "NATIVE", "NO_TOKEN", "REWARDS", "ROUTES", "SUPPORTS", "TOKENS",
    "TOPK_IDS", "TOPK_LOGPROBS", "TOPK_NAMES", "TURN_INDICES", "TURN_STATES", "Column", "Columns", "TokenArray",
    "Values", "as_columns", "column_named", "column_of", "cut", "extended", "joined", "register", "registered",
    "reserve", "support_ends", "topk_columns", "topk_parts", "turn_columns",
]  # fmt: skip
