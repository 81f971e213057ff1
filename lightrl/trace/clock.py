"""The clocks of several machines: how far each is from rank 0's, with bounds that need no assumption about the network.

Nobody leaves a barrier before the last has come. So what a rank reads after a barrier is later than what any rank read
before it, and each barrier bounds the offset of two clocks from both sides.
"""

from __future__ import annotations

from collections.abc import Sequence

Reading = tuple[int, int]  # this rank's clock before and after a barrier, in ns


def clock_offset_ns(own: Sequence[Reading], first: Sequence[Reading]) -> tuple[int, int]:
    """What to subtract from a rank's clock to get rank 0's, and the largest error of it, in ns.

    Args:
        own, first: readings of the rank and of rank 0 around the same barriers, in order.
    """
    at_least = max(before - after_first for (before, _), (_, after_first) in zip(own, first, strict=True))
    at_most = min(after - before_first for (_, after), (before_first, _) in zip(own, first, strict=True))
    return (at_least + at_most) // 2, max(0, at_most - at_least) // 2
