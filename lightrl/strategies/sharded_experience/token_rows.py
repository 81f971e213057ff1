"""TokenRows: a field per token, without padding, for those of an iteration's trajectories that are on this rank.

Shapes: B trajectories of the iteration, N tokens of some of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Values = np.ndarray[Any, np.dtype[Any]]


class TokenRows:
    """Values per token on the host: for each row an array [tokens of the row, ...], or None if it is on another rank.

    Args:
        rows: the arrays, B of them.
        empty: an array [0, ...] with their dtype and shape.
    """

    def __init__(self, rows: Sequence[Any], empty: Values) -> None:
        self.rows = rows
        self.empty = empty

    @classmethod
    def of_rows(cls, rows: Sequence[Values]) -> TokenRows:
        """Makes it from the values of all rows; there must be at least one."""
        return cls(rows, rows[0][:0])

    @classmethod
    def of_flat(cls, values: Values, lengths: Tensor, rows: Sequence[int] | None = None) -> TokenRows:
        """Splits an array [N, ...] of the concatenated values of `rows`, or of all rows."""
        rows = range(len(lengths)) if rows is None else rows
        made: list[Values | None] = [None] * len(lengths)
        start = 0
        for row, length in zip(rows, lengths[list(rows)].tolist(), strict=True):
            made[row] = values[start : start + length]
            start += length
        return cls(made, values[:0])

    @classmethod
    def of_padded(
        cls, values: Tensor, lengths: Tensor, rows: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> TokenRows:
        """Takes the values of `rows`, or of all rows, from a tensor [b, T, ...]."""
        here = lengths if rows is None else lengths[list(rows)]
        flat = values.detach().cpu()[torch.arange(values.shape[1]) < here[:, None]]
        return cls.of_flat(flat.to(dtype or flat.dtype).numpy(), lengths, rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def here(self) -> list[int]:
        return [row for row, values in enumerate(self.rows) if values is not None]

    @property
    def is_whole(self) -> bool:
        """Whether all rows are here."""
        return all(values is not None for values in self.rows)

    @property
    def token_bytes(self) -> int:
        return int(self.empty.itemsize * np.prod(self.empty.shape[1:]))

    def flat(self, rows: Iterable[int] | None = None) -> Values:
        """Concatenates the values of these rows, or of all, in their order: an array [N, ...]."""
        picked = self.rows if rows is None else [self.rows[row] for row in rows]
        return np.concatenate([self.empty, *picked])

    def select(self, rows: Iterable[int]) -> TokenRows:
        return TokenRows([self.rows[row] for row in rows], self.empty)

    def only(self, rows: Collection[int]) -> TokenRows:
        """Returns a copy without the values of other rows."""
        return TokenRows([values if row in rows else None for row, values in enumerate(self.rows)], self.empty)

    def with_flat(self, values: Values, lengths: Tensor, rows: Sequence[int]) -> TokenRows:
        """Returns a copy with the concatenated values of further rows."""
        added = TokenRows.of_flat(values, lengths, rows).rows
        return TokenRows([old if new is None else new for old, new in zip(self.rows, added, strict=True)], self.empty)

    def times(self, values: Tensor) -> TokenRows:
        """Returns each row's value, from [B], where this mask is True, and 0 elsewhere."""
        numbers = values.numpy()
        zero = numbers.dtype.type(0)
        pairs = zip(self.rows, numbers, strict=True)
        return TokenRows([None if mask is None else np.where(mask, value, zero) for mask, value in pairs], numbers[:0])

    def with_end(self, rows: Collection[int], value: float) -> TokenRows:
        """Returns a copy with one more token in these rows, if they are here."""
        end = np.full((1, *self.empty.shape[1:]), value, self.empty.dtype)
        longer = [
            np.concatenate([values, end]) if row in rows and values is not None else values
            for row, values in enumerate(self.rows)
        ]
        return TokenRows(longer, self.empty)
