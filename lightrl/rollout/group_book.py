"""GroupBook: which groups may start and which a batch takes. Plain decisions: no asyncio, threads, clocks or I/O.

Letters: v the weight version (now), η `max_staleness`, P `groups_per_iteration`, s any version. A group's version is
that of its oldest token; for a running one it is the version that served when it started, a lower bound.

Two rules bound the staleness: `num_admissible` bounds what starts, `choose_batch` what a batch leaves over. Admission
alone does not suffice: with 5 % stragglers 30 times slower, staleness reached 29 at η = 1. With both rules the bound
held exactly for η = 0, 1, 2, 4, 8.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrl.checks.user_code import named_user_code
from lightrl.rollout.drop_tally import DropTally
from lightrl.rollout.schedule import ScheduleLog
from lightrl.rollout.settings import RolloutSettings
from lightrl.trajectory import Group, Prompt, Trajectory

MAX_REDRAWS = 3  # of a group that lost a trajectory; then it is dropped


@dataclass(frozen=True)
class Batch:
    """What `choose_batch` decides: the groups to train on, or the running groups to wait for."""

    group_ids: list[int] | None  # P group ids, or None: wait
    waits_for: list[int]  # running groups that hold the batch back; empty if it only needs more groups
    gives_up: list[int] = field(default_factory=list)  # over-sampled groups that would hold this batch back

    def describe_wait(self) -> str:  # the first five groups, for messages
        more = f" and {len(self.waits_for) - 5} more" if len(self.waits_for) > 5 else ""
        return f"groups {', '.join(map(str, self.waits_for[:5]))}{more}" if self.waits_for else "more finished groups"


@dataclass(eq=False)
class RunningGroup:
    """One draw of a group; a redraw of the same group is another object."""

    group: Group
    started_version: int  # the weights that served when it started: no token is older
    seed_name: str  # the seeds of its generations follow from this
    results: dict[int, Trajectory | None] = field(default_factory=dict)  # by sample; None was dropped


class GroupBook:
    """Knows where each group is. The controller reports what happens and does what the book decides.

        queue ──start──► running ─record, settle─► finished ──take──► taken ──commit──► trained on
          ▲                 │ redrawn                  │ overdue          │ not committed: finished again
          └─────────────────┴──────────────────────────┘

    A position of the prompt stream, once queued, is in one of these places until it is trained on, dropped or given up.
    """

    def __init__(self, settings: RolloutSettings) -> None:
        self.settings = settings
        self.tally = DropTally(settings)
        self.log: ScheduleLog | None = None  # where decisions are recorded
        self.num_consumed = 0  # groups that an iteration was trained on
        self.running: dict[int, RunningGroup] = {}
        self.finished: dict[int, tuple[Group, int]] = {}  # with the version of its oldest token
        self.taken: list[Group] = []
        self._queued: collections.deque[int] = collections.deque()  # positions to start next
        self._again: list[int] = []  # on-policy, positions to draw again in the next wave
        self._begun: dict[int, tuple[int, dict[int, Trajectory | None]]] = {}  # of a checkpoint: version, done samples
        self._redraws: dict[int, int] = {}  # how often a position in flight was started again, each time with new seeds

    @property
    def num_done_trajectories(self) -> int:
        """Of running and finished groups, for progress."""
        return sum(len(item.results) for item in self.running.values()) + len(self.finished) * self.settings.group_size

    def may_start(self, weight_version: int) -> bool:
        """Whether a group may start now.

        On-policy, replacements of dropped groups wait until the whole wave before them is done: which groups are drawn,
        and which are decoded together, then depends on the seed, not on which one finished first.
        """
        if self.settings.max_staleness == 0 and self.running and not self._queued:
            return False
        return self._num_admissible(weight_version, self.settings.max_concurrent) > 0

    def plan(self, weight_version: int) -> int:
        """How many new positions to `queue` before groups start; on-policy those of a whole wave."""
        max_concurrent = self.settings.max_concurrent
        if self.settings.max_staleness == 0:
            if self.running or self._queued:
                return 0
            self._queued.extend(sorted(self._again))
            self._again, max_concurrent = [], None
        return max(0, self._num_admissible(weight_version, max_concurrent) - len(self._queued))

    def room(self, weight_version: int) -> int:
        """At most how many new positions `plan` asks for."""
        max_concurrent = None if self.settings.max_staleness == 0 else self.settings.max_concurrent
        return max(0, self._num_admissible(weight_version, max_concurrent) - len(self._queued) - len(self._again))

    def queue(self, position: int) -> None:
        """This position of the prompt stream is next after those already queued."""
        self._queued.append(position)

    def startable(self, weight_version: int) -> list[int]:
        """The queued positions that may start now, in order."""
        return list(self._queued)[: self._num_admissible(weight_version, self.settings.max_concurrent)]

    def start(self, position: int, prompt: Prompt, weight_version: int) -> RunningGroup:
        """A queued position starts, under these weights."""
        (self._queued if position in self._queued else self._again).remove(position)
        if self.log is not None:
            self.log.started(position, weight_version)
        seed_name = self.seed_name(position, prompt)
        started_version, results = self._begun.pop(position, (weight_version, {}))
        self.running[position] = RunningGroup(Group(position, prompt), started_version, seed_name, results)
        return self.running[position]

    def seed_name(self, position: int, prompt: Prompt) -> str:
        """From which the seeds of a group's next draw follow."""
        redraws = self._redraws.get(position)
        return f"{position}:{prompt.id}" + (f":{redraws}" if redraws else "")

    def _num_admissible(self, weight_version: int, max_concurrent: int | None) -> int:
        accepted = self.num_consumed + len(self.taken) + len(self.finished)
        return num_admissible(self.settings, weight_version, len(self.running), accepted, max_concurrent)

    def record(self, running: RunningGroup, sample: int, trajectory: Trajectory | None) -> bool:
        """A trajectory of a running group is done; None if it was dropped. Raises RolloutError if too many failed.

        Returns:
            True once all trajectories are done, then call `settle`; False before, and if the group is drawn again.
        """
        if self.log is not None:
            self.log.done(running.group.id, sample, trajectory)
        running.results[sample] = trajectory
        self.tally.count_trajectory(is_failed=trajectory is None)
        if len(running.results) < self.settings.group_size:
            return False
        group = running.group
        group.trajectories = [item for _, item in sorted(running.results.items()) if item is not None]
        is_incomplete, redraws = len(group.trajectories) < self.settings.group_size, self._redraws.get(group.id, 0)
        if is_incomplete and self.settings.incomplete_groups == "redraw" and redraws < MAX_REDRAWS:
            self._drop(group.id, "incomplete", f"Group {group.id} lost a trajectory and is drawn again.")
            self._redraws[group.id] = redraws + 1
            (self._again if self.settings.max_staleness == 0 else self._queued).append(group.id)
            return False
        return True

    def settle(self, group: Group) -> None:
        """Keeps or drops a group whose trajectories are all done. Raises RolloutError if too many were dropped.

        It also raises if the group filter does; the group stays in flight, and a run with a fixed filter redraws it.
        """
        self._redraws.pop(group.id, None)
        verdict = self._reason_to_drop(group)
        if verdict is None:
            del self.running[group.id]
            self._keep(group)
            self.tally.count_kept()
        else:
            self._drop(group.id, *verdict)
            self.tally.count_dropped(*verdict)

    def _reason_to_drop(self, group: Group) -> tuple[str, str] | None:
        num, size = len(group.trajectories), self.settings.group_size
        if num == 0:
            return "failed", f"Every trajectory of group {group.id} failed: {self.tally.last.message}"
        if num < size and self.settings.incomplete_groups != "train":
            return "incomplete", f"Group {group.id} has {num} of its {size} trajectories."
        if self.settings.group_filter is None:
            return None
        with named_user_code("The group filter", on=f"group {group.id}"):
            return self.settings.group_filter(group)

    def _keep(self, group: Group) -> None:
        self.finished[group.id] = (group, group.oldest_version)

    def unjudged(self) -> list[Group]:
        """Finished groups without rewards: a checkpoint's, of a run that took groups before they were judged."""
        return [group for group, _ in self.finished.values() if any(item.reward is None for item in group.trajectories)]

    def rejudged(self, groups: Sequence[Group]) -> None:
        """The groups of `unjudged` now have their rewards; where all of them failed, the group is drawn again."""
        for group in groups:
            if group.trajectories:
                self._keep(group)
            else:
                del self.finished[group.id]
                self._queued.append(group.id)

    def begin_take(self, weight_version: int) -> None:
        """The last batch, unless committed, is finished again; finished groups too old for any batch are redrawn."""
        for group in self.taken:
            self._keep(group)
        self.taken = []
        for group_id in find_overdue(self.settings, weight_version, self._finished_versions(weight_version)):
            bound = f"max_staleness={self.settings.max_staleness}"
            self._drop(group_id, "stale", f"Group {group_id} is too old for {bound} and is drawn again.")
            self._queued.append(group_id)

    def take(self, weight_version: int) -> Batch:
        """Takes a batch if one can be taken, and leaves out the over-sampled groups that it gives up."""
        running = {group_id: item.started_version for group_id, item in self.running.items()}
        batch = choose_batch(self.settings, weight_version, self._finished_versions(weight_version), running)
        if batch.group_ids is None:
            return batch
        self.taken = [self.finished.pop(group_id)[0] for group_id in batch.group_ids]
        for group_id in batch.gives_up:
            self._drop(group_id, "oversampled", f"Group {group_id} was over-sampled and the iteration did not need it.")
            self._redraws.pop(group_id, None)
            self.tally.count_given_up("oversampled")
        self.tally.begin_iteration()
        if self.log is not None:
            self.log.took(weight_version, batch.group_ids, batch.gives_up)
        return batch

    def stragglers(self, batch: Batch, weight_version: int) -> list[int]:
        """The groups a batch waits for that `redraw` should start again: all that then get newer weights."""
        if not self.settings.redraw_stragglers or len(self.finished) < self.settings.groups_per_iteration:
            return []
        return [group_id for group_id in batch.waits_for if self.running[group_id].started_version < weight_version]

    def redraw(self, group_id: int) -> Prompt:
        """Puts a running group back at the front of the queue, to `start` with new seeds and this prompt."""
        running = self.running[group_id]
        if self.log is not None:
            self.log.redrawn(group_id)
        message = f"Group {group_id} of version {running.started_version} held a batch back and is drawn again."
        self._drop(group_id, "straggler", message)
        self._redraws[group_id] = self._redraws.get(group_id, 0) + 1
        self._queued.appendleft(group_id)
        return running.group.prompt

    def commit(self) -> None:
        """The groups of the last `take` have been trained on."""
        self.num_consumed += len(self.taken)
        self.taken = []

    def _drop(self, group_id: int, reason: str, message: str) -> None:
        """Removes a running or finished group and drops those of its trajectories that were not dropped before."""
        if group_id in self.running:
            running = self.running.pop(group_id)
            num_failed = sum(trajectory is None for trajectory in running.results.values())
            prompt, num = running.group.prompt, self.settings.group_size - num_failed
        else:
            group, _ = self.finished.pop(group_id)
            prompt, num = group.prompt, len(group.trajectories)
        for _ in range(num):
            self.tally.drop(reason, message, prompt)

    def _finished_versions(self, weight_version: int) -> dict[int, int]:
        # A group in which the policy wrote nothing has version -1 and cannot be stale.
        return {key: version if version >= 0 else weight_version for key, (_, version) in self.finished.items()}

    def state_dict(self) -> dict[str, Any]:
        """Positions in flight and groups not yet trained on; plain Python."""
        in_flight = sorted([*self.running, *self._queued, *self._again])
        return {
            "groups_per_iteration": self.settings.groups_per_iteration,
            "num_consumed": self.num_consumed,
            "in_flight": in_flight,
            "max_staleness": self.settings.max_staleness,
            "begun": [
                [position, item.started_version, [_state_of(*result) for result in sorted(item.results.items())]]
                for position, item in sorted(self.running.items())
            ],
            "redraws": [[position, self._redraws[position]] for position in in_flight if position in self._redraws],
            "finished": [
                group.state_dict() for group in [*self.taken, *(group for group, _ in self.finished.values())]
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first `take`: restores finished groups; what was in flight starts again first."""
        num_iterations = int(state["num_consumed"]) // int(state["groups_per_iteration"])
        self.num_consumed = num_iterations * self.settings.groups_per_iteration  # admission counts this run's P
        self._queued = collections.deque(state["in_flight"])
        self._redraws, self.finished = dict(state["redraws"]), {}
        for record in state["finished"]:
            self._keep(Group.from_json(record))
        # With a smaller bound what was begun might be too old when it is done, so it starts again.
        is_in_time = state.get("max_staleness", -1) <= self.settings.max_staleness
        for position, version, results in state.get("begun", []) if is_in_time else []:
            done = {sample: None if item is None else Trajectory.from_json(item) for sample, item in results}
            self._begun[position] = (version, done)

    def begun_versions(self) -> dict[int, int]:
        """Of the groups of a checkpoint that go on where they were: the version under which each started."""
        return {position: version for position, (version, _) in self._begun.items()}


def _state_of(sample: int, trajectory: Trajectory | None) -> list[Any]:
    return [sample, None if trajectory is None else trajectory.state_dict()]


def num_admissible(
    settings: RolloutSettings, weight_version: int, running: int, accepted: int, max_concurrent: int | None
) -> int:
    """How many groups may start now.

    A group may start while `accepted + running < (η + v + 1)·P`: even if it finishes at once, it is trained on no
    later than η versions from now. With over-sampling a few more may start; `choose_batch` gives up those that would
    hold a batch back.

    Args:
        weight_version: v, the version that all routable engines have acknowledged.
        running: groups in flight, at most `max_concurrent` if that is not None.
        accepted: groups finished and kept since the run began, trained on or waiting; dropped ones do not count.
    """
    room = (settings.max_staleness + weight_version + 1) * settings.groups_per_iteration + settings.num_oversampled
    if settings.total_groups is not None:
        room = min(room, settings.total_groups)
    room -= accepted + running
    if max_concurrent is not None:
        room = min(room, max_concurrent - running)
    return max(0, room)


def choose_batch(
    settings: RolloutSettings, weight_version: int, finished: Mapping[int, int], running: Mapping[int, int]
) -> Batch:
    """The oldest P finished groups, if what they leave over can still be trained on in time; else which to wait for.

    A batch may leave over at most `(s + η - v)·P` groups of version ≤ s, for every s in [v - η, v]: the iterations up
    to version s + η can take that many.

    With over-sampling it may give up groups, but only to take a batch at once: running ones before finished ones, older
    versions first. The others are carried over. Giving up as many as admission lets in beyond the bound always
    suffices, because for every s the excess of groups of version ≤ s is at most that.

    Args:
        weight_version: v, of the trainer.
        finished, running: group id → version of its oldest token, or of the weights that served when it started.
    """
    finished, running = dict(finished), dict(running)
    size = settings.groups_per_iteration
    gives_up: list[int] = []
    at_first = batch = _choose_batch(settings, weight_version, finished, running)
    while batch.group_ids is None and len(gives_up) < settings.num_oversampled and len(finished) >= size:
        if batch.waits_for:
            given_up = min(batch.waits_for, key=lambda group_id: (running[group_id], -group_id))
            del running[given_up]
        else:
            given_up = _oldest_first(finished)[size]
            del finished[given_up]
        gives_up.append(given_up)
        batch = _choose_batch(settings, weight_version, finished, running)
    return at_first if batch.group_ids is None else Batch(batch.group_ids, [], sorted(gives_up))


def _choose_batch(
    settings: RolloutSettings, weight_version: int, finished: Mapping[int, int], running: Mapping[int, int]
) -> Batch:
    size, too_old = settings.groups_per_iteration, weight_version - settings.max_staleness
    taken = set(_oldest_first(finished)[:size])
    if len(taken) < size:
        return Batch(None, sorted(group_id for group_id, oldest in running.items() if oldest <= too_old))
    left_over = [version for group_id, version in finished.items() if group_id not in taken] + list(running.values())
    for version in range(too_old, weight_version + 1):
        if sum(1 for oldest in left_over if oldest <= version) > (version - too_old) * size:
            return Batch(None, sorted(group_id for group_id, oldest in running.items() if oldest <= version))
    return Batch(sorted(taken), [])


def find_overdue(settings: RolloutSettings, weight_version: int, finished: Mapping[int, int]) -> list[int]:
    """The finished groups that no batch can take in time anymore.

    None in a run that kept both rules; some after a resume with a smaller η or P. The arguments are `choose_batch`'s.
    """
    overdue: list[int] = []
    num_kept = 0
    for group_id in _oldest_first(finished):
        num_iterations = finished[group_id] + settings.max_staleness - weight_version + 1  # that can still take it
        if num_kept < num_iterations * settings.groups_per_iteration:
            num_kept += 1
        else:
            overdue.append(group_id)
    return sorted(overdue)


def _oldest_first(finished: Mapping[int, int]) -> list[int]:
    return sorted(finished, key=lambda group_id: (finished[group_id], group_id))
