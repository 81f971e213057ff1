"""Batches trajectories with little or no padding: in rectangles of similar lengths, or in packed rows.

Shapes: B trajectories, T tokens. Both layouts compute the same forward pass:

    rectangles (CPU)                       packed rows (variable-length attention)
    ┌───┬───┐  ┌─────────────┐             ┌──────┬────┬──────┬──┐
    │ a     │  │ d           │             │ d    │ a  │ c    │ b│   position_ids restart at 0
    │ b   · │  │ e       · · │             └──────┴────┴──────┴──┘   at each trajectory
    └───────┘  └─────────────┘

In a rectangle the padding is on the right, so a causal model needs no attention mask. In a packed row
(strategies/layouts/shared_prefix.py), attention needs to know where each trajectory starts (packed_attention.py).
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence

from lightrl.checks.bounds import check_bounds


def rectangles(lengths: Sequence[int], overhead_tokens: int = 0) -> list[list[int]]:
    """Finds the cheapest partition of trajectories into right-padded rectangles.

    The cost is Σ rows · longest + overhead_tokens · number of rectangles. Some optimal partition cuts the sorted
    lengths without separating equal lengths, so dynamic programming over the distinct lengths finds the minimum.

    Args:
        lengths: number of tokens in each trajectory, 0 or more.
        overhead_tokens: cost of one more forward pass, in tokens.

    Returns:
        The row indices of each rectangle, ascending; the rectangle with the shortest rows first. Every row is in
        exactly one rectangle.
    """
    check_bounds(0, **{"overhead_tokens": overhead_tokens, "the shortest length": min(lengths, default=0)})
    rows_of: defaultdict[int, list[int]] = defaultdict(list)
    for row, length in enumerate(lengths):
        rows_of[length].append(row)
    distinct = sorted(rows_of)
    num_shorter = [0]  # [end]: the number of trajectories shorter than distinct[end]
    best_cost, best_start = [0], [0]  # [end]: their lowest cost, and where their last rectangle starts in `distinct`
    for end, longest in enumerate(distinct, start=1):
        num_shorter.append(num_shorter[-1] + len(rows_of[longest]))
        cost, start = min((best_cost[start] - num_shorter[start] * longest, start) for start in range(end))
        best_cost.append(cost + num_shorter[end] * longest + overhead_tokens)
        best_start.append(start)
    groups: list[list[int]] = []
    end = len(distinct)
    while end > 0:
        start = best_start[end]
        groups.append(sorted(row for length in distinct[start:end] for row in rows_of[length]))
        end = start
    return groups[::-1]


def bins(sizes: Sequence[int], max_size: int) -> list[list[int]]:
    """Partitions items into bins of at most `max_size` by best-fit decreasing; a larger item gets its own bin.

    Groups items of similar size instead if this needs no more bins, so that rectangles have little padding.

    Returns:
        Indices into `sizes`, the largest item of each bin first. Every index is in exactly one bin.
    """
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    next_fit: list[list[int]] = []
    free = 0
    for index in order:
        if not next_fit or sizes[index] > free:
            next_fit.append([])
            free = max_size
        next_fit[-1].append(index)
        free -= sizes[index]
    best_fit: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (free space of a bin, its index), ascending
    for index in order:
        smallest = bisect.bisect_left(spaces, (sizes[index], 0))
        if smallest == len(spaces):
            best_fit.append([])
            space, number = max_size, len(best_fit) - 1
        else:
            space, number = spaces.pop(smallest)
        best_fit[number].append(index)
        bisect.insort(spaces, (space - sizes[index], number))
    return next_fit if len(next_fit) <= len(best_fit) else best_fit


def microbatch_bins(lengths: Sequence[int], units: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Returns each microbatch's rows: at most `max_tokens` tokens, or one larger unit. A unit's rows stay together."""
    if sum(lengths[row] for rows in units for row in rows) <= max_tokens:
        return [sorted(row for rows in units for row in rows)]
    sizes = [sum(lengths[row] for row in rows) for rows in units]
    return [sorted(row for index in indices for row in units[index]) for indices in bins(sizes, max_tokens)]


def chunks_of_similar_length(
    sequences: Sequence[Sequence[int]], max_tokens: int, *, may_pad: bool = True
) -> Iterator[list[int]]:
    """Divides sequences into chunks that are prefilled together; yields each chunk's indices, longest sequences first.

    Args:
        sequences: token ids.
        max_tokens: upper bound on a chunk's tokens, padding included; a longer sequence gets its own chunk.
        may_pad: True allows sequences down to half the length of the longest; False allows only equal lengths.
    """
    chunk: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i)):
        if chunk:
            longest, length = len(sequences[chunk[0]]), len(sequences[index])
            is_too_short = 2 * length + 16 < longest if may_pad else length < longest
            if (len(chunk) + 1) * longest > max_tokens or is_too_short:
                yield chunk
                chunk = []
        chunk.append(index)
    if chunk:
        yield chunk
