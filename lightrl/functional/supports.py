"""Supports: the tokens that could be sampled at a position, under top-p or top-k; as bytes, and in a softmax.

The logprob of a token sampled from a truncated distribution is that of the softmax over its support. So the support of
each sampled token travels with it, and every model that computes its logprob renormalizes over it:

    engine ── bytes ──► Completion ──► Trajectory ──► Experience ── Supports.at ──► logits of M ids ──► softmax

The code of a token is the sorted ids of its support without the sampled one, as gaps in variable-length bytes (LEB128)
and an end: 0, or 1 if every token of the vocabulary could be sampled. A support of one id takes 1 byte, one of k ids of
a vocabulary of 150,000 about 2·k. Codes are concatenated like the tokens they belong to.

Shapes: T tokens; N positions that predict a token, n of them with a support; M ids of all supports; V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from lightrl.functional.device_copy import on_host, to_device

_BITS = 7  # each byte holds seven bits of a number; the eighth says that more follow
_MORE_BYTES = [2 ** (_BITS * count) for count in range(1, 5)]  # the least numbers of 2, 3, 4 and 5 bytes

_Ints = np.ndarray[Any, np.dtype[Any]]
_Pair = tuple[Tensor, Tensor]


def encode_supports(rows: _Ints, ids: _Ints, sampled: _Ints, vocabulary: int | None = None) -> list[bytes]:
    """The code of each of `len(sampled)` tokens.

    Args:
        rows: int [M], ascending: the token of each id.
        ids: int [M], of the supports, ascending within a token; no ids if every token could be sampled.
        sampled: int [n], the tokens.
        vocabulary: V, to recognize supports that are the whole vocabulary; None if it is not known.
    """
    num = len(sampled)
    counts = np.bincount(rows, minlength=num)
    is_sampled = ids == sampled[rows]
    if int(is_sampled.sum()) != int((counts > 0).sum()):
        raise ValueError("A sampled token is outside the support that it was sampled from.")
    is_every = (counts == 0) | (counts == vocabulary)
    is_coded = ~(is_sampled | is_every[rows])
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


def decode_supports(codes: _Ints) -> tuple[_Ints, _Ints, _Ints]:
    """The inverse of `encode_supports`, for codes end to end, uint8.

    Returns:
        For each token whether every token could be sampled, bool [T]; how many others than the sampled one are in its
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


@dataclass(frozen=True)
class Supports:
    """The supports of those of N positions that have one; n positions with M ids in all."""

    limited: Tensor  # int64 [n], ascending: the positions with a support
    others: Tensor  # int64 [N - n], ascending: those where every token could be sampled
    ids: Tensor  # int64 [M], end to end; the sampled token is the last of each
    rows: Tensor  # int64 [M], ascending: which of the n has the id
    counts: Tensor  # int64 [n]
    ends: list[int]  # [n], of the ids of each; on the host, which cuts chunks

    @classmethod
    def at(cls, codes: Sequence[Tensor], lengths: Tensor, token_ids: Tensor, rows: Tensor, columns: Tensor) -> Supports:
        """Selects positions (rows [N], columns [N]), which predict the token in the next column.

        Args:
            codes: uint8, of each row's tokens; on the host.
            lengths: int64 [B], tokens of each row.
            token_ids: int64 [B, T]; their device is that of the result.
        """
        is_every, num_others, ids = decode_supports(torch.cat(list(codes)).numpy())
        # Where the tokens are among all; one more, without a support, stands for those in the padding.
        sizes = on_host(lengths).numpy()
        row, column = on_host(rows).numpy(), on_host(columns).numpy() + 1
        token = np.where(column < sizes[row], (sizes.cumsum() - sizes)[row] + column, len(num_others))
        is_limited = ~np.append(is_every, True)[token]
        token, row, column = token[is_limited], row[is_limited], column[is_limited]
        others = num_others[token]
        counts = others + 1
        ends = counts.cumsum()
        is_sampled = np.zeros(int(counts.sum()), bool)
        is_sampled[ends - 1] = True
        first = (num_others.cumsum() - num_others)[token] - (others.cumsum() - others)
        other_ids = np.empty(len(is_sampled), np.int64)
        other_ids[~is_sampled] = ids[first.repeat(others) + np.arange(int(others.sum()))]
        other_ids[is_sampled] = on_host(token_ids).numpy()[row, column]

        def moved(values: _Ints) -> Tensor:
            return to_device(torch.from_numpy(values), token_ids.device)

        return cls(
            limited=moved(np.flatnonzero(is_limited)),
            others=moved(np.flatnonzero(~is_limited)),
            ids=moved(other_ids),
            rows=moved(np.arange(len(counts)).repeat(counts)),
            counts=moved(counts),
            ends=ends.tolist(),
        )

    def chunks(self, num: int) -> Iterator[tuple[slice, slice]]:
        """Yields at most `num` of the n positions at a time, and their ids."""
        for start in range(0, len(self.ends), num):
            end = min(start + num, len(self.ends))
            yield slice(start, end), slice(self.ends[start - 1] if start else 0, self.ends[end - 1])

    def logprobs(self, scores: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Logprobs of the sampled tokens and entropies, [n] each, of the softmax over each support.

        Args:
            scores: [M], logits of the ids. Carries the gradient.
        """
        # The check that unsafe leaves out reads the lengths from the device.
        reduce = functools.partial(torch.segment_reduce, lengths=self.counts, unsafe=True)
        shifted = (scores - reduce(scores.detach(), "max")[self.rows]) / temperature  # else large logits lose digits
        powers = shifted.exp()
        total = reduce(powers, "sum")
        weighted = reduce(powers * shifted, "sum")
        normalizer = total.log()
        return shifted[self.counts.cumsum(0) - 1] - normalizer, normalizer - weighted / total

    def filled(self, within: tuple[Tensor, Tensor], read: Callable[[Tensor], tuple[Tensor, Tensor]]) -> _Pair:
        """Logprobs and entropies of all N positions.

        Args:
            within: those of the n positions with a support.
            read: gives those of other positions; called only if there are any.
        """
        if not len(self.others):
            return within
        logprobs, entropy = read(self.others)
        num = len(self.limited) + len(self.others)
        zeros = logprobs.new_zeros(num), entropy.new_zeros(num)
        pairs = zip(zeros, (logprobs, entropy), within, strict=True)
        filled = (zero.index_put((self.others,), other).index_put((self.limited,), own) for zero, other, own in pairs)
        return next(filled), next(filled)


def support_scores(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    supports: Supports,
    *,
    chunk_tokens: int,
    first_id: int = 0,
    total: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """The logits of the supports' ids, float32 [M]; keeps nothing of size V but the head.

    Args:
        hidden: [n, H] at the positions with a support. Carries the gradient, like weight and bias.
        weight: [V, H] of the output head, or this rank's rows of it.
        bias: [V], or None.
        chunk_tokens: positions whose logits exist at a time.
        first_id: the id of the first of this rank's rows.
        total: sums [M] in place over the ranks that have the other rows; None if this one has all.
    """
    scores: Tensor = _SupportScores.apply(hidden, weight, bias, supports, chunk_tokens, first_id, total)  # type: ignore[no-untyped-call]
    return scores


class _SupportScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        supports: Supports,
        chunk_tokens: int,
        first_id: int,
        total: Callable[[Tensor], object] | None,
    ) -> Tensor:
        rows, ids = supports.rows, supports.ids - first_id
        is_here = None if total is None else (ids >= 0) & (ids < weight.shape[0])
        if is_here is not None:
            ids = torch.where(is_here, ids, 0)
        scores = torch.empty(len(ids), dtype=torch.promote_types(weight.dtype, torch.float32), device=hidden.device)
        for positions, part in supports.chunks(chunk_tokens):
            logits = linear(hidden[positions], weight, bias)
            scores[part] = logits[rows[part] - positions.start, ids[part]].to(scores.dtype)
        if total is not None and is_here is not None:
            scores = torch.where(is_here, scores, 0.0)
            total(scores)
        ctx.save_for_backward(hidden, weight, bias, ids, is_here)
        ctx.supports, ctx.chunk_tokens = supports, chunk_tokens
        return scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_scores: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, is_here = ctx.saved_tensors
        if is_here is not None:
            grad_scores = torch.where(is_here, grad_scores, 0.0)
        grad_hidden = torch.empty_like(hidden)
        # Summed in float32 at least: a bfloat16 sum of hundreds of chunks would lose most of the small ones.
        grad_weight = torch.zeros_like(weight, dtype=grad_scores.dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=grad_scores.dtype)
        for positions, part in ctx.supports.chunks(ctx.chunk_tokens):
            gradient = grad_scores.new_zeros(positions.stop - positions.start, weight.shape[0])
            indices = (ctx.supports.rows[part] - positions.start, ids[part])
            gradient.index_put_(indices, grad_scores[part], accumulate=is_here is not None)
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
            gradient = gradient.to(weight.dtype)
            torch.mm(gradient, weight, out=grad_hidden[positions])
            grad_weight += gradient.T @ hidden[positions]
        return (
            grad_hidden,
            grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 4,
        )
