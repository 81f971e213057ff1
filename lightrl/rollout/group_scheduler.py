"""GroupScheduler: decides which groups start and which ones a batch takes, without asyncio, threads, clocks or I/O.

Notation: v is the current weight version, η is `max_staleness`, and P is `groups_per_iteration`. A group's version is
the version of its oldest token. For a running group, a lower bound is used: the weight version at the group's start.

By default, a group may start once it is among the next (η + 1)·P groups in the prompt stream. Each iteration moves this
window by P groups. A batch is the first P kept groups in the stream, even if it must wait for a slow group. So at most
(η + 1)·P - 1 groups precede a group when it starts, and it is trained on at most η versions later. How long a group
takes has no effect on which batch it is in, so fast groups are not preferred.

A run that over-samples instead gives up slow groups that would be too old for any later batch (`find_late`).
"""

from __future__ import annotations

import bisect
import collections
import functools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightrl.checks.bounds import check_bounds, check_choice
from lightrl.checks.printable import count_text
from lightrl.checks.user_code import named_user_code
from lightrl.errors import RewardError, RolloutError
from lightrl.rollout.prompts import Curriculum, State
from lightrl.trajectory import Group, Prompt, Trajectory

MAX_DROPPED_ITERATIONS = 10  # the default limit on dropped groups is this times P
MAX_RESAMPLES = 3  # how often an incomplete group is sampled again before it is dropped

# Drop reason → advice for a run that drops too many groups for this reason.
ADVICE = {
    "filtered_zero_variance": "increase group_size or the temperature, or use prompts of medium difficulty",
    "filtered_too_hard": "lower min_success, or use easier prompts",
    "filtered_too_easy": "increase max_success, or use harder prompts",
    "filtered_too_long": "increase max_group_tokens, or lower max_new_tokens",
    "incomplete": "fix what makes trajectories fail, or train on incomplete groups",
    "failed": "fix what makes trajectories fail",
}
OTHER_ADVICE = "loosen the rule"


@dataclass(frozen=True)
class GroupFilter:
    """Decides whether to drop a group with rewards. Returns (reason, message) to drop it, or None to keep it.

    The policy learns from differences between a group's trajectories. If all rewards are equal, the advantages are 0:
    the group takes up a place in the iteration but yields no gradient. DAPO's dynamic sampling replaces it.

    Source: DAPO, https://arxiv.org/abs/2503.14476.

    Dropping changes what the policy learns. Without groups that always succeed or always fail, the mean training reward
    no longer shows how good the policy is (validation does), and a bound on tokens favors short completions.
    """

    drop_zero_variance: bool = True  # drop a group whose trajectories all have the same reward
    min_success: float = 0.0  # bounds on the group's success rate, 0 to 1
    max_success: float = 1.0
    max_group_tokens: int | None = None  # maximum length of the longest trajectory, without its prompt
    rule: Callable[[Group], object] | None = None  # returns True, or a word as the reason, to drop a group

    def __post_init__(self) -> None:
        check_bounds(1, max_group_tokens=self.max_group_tokens)
        if not 0 <= self.min_success <= self.max_success <= 1:
            bounds = f"min_success={self.min_success} and max_success={self.max_success}"
            raise ValueError(f"0 <= min_success <= max_success <= 1 is required, got {bounds}.")

    def __call__(self, group: Group) -> tuple[str, str] | None:
        rewards = [trajectory.reward for trajectory in group.trajectories]
        success = success_rate(group)
        longest = max(trajectory.num_loss_tokens for trajectory in group.trajectories)
        name = f"Group {group.id} of prompt {group.prompt.id!r}"
        if success < self.min_success:
            return "filtered_too_hard", f"{name} has success rate {success:.2f}, below min_success={self.min_success}."
        if success > self.max_success:
            return "filtered_too_easy", f"{name} has success rate {success:.2f}, above max_success={self.max_success}."
        if self.drop_zero_variance and rewards.count(rewards[0]) == len(rewards):
            return "filtered_zero_variance", f"{name} got reward {rewards[0]:g} in every trajectory."
        if self.max_group_tokens is not None and longest > self.max_group_tokens:
            bound = f"max_group_tokens={self.max_group_tokens}"
            return "filtered_too_long", f"{name} has a trajectory of {count_text(longest, 'token')}, above {bound}."
        reason = self.rule(group) if self.rule is not None else None
        if not reason:
            return None
        return f"filtered_{reason if isinstance(reason, str) else 'rule'}", f"{name} is dropped by the rule."


def success_rate(group: Group) -> float:
    """Returns the mean accuracy of the group's trajectories, 0 to 1; there must be at least one."""
    return sum(trajectory.accuracy for trajectory in group.trajectories) / len(group.trajectories)


# Returns (reason, message) to drop a group with rewards, or None to keep it; for example a `GroupFilter`.
DropsGroups = Callable[[Group], tuple[str, str] | None]


@dataclass(frozen=True)
class RolloutSettings:
    """The controller's settings.

    Args:
        group_size: G, trajectories per prompt.
        group_sizes: data source's label → G of its prompts.
        groups_per_iteration: P.
        total_groups: number of groups that the whole run needs; None if the run's end is unknown.
        max_staleness: η, in versions; 0 is on-policy.
        max_concurrent: maximum number of groups in flight; None limits them only by `max_staleness`.
        rollout_timeout_s: the run ends if a batch waits this long without a finished trajectory.
        loop_timeout_s: the run ends if a workflow or async reward blocks the event loop for this long.
        max_failed_fraction: the run ends if more than this fraction of an iteration's trajectories fail.
        curriculum: chooses prompts by past success; None runs all prompts.
        group_filter: decides from the rewards which groups to drop, and why; a new prompt replaces each dropped group.
        max_dropped_groups: the run ends if more groups than this are dropped per P kept groups, by the filter, as
            incomplete, or because every trajectory failed; None means 10·P.
        incomplete_groups: if some trajectories in a group fail, `train` on the rest, `resample` the whole group with
            new seeds (at most three times), or `drop` it for a new prompt.
        oversample_fraction: number of extra groups to start, as a fraction of P. Groups in flight that would delay a
            batch are given up, and the rest are kept for later batches; on-policy, all groups in flight are given up.
        workflow_workers: number of processes that run the workflow; 0 runs it on the controller's event loop.
        reward_metrics: metrics that each reward must have; a trajectory without one counts as a failed reward.
        defers_rewards: `take` returns groups without rewards, and `wait_for_rewards` waits for them, so `curriculum`
            and `group_filter` cannot read rewards. Only for on-policy runs.
    """

    group_size: int = 1
    group_sizes: Mapping[str, int] = field(default_factory=dict)
    groups_per_iteration: int = 1
    total_groups: int | None = None
    max_staleness: int = 0
    max_concurrent: int | None = None
    rollout_timeout_s: float = 1800.0
    loop_timeout_s: float = 60.0
    max_failed_fraction: float = 0.5
    curriculum: Curriculum | None = None
    group_filter: DropsGroups | None = None
    max_dropped_groups: int | None = None
    incomplete_groups: Literal["train", "resample", "drop"] = "train"
    oversample_fraction: float = 0.0
    workflow_workers: int = 0
    reward_metrics: Collection[str] = ()
    defers_rewards: bool = False

    def __post_init__(self) -> None:
        check_choice(("train", "resample", "drop"), incomplete_groups=self.incomplete_groups)
        check_bounds(1, group_size=self.group_size, groups_per_iteration=self.groups_per_iteration)
        check_bounds(1, **{f"group_size of source {label!r}": size for label, size in self.group_sizes.items()})
        check_bounds(1, max_concurrent=self.max_concurrent)
        check_bounds(0, max_staleness=self.max_staleness, max_dropped_groups=self.max_dropped_groups)
        check_bounds(0, workflow_workers=self.workflow_workers)
        check_bounds(0, 1, max_failed_fraction=self.max_failed_fraction)
        check_bounds(0, 10, oversample_fraction=self.oversample_fraction)
        timeouts = {"rollout_timeout_s": self.rollout_timeout_s, "loop_timeout_s": self.loop_timeout_s}
        check_bounds(1e-3, threading.TIMEOUT_MAX, **timeouts)
        if self.defers_rewards and (self.max_staleness or self.reads_rewards):
            raise ValueError(
                "defers_rewards cannot be combined with max_staleness, curriculum, group_filter, incomplete_groups or "
                "oversample_fraction: they need rewards before a group is taken."
            )

    @property
    def reads_rewards(self) -> bool:
        """Whether rewards decide which groups are taken, so that rewards must be known first."""
        return bool(
            self.curriculum or self.group_filter or self.incomplete_groups != "train" or self.oversample_fraction
        )

    def size_of(self, prompt: Prompt) -> int:
        return self.group_sizes.get(prompt.source or "", self.group_size)

    @functools.cached_property
    def num_oversampled(self) -> int:
        """The number of groups started beyond the P that an iteration needs."""
        return math.ceil(self.oversample_fraction * self.groups_per_iteration)


@dataclass(frozen=True)
class Drop:
    """A trajectory that was dropped, and why."""

    reason: str  # one word, for counting
    message: str
    prompt_id: str


class DropCounter:
    """Counts failures and drops per batch, enforces the bounds in the settings, and keeps drops until `drain`."""

    def __init__(self, settings: RolloutSettings) -> None:
        self.settings = settings
        self.last = Drop("none", "nothing was dropped", "")
        self._drops: collections.deque[Drop] = collections.deque()  # the main thread removes drops from the left
        self._group_drops: collections.Counter[str] = collections.Counter()  # dropped groups, since the last drain
        self.thrown_away: dict[str, float] = collections.defaultdict(float)  # see `count_thrown_away`
        self._num_done = 0  # finished trajectories, since the last batch was taken
        self._num_failed = 0  # failed trajectories, since the last batch
        self.num_kept = 0  # kept groups, since the last batch
        self._num_dropped: collections.Counter[str] = collections.Counter()  # dropped groups, since the last batch

    def begin_iteration(self) -> None:
        """Resets the counts, because a batch was taken."""
        self._num_done = self._num_failed = self.num_kept = 0
        self._num_dropped.clear()

    def drop(self, reason: str, message: str, prompt: Prompt) -> None:
        self.last = Drop(reason, message, prompt.id)
        self._drops.append(self.last)

    def count_thrown_away(self, trajectories: Iterable[Trajectory]) -> None:
        """Adds the finished trajectories in a dropped group to the sums since the start."""
        for trajectory in trajectories:
            self.thrown_away["thrown_away_trajectories"] += 1
            self.thrown_away["thrown_away_tokens"] += trajectory.num_loss_tokens
            self.thrown_away["thrown_away_correct"] += trajectory.accuracy

    def drop_failed(self, error: RewardError | RolloutError, prompt: Prompt) -> None:
        """Drops a trajectory because its workflow or reward raised this error."""
        self.drop(f"reward_{error.reason}" if isinstance(error, RewardError) else "rollout", str(error), prompt)

    def count_trajectory(self, num_expected: float, *, is_failed: bool) -> None:
        """Counts a finished trajectory; raises RolloutError if too many trajectories in an iteration have failed."""
        self._num_done += 1
        self._num_failed += is_failed
        if is_failed:
            total = max(self._num_done, round(num_expected))  # off-policy, up to η + 1 iterations may be done
            self.check_failed(self._num_failed, total, "since the last batch was taken")

    def check_failed(self, num_failed: int, total: int, when: str) -> None:
        """Raises RolloutError if so many of `total` trajectories failed that the mean would mislead."""
        max_fraction = self.settings.max_failed_fraction
        if num_failed > max_fraction * total:
            raise RolloutError(
                f"Aborting: {num_failed} of {count_text(total, 'trajectory')} failed {when} "
                f"(max_failed_fraction={max_fraction:g}). Last failure: {self.last.reason}: {self.last.message}"
            )

    def count_given_up(self) -> None:
        """Counts an over-sampled group that was given up, which is not a failure."""
        self._group_drops["oversampled"] += 1

    def count_dropped(self, reason: str, message: str) -> None:
        """Counts a dropped group that a new prompt replaces; raises RolloutError if too many were dropped."""
        self._group_drops[reason] += 1
        self._num_dropped[reason] += 1
        size, max_dropped = self.settings.groups_per_iteration, self.settings.max_dropped_groups
        if max_dropped is None:
            max_dropped = MAX_DROPPED_ITERATIONS * size
        if self._num_dropped.total() > max_dropped * max(1.0, self.num_kept / size):
            advice = dict.fromkeys(ADVICE.get(reason, OTHER_ADVICE) for reason, _ in self._num_dropped.most_common())
            raise RolloutError(
                f"Aborting: {count_text(self._num_dropped.total(), 'dropped group')} ({dict(self._num_dropped)}) and "
                f"{self.num_kept} kept since the last batch was taken. The limit is max_dropped_groups_per_iteration="
                f"{max_dropped} per {size} kept. To fix this, {'; or '.join(advice)}. Last drop: {message}"
            )

    def drain(self) -> list[Drop]:
        """Returns the trajectories dropped since the last call; may be called from any thread."""
        return [self._drops.popleft() for _ in range(len(self._drops))]

    def drain_groups(self) -> dict[str, int]:
        """Returns reason → number of groups dropped since the last call."""
        drops, self._group_drops = dict(self._group_drops), collections.Counter()
        return drops


@dataclass(frozen=True)
class Batch:
    """The decision of `take`: the groups to train on, or the running groups to wait for."""

    group_ids: list[int] | None  # the P groups to train on; None means to wait
    waits_for: list[int]  # running groups that delay the batch
    gives_up: list[int] = field(default_factory=list)  # over-sampled groups that would be too old for later batches

    def describe_wait(self) -> str:  # for messages; names the first five groups
        others = f" and {len(self.waits_for) - 5} more" if len(self.waits_for) > 5 else ""
        return f"groups {', '.join(map(str, self.waits_for[:5]))}{others}" if self.waits_for else "more finished groups"


@dataclass(eq=False)
class RunningGroup:
    """A group that is being sampled; if it is sampled again, a new object is made."""

    group: Group
    started_version: int  # weight version that served when the group started; no token is older
    seed_name: str  # determines the seeds of the group's generations
    results: dict[int, Trajectory | None] = field(default_factory=dict)  # sample → trajectory; None if dropped


class GroupScheduler:
    """Tracks the state of each group. The controller reports events and carries out the scheduler's decisions.

        queue ──start──► running ─record, settle─► finished ──take──► taken ──commit──► trained on
          ▲                 │ resampled                │ too old          │ not committed: finished again
          └─────────────────┴──────────────────────────┘

    Once queued, a position in the prompt stream is in exactly one of these states until it is trained on or dropped.
    """

    def __init__(self, settings: RolloutSettings) -> None:
        self.settings = settings
        self.counter = DropCounter(settings)
        self.num_consumed = 0  # groups that have been trained on
        self.running: dict[int, RunningGroup] = {}
        self.finished: dict[int, tuple[Group, int]] = {}  # position → group, version of its oldest token
        self.taken: list[Group] = []
        self._queued: list[int] = []  # positions to start next, in order
        self._again: list[int] = []  # on-policy, positions to sample again in the next admission batch
        # Groups that were running when the checkpoint was written: position → version at the start, finished samples.
        self.started: dict[int, tuple[int, dict[int, Trajectory | None]]] = {}
        self._num_resamples: dict[int, int] = {}  # position in flight → how often it was resampled

    @property
    def num_done_trajectories(self) -> int:
        """The number of finished trajectories in groups that may be in the next batch, to report progress."""
        ids = [*self.running, *self.finished]
        if not self.settings.num_oversampled:
            ids = self._stream()[: self.settings.groups_per_iteration]
        sizes = {group_id: len(item.results) for group_id, item in self.running.items()}
        sizes |= {group_id: self.settings.size_of(group.prompt) for group_id, (group, _) in self.finished.items()}
        return sum(sizes.get(group_id, 0) for group_id in ids)

    @property
    def num_expected(self) -> float:
        """The number of trajectories per iteration; if G differs by source, estimated from the groups in flight."""
        groups = [*(item.group for item in self.running.values()), *(group for group, _ in self.finished.values())]
        sizes = [self.settings.size_of(group.prompt) for group in groups if self.settings.group_sizes]
        return self.settings.groups_per_iteration * (sum(sizes) / len(sizes) if sizes else self.settings.group_size)

    def _stream(self) -> list[int]:
        """Returns all groups in flight or finished, in the order of the prompt stream."""
        return sorted([*self.running, *self.finished, *self._queued, *self._again])

    def may_start(self, weight_version: int) -> bool:
        """Whether a group may start now.

        On-policy, replacements of dropped groups wait until the whole admission batch before them is done. So the seed
        decides which groups are sampled and which are decoded together, not the order in which groups finish.
        """
        if self.settings.max_staleness == 0 and self.running and not self._queued:
            return False
        if self._num_admissible(weight_version, self.settings.max_concurrent) > 0:
            return True
        return bool(self.startable(weight_version))  # after a resume, finished groups may exceed the window

    def plan(self, weight_version: int) -> int:
        """Returns how many new positions to `queue` before groups start. On-policy, also queues groups to resample."""
        if self.settings.max_staleness == 0:
            if self.running or self._queued:
                return 0
            self._queued, self._again = sorted(self._again), []
        return self.max_new(weight_version)

    def max_new(self, weight_version: int) -> int:
        """Returns the largest number of new positions that `plan` may return."""
        max_concurrent = None if self.settings.max_staleness == 0 else self.settings.max_concurrent
        return max(0, self._num_admissible(weight_version, max_concurrent) - len(self._queued) - len(self._again))

    def queue(self, position: int) -> None:
        """Adds a position in the prompt stream to the queue, which is in stream order."""
        bisect.insort(self._queued, position)

    def startable(self, weight_version: int) -> list[int]:
        """Returns the queued positions that may start now, because they are inside the window, in order."""
        if not self._queued:
            return []
        accepted = self.num_consumed + len(self.taken)
        window = set(self._stream()[: num_admissible(self.settings, weight_version, 0, accepted, None)])
        startable = [position for position in self._queued if position in window]
        max_concurrent = self.settings.max_concurrent
        return startable if max_concurrent is None else startable[: max(0, max_concurrent - len(self.running))]

    def start(self, position: int, prompt: Prompt, weight_version: int) -> RunningGroup:
        """Moves a queued position to `running` and records this weight version."""
        (self._queued if position in self._queued else self._again).remove(position)
        num_resamples = self._num_resamples.get(position)
        seed_name = f"{position}:{prompt.id}" + (f":{num_resamples}" if num_resamples else "")
        started_version, results = self.started.pop(position, (weight_version, {}))
        self.running[position] = RunningGroup(Group(position, prompt), started_version, seed_name, results)
        return self.running[position]

    def _num_admissible(self, weight_version: int, max_concurrent: int | None) -> int:
        accepted = self.num_consumed + len(self.taken) + len(self.finished)
        return num_admissible(self.settings, weight_version, len(self.running), accepted, max_concurrent)

    def record(self, running: RunningGroup, sample: int, trajectory: Trajectory | None) -> bool:
        """Records a finished trajectory in a running group, None if dropped; raises RolloutError if too many failed.

        Returns whether the caller must now call `settle`: all trajectories are done, and the group is not resampled.
        """
        running.results[sample] = trajectory
        self.counter.count_trajectory(self.num_expected, is_failed=trajectory is None)
        group, size = running.group, self.settings.size_of(running.group.prompt)
        if len(running.results) < size:
            return False
        group.trajectories = [item for _, item in sorted(running.results.items()) if item is not None]
        return len(group.trajectories) == size or not self._resample(group.id)

    def _resample(self, group_id: int) -> bool:
        """Samples an incomplete group again; returns False if the settings forbid that or the limit is reached."""
        num_resamples = self._num_resamples.get(group_id, 0)
        if self.settings.incomplete_groups != "resample" or num_resamples >= MAX_RESAMPLES:
            return False
        self._drop(group_id, "incomplete", f"Group {group_id} lost a trajectory and is sampled again.")
        self._num_resamples[group_id] = num_resamples + 1
        if self.settings.max_staleness == 0:
            self._again.append(group_id)
        else:
            self.queue(group_id)
        return True

    def settle(self, group: Group) -> None:
        """Keeps or drops a group whose trajectories are all done. Raises RolloutError if too many were dropped.

        If the group filter raises, the error is passed on and the group stays in flight, so that a run resumed with a
        corrected filter samples the group again.
        """
        self._num_resamples.pop(group.id, None)
        num, size = len(group.trajectories), self.settings.size_of(group.prompt)
        reason: tuple[str, str] | None = None
        if num == 0:
            reason = "failed", f"Every trajectory in group {group.id} failed: {self.counter.last.message}"
        elif num < size and self.settings.incomplete_groups != "train":
            reason = "incomplete", f"Group {group.id} has only {num} of {size} trajectories."
        elif self.settings.group_filter is not None:
            with named_user_code("The group filter", on=f"group {group.id}"):
                reason = self.settings.group_filter(group)
        if reason is None:
            del self.running[group.id]
            self.finished[group.id] = (group, group.oldest_version)
            self.counter.num_kept += 1
        else:
            self._drop(group.id, *reason)
            self.counter.count_dropped(*reason)

    def unrewarded(self) -> list[Group]:
        """Returns finished groups without rewards; they come from the checkpoint of a run that deferred rewards."""
        return [group for group, _ in self.finished.values() if any(item.reward is None for item in group.trajectories)]

    def on_rewards(self, groups: Sequence[Group]) -> None:
        """Keeps the groups of `unrewarded`, now with rewards; samples a group again if all its rewards failed."""
        for group in groups:
            if group.trajectories:
                self.finished[group.id] = (group, group.oldest_version)
            else:
                del self.finished[group.id]
                self.queue(group.id)

    def begin_take(self, weight_version: int) -> None:
        """Returns an uncommitted batch to `finished`, and resamples finished groups that are too old for any batch."""
        self.finished |= {group.id: (group, group.oldest_version) for group in self.taken}
        self.taken = []
        for group_id in find_late(self.settings, weight_version, _versions(self.finished, weight_version)):
            bound = f"max_staleness={self.settings.max_staleness}"
            self._drop(group_id, "stale", f"Group {group_id} is too old for {bound} and is sampled again.")
            self.queue(group_id)

    def take(self, weight_version: int) -> Batch:
        """Takes a batch if enough groups are finished, and drops over-sampled groups too old for later batches."""
        if self.settings.num_oversampled:  # a batch can take any finished groups
            running = {group_id: item.started_version for group_id, item in self.running.items()}
            batch = pass_over(self.settings, weight_version, _versions(self.finished, weight_version), running)
        else:  # a batch takes the first groups of the stream
            first = self._stream()[: self.settings.groups_per_iteration]
            missing = [group_id for group_id in first if group_id not in self.finished]
            is_full = not missing and len(first) == self.settings.groups_per_iteration
            waits_for = [group_id for group_id in missing if group_id in self.running]  # other missing ones are queued
            batch = Batch(group_ids=first if is_full else None, waits_for=waits_for)
        if batch.group_ids is None:
            return batch
        self.taken = [self.finished.pop(group_id)[0] for group_id in batch.group_ids]
        for group_id in batch.gives_up:
            message = f"Group {group_id} was over-sampled and would be too old for later batches."
            self._drop(group_id, "oversampled", message)
            self._num_resamples.pop(group_id, None)
            self.counter.count_given_up()
        self.counter.begin_iteration()
        return batch

    def commit(self) -> None:
        """Forgets the groups from the last `take`, which have been trained on."""
        self.num_consumed += len(self.taken)
        self.taken = []

    def _drop(self, group_id: int, reason: str, message: str) -> None:
        """Removes a running or finished group and drops its trajectories that are not dropped yet."""
        if group_id in self.running:
            running = self.running.pop(group_id)
            num_failed = sum(trajectory is None for trajectory in running.results.values())
            prompt, num = running.group.prompt, self.settings.size_of(running.group.prompt) - num_failed
            self.counter.count_thrown_away(item for item in running.results.values() if item is not None)
        else:
            group, _ = self.finished.pop(group_id)
            prompt, num = group.prompt, len(group.trajectories)
            self.counter.count_thrown_away(group.trajectories)
        for _ in range(num):
            self.counter.drop(reason, message, prompt)

    def state_dict(self) -> State:
        """Returns the positions in flight and the groups not yet trained on, in plain Python."""
        groups = [*self.taken, *(group for group, _ in self.finished.values())]
        unusable = {group.id for group in groups if not all(map(_outlasts_its_run, group.trajectories))}
        in_flight = sorted([*self.running, *self._queued, *self._again, *unusable])
        started = self.started | {key: (item.started_version, item.results) for key, item in self.running.items()}
        return {
            "groups_per_iteration": self.settings.groups_per_iteration,
            "num_consumed": self.num_consumed,
            "in_flight": in_flight,
            "max_staleness": self.settings.max_staleness,
            "group_size": self.settings.group_size,
            "group_sizes": dict(self.settings.group_sizes),
            "begun": [
                [
                    position,
                    version,
                    [
                        [sample, None if trajectory is None else trajectory.to_text()]
                        for sample, trajectory in sorted(results.items())
                        if _outlasts_its_run(trajectory)
                    ],
                ]
                for position, (version, results) in sorted(started.items())
            ],
            "resamples": [
                [position, self._num_resamples[position]] for position in in_flight if position in self._num_resamples
            ],
            "finished": [group.state_dict() for group in groups if group.id not in unusable],
        }

    def load_state_dict(self, state: State) -> None:
        """Restores finished groups before the first `take`; requeues groups that were in flight."""
        num_iterations = int(state["num_consumed"]) // int(state["groups_per_iteration"])
        self.num_consumed = num_iterations * self.settings.groups_per_iteration  # admission uses this run's P
        self._queued = sorted(state["in_flight"])
        self._num_resamples, self.finished = dict(state["resamples"]), {}
        for group in map(Group.from_state, state["finished"]):
            self.finished[group.id] = (group, group.oldest_version)
        # With a smaller bound, groups that were running might be too old when they finish, so they start again.
        is_in_time = state.get("max_staleness", 0) <= self.settings.max_staleness
        sizes = state.get("group_size"), state.get("group_sizes", {})
        continues = is_in_time and sizes == (self.settings.group_size, self.settings.group_sizes)
        for position, version, results in state["begun"] if continues else []:
            done = {sample: None if text is None else Trajectory.from_text(text) for sample, text in results}
            self.started[position] = (version, done)


def _outlasts_its_run(trajectory: Trajectory | None) -> bool:
    """Whether a resumed run can use the trajectory: its reward must not need an agent's folder, which is deleted."""
    return trajectory is None or trajectory.workspace is None


def num_admissible(
    settings: RolloutSettings, weight_version: int, running: int, accepted: int, max_concurrent: int | None
) -> int:
    """Returns how many groups may start now.

    A group may start while `accepted + running < (η + v + 1)·P`, so that it is trained on by version v + η. With
    over-sampling, a few more groups may start; `pass_over` gives up those that would delay a batch.

    Args:
        weight_version: v, the version that all serving engines have acknowledged.
        running: number of groups in flight, at most `max_concurrent` if that is set.
        accepted: number of groups finished and kept since the run began, trained on or not; excludes dropped groups.
    """
    num = (settings.max_staleness + weight_version + 1) * settings.groups_per_iteration + settings.num_oversampled
    if settings.total_groups is not None:
        num = min(num, settings.total_groups)
    num -= accepted + running
    if max_concurrent is not None:
        num = min(num, max_concurrent - running)
    return max(0, num)


def pass_over(
    settings: RolloutSettings, weight_version: int, finished: Mapping[int, int], running: Mapping[int, int]
) -> Batch:
    """Takes the P finished groups with the oldest versions, unless too many of the remaining groups would be late.

    It gives up the late groups, but at most as many as over-sampling started, which is always enough.

    Args:
        weight_version: v, the trainer's version.
        finished, running: group id → version of its oldest token, or of the weights that served when it started.
    """
    size = settings.groups_per_iteration
    taken = set(sorted(finished, key=lambda group_id: (finished[group_id], group_id))[:size])
    if len(taken) < size:
        return Batch(group_ids=None, waits_for=sorted(running))
    left_over = {**finished, **running}
    for group_id in taken:
        del left_over[group_id]
    late = find_late(settings, weight_version + 1, left_over, running)
    if len(late) > settings.num_oversampled:
        return Batch(group_ids=None, waits_for=[group_id for group_id in late if group_id in running])
    return Batch(group_ids=sorted(taken), waits_for=[], gives_up=late)


def find_late(
    settings: RolloutSettings, weight_version: int, versions: Mapping[int, int], running: Collection[int] = ()
) -> list[int]:
    """Returns the smallest set of groups to give up so that the rest train in time; gives up running groups first.

    Without over-sampling, no group is late, except after a resume with a smaller η or P.

    Args:
        weight_version: version of the next batch, which takes the P groups with the oldest versions.
        versions: group id → version.
        running: the groups that are not finished.
    """
    late: list[int] = []
    in_time: list[int] = []
    for group_id in sorted(versions, key=lambda group_id: (versions[group_id], group_id)):
        in_time.append(group_id)
        trained_at = weight_version + (len(in_time) - 1) // settings.groups_per_iteration
        if trained_at > versions[group_id] + settings.max_staleness:
            late.append(next((candidate for candidate in in_time if candidate in running), group_id))
            in_time.remove(late[-1])
    return sorted(late)


def _versions(finished: Mapping[int, tuple[Group, int]], weight_version: int) -> dict[int, int]:
    # A group in which the policy generated nothing has version -1 and cannot be stale.
    return {key: version if version >= 0 else weight_version for key, (_, version) in finished.items()}
