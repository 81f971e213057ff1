"""Supports: the tokens that top-p or top-k allowed at a position, how they are encoded, and the softmax over them.

With truncated sampling, a token's logprob comes from the softmax over its support. Each sampled token therefore
carries its support, and every model that computes the token's logprob renormalizes over it:

    engine ── bytes ──► Completion ──► Trajectory ──► Experience ── Supports.at ──► logits of M ids ──► softmax

A token's code lists the sorted ids of its support, except the sampled id, as differences in variable-length bytes
(LEB128), then an end mark: 0, or 1 if every token of the vocabulary could be sampled. A support of one id takes 1 byte;
with a vocabulary of 150,000, k ids take about 2·k bytes. Codes are concatenated in token order.

Shapes: T tokens; N positions that predict a token, n of them with a support; M ids in all supports; V vocabulary.
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

_BITS = 7  # each byte holds seven bits of a number; the eighth is set if more bytes follow
_MORE_BYTES = [2 ** (_BITS * count) for count in range(1, 5)]  # smallest numbers that need 2, 3, 4 and 5 bytes

_Ints = np.ndarray[Any, np.dtype[Any]]
_Pair = tuple[Tensor, Tensor]


def encode_supports(rows: _Ints, ids: _Ints, sampled: _Ints, vocabulary: int | None = None) -> list[bytes]:
    """Encodes the support of each of `len(sampled)` tokens.

    Args:
        rows: int [M], ascending: index of the token that each id belongs to.
        ids: int [M], the supports' ids, ascending within a token. A token has no ids if any token could be sampled.
        sampled: int [n], the sampled tokens.
        vocabulary: V, to detect supports that are the whole vocabulary; None if unknown.
    """
    num = len(sampled)
    counts = np.bincount(rows, minlength=num)
    is_sampled = ids == sampled[rows]
    if int(is_sampled.sum()) != int((counts > 0).sum()):
        raise ValueError("A sampled token is not in the support that it was sampled from.")
    is_unlimited = (counts == 0) | (counts == vocabulary)
    is_coded = ~(is_sampled | is_unlimited[rows])
    rows, ids = rows[is_coded], ids[is_coded].astype(np.int64)
    gaps = np.diff(ids, prepend=-1) - 1
    is_first = np.diff(rows, prepend=-1) != 0
    gaps[is_first] = ids[is_first]
    ends = (np.bincount(rows, minlength=num) + 1).cumsum()
    numbers = np.empty(len(ids) + num, np.int64)
    is_end = np.zeros(len(numbers), bool)
    is_end[ends - 1] = True
    numbers[is_end], numbers[~is_end] = is_unlimited, gaps + 2  # 0 and 1 are end marks
    sizes = 1 + np.searchsorted(_MORE_BYTES, numbers, side="right")
    starts = sizes.cumsum() - sizes
    data = np.empty(int(sizes.sum()), np.uint8)
    for index in range(int(sizes.max(initial=0))):
        has_byte = sizes > index
        bits = (numbers[has_byte] >> (_BITS * index)) & 127
        data[starts[has_byte] + index] = bits | np.where(sizes[has_byte] > index + 1, 128, 0)
    codes = data.tobytes()
    bounds = [0, *(starts + sizes)[ends - 1].tolist()]
    return [codes[start:end] for start, end in itertools.pairwise(bounds)]


def decode_supports(codes: _Ints) -> tuple[_Ints, _Ints, _Ints]:
    """Decodes concatenated codes from `encode_supports`, uint8.

    Returns:
        Whether every token could be sampled, bool [T]; the number of ids in each support, except the sampled id,
        int64 [T]; and these ids, concatenated, int64 [M].
    """
    if not len(codes):
        return np.zeros(0, bool), np.zeros(0, np.int64), np.zeros(0, np.int64)
    is_last = codes < 128  # the last byte of a number
    starts = np.flatnonzero(is_last)
    starts = np.concatenate([[0], starts[:-1] + 1])
    byte_index = np.arange(len(codes)) - starts.repeat(np.diff(starts, append=len(codes)))  # within the number
    numbers = np.add.reduceat((codes & 127).astype(np.int64) << (_BITS * byte_index), starts)
    is_end = numbers < 2
    ends = np.flatnonzero(is_end)
    counts = np.diff(ends, prepend=-1) - 1
    totals = np.where(is_end, 0, numbers - 1).cumsum()  # a number is an id's distance from the previous id, plus 1
    before = np.concatenate([[0], totals[ends[:-1]]])
    return numbers[ends] == 1, counts, totals[~is_end] - before.repeat(counts) - 1


@dataclass(frozen=True)
class Supports:
    """The supports at n of N positions, with M ids in total; at the other positions every token could be sampled."""

    limited: Tensor  # int64 [n], ascending: the positions with a support
    unlimited: Tensor  # int64 [N - n], ascending: the other positions
    ids: Tensor  # int64 [M], the concatenated supports; each ends with the sampled token
    rows: Tensor  # int64 [M], ascending: index of the support, 0 to n - 1, that each id belongs to
    counts: Tensor  # int64 [n], number of ids in each support
    ends: list[int]  # [n], end of each support in `ids`; on the host, which computes the chunks

    @classmethod
    def at(cls, codes: Sequence[Tensor], lengths: Tensor, token_ids: Tensor, rows: Tensor, columns: Tensor) -> Supports:
        """Selects the supports at positions (rows [N], columns [N]); each predicts the token in the next column.

        Args:
            codes: uint8, the codes of each row's tokens; on the host.
            lengths: int64 [B], number of tokens in each row.
            token_ids: int64 [B, T]; the result is on their device.
        """
        is_unlimited, num_others, other_ids = decode_supports(torch.cat(list(codes)).numpy())
        # Each token's index among the tokens of all rows. Padding gets an additional index, which has no support.
        sizes = on_host(lengths).numpy()
        row, column = on_host(rows).numpy(), on_host(columns).numpy() + 1
        token = np.where(column < sizes[row], (sizes.cumsum() - sizes)[row] + column, len(num_others))
        is_limited = ~np.append(is_unlimited, True)[token]
        token, row, column = token[is_limited], row[is_limited], column[is_limited]
        counts = num_others[token] + 1
        ends = counts.cumsum()
        is_sampled = np.zeros(int(counts.sum()), bool)
        is_sampled[ends - 1] = True
        support_ids = np.empty(len(is_sampled), np.int64)
        support_ids[~is_sampled] = other_ids[_ranges((num_others.cumsum() - num_others)[token], num_others[token])]
        support_ids[is_sampled] = on_host(token_ids).numpy()[row, column]

        def on_device(values: _Ints) -> Tensor:
            return to_device(torch.from_numpy(values), token_ids.device)

        return cls(
            limited=on_device(np.flatnonzero(is_limited)),
            unlimited=on_device(np.flatnonzero(~is_limited)),
            ids=on_device(support_ids),
            rows=on_device(np.arange(len(counts)).repeat(counts)),
            counts=on_device(counts),
            ends=ends.tolist(),
        )

    def chunks(self, num: int) -> Iterator[tuple[slice, slice]]:
        """Yields slices of at most `num` of the n positions, each with the slice of their ids."""
        for start in range(0, len(self.ends), num):
            end = min(start + num, len(self.ends))
            yield slice(start, end), slice(self.ends[start - 1] if start else 0, self.ends[end - 1])

    def logprobs(self, scores: Tensor, temperature: float, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tokens' logprobs, [n] or [n, J], and the entropies, [n], of the softmax over each support.

        Args:
            scores: [M], logits of the ids. Carries the gradient.
            token_ids: int64 [N], the sampled tokens; or [N, J], candidates at each position, whose logprob is -inf if
                they are not in the support.
        """
        # `unsafe` skips a check that would read the lengths from the device.
        reduce = functools.partial(torch.segment_reduce, lengths=self.counts, unsafe=True)
        shifted = (scores - reduce(scores.detach(), "max")[self.rows]) / temperature  # keeps the digits of large logits
        powers = shifted.exp()
        total = reduce(powers, "sum")
        weighted = reduce(powers * shifted, "sum")
        normalizer = total.log()
        entropy = normalizer - weighted / total
        if token_ids.dim() == 1:
            return shifted[self.counts.cumsum(0) - 1] - normalizer, entropy
        places = self._places(token_ids[self.limited])
        within = shifted[places.clamp(min=0)] - normalizer[:, None]
        return torch.where(places >= 0, within, -torch.inf), entropy

    def _places(self, token_ids: Tensor) -> Tensor:
        """Returns the index in `ids` of each of these tokens, [n, J]; -1 if it is not in its position's support."""
        base = torch.cat([self.ids, token_ids.flatten()]).amax() + 1
        keys, order = (self.rows * base + self.ids).sort()
        wanted = torch.arange(len(token_ids), device=token_ids.device)[:, None] * base + token_ids
        places = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        return torch.where(keys[places] == wanted, order[places], -1)

    def filled(self, limited: _Pair, compute_unlimited: Callable[[Tensor], _Pair]) -> _Pair:
        """Returns logprobs and entropies of all N positions.

        Args:
            limited: logprobs and entropies of the n positions with a support.
            compute_unlimited: computes both at the other positions; called only if there are any.
        """
        if not len(self.unlimited):
            return limited
        places, num = (self.unlimited,), len(self.unlimited) + len(self.limited)
        logprobs, entropy = (
            others.new_zeros(num, *others.shape[1:]).index_put(places, others).index_put((self.limited,), within)
            for others, within in zip(compute_unlimited(self.unlimited), limited, strict=True)
        )
        return logprobs, entropy


def _ranges(starts: _Ints, sizes: _Ints) -> _Ints:
    """Concatenates ranges of integers: starts [5, 2] and sizes [2, 3] give [5, 6, 2, 3, 4]."""
    offsets: _Ints = (starts - (sizes.cumsum() - sizes)).repeat(sizes)
    return offsets + np.arange(len(offsets))


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
    """Computes the logits of the supports' ids, float32 [M]. Stores no tensor of size V except the head.

    Args:
        hidden: [n, H] at the positions with a support. Carries the gradient, as do weight and bias.
        weight: [V, H] of the output head, or this rank's rows of it.
        bias: [V], or None.
        chunk_tokens: number of positions whose logits are in memory at a time.
        first_id: the token id of this rank's first row.
        total: sums [M] in place over the ranks that hold the head's other rows; None if this rank holds all rows.
    """
    scores: Tensor = _SupportScores.apply(hidden, weight, bias, supports, chunk_tokens, first_id, total)  # type: ignore[no-untyped-call]
    return scores


class _SupportScores(torch.autograd.Function):
    """Keeps the logits, or their gradient, of only one chunk of positions in memory at a time."""

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
        is_own = None if total is None else (ids >= 0) & (ids < weight.shape[0])  # ids of this rank's rows
        if is_own is not None:
            ids = torch.where(is_own, ids, 0)
        scores = torch.empty(len(ids), dtype=torch.promote_types(weight.dtype, torch.float32), device=hidden.device)
        for positions, ids_slice in supports.chunks(chunk_tokens):
            logits = linear(hidden[positions], weight, bias)
            scores[ids_slice] = logits[rows[ids_slice] - positions.start, ids[ids_slice]].to(scores.dtype)
        if total is not None and is_own is not None:
            scores = torch.where(is_own, scores, 0.0)
            total(scores)
        ctx.save_for_backward(hidden, weight, bias, ids, is_own)
        ctx.supports, ctx.chunk_tokens = supports, chunk_tokens
        return scores

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_scores: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, is_own = ctx.saved_tensors
        if is_own is not None:
            grad_scores = torch.where(is_own, grad_scores, 0.0)
        grad_hidden = torch.empty_like(hidden)
        # Sum in at least float32, because a bfloat16 sum over hundreds of chunks loses most small terms.
        grad_weight = torch.zeros_like(weight, dtype=grad_scores.dtype)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=grad_scores.dtype)
        for positions, ids_slice in ctx.supports.chunks(ctx.chunk_tokens):
            gradient = grad_scores.new_zeros(positions.stop - positions.start, weight.shape[0])
            indices = (ctx.supports.rows[ids_slice] - positions.start, ids[ids_slice])
            gradient.index_put_(indices, grad_scores[ids_slice], accumulate=is_own is not None)  # others have id 0
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
