"""Measures how trained lengths differ from sampled lengths if a few trajectories take 30 times as long.

Part of `python -m benchmarks.async_overlap`. Time is simulated: an update takes 1, a group as long as its longest
completion, and GroupScheduler decides, as in a run. 10,000 trajectories take a second; the result is deterministic.

Lengths are lognormal (sigma 0.8, in units of the median), capped at 30; 5 % of the completions reach the cap.

Orders:
    windowed      the default: stream order, which waits for slow groups
    over-sample   `DynamicSampling(oversample_fraction=0.25)`: drops groups that would delay a batch
    discard       not in lightrl: any P finished groups; discards groups that are too old, and requeues their prompts

`ks_distance` is the Kolmogorov-Smirnov distance between the trained lengths and the sampled distribution. For 10,000
independent samples it is 0.009 on average, and above 0.0195 once in a thousand runs.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.report import Report
from lightrl.rollout import RolloutSettings
from lightrl.rollout.group_scheduler import GroupScheduler, RunningGroup
from lightrl.trajectory import Prompt, Trajectory

LONGEST = 30.0  # medians
ENDLESS_FRACTION = 0.05
SIGMA = 0.8
PROMPTS, GROUP_SIZE = 16, 8


def fraction_below(length: float) -> float:
    """Returns the fraction of drawn lengths that are shorter."""
    return (1 - ENDLESS_FRACTION) * statistics.NormalDist(sigma=SIGMA).cdf(math.log(length))


def fraction_up_to(length: float) -> float:
    """Returns the fraction of drawn lengths that are at most this long; it jumps to 1 at the cap."""
    return 1.0 if length >= LONGEST else fraction_below(length)


def draw_lengths(position: int, draw: int) -> list[float]:
    """Draws the lengths of a group's completions; another draw of the same prompt gives different ones."""
    source = random.Random(f"{position}/{draw}")
    return [
        LONGEST if source.random() < ENDLESS_FRACTION else min(LONGEST, math.exp(source.gauss(0, SIGMA)))
        for _ in range(GROUP_SIZE)
    ]


def ks_distance(
    lengths: Sequence[float],
    up_to: Callable[[float], float] = fraction_up_to,
    below: Callable[[float], float] = fraction_below,
) -> float:
    """Returns the largest difference over x between the fractions of `lengths` and of all drawn ones at most x."""
    ordered, num = sorted(lengths), len(lengths)
    return max(
        max(
            abs(bisect.bisect_right(ordered, length) / num - up_to(length)),
            abs(bisect.bisect_left(ordered, length) / num - below(length)),
        )
        for length in set(ordered)
    )


class Order(Protocol):
    """Decides which groups start and which are trained on."""

    max_staleness: int
    num_discarded: int

    def start(self, version: int) -> list[int]:
        """Starts the groups that may start; returns their positions."""
        ...

    def finish(self, position: int) -> None: ...

    def take(self, version: int) -> list[int]:
        """Returns the positions to train on, or none yet."""
        ...

    def is_running(self, position: int) -> bool: ...


class OrderOfScheduler:
    """Makes the decisions of GroupScheduler, in the controller's sequence."""

    def __init__(self, **settings: Any) -> None:
        self.scheduler = GroupScheduler(RolloutSettings(**{"groups_per_iteration": PROMPTS, **settings}))
        self.max_staleness = self.scheduler.settings.max_staleness
        self.num_discarded = 0
        self._next_position = 0

    def start(self, version: int) -> list[int]:
        scheduler, started = self.scheduler, list[int]()
        if scheduler.may_start(version):
            for _ in range(scheduler.plan(version)):
                scheduler.queue(self._next_position)
                self._next_position += 1
            started += [self._start(position, version).group.id for position in scheduler.startable(version)]
        return started

    def finish(self, position: int) -> None:
        running = self.scheduler.running[position]
        trajectory = Trajectory(
            running.group.prompt, position, 0, [0, 1], [False, True], [0.0, 0.0], [-1, running.started_version], [1],
            "", reward=1.0,
        )  # fmt: skip
        if self.scheduler.record(running, 0, trajectory):
            self.scheduler.settle(running.group)

    def take(self, version: int) -> list[int]:
        self.scheduler.begin_take(version)
        batch = self.scheduler.take(version)
        self.num_discarded += len(batch.gives_up)
        if batch.group_ids is None:
            return []
        assert all(version - group.oldest_version <= self.max_staleness for group in self.scheduler.taken)
        self.scheduler.commit()
        return batch.group_ids

    def is_running(self, position: int) -> bool:
        return position in self.scheduler.running

    def _start(self, position: int, version: int) -> RunningGroup:
        return self.scheduler.start(position, Prompt(id=str(position), token_ids=[0]), version)


class DiscardAndRequeue:
    """Keeps as many groups in flight as lightrl, but makes a batch of any P finished ones, first come, first served."""

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self.num_discarded = 0
        self._versions: dict[int, int] = {}  # of running groups, when they started
        self._finished: list[tuple[int, int]] = []  # position and version, in the order in which they finished
        self._requeued: deque[int] = deque()
        self._num_trained = self._next_position = 0

    def start(self, version: int) -> list[int]:
        started = []
        window = (self.max_staleness + version + 1) * PROMPTS
        while self._num_trained + len(self._finished) + len(self._versions) < window:
            if self._requeued:
                started.append(self._requeued.popleft())
            else:
                started.append(self._next_position)
                self._next_position += 1
            self._versions[started[-1]] = version
        return started

    def finish(self, position: int) -> None:
        self._finished.append((position, self._versions.pop(position)))

    def take(self, version: int) -> list[int]:
        in_time = [item for item in self._finished if item[1] + self.max_staleness >= version]
        self._requeued += [item[0] for item in self._finished if item not in in_time]
        self.num_discarded += len(self._finished) - len(in_time)
        self._finished = in_time
        if len(in_time) < PROMPTS:
            return []
        taken, self._finished = in_time[:PROMPTS], in_time[PROMPTS:]
        self._num_trained += PROMPTS
        return [position for position, _ in taken]

    def is_running(self, position: int) -> bool:
        return position in self._versions


@dataclass
class SimulatedRun:
    """Simulates a trainer whose update takes 1 and a server on which a group takes as long as its longest completion.

    Args:
        order: decides which groups start and train.
        median: time of a completion of median length.
    """

    order: Order
    median: float
    clock: float = 0.0
    version: int = 0
    waited: list[float] = field(default_factory=list)  # by iteration
    lengths: list[float] = field(default_factory=list)  # of the trajectories trained on

    def run(self, num_trajectories: int) -> SimulatedRun:
        draws: dict[int, int] = {}
        ends: list[tuple[float, int, int]] = []  # time, position, draw
        update_ends = waits_since = 0.0
        is_updating = False
        while len(self.lengths) < num_trajectories:
            if not is_updating and (taken := self.order.take(self.version)):
                self.waited.append(self.clock - waits_since)
                self.lengths += [length for position in taken for length in draw_lengths(position, draws[position])]
                is_updating, update_ends = True, self.clock + 1.0
            may_start = self.order.max_staleness > 0 or not is_updating  # as in the controller
            for position in self.order.start(self.version) if may_start else []:
                draws[position] = draws.get(position, -1) + 1
                duration = self.median * max(draw_lengths(position, draws[position]))
                heapq.heappush(ends, (self.clock + duration, position, draws[position]))
            if is_updating and (not ends or update_ends <= ends[0][0]):
                self.clock = waits_since = update_ends
                self.version += 1
                is_updating = False
                continue
            self.clock, position, draw = heapq.heappop(ends)
            if draw == draws[position] and self.order.is_running(position):
                self.order.finish(position)
        return self

    def idle_fraction(self, warm_up: int) -> float:
        """The waiting time over the total, without the iterations that fill the window."""
        waited = self.waited[warm_up:]
        return sum(waited) / (sum(waited) + len(waited))


def measure(stalenesses: Sequence[int], paces: Sequence[float], num_trajectories: int) -> None:
    """Prints a row for each order, staleness and pace, the number of updates that the longest completion takes."""
    report = Report("async_overlap", clock="simulated", prompts=PROMPTS, group_size=GROUP_SIZE)
    for pace in paces:
        for staleness in stalenesses:
            orders: dict[str, Order] = {
                "windowed": OrderOfScheduler(max_staleness=staleness),
                "over-sample": OrderOfScheduler(max_staleness=staleness, oversample_fraction=0.25),
                "discard": DiscardAndRequeue(staleness),
            }
            for name, order in orders.items():
                run = SimulatedRun(order, pace / LONGEST).run(num_trajectories)
                report.add(
                    "order",
                    order=name,
                    staleness=staleness,
                    longest_in_updates=pace,
                    ks_distance=round(ks_distance(run.lengths[:num_trajectories]), 4),
                    mean_length=round(statistics.fmean(run.lengths), 3),
                    discarded_groups=order.num_discarded,
                    idle_fraction=round(run.idle_fraction(staleness + 1), 4),
                    trajectories=num_trajectories,
                )
    report.finish(
        [
            "longest_in_updates", "staleness", "order", "ks_distance", "mean_length", "discarded_groups",
            "idle_fraction",
        ]
    )  # fmt: skip
