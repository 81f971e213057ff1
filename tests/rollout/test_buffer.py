"""Admission and batch taking: by hand, and in a simulation in virtual time that uses these functions and nothing else.

Letters as in buffer.py: v weight version, η max_staleness, P groups per iteration.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from lightrl.rollout.buffer import Batch, choose_batch, describe_waiting, find_overdue, num_admissible


@pytest.mark.parametrize(
    ("counts", "limits", "expected"),
    [
        pytest.param((0, 0, 0), (4, 0, None, None), 4, id="on-policy, one iteration's groups"),
        pytest.param((1, 3, 0), (4, 0, None, None), 0, id="on-policy, all of them are there or on their way"),
        pytest.param((1, 2, 0), (4, 0, None, None), 1, id="a dropped group frees its place"),
        pytest.param((0, 4, 1), (4, 0, None, None), 4, id="the next version admits the next iteration"),
        pytest.param((0, 0, 0), (4, 2, None, None), 12, id="η + 1 iterations ahead"),
        pytest.param((3, 20, 5), (4, 1, None, None), 5, id="(1 + 5 + 1)·4 - 20 - 3"),
        pytest.param((3, 20, 5), (4, 1, 5, None), 2, id="at most 5 in flight"),
        pytest.param((3, 20, 5), (4, 1, None, 24), 1, id="the run needs 24 in all"),
        pytest.param((9, 0, 0), (4, 0, 2, 4), 0, id="never negative"),
        pytest.param((0, 0, -1), (4, 0, None, None), 0, id="nothing before the first weights"),
    ],
)
def test_num_admissible(
    counts: tuple[int, int, int], limits: tuple[int, int, int | None, int | None], expected: int
) -> None:
    (running, accepted, version), (per_iteration, staleness, concurrent, total) = counts, limits
    admissible = num_admissible(
        running=running,
        accepted=accepted,
        weight_version=version,
        groups_per_iteration=per_iteration,
        max_staleness=staleness,
        max_concurrent=concurrent,
        total=total,
    )
    assert admissible == expected


@pytest.mark.parametrize(
    ("finished", "running", "version", "staleness", "expected"),
    [
        pytest.param({3: 0, 1: 0}, {}, 0, 0, Batch([1, 3], []), id="in stream order"),
        pytest.param({3: 0}, {1: 0}, 0, 0, Batch(None, [1]), id="too few: waits for the one that runs"),
        pytest.param({}, {}, 0, 0, Batch(None, []), id="nothing at all"),
        pytest.param({1: 5, 2: 4, 3: 5, 4: 4}, {}, 5, 1, Batch([2, 4], []), id="the oldest version first"),
        pytest.param({2: 5, 3: 5, 4: 5}, {1: 5}, 5, 1, Batch([2, 3], []), id="two of version 5 still have a batch"),
        # The batch at v = 5 is the last that version 4 may be in: group 1 cannot be left over.
        pytest.param({2: 5, 3: 5}, {1: 4}, 5, 1, Batch(None, [1]), id="a straggler that this batch must hold"),
        # η = 2: of what has version 4 or older, one batch of 2 may come after this one; three would be left.
        pytest.param({5: 4, 6: 4}, {1: 4, 2: 4, 3: 4}, 5, 2, Batch(None, [1, 2, 3]), id="more than later ones hold"),
        pytest.param({5: 4, 6: 4}, {1: 4, 2: 4, 3: 5}, 5, 2, Batch([5, 6], []), id="just what later ones hold"),
    ],
)
def test_choose_batch_of_two_groups(
    finished: dict[int, int], running: dict[int, int], version: int, staleness: int, expected: Batch
) -> None:
    batch = choose_batch(finished, running, weight_version=version, groups_per_iteration=2, max_staleness=staleness)
    assert batch == expected


@pytest.mark.parametrize(
    ("finished", "staleness", "expected"),
    [
        pytest.param({1: 5, 2: 5}, 0, [], id="one batch of this version"),
        pytest.param({1: 5, 2: 5, 3: 5}, 0, [3], id="on-policy there is no second batch"),
        pytest.param({1: 4, 2: 5}, 0, [1], id="older than the bound"),
        pytest.param({1: 4, 2: 4, 3: 4, 4: 5, 5: 5}, 1, [3], id="version 4 has one batch, both versions have two"),
    ],
)
def test_groups_that_no_batch_can_take_in_time_are_overdue(
    finished: dict[int, int], staleness: int, expected: list[int]
) -> None:
    overdue = find_overdue(finished, weight_version=5, groups_per_iteration=2, max_staleness=staleness)
    assert overdue == expected


def test_a_message_names_the_first_groups_only() -> None:
    assert describe_waiting([3, 4]) == "3, 4"
    assert describe_waiting(range(9)) == "0, 1, 2, 3, 4 and 4 more"


# ---------------------------------------------------------------------- simulation


@dataclass
class Simulation:
    """Groups with random durations and a trainer whose update takes 1; time is a number, there is no event loop."""

    groups_per_iteration: int
    max_staleness: int
    seed: int = 0
    max_concurrent: int | None = None
    total: int | None = None
    oversampled: int = 0
    given_up: set[int] = field(default_factory=set)
    takes_by_rule: bool = True  # False: any P finished groups, in the order in which they finished
    clock: float = 0.0
    version: int = 0
    accepted: int = 0
    position: int = 0
    dropped: set[int] = field(default_factory=set)
    restart: list[int] = field(default_factory=list)  # positions in flight at a checkpoint
    staleness: list[int] = field(default_factory=list)  # of each group trained on
    trained: list[int] = field(default_factory=list)
    running: dict[int, int] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    ends: list[tuple[float, int]] = field(default_factory=list)
    update_ends: float | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def run(self, num_iterations: int) -> Simulation:
        while self.version < num_iterations:
            self.admit()
            if self.update_ends is None and (ids := self.choose()) is not None:
                for group_id in ids:
                    self.staleness.append(self.version - self.finished.pop(group_id))
                self.trained += ids
                self.update_ends = self.clock + 1.0
            self.advance()
        return self

    def admit(self) -> None:
        for _ in range(
            num_admissible(
                running=len(self.running),
                accepted=self.accepted,
                weight_version=self.version,
                groups_per_iteration=self.groups_per_iteration,
                max_staleness=self.max_staleness,
                max_concurrent=self.max_concurrent,
                total=self.total,
                oversampled=self.oversampled,
            )
        ):
            duration = self.random.uniform(0.5, 1.0) * (30 if self.random.random() < 0.05 else 1)
            group_id = self.restart.pop(0) if self.restart else self.position
            self.position = max(self.position, group_id + 1)
            heapq.heappush(self.ends, (self.clock + duration, group_id))
            self.running[group_id] = self.version

    def choose(self) -> list[int] | None:
        if not self.takes_by_rule:
            ids = list(self.finished)[: self.groups_per_iteration]
            return ids if len(ids) == self.groups_per_iteration else None
        batch = choose_batch(
            self.finished,
            self.running,
            weight_version=self.version,
            groups_per_iteration=self.groups_per_iteration,
            max_staleness=self.max_staleness,
            max_given_up=self.oversampled,
        )
        for group_id in batch.gives_up:
            self.accepted -= self.finished.pop(group_id, None) is not None
            self.running.pop(group_id, None)
            self.given_up.add(group_id)
        self.ends = [end for end in self.ends if end[1] in self.running]
        heapq.heapify(self.ends)
        return batch.group_ids

    def advance(self) -> None:
        """To the next event; without one the run would wait for ever."""
        next_end = self.ends[0][0] if self.ends else float("inf")
        assert self.update_ends is not None or self.ends, "deadlock: nothing runs and no batch can be taken"
        if self.update_ends is not None and self.update_ends <= next_end:
            self.clock, self.update_ends = self.update_ends, None
            self.version += 1
            return
        self.clock, group_id = heapq.heappop(self.ends)
        version = self.running.pop(group_id)
        if self.random.random() < 0.03:
            self.dropped.add(group_id)
        else:
            self.finished[group_id] = version
            self.accepted += 1

    def resumed(self) -> Simulation:
        """As after a checkpoint: what is finished stays, what was in flight starts again under the present version."""
        resumed = Simulation(self.groups_per_iteration, self.max_staleness, seed=self.seed + 1)
        resumed.version, resumed.finished = self.version, dict(self.finished)
        resumed.accepted = self.version * self.groups_per_iteration + len(self.finished)
        resumed.position, resumed.trained, resumed.restart = self.position, self.trained, sorted(self.running)
        return resumed


@pytest.mark.parametrize("groups_per_iteration", [1, 3, 8])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4, 8])
def test_the_bound_holds_exactly_with_stragglers_and_drops(max_staleness: int, groups_per_iteration: int) -> None:
    simulation = Simulation(groups_per_iteration, max_staleness).run(200)
    assert len(simulation.trained) == len(set(simulation.trained)) == 200 * groups_per_iteration
    assert simulation.dropped
    assert max(simulation.staleness) == max_staleness


@pytest.mark.parametrize("max_concurrent", [1, 5, 9])
def test_the_bound_holds_with_few_groups_in_flight(max_concurrent: int) -> None:
    for max_staleness in (0, 2, 8):
        simulation = Simulation(4, max_staleness, max_concurrent=max_concurrent).run(100)
        assert max(simulation.staleness) <= max_staleness


@pytest.mark.parametrize("oversampled", [1, 2, 5])
@pytest.mark.parametrize("groups_per_iteration", [1, 3, 8])
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_over_sampling_keeps_the_bound_and_every_batch_can_be_taken(
    max_staleness: int, groups_per_iteration: int, oversampled: int
) -> None:
    num = 100 * groups_per_iteration
    simulation = Simulation(groups_per_iteration, max_staleness, seed=2, oversampled=oversampled, total=num).run(100)
    assert len(simulation.trained) == len(set(simulation.trained)) == num
    assert not simulation.given_up & set(simulation.trained)
    assert max(simulation.staleness) <= max_staleness


def test_over_sampling_is_faster_than_waiting_for_stragglers() -> None:
    for max_staleness in (0, 1):
        patient, hasty = (Simulation(8, max_staleness, seed=1, oversampled=extra).run(200).clock for extra in (0, 4))
        assert hasty < patient / 2


def test_admission_alone_lets_stragglers_become_far_too_old() -> None:
    simulation = Simulation(8, max_staleness=1, takes_by_rule=False).run(200)
    assert max(simulation.staleness) > 10


def test_more_staleness_gives_more_iterations_in_the_same_time() -> None:
    seconds = [Simulation(8, max_staleness, seed=1).run(200).clock for max_staleness in (0, 1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0] / 2


def test_nothing_old_is_ever_overdue_when_both_rules_are_kept() -> None:
    simulation = Simulation(3, max_staleness=2)
    for num_iterations in range(1, 60):
        simulation.run(num_iterations)
        kept = find_overdue(
            simulation.finished, weight_version=simulation.version, groups_per_iteration=3, max_staleness=2
        )
        assert kept == []


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_the_bound_holds_after_a_resume_from_any_iteration(max_staleness: int) -> None:
    for stop in range(1, 20):
        before = Simulation(4, max_staleness, seed=stop).run(stop)
        resumed = before.resumed().run(stop + 30)
        assert max(resumed.staleness) <= max_staleness
        assert len(resumed.trained) == len(set(resumed.trained)) == (stop + 30) * 4
        assert set(before.running) <= set(resumed.trained) | resumed.dropped


@pytest.mark.parametrize(
    ("finished", "running", "staleness", "max_given_up", "expected"),
    [
        pytest.param({0: 5, 2: 5}, {1: 5}, 0, 1, Batch([0, 2], [], [1]), id="on-policy, what still runs"),
        pytest.param({0: 5, 1: 5, 2: 5}, {}, 0, 1, Batch([0, 1], [], [2]), id="on-policy, what is done beyond P"),
        pytest.param({0: 5, 2: 5}, {1: 5, 3: 5}, 0, 1, Batch(None, [1, 3]), id="never more than may be"),
        pytest.param({0: 5}, {1: 5, 3: 5}, 0, 2, Batch(None, [1, 3]), id="nothing while too few are done"),
        pytest.param({0: 5, 2: 5}, {1: 5, 3: 5}, 1, 1, Batch([0, 2], []), id="carried over where the bound allows it"),
        pytest.param({0: 5, 2: 5}, {1: 4, 3: 5}, 1, 1, Batch([0, 2], [], [1]), id="the one that holds the batch back"),
    ],
)
def test_over_sampled_groups_are_given_up_where_they_hold_a_batch_back(
    finished: dict[int, int], running: dict[int, int], staleness: int, max_given_up: int, expected: Batch
) -> None:
    batch = choose_batch(
        finished, running, weight_version=5, groups_per_iteration=2, max_staleness=staleness, max_given_up=max_given_up
    )
    assert batch == expected
