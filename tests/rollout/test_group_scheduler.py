"""GroupScheduler: its rules by hand, a simulation in virtual time, and random events against its invariants.

Letters as in group_scheduler.py: v weight version, η max_staleness, P groups per iteration, G group size.
"""

import copy
import heapq
import json
import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightrl.rollout import GroupFilter, RolloutSettings
from lightrl.rollout.group_scheduler import Batch, GroupScheduler, RunningGroup, find_late, num_admissible, pass_over
from lightrl.testing import make_groups
from lightrl.trajectory import Group, Prompt, Trajectory

STALENESSES = (0, 1, 2, 4, 8)


def rules(groups_per_iteration: int, max_staleness: int = 0, *, oversampled: int = 0, **others: Any) -> RolloutSettings:
    return RolloutSettings(
        groups_per_iteration=groups_per_iteration,
        max_staleness=max_staleness,
        oversample_fraction=oversampled / groups_per_iteration,
        **{"max_failed_fraction": 1.0, "max_dropped_groups": 10**6, **others},
    )


def trajectory_of(running: RunningGroup, sample: int = 0, *, version: int, reward: float | None = 1.0) -> Trajectory:
    """One token, sampled by this version."""
    prompt = running.group.prompt
    return Trajectory(
        prompt, running.group.id, sample, [0, 1], [False, True], [0.0, 0.0], [-1, version], [1], "", reward=reward
    )


def drops_negative(group: Group) -> tuple[str, str] | None:
    rewards = [item.reward for item in group.trajectories]
    return ("filtered_rule", f"no {group.id}") if any(reward is not None and reward < 0 for reward in rewards) else None


def start_all(scheduler: GroupScheduler, weight_version: int, next_position: int) -> list[RunningGroup]:
    """What the controller does when groups may start."""
    if not scheduler.may_start(weight_version):
        return []
    for position in range(next_position, next_position + scheduler.plan(weight_version)):
        scheduler.queue(position)
    return [
        scheduler.start(position, Prompt(id=f"p{position}", token_ids=[position]), weight_version)
        for position in scheduler.startable(weight_version)
    ]


def finish(scheduler: GroupScheduler, running: RunningGroup, *, version: int = 0, reward: float = 1.0) -> None:
    for sample in range(scheduler.settings.group_size):
        if sample not in running.results:
            trajectory = trajectory_of(running, sample, version=version, reward=reward)
            if scheduler.record(running, sample, trajectory):
                scheduler.settle(running.group)


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
def test_num_admissible(counts, limits, expected):
    (running, accepted, version), (per_iteration, staleness, concurrent, total) = counts, limits
    settings = rules(per_iteration, staleness, total_groups=total)
    assert num_admissible(settings, version, running, accepted, concurrent) == expected


@pytest.mark.parametrize(
    ("finished", "running", "version", "staleness", "expected"),
    [
        pytest.param({3: 0}, {1: 0}, 0, 0, Batch(None, [1]), id="too few: waits for the one that runs"),
        pytest.param({1: 5, 2: 4, 3: 5, 4: 4}, {}, 5, 1, Batch([2, 4], []), id="the oldest version first"),
        pytest.param({2: 5, 3: 5, 4: 5}, {1: 5}, 5, 1, Batch([2, 3], []), id="two of version 5 still have a batch"),
        # The batch at v = 5 is the last that version 4 may be in: group 1 cannot be left over.
        pytest.param({2: 5, 3: 5}, {1: 4}, 5, 1, Batch(None, [1]), id="a straggler that this batch must hold"),
        # η = 2: of what has version 4 or older, one batch of 2 may come after this one; three would be left.
        pytest.param({5: 5, 6: 5}, {1: 4, 2: 4, 3: 4}, 5, 2, Batch(None, [1]), id="more than later ones hold"),
        pytest.param({5: 4, 6: 4}, {1: 4, 2: 4, 3: 5}, 5, 2, Batch([5, 6], []), id="just what later ones hold"),
    ],
)
def test_passing_over_leaves_only_what_can_be_trained_on_in_time(finished, running, version, staleness, expected):
    assert pass_over(rules(2, staleness), version, finished, running) == expected


@pytest.mark.parametrize(
    ("finished", "running", "staleness", "oversampled", "expected"),
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
    finished: dict[int, int], running: dict[int, int], staleness: int, oversampled: int, expected: Batch
) -> None:
    assert pass_over(rules(2, staleness, oversampled=oversampled), 5, finished, running) == expected


@pytest.mark.parametrize(
    ("finished", "staleness", "expected"),
    [
        pytest.param({1: 5, 2: 5}, 0, [], id="one batch of this version"),
        pytest.param({1: 5, 2: 5, 3: 5}, 0, [3], id="on-policy there is no second batch"),
        pytest.param({1: 4, 2: 5}, 0, [1], id="older than the bound"),
        pytest.param({1: 4, 2: 4, 3: 4, 4: 5, 5: 5}, 1, [3], id="version 4 has one batch, both versions have two"),
    ],
)
def test_groups_that_no_batch_can_take_in_time_are_overdue(finished, staleness, expected):
    assert find_late(rules(2, staleness), 5, finished) == expected


def test_a_message_names_the_first_groups_only() -> None:
    assert Batch(None, [3, 4]).describe_wait() == "groups 3, 4"
    assert Batch(None, list(range(9))).describe_wait() == "groups 0, 1, 2, 3, 4 and 4 more"
    assert Batch(None, []).describe_wait() == "more finished groups"


def test_a_batch_is_the_first_groups_of_the_stream_whatever_finishes_first() -> None:
    scheduler = GroupScheduler(rules(2, 2, group_filter=drops_negative))
    running = start_all(scheduler, 0, next_position=0)
    for position in (5, 2, 4, 3):
        finish(scheduler, running[position])
    assert scheduler.take(0) == Batch(None, [0, 1])
    finish(scheduler, running[1], reward=-1.0)
    assert scheduler.take(0) == Batch(None, [0])  # group 1 was dropped: 2 moves up
    finish(scheduler, running[0])
    assert scheduler.take(0) == Batch([0, 2], [])
    assert start_all(scheduler, 0, next_position=6)[0].group.id == 6  # in the place of the dropped one
    assert start_all(scheduler, 0, next_position=7) == []
    scheduler.commit()
    assert len(start_all(scheduler, 1, next_position=7)) == 2  # only the trainer makes room


def test_what_a_batch_waits_for_starts_although_the_window_is_full_of_finished_groups() -> None:
    """A resume with a smaller bound, in which the first group was in flight."""
    first = GroupScheduler(rules(1, 3))
    for running in start_all(first, 0, next_position=0)[1:]:
        finish(first, running, version=1)
    scheduler = GroupScheduler(rules(1, 1))
    scheduler.load_state_dict(first.state_dict())
    scheduler.begin_take(1)
    (running,) = start_all(scheduler, 1, next_position=4)
    assert running.group.id == 0
    finish(scheduler, running, version=1)
    assert scheduler.take(1) == Batch([0], [])


def test_a_group_that_lost_a_trajectory_is_sampled_again_three_times_with_other_seeds() -> None:
    scheduler = GroupScheduler(rules(1, group_size=2, incomplete_groups="resample"))
    names = []
    for _ in range(4):
        (running,) = start_all(scheduler, 0, next_position=len(scheduler.state_dict()["in_flight"]))
        names.append(running.seed_name)
        assert not scheduler.record(running, 1, None)
        if scheduler.record(running, 0, trajectory_of(running, version=0)):
            scheduler.settle(running.group)
    assert names == ["0:p0", "0:p0:1", "0:p0:2", "0:p0:3"]
    assert scheduler.counter.drain_groups() == {"incomplete": 1}
    assert (scheduler.running, scheduler.finished, scheduler.state_dict()["resamples"]) == ({}, {}, [])


def test_a_checkpoint_samples_again_what_waits_for_a_reward_of_a_workspace() -> None:
    scheduler = GroupScheduler(rules(3, group_size=2))
    whole, waiting, half = start_all(scheduler, 0, next_position=0)
    for running in (whole, waiting):
        for sample in range(2):
            trajectory = trajectory_of(running, sample, version=0)
            trajectory.workspace = "/tmp/left" if running is waiting and sample else None
            if scheduler.record(running, sample, trajectory):
                scheduler.settle(running.group)
    for sample, workspace in enumerate(("/tmp/left", None)):
        trajectory = trajectory_of(half, sample, version=0, reward=None if workspace else 1.0)
        trajectory.workspace = workspace
        half.results[sample] = trajectory
    state = scheduler.state_dict()
    assert state["in_flight"] == [waiting.group.id, half.group.id]
    assert [group["id"] for group in state["finished"]] == [whole.group.id]
    assert [[sample for sample, _ in results] for _, _, results in state["begun"]] == [[1]]


def test_a_restored_group_whose_rewards_all_failed_is_sampled_again() -> None:
    first = GroupScheduler(rules(2, defers_rewards=True))
    for running in start_all(first, 0, next_position=0):
        first.record(running, 0, trajectory_of(running, version=0, reward=None))
        first.settle(running.group)
    first.take(0)
    scheduler = GroupScheduler(rules(2))
    scheduler.load_state_dict(first.state_dict())
    failed, rewarded = groups = scheduler.unrewarded()
    failed.trajectories = []
    rewarded.trajectories[0].reward = 1.0
    scheduler.on_rewards(groups)
    assert (list(scheduler.finished), scheduler.state_dict()["in_flight"]) == ([rewarded.id], [failed.id])
    assert scheduler.unrewarded() == []


@dataclass
class Simulation:
    """Groups with random durations and a trainer whose update takes 1; time is a number, there is no event loop."""

    settings: RolloutSettings
    seed: int = 0
    clock: float = 0.0
    version: int = 0
    next_position: int = 0
    staleness: list[int] = field(default_factory=list)  # of each group trained on
    trained: list[int] = field(default_factory=list)
    ends: list[tuple[float, int]] = field(default_factory=list)
    update_ends: float | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.scheduler = GroupScheduler(self.settings)

    def run(self, num_iterations: int) -> "Simulation":
        while self.version < num_iterations:
            for running in start_all(self.scheduler, self.version, self.next_position):
                duration = self.random.uniform(0.5, 1.0) * (30 if self.random.random() < 0.05 else 1)
                heapq.heappush(self.ends, (self.clock + duration, running.group.id))
                self.next_position = max(self.next_position, running.group.id + 1)
            if self.update_ends is None and self.scheduler.take(self.version).group_ids is not None:
                for group in self.scheduler.taken:
                    self.staleness.append(self.version - group.oldest_version)
                    self.trained.append(group.id)
                self.scheduler.commit()
                self.update_ends = self.clock + 1.0
            self.advance()
        return self

    def advance(self) -> None:
        """To the next event; without one the run would wait for ever."""
        self.ends = [end for end in self.ends if end[1] in self.scheduler.running]  # some were given up
        heapq.heapify(self.ends)
        next_end = self.ends[0][0] if self.ends else float("inf")
        assert self.update_ends is not None or self.ends, "deadlock: nothing runs and no batch can be taken"
        if self.update_ends is not None and self.update_ends <= next_end:
            self.clock, self.update_ends = self.update_ends, None
            self.version += 1
            return
        self.clock, group_id = heapq.heappop(self.ends)
        running = self.scheduler.running[group_id]
        finish(self.scheduler, running, version=running.started_version, reward=-float(self.random.random() < 0.03))


def simulation(groups_per_iteration: int, max_staleness: int, *, seed: int = 0, **others: Any) -> "Simulation":
    return Simulation(rules(groups_per_iteration, max_staleness, group_filter=drops_negative, **others), seed=seed)


@pytest.mark.parametrize("groups_per_iteration", [1, 3, 8])
@pytest.mark.parametrize("max_staleness", STALENESSES)
def test_the_bound_holds_exactly_with_stragglers_and_drops(max_staleness: int, groups_per_iteration: int) -> None:
    run = simulation(groups_per_iteration, max_staleness).run(200)
    assert len(run.trained) == len(set(run.trained)) == 200 * groups_per_iteration
    assert run.scheduler.counter.drain_groups()["filtered_rule"] > 0
    assert max(run.staleness) == max_staleness


@pytest.mark.parametrize("max_staleness", STALENESSES)
def test_which_groups_are_trained_on_does_not_depend_on_how_long_they_take(max_staleness: int) -> None:
    runs = [Simulation(rules(4, max_staleness), seed=seed).run(50).trained for seed in range(3)]
    assert runs == [list(range(200))] * 3


class Controller(RuleBasedStateMachine):
    """Does with the scheduler what a controller may do, in any order, and checks it after each step."""

    @initialize(
        per_iteration=st.integers(1, 3),
        max_staleness=st.sampled_from(STALENESSES),
        oversampled=st.integers(0, 2),
        num_iterations=st.none() | st.integers(1, 6),
        others=st.fixed_dictionaries(
            {
                "group_size": st.integers(1, 2),
                "max_concurrent": st.none() | st.integers(1, 5),
                "incomplete_groups": st.sampled_from(["train", "resample", "drop"]),
            }
        ),
    )
    def begin(self, per_iteration, max_staleness, oversampled, num_iterations, others):
        others["total_groups"] = None if num_iterations is None else num_iterations * per_iteration
        others["group_filter"] = drops_negative
        self.settings = rules(per_iteration, max_staleness, oversampled=oversampled, **others)
        self.scheduler = GroupScheduler(self.settings)
        self.next_position = 0
        self.version = self.served = 0  # of the trainer and of the engine
        self.is_waiting = False  # for a batch
        self.trained: list[int] = []
        self.gone: list[int] = []  # groups dropped or given up
        self.num_drops: Counter[str] = Counter()  # trajectories, by reason

    # ---- what happens

    @precondition(lambda self: self.is_waiting or self.settings.max_staleness > 0)
    @rule()
    def start(self) -> None:
        for running in start_all(self.scheduler, self.served, self.next_position):
            self.next_position = max(self.next_position, running.group.id + 1)
        planned = self.scheduler.state_dict()["in_flight"]
        self.next_position = max([self.next_position, *(position + 1 for position in planned)])

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data(), reward=st.sampled_from([1.0, 1.0, 1.0, -1.0, None]), is_late=st.booleans())
    def end_trajectory(self, data: st.DataObject, reward: float | None, is_late: bool) -> None:
        running = self.scheduler.running[data.draw(st.sampled_from(sorted(self.scheduler.running)))]
        sample = data.draw(st.sampled_from(sorted(set(range(self.settings.group_size)) - set(running.results))))
        version = self.served if is_late else running.started_version
        trajectory = trajectory_of(running, sample, version=version, reward=reward) if reward is not None else None
        self.record(running, sample, trajectory)

    def record(self, running: RunningGroup, sample: int, trajectory: Trajectory | None) -> None:
        group = running.group
        if self.scheduler.record(running, sample, trajectory):
            self.scheduler.settle(group)
            if group.id not in self.scheduler.finished:
                self.gone.append(group.id)
                is_incomplete = len(group.trajectories) < self.settings.group_size
                is_dropped_for_it = is_incomplete and self.settings.incomplete_groups != "train"
                reason = "incomplete" if is_dropped_for_it else "filtered_rule"
                self.num_drops[reason] += len(group.trajectories)
        elif group.id not in self.scheduler.running:
            assert self.settings.incomplete_groups == "resample"
            self.num_drops["incomplete"] += len(group.trajectories)

    @precondition(lambda self: self.version - self.served <= self.settings.max_staleness)
    @rule()
    def wait_for_a_batch(self) -> None:
        finished = [group for group, _ in self.scheduler.finished.values()] + self.scheduler.taken
        self.scheduler.begin_take(self.version)
        stale = [group for group in finished if group.id not in self.scheduler.finished]
        assert not stale or self.settings.num_oversampled
        self.num_drops["stale"] += sum(len(group.trajectories) for group in stale)
        self.is_waiting = True
        self.start()
        self.take()

    def take(self) -> None:
        running = dict(self.scheduler.running)
        in_line = [*self.scheduler.state_dict()["in_flight"], *self.scheduler.finished]
        batch = self.scheduler.take(self.version)
        if batch.group_ids is None:
            assert self.scheduler.taken == []
            return
        self.is_waiting = False
        assert [group.id for group in self.scheduler.taken] == batch.group_ids
        assert len(batch.group_ids) == self.settings.groups_per_iteration
        if not self.settings.num_oversampled:
            earlier = [position for position in in_line if position < max(batch.group_ids)]
            assert sorted(earlier) == batch.group_ids[:-1]
        assert all(self.version - group.oldest_version <= self.settings.max_staleness for group in self.scheduler.taken)
        self.gone += batch.gives_up
        for group_id in batch.gives_up:
            results = running[group_id].results.values() if group_id in running else []
            self.num_drops["oversampled"] += self.settings.group_size - sum(item is None for item in results)

    @precondition(lambda self: self.scheduler.taken)
    @rule()
    def train(self) -> None:
        self.trained += [group.id for group in self.scheduler.taken]
        self.scheduler.commit()
        self.version += 1

    @rule()
    def sync(self) -> None:
        self.served = self.version

    @precondition(lambda self: self.version - self.served <= self.settings.max_staleness)
    @rule(num_iterations=st.integers(1, 4), num_stragglers=st.integers(0, 2))
    def iterate(self, num_iterations: int, num_stragglers: int) -> None:
        """Iterations of a batch, an update and a sync, as far as the same stragglers, which never finish, allow it."""
        stragglers = None
        for _ in range(num_iterations):
            self.wait_for_a_batch()
            stragglers = sorted(self.scheduler.running)[:num_stragglers] if stragglers is None else stragglers
            self.finish_all(but=stragglers)
            self.wait_for_a_batch()
            if not self.scheduler.taken:
                return
            self.train()
            self.sync()

    def finish_all(self, *, but: Collection[int] = ()) -> None:
        for running in [item for group_id, item in self.scheduler.running.items() if group_id not in but]:
            for sample in set(range(self.settings.group_size)) - set(running.results):
                self.record(running, sample, trajectory_of(running, sample, version=running.started_version))

    @rule()
    def resume(self) -> None:
        before, state = self.scheduler, json.loads(json.dumps(self.scheduler.state_dict()))
        self.scheduler = GroupScheduler(self.settings)
        self.scheduler.load_state_dict(state)
        assert self.scheduler.state_dict() == state
        if not before.running and not self.is_waiting:
            before, after = copy.deepcopy(before), copy.deepcopy(self.scheduler)
            for scheduler in (before, after):
                scheduler.begin_take(self.version)
            assert before.take(self.version) == after.take(self.version)
            assert {item.id for item in before.taken} == {item.id for item in after.taken}
            assert before.state_dict() == after.state_dict()
        before.counter.drain()
        self.scheduler.counter = before.counter
        self.served, self.is_waiting = self.version, False

    @rule()
    def finish_everything(self) -> None:
        """Whatever came before, a batch can be taken once all that runs has finished."""
        total = self.settings.total_groups
        if total is not None and len(self.trained) + self.settings.groups_per_iteration > total:
            return
        self.served = self.version
        for _ in range(100):
            self.wait_for_a_batch()
            if not self.is_waiting:
                return
            self.finish_all()
        raise AssertionError("no batch could be taken")

    # ---- what always holds

    @invariant()
    def every_position_is_in_exactly_one_place(self) -> None:
        scheduler = self.scheduler
        finished, taken = list(scheduler.finished), [group.id for group in scheduler.taken]
        waiting = [position for position in scheduler.state_dict()["in_flight"] if position not in scheduler.running]
        places = [*waiting, *scheduler.running, *finished, *taken, *self.trained, *self.gone]
        assert sorted(places) == list(range(self.next_position))

    @invariant()
    def no_more_groups_start_than_the_bounds_allow(self) -> None:
        scheduler, settings = self.scheduler, self.settings
        accepted = len(scheduler.finished) + len(scheduler.taken) + len(self.trained)
        num = len(scheduler.state_dict()["in_flight"]) + accepted
        ahead = settings.max_staleness + self.served + 1
        assert num <= ahead * settings.groups_per_iteration + settings.num_oversampled
        assert settings.total_groups is None or num <= settings.total_groups
        assert settings.max_concurrent is None or len(scheduler.running) <= settings.max_concurrent

    @invariant()
    def the_counts_add_up(self) -> None:
        assert self.scheduler.num_consumed == len(self.trained)
        assert Counter(drop.reason for drop in self.scheduler.counter.drain()) == +self.num_drops
        self.num_drops.clear()
        dropped = self.scheduler.counter.drain_groups()
        self.num_gone = getattr(self, "num_gone", 0) + sum(dropped.values())
        assert self.num_gone == len(self.gone)


TestController = Controller.TestCase
TestController.settings = hypothesis_settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes; add Phase.shrink to debug a failure
)


def group(*rewards: float, num_tokens: int = 2) -> Group:
    return make_groups([rewards], completion_ids=(9,) * num_tokens)[0]


@pytest.mark.parametrize(
    ("settings", "rewarded", "reason"),
    [
        pytest.param({}, group(0.0, 1.0), None, id="rewards that differ"),
        pytest.param({}, group(0.5, 0.5, 0.5), "filtered_zero_variance", id="rewards that are all equal"),
        pytest.param({"drop_zero_variance": False}, group(0.5, 0.5), None, id="equal, and that may be"),
        pytest.param({"min_success": 0.5}, group(0.0, 0.2, 1.0), "filtered_too_hard", id="a third succeeds"),
        pytest.param({"max_success": 0.6}, group(0.0, 1.0, 1.0), "filtered_too_easy", id="two thirds succeed"),
        pytest.param({"min_success": 0.5, "max_success": 0.5}, group(0.0, 1.0), None, id="just at both bounds"),
        pytest.param({"max_group_tokens": 5}, group(0.0, 1.0, num_tokens=6), "filtered_too_long", id="too long"),
        pytest.param({"max_group_tokens": 5}, group(0.0, 1.0, num_tokens=5), None, id="just as long as may be"),
        pytest.param({"rule": lambda rewarded: "dull"}, group(0.0, 1.0), "filtered_dull", id="a word of the user's"),
        pytest.param({"rule": lambda rewarded: rewarded.id == 0}, group(0.0, 1.0), "filtered_rule", id="a yes"),
        pytest.param({"rule": lambda rewarded: None}, group(0.0, 1.0), None, id="nothing from the user's rule"),
    ],
)
def test_reason(settings: dict[str, Any], rewarded: Group, reason: str | None) -> None:
    dropped = GroupFilter(**settings)(rewarded)
    assert (dropped[0] if dropped else None) == reason
    assert dropped is None or "'prompt-0'" in dropped[1]


def test_success_is_the_accuracy_that_the_reward_gives_where_it_gives_one() -> None:
    rewarded = group(0.1, 0.2)
    for trajectory in rewarded.trajectories:
        trajectory.metrics["accuracy"] = 1.0
    dropped = GroupFilter(max_success=0.9)(rewarded)
    assert dropped[0] == "filtered_too_easy"


@pytest.mark.parametrize(
    "settings", [{"min_success": 0.7, "max_success": 0.5}, {"max_success": 2}, {"min_success": -1}]
)
def test_bounds_that_no_group_can_keep_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="min_success"):
        GroupFilter(**settings)
    with pytest.raises(ValueError, match="max_group_tokens"):
        GroupFilter(max_group_tokens=0)
