"""The `supports` column: the tokens that top-p or top-k allowed, encoded as in functional/supports.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lightrl.columns.column import Column, Values

EVERY_TOKEN = b"\x01"  # the code of a token that was not sampled, or was sampled from the whole vocabulary


def support_ends(codes: Any) -> Any:
    """Returns the end of each token's code, int64 [T]. A code is a sequence of varints that ends with 0 or 1."""
    import numpy as np

    data = np.asarray(codes, np.uint8)
    is_first = np.append(True, data < 128)[:-1]  # first byte of a number
    return np.flatnonzero((data < 2) & is_first) + 1


@dataclass(frozen=True)
class _Supports(Column):
    is_coded: ClassVar[bool] = True
    required_if: ClassVar[str] = "is_truncated"

    def problem(self, values: Values, num_tokens: int) -> str | None:
        num_coded = len(support_ends(values))
        if num_coded == num_tokens:
            return None
        return (
            f"has the supports of {num_coded} tokens but {num_tokens} token_ids. Join its completions' columns with "
            "lightrl.columns.extended."
        )

    def requirement(self, sampling: Any) -> str:
        return (
            f"top_p={sampling.top_p:g} and top_k={sampling.top_k} truncate its sampling, so the trainer's logprobs "
            "would be wrong. Set top_p to 1 and top_k to -1, or return the supports (functional.encode_supports)"
        )

    def _indices(self, values: Values, num_tokens: int, tokens: Sequence[int]) -> list[int]:
        starts = {0: 0, num_tokens: len(values)}
        if not starts.keys() >= set(tokens):
            ends = support_ends(values)
            starts |= {token: int(ends[token - 1]) for token in tokens if token}
        return [starts[token] for token in tokens]


SUPPORTS = _Supports("supports", "B", fill=EVERY_TOKEN[0], is_hidden=True, is_model_input=True)
