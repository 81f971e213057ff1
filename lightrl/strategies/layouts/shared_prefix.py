"""Shared prefixes: tokens at the start of several rows are computed once, not once per row.

In a causal model a token's states do not depend on what follows, so sharing is exact, including the gradient. The rows
of a microbatch form a tree. A group's trajectories share their prompt; an agent's conversations share all requests up
to the one where they diverge. A segment holds the tokens between two branches:

    rows   p q a b          segments   p q ─┬─ a b
           p q c d e                        └─ c d ─┬─ e
           p q c d f                                └─ f

    shared_rows   p q a b c d e f    a token sees its own segment and those before it on its path, because of a T × T
                                     mask; suits short rows
    packed        p q a b c d e f    one row for the whole microbatch; attention repeats the keys of earlier segments
                                     (packed_attention.py)

Shapes: B rows in the microbatch, T tokens in a row, R rows in a forward, N positions, H hidden size.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightrl.experience import Experience
from lightrl.functional import bins, on_host, rectangles, to_device

if TYPE_CHECKING:
    import torch.distributed as dist
    from transformers import PretrainedConfig, PreTrainedModel

# Cost of one more forward pass, in tokens. Padding with fewer tokens is cheaper than calling every layer again.
CALL_OVERHEAD_TOKENS = 256
MAX_ROW_TOKENS = 128  # limit for rows with a mask; longer rows have less padding but a larger mask
MIN_SEGMENT_TOKENS = 16  # shorter segments of a packed row are repeated, since each segment is one more attention call
# Number of keys whose multiplications cost as much as one more token: a layer's parameters / (2 · heads · head size),
# here for a policy with 0.8 M parameters. Larger models have a larger number, so this overestimates their masks' cost.
_KEYS_OF_A_TOKEN = 768
_COPIED_KEYS_OF_A_TOKEN = 8  # copying this many keys and values costs as much time and memory as one more token

Integers = NDArray[np.int64]


class Segment(NamedTuple):
    """Consecutive tokens in a row, which all rows below the segment share."""

    row: int  # one of the rows that share it
    start: int  # position of the first token
    end: int  # position after the last token
    parent: int  # index of the segment that ends before `start`, or -1


class PrefixTree(NamedTuple):
    """Segments in depth-first order, and the last segment of each row."""

    segments: list[Segment]
    last_segments: dict[int, int]  # row → index

    @property
    def num_tokens(self) -> int:
        return sum(segment.end - segment.start for segment in self.segments)

    @property
    def is_chain(self) -> bool:
        """Whether each segment follows the one before it, so that a causal model needs no mask."""
        return all(segment.parent == index - 1 for index, segment in enumerate(self.segments))

    def tokens(self) -> tuple[Integers, Integers, Integers]:
        """Returns each token's segment, row and position in this row, [num_tokens], in the order of the segments."""
        rows, starts, ends, _ = np.array(self.segments).T
        segments, positions = _concatenated(starts, ends)
        return segments, rows[segments], positions

    def fill(self, flat_indices: Integers, first: int = 0) -> None:
        """Sets, in `flat_indices` int64 [B, T], each position's index in the concatenated segments, plus `first`."""
        _, starts, ends, parents = np.array(self.segments).T
        firsts = first + (ends - starts).cumsum() - ends  # the index of a segment's token minus its position
        rows, segments = np.array([*self.last_segments.items()]).T
        while len(rows):
            owners, positions = _concatenated(starts[segments], ends[segments])
            flat_indices[rows[owners], positions] = firsts[segments][owners] + positions
            segments = parents[segments]
            rows, segments = rows[segments >= 0], segments[segments >= 0]


def _concatenated(starts: Integers, ends: Integers) -> tuple[Integers, Integers]:
    """Concatenates the ranges from `starts` to `ends`; returns each number's range and the number."""
    sizes = ends - starts
    ranges = np.arange(len(sizes)).repeat(sizes)
    return ranges, np.arange(len(ranges)) + (ends - sizes.cumsum())[ranges]


class Prefixes(NamedTuple):
    """The rows of a microbatch, ordered so that rows that share a prefix are neighbors."""

    order: list[int]
    shared: list[int]  # for each row in this order, the number of tokens that it shares with the row before it
    ends: list[int]  # for each row in this order, the number of tokens that the model reads

    @classmethod
    def of(cls, experience: Experience, config: PretrainedConfig | None = None) -> Prefixes:
        """Compares the rows of each group, without their last tokens, which predict nothing.

        Rows with images share only tokens before their first loss token, and only if their images are equal. A row with
        image tokens after its first loss token shares no prefix.
        """
        token_ids = on_host(experience.token_ids)
        ends = (on_host(experience.lengths) - 1).clamp(min=1)
        limits = ends
        images = token_ids[:, :0].numpy()
        if experience.image_rows is not None:
            loss_mask, images = on_host(experience.loss_mask), on_host(experience.image_rows).numpy()
            limits = torch.where(loss_mask.any(1), loss_mask.int().argmax(1), ends).clamp(min=1)
            is_read = ~loss_mask & (torch.arange(token_ids.shape[1]) >= limits[:, None])  # read after the prompt
            is_alone = (is_read & (token_ids == getattr(config, "image_token_id", None))).any(1)
            limits = torch.where(is_alone, 0, limits)
        groups, sizes, most = (on_host(values).tolist() for values in (experience.group_ids, ends, limits))
        ids = token_ids.numpy()
        # Rows of one kind may share a prefix. Kinds are numbered in row order, since a replayed group's id may differ.
        numbers: dict[tuple[int, bytes], int] = {}
        kinds = [
            numbers.setdefault((group, image.tobytes()), len(numbers))
            for group, image in zip(groups, images, strict=True)
        ]
        order = sorted(range(len(sizes)), key=lambda row: (kinds[row], ids[row, : sizes[row]].tobytes()))
        shared = [0]
        for left, row in pairwise(order):
            most_equal = min(most[left], most[row]) if kinds[left] == kinds[row] else 0
            differ = ids[left, :most_equal] != ids[row, :most_equal]
            shared.append(int(differ.argmax()) if differ.any() else most_equal)
        return cls(order, shared, [sizes[row] for row in order])

    def chunks(self, max_tokens: int) -> list[Prefixes]:
        """Divides the rows into trees of at most `max_tokens` tokens, or of one longer row.

        Each tree is cut in the order of its rows, or its branches are combined, whichever repeats fewer tokens.
        """
        starts = [index for index, shared in enumerate(self.shared) if not shared]
        trees = [self._part(*bounds) for bounds in pairwise([*starts, len(self.order)])]
        options = [(tree._in_order(max_tokens), tree._in_bins(max_tokens)) for tree in trees]
        return [part for option in options for part in min(option, key=lambda parts: sum(map(Prefixes._size, parts)))]

    def _size(self) -> int:
        return sum(self.ends) - sum(self.shared)

    def _in_order(self, max_tokens: int) -> list[Prefixes]:
        starts, num_tokens = [0], 0
        for index, (shared, end) in enumerate(zip(self.shared, self.ends, strict=True)):
            num_tokens += end - shared
            if index and num_tokens > max_tokens:
                starts.append(index)
                num_tokens = end
        return [self._part(*bounds) for bounds in pairwise([*starts, len(self.order)])]

    def _in_bins(self, max_tokens: int) -> list[Prefixes]:
        """Combines branches that begin after the tokens that all rows share; cuts a branch that is too large."""
        common = min(self.shared[1:], default=0)
        cuts = [index for index, shared in enumerate(self.shared) if index == 0 or shared == common]
        branches = [self._part(*bounds) for bounds in pairwise([*cuts, len(self.order)])]
        parts: list[Prefixes] = []
        for picked in bins([branch._size() - common for branch in branches], max(0, max_tokens - common)):
            chosen = [branches[index] for index in picked]
            order, ends = ([number for branch in chosen for number in branch[at]] for at in (0, 2))
            shared = [number for branch in chosen for number in (common, *branch.shared[1:])]
            parts += Prefixes(order, [0, *shared[1:]], ends)._in_order(max_tokens)
        return parts

    def packed_chunks(self, max_tokens: int) -> Iterator[Prefixes]:
        """Cuts the order into parts whose packed rows need at most the memory of `max_tokens`, or of one longer row."""
        start = 0
        while (left := len(self.order) - start) > 0:
            held_tokens, num = functools.partial(self._held_tokens, start), 1
            while num < left and held_tokens(2 * num) <= max_tokens:
                num *= 2
            num += bisect.bisect_right(range(num + 1, min(2 * num, left)), float(max_tokens), key=held_tokens)
            yield self._part(start, start + num)
            start += num

    def _held_tokens(self, start: int, num_rows: int) -> float:
        """Returns the memory of rows from `start`, in tokens; attention copies the keys before each segment."""
        tree = self._part(start, start + num_rows).tree(MIN_SEGMENT_TOKENS)
        num_copied = sum(segment.start for segment in tree.segments if segment.parent >= 0)
        return tree.num_tokens + num_copied / _COPIED_KEYS_OF_A_TOKEN

    def _part(self, start: int, end: int | None) -> Prefixes:
        return Prefixes(self.order[start:end], [0, *self.shared[start:end][1:]], self.ends[start:end])

    def tree(self, min_tokens: int = 1) -> PrefixTree:
        """Returns the rows' tree. A shared segment of fewer than `min_tokens` tokens is repeated for each branch."""
        segments: list[Segment] = []
        last_segments: dict[int, int] = {}
        # Rows `first` to `last` of the order follow the segment `parent`, which ends at position `start`.
        parts = [(0, len(self.order), 0, -1)]
        while parts:
            first, last, start, parent = parts.pop()
            is_leaf = last - first == 1
            common = self.ends[first] if is_leaf else min(self.shared[first + 1 : last])
            if common - start >= (1 if is_leaf else min_tokens):
                segments.append(Segment(self.order[first], start, common, parent))
                start, parent = common, len(segments) - 1
            if is_leaf:
                last_segments[self.order[first]] = parent
                continue
            # Branches begin where neighbors share no more than `common`. The first branch is popped first.
            cuts = [first, *(index for index in range(first + 1, last) if self.shared[index] == common), last]
            parts += [(begin, end, start, parent) for begin, end in pairwise(cuts)][::-1]
        return PrefixTree(segments, last_segments)


def each_alone(experience: Experience) -> PrefixTree:
    """Returns a prefix tree in which no rows share a prefix."""
    ends = (on_host(experience.lengths) - 1).clamp(min=1).tolist()  # the last token predicts nothing
    segments = [Segment(row, 0, end, -1) for row, end in enumerate(ends)]
    return PrefixTree(segments, {row: row for row in range(len(ends))})


Plan = list[list[PrefixTree]]  # for each forward pass, a tree per row; empty if the microbatch's rows stay separate


def shared_rows(prefixes: Prefixes) -> Plan:
    """Plans rows that each contain one tree, with at most MAX_ROW_TOKENS tokens if possible."""
    trees = [part.tree() for part in prefixes.chunks(MAX_ROW_TOKENS)]
    sizes = [tree.num_tokens for tree in trees]
    return [[trees[index] for index in part] for part in rectangles(sizes, CALL_OVERHEAD_TOKENS)]


def cost_of_rectangles(sizes: Sequence[int]) -> float:
    """Returns the cost, in tokens, of rows of these sizes without shared prefixes, including padding."""
    parts = rectangles(sizes, CALL_OVERHEAD_TOKENS)
    return sum(CALL_OVERHEAD_TOKENS + len(part) * max(sizes[row] for row in part) for part in parts)


def cost_of_shared_rows(plan: Plan) -> float:
    """Returns the cost of `shared_rows`, in tokens, including padding and masked attention."""
    total = 0.0
    for trees in plan:
        longest = max(tree.num_tokens for tree in trees)
        masked_keys = 0 if all(tree.is_chain for tree in trees) else longest
        total += CALL_OVERHEAD_TOKENS + len(trees) * longest * (1 + masked_keys / _KEYS_OF_A_TOKEN)
    return total


def cost_of_packed(tree: PrefixTree) -> float:
    """Returns the cost, in tokens, of a packed row on the CPU, where attention copies the keys before each segment."""
    num_copied = sum(segment.end for segment in tree.segments if segment.parent >= 0)
    return 2 * CALL_OVERHEAD_TOKENS + tree.num_tokens + num_copied / _COPIED_KEYS_OF_A_TOKEN


class PackedTokens(NamedTuple):
    """The layout of a packed row, of which a rank has P tokens; on the host."""

    rows: Tensor  # int64 [P], the microbatch's row that each token comes from
    columns: Tensor  # int64 [P], the token's position in that row
    lengths: list[int]  # number of tokens of each segment; the last is the padding
    parents: list[int]  # index of the segment that each segment follows, or -1
    flat_indices: Tensor  # int64 [B, T], index of each position's state, or -1 without a state on this rank


def packed(
    tree: PrefixTree, shape: Sequence[int], group: dist.ProcessGroup | None = None, *, multiple: int = 1
) -> PackedTokens:
    """Lays out a tree's segments, of rows of shape (B, T), one after the other.

    The ranks of `group` have parts of equal length, a multiple of `multiple`; the first token pads the last part.
    """
    _, rows, columns = map(torch.from_numpy, tree.tokens())
    flat_indices = torch.full(tuple(shape), -1)
    tree.fill(flat_indices.numpy())
    index, num = (0, 1) if group is None else (group.rank(), group.size())
    padding = -len(rows) % (multiple * num)
    rows, columns = torch.nn.functional.pad(torch.stack([rows, columns]), (0, padding)).chunk(num, 1)[index]
    flat_indices -= index * len(rows)
    flat_indices[(flat_indices < 0) | (flat_indices >= len(rows))] = -1
    lengths = [*(segment.end - segment.start for segment in tree.segments), padding]
    return PackedTokens(rows, columns, lengths, [*(segment.parent for segment in tree.segments), -1], flat_indices)


def shared_hidden(
    model: PreTrainedModel,
    token_ids: Tensor,
    predicting: tuple[Tensor, Tensor],
    plan: Plan,
    layer_input: Callable[[Tensor, Tensor], dict[str, Tensor]],
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Runs the forward passes; yields each one's predicting positions (rows [N], columns [N]) and hidden states [N, H].

    Args:
        token_ids: int64 [B, T].
        predicting: rows and columns of the predicting positions, on the host.
        layer_input: makes the model's arguments from rows of the microbatch [R] and tokens [R, T] that begin with these
            rows' prompts, which may contain images.
    """
    device = token_ids.device
    for trees in plan:
        tokens = _Tokens.of(trees, on_host(token_ids))
        first_rows = torch.tensor([tree.segments[0].row for tree in trees])
        inputs: dict[str, Any] = layer_input(to_device(first_rows, device), to_device(tokens.token_ids, device))
        if not all(tree.is_chain for tree in trees):
            inputs["position_ids"] = to_device(tokens.positions, device)
            inputs["attention_mask"] = mask_of(to_device(tokens.visible_until, device), model.dtype)
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
        indices = tokens.flat_indices[predicting]
        rows, columns, indices = (to_device(values[indices >= 0], device) for values in (*predicting, indices))
        yield rows, columns, hidden.flatten(0, 1)[indices]


class _Tokens(NamedTuple):
    """The rows of a forward pass, each of which contains a tree; int64, on the host."""

    token_ids: Tensor  # [R, T]
    positions: Tensor  # [R, T], in the microbatch's rows
    visible_until: Tensor  # [R, T]; columns from the token's own up to this one (exclusive) see the token
    flat_indices: Tensor  # [B, T of the microbatch], each token's index in the concatenated rows, or -1

    @classmethod
    def of(cls, trees: Sequence[PrefixTree], token_ids: Tensor) -> _Tokens:
        """Lays out each tree's segments, then padding. A segment's subtree follows it without a gap."""
        width = max(tree.num_tokens for tree in trees)
        ids, positions = np.zeros((2, len(trees), width), np.int64)
        visible_until = np.full((len(trees), width), width)  # padding sees padding
        flat_indices = np.full(token_ids.shape, -1)
        for number, tree in enumerate(trees):
            segments, rows, columns = tree.tokens()
            ids[number, : len(rows)] = token_ids.numpy()[rows, columns]
            positions[number, : len(rows)] = columns
            subtree_ends = np.cumsum([segment.end - segment.start for segment in tree.segments])
            for index, segment in reversed([*enumerate(tree.segments)]):
                if segment.parent >= 0:
                    subtree_ends[segment.parent] = max(subtree_ends[segment.parent], subtree_ends[index])
            visible_until[number, : len(rows)] = subtree_ends[segments]
            tree.fill(flat_indices, number * width)
        return cls(*map(torch.from_numpy, (ids, positions, visible_until, flat_indices)))


def mask_of(visible_until: Tensor, dtype: torch.dtype) -> Tensor:
    """Builds the mask [R, 1, T, T], 0 or -inf: a token sees itself and the earlier tokens on its path."""
    columns = torch.arange(visible_until.shape[1], device=visible_until.device)
    is_seen = (columns <= columns[:, None]) & (columns[:, None] < visible_until[:, None])
    mask = torch.zeros(is_seen.shape, dtype=dtype, device=visible_until.device)
    return mask.masked_fill_(~is_seen, float("-inf"))[:, None]
