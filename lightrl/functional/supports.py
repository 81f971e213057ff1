"""Supports: the tokens that could be drawn at a position, under top-p or top-k; as bytes, and in a softmax.

The logprob of a token drawn from a truncated distribution is that of the softmax over its support. So the support of
each draw travels with the token, and every model that judges the token renormalizes over it:

    engine ── bytes ──► Completion ──► Trajectory ──► Experience ── Supports.at ──► scores outside become NEVER

The code of a token is the sorted ids of its support without the drawn one, as gaps in variable-length bytes (LEB128),
and an end: 0, or 1 if every token of the vocabulary could be drawn. A support of one id takes 1 byte, one of k ids of a
vocabulary of 150,000 about 2·k. Codes are concatenated like the tokens they belong to.

Shapes: T tokens, N positions that predict a token, M ids of all supports, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrl.functional.device_copy import on_host, to_device
from lightrl.trajectory import TokenArray

EVERY_TOKEN = b"\x01"  # the code of a token that was read, or drawn from the whole vocabulary
# A score whose probability is 0; finite, so that 0 times it, and times a gradient, is 0.
NEVER = -1e30
_BITS = 7  # of a number, in each byte; the eighth tells that more follow
_MORE_BYTES = [2 ** (_BITS * count) for count in range(1, 5)]  # the least numbers of 2, 3, 4 and 5 bytes

_Ints = np.ndarray[Any, np.dtype[Any]]


def encode_supports(rows: _Ints, ids: _Ints, drawn: _Ints, vocabulary: int | None = None) -> list[bytes]:
    """The code of each of `len(drawn)` tokens.

    Args:
        rows: int [M], ascending: the token of each id.
        ids: int [M], of the supports, ascending within a token; no ids if every token could be drawn.
        drawn: int [n], the tokens.
        vocabulary: V, to recognize supports that are the whole vocabulary; None if it is not known.

    Raises:
        ValueError: if a drawn token is outside its support.
    """
    num = len(drawn)
    counts = np.bincount(rows, minlength=num)
    is_drawn = ids == drawn[rows]
    if int(is_drawn.sum()) != int((counts > 0).sum()):
        raise ValueError("A drawn token is outside the support that it was drawn from.")
    is_every = (counts == 0) | (counts == vocabulary)
    is_coded = ~(is_drawn | is_every[rows])
    rows, ids = rows[is_coded], ids[is_coded].astype(np.int64)
    gaps = np.diff(ids, prepend=-1) - 1
    is_first = np.diff(rows, prepend=-1) != 0
    gaps[is_first] = ids[is_first]
    num_numbers = np.bincount(rows, minlength=num) + 1
    ends = num_numbers.cumsum()
    numbers = np.empty(len(ids) + num, np.int64)
    is_end = np.zeros(len(numbers), bool)
    is_end[ends - 1] = True
    numbers[is_end], numbers[~is_end] = is_every, gaps + 2
    sizes = 1 + np.searchsorted(_MORE_BYTES, numbers, side="right")
    starts = sizes.cumsum() - sizes
    data = np.empty(int(sizes.sum()), np.uint8)
    for place in range(int(sizes.max(initial=0))):
        has_byte = sizes > place
        bits = (numbers[has_byte] >> (_BITS * place)) & 127
        data[starts[has_byte] + place] = bits | np.where(sizes[has_byte] > place + 1, 128, 0)
    whole = data.tobytes()
    bounds = [0, *(starts + sizes)[ends - 1].tolist()]
    return [whole[start:end] for start, end in itertools.pairwise(bounds)]


def joined_supports(parts: Sequence[tuple[int, Sequence[int] | None]]) -> TokenArray[int] | None:
    """The codes of parts of a trajectory, end to end; None if no part has codes.

    Args:
        parts: the tokens of each part and their codes; None if the policy did not write them, or from all tokens.
    """
    if all(codes is None for _, codes in parts):
        return None
    return TokenArray.joined([EVERY_TOKEN * num if codes is None else codes for num, codes in parts], "B")


def num_coded_tokens(codes: Sequence[int]) -> int:
    """How many tokens these bytes are the codes of."""
    data = np.asarray(codes, np.uint8)
    return int(_is_end(data).sum())


def decode_supports(codes: _Ints) -> tuple[_Ints, _Ints, _Ints]:
    """The inverse of `encode_supports`, for codes end to end, uint8.

    Returns:
        For each token whether every token could be drawn, bool [T]; how many others than the drawn one are in its
        support, int64 [T]; and their ids, int64 [M], end to end.
    """
    if not len(codes):
        return np.zeros(0, bool), np.zeros(0, np.int64), np.zeros(0, np.int64)
    is_last = codes < 128
    starts = np.flatnonzero(is_last)
    starts = np.concatenate([[0], starts[:-1] + 1])
    place = np.arange(len(codes)) - starts.repeat(np.diff(starts, append=len(codes)))
    numbers = np.add.reduceat((codes & 127).astype(np.int64) << (_BITS * place), starts)
    is_end = numbers < 2
    ends = np.flatnonzero(is_end)
    counts = np.diff(ends, prepend=-1) - 1
    totals = np.where(is_end, 0, numbers - 1).cumsum()
    before = np.concatenate([[0], totals[ends[:-1]]])
    return numbers[ends] == 1, counts, totals[~is_end] - before.repeat(counts) - 1


def _is_end(data: _Ints) -> _Ints:
    follows = np.concatenate([[False], data[:-1] >= 128]) if len(data) else np.zeros(0, bool)
    ends: _Ints = (data < 2) & ~follows
    return ends


@dataclass(frozen=True)
class Supports:
    """The supports of N positions, for the softmax of their scores."""

    is_every: Tensor  # bool [N], True where every token could be drawn
    rows: Tensor  # int64 [M], ascending: the position of each id
    ids: Tensor  # int64 [M], drawn tokens included; only of positions with a support
    ends: tuple[int, ...]  # [N], of the ids of each position; on the host, which cuts chunks

    @classmethod
    def at(cls, codes: Sequence[Tensor], lengths: Tensor, token_ids: Tensor, rows: Tensor, columns: Tensor) -> Supports:
        """At the positions (rows [N], columns [N]), which predict the token in the next column.

        Args:
            codes: uint8, of each row's tokens; on the host.
            lengths: int64 [B], tokens of each row.
            token_ids: int64 [B, T]; their device is that of the result.
        """
        is_every, counts, ids = decode_supports(torch.cat(list(codes)).numpy())
        # Where the tokens are among all; one more, without a support, stands for those in the padding.
        sizes = on_host(lengths).numpy()
        row, column = on_host(rows).numpy(), on_host(columns).numpy() + 1
        token = np.where(column < sizes[row], (sizes.cumsum() - sizes)[row] + column, len(counts))
        is_every, counts = np.append(is_every, True), np.append(counts, 0)
        first = (counts.cumsum() - counts)[token]
        is_every, num_others = is_every[token], counts[token]
        others = (first - (num_others.cumsum() - num_others)).repeat(num_others) + np.arange(int(num_others.sum()))
        num_ids = num_others + ~is_every
        ends = num_ids.cumsum()
        is_drawn = np.zeros(int(num_ids.sum()), bool)
        is_drawn[(ends - 1)[~is_every]] = True
        found = np.empty(len(is_drawn), np.int64)
        found[~is_drawn] = ids[others]
        found[is_drawn] = on_host(token_ids).numpy()[row[~is_every], column[~is_every]]
        tensors = (is_every, np.arange(len(num_ids)).repeat(num_ids), found)
        every, of_ids, moved = (to_device(torch.from_numpy(value), token_ids.device) for value in tensors)
        return cls(every, of_ids, moved, tuple(ends.tolist()))

    def chunk(self, chunk: slice) -> Supports:
        """Those of consecutive positions."""
        first, last, _ = chunk.indices(len(self.ends))
        before = self.ends[first - 1] if first else 0
        ends = tuple(end - before for end in self.ends[first:last])
        part = slice(before, before + (ends[-1] if ends else 0))
        return Supports(self.is_every[first:last], self.rows[part] - first, self.ids[part], ends)

    def limit(self, scores: Tensor, first_id: int | None = None) -> Tensor:
        """Scores [N, V], NEVER outside the supports.

        Args:
            first_id: that of the first column, if the columns are a part of the vocabulary; None if they are all.
        """
        rows, ids = self.rows, self.ids
        if first_id is not None:
            ids = ids - first_id
            is_here = (ids >= 0) & (ids < scores.shape[1])
            rows, ids = rows[is_here], ids[is_here]
        limited = torch.where(self.is_every[:, None], scores, NEVER)
        return limited.index_put_((rows, ids), scores[rows, ids])
