"""The `turn_indices` and `turn_states` columns: a token's turn, and a hash of the observation before it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from lightrl.columns.column import Column, TokenArray, Values

TURN_INDICES = Column("turn_indices", "i", fill=-1, as_runs=True)  # from 0; -1 for tokens that the policy only read
# Hash of the observation before the token's turn (for the first turn, the prompt), equal for equal observations.
TURN_STATES = Column("turn_states", "i", fill=-1, as_runs=True)


def turn_columns(token_ids: Sequence[int], turns: Iterable[tuple[int, int]], num_tokens: int) -> dict[str, Values]:
    """Makes both columns for the first `num_tokens` tokens; `turns` lists each turn's completion as (start, end)."""
    indices: list[tuple[float, int]] = []
    states: list[tuple[float, int]] = []
    before = 0
    for index, (start, end) in enumerate(turns):
        observation = TokenArray[Any](token_ids[before:start], "i").stored[0]
        digest = int.from_bytes(hashlib.blake2b(observation, digest_size=4).digest(), "big") >> 1  # fits int32
        indices += [(-1, start - before), (index, end - start)]
        states += [(-1, start - before), (digest, end - start)]
        before = end
    rest: list[tuple[float, int]] = [(-1, num_tokens - before)]
    return {
        TURN_INDICES.name: TokenArray.of_runs(indices + rest, "i"),
        TURN_STATES.name: TokenArray.of_runs(states + rest, "i"),
    }
