"""A made-up column, for columns_run.py: how much the engine doubts each token that it sampled."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightrl.columns import Column, register

DOUBT = Column("doubt", "f")
register(DOUBT)


def doubts(token_ids: Sequence[int], logprobs: Sequence[float]) -> Any:
    """What the engine says of its tokens: a number that no two tokens of a test share, unless they are the same."""
    return np.asarray(token_ids, np.float32) - 3 * np.asarray(logprobs, np.float32)
