"""GroupBook: which groups may start and which a batch takes. Plain decisions: no asyncio, threads, clocks or I/O.

Letters: v the weight version (now), η `max_staleness`, P `groups_per_iteration`, s any version. A group's version is
that of its oldest token; for a running one it is the version that served when it started, a lower bound.

Windowed order, the default: a group may start once it is among the next (η + 1)·P groups of the stream, and only the
trainer moves this window, by P groups in each iteration. A batch is the first P groups that were kept, however long one
of them takes. So a group starts with at most (η + 1)·P - 1 groups before it and is trained on at most η versions later,
and which groups a batch has does not depend on how long they took: fast ones are not preferred.

A run that over-samples or redraws stragglers passes over slow groups instead: `find_late` tells for which of those left
over no later batch would come in time.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrl.checks.user_code import named_user_code
from lightrl.rollout.drop_tally import DropTally
from lightrl.rollout.settings import RolloutSettings
from lightrl.trajectory import Group, Prompt, Trajectory

MAX_REDRAWS = 3  # of a group that lost a trajectory; then it is dropped


@dataclass(frozen=True)
class Batch:
    """What `take` decides: the groups to train on, or the running groups to wait for."""

    group_ids: list[int] | None  # P group ids, or None: wait
    waits_for: list[int]  # running groups that hold the batch back
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
        self.num_consumed = 0  # groups that an iteration was trained on
        self.num_redrawn = 0  # stragglers, since this object was made
        self.running: dict[int, RunningGroup] = {}
        self.finished: dict[int, tuple[Group, int]] = {}  # with the version of its oldest token
        self.taken: list[Group] = []
        self._queued: list[int] = []  # positions to start next, in order
        self._again: list[int] = []  # on-policy, positions to draw again in the next wave
        self.begun: dict[int, tuple[int, dict[int, Trajectory | None]]] = {}  # of a checkpoint: version, done samples
        self._redraws: dict[int, int] = {}  # how often a position in flight was started again, each time with new seeds

    @property
    def num_done_trajectories(self) -> int:
        """Of the groups that the next batch may have, for progress."""
        ids = [*self.running, *self.finished]
        if not self.settings.passes_over_stragglers:
            ids = self._stream()[: self.settings.groups_per_iteration]
        sizes = {group_id: len(item.results) for group_id, item in self.running.items()}
        sizes |= dict.fromkeys(self.finished, self.settings.group_size)
        return sum(sizes.get(group_id, 0) for group_id in ids)

    def _stream(self) -> list[int]:
        """All that is in flight or finished, in the order of the prompt stream."""
        return sorted([*self.running, *self.finished, *self._queued, *self._again])

    def may_start(self, weight_version: int) -> bool:
        """Whether a group may start now.

        On-policy, replacements of dropped groups wait until the whole wave before them is done: which groups are drawn,
        and which are decoded together, then depends on the seed, not on which one finished first.
        """
        if self.settings.max_staleness == 0 and self.running and not self._queued:
            return False
        if self._num_admissible(weight_version, self.settings.max_concurrent) > 0:
            return True
        return bool(self.startable(weight_version))  # after a resume: more is finished than the window holds

    def plan(self, weight_version: int) -> int:
        """How many new positions to `queue` before groups start; on-policy those of a whole wave."""
        max_concurrent = self.settings.max_concurrent
        if self.settings.max_staleness == 0:
            if self.running or self._queued:
                return 0
            self._queued, self._again, max_concurrent = sorted(self._again), [], None
        return max(0, self._num_admissible(weight_version, max_concurrent) - len(self._queued))

    def room(self, weight_version: int) -> int:
        """At most how many new positions `plan` asks for."""
        max_concurrent = None if self.settings.max_staleness == 0 else self.settings.max_concurrent
        return max(0, self._num_admissible(weight_version, max_concurrent) - len(self._queued) - len(self._again))

    def queue(self, position: int) -> None:
        """This position of the prompt stream waits for its start, in the stream's order."""
        bisect.insort(self._queued, position)

    def startable(self, weight_version: int) -> list[int]:
        """The queued positions that may start now, in order: those in the window."""
        if not self._queued:
            return []
        accepted = self.num_consumed + len(self.taken)
        window = set(self._stream()[: num_admissible(self.settings, weight_version, 0, accepted, None)])
        startable = [position for position in self._queued if position in window]
        max_concurrent = self.settings.max_concurrent
        return startable if max_concurrent is None else startable[: max(0, max_concurrent - len(self.running))]

    def start(self, position: int, prompt: Prompt, weight_version: int) -> RunningGroup:
        """A queued position starts, under these weights."""
        (self._queued if position in self._queued else self._again).remove(position)
        redraws = self._redraws.get(position)
        seed_name = f"{position}:{prompt.id}" + (f":{redraws}" if redraws else "")
        started_version, results = self.begun.pop(position, (weight_version, {}))
        self.running[position] = RunningGroup(Group(position, prompt), started_version, seed_name, results)
        return self.running[position]

    def _num_admissible(self, weight_version: int, max_concurrent: int | None) -> int:
        accepted = self.num_consumed + len(self.taken) + len(self.finished)
        return num_admissible(self.settings, weight_version, len(self.running), accepted, max_concurrent)

    def record(self, running: RunningGroup, sample: int, trajectory: Trajectory | None) -> bool:
        """A trajectory of a running group is done; None if it was dropped. Raises RolloutError if too many failed.

        Returns:
            True once all trajectories are done, then call `settle`; False before, and if the group is drawn again.
        """
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
            if self.settings.max_staleness == 0:
                self._again.append(group.id)
            else:
                self.queue(group.id)
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
                self.queue(group.id)

    def begin_take(self, weight_version: int) -> None:
        """The last batch, unless committed, is finished again; finished groups too old for any batch are redrawn."""
        for group in self.taken:
            self._keep(group)
        self.taken = []
        for group_id in find_late(self.settings, weight_version, _versions(self.finished, weight_version)):
            bound = f"max_staleness={self.settings.max_staleness}"
            self._drop(group_id, "stale", f"Group {group_id} is too old for {bound} and is drawn again.")
            self.queue(group_id)

    def take(self, weight_version: int) -> Batch:
        """Takes a batch if one can be taken, and leaves out the over-sampled groups that it gives up."""
        if self.settings.passes_over_stragglers:
            running = {group_id: item.started_version for group_id, item in self.running.items()}
            batch = pass_over(self.settings, weight_version, _versions(self.finished, weight_version), running)
        else:
            first = self._stream()[: self.settings.groups_per_iteration]
            waits_for = [group_id for group_id in first if group_id not in self.finished]
            is_full = not waits_for and len(first) == self.settings.groups_per_iteration
            batch = Batch(first if is_full else None, [group_id for group_id in waits_for if group_id in self.running])
        if batch.group_ids is None:
            return batch
        self.taken = [self.finished.pop(group_id)[0] for group_id in batch.group_ids]
        for group_id in batch.gives_up:
            self._drop(group_id, "oversampled", f"Group {group_id} was over-sampled and the iteration did not need it.")
            self._redraws.pop(group_id, None)
            self.tally.count_given_up("oversampled")
        self.tally.begin_iteration()
        return batch

    @property
    def is_held_back(self) -> bool:
        """Whether enough groups for a batch are finished, so that it waits for slow ones alone."""
        return len(self.finished) >= self.settings.groups_per_iteration

    def stragglers(self, batch: Batch, weight_version: int) -> list[int]:
        """The groups a batch waits for that `redraw` should start again: all that then get newer weights."""
        if not self.settings.redraw_stragglers or not self.is_held_back:
            return []
        return [group_id for group_id in batch.waits_for if self.running[group_id].started_version < weight_version]

    def redraw(self, group_id: int) -> Prompt:
        """Puts a running group back into the queue, to `start` with new seeds and this prompt."""
        running = self.running[group_id]
        message = f"Group {group_id} of version {running.started_version} held a batch back and is drawn again."
        self._drop(group_id, "straggler", message)
        self._redraws[group_id] = self._redraws.get(group_id, 0) + 1
        self.num_redrawn += 1
        self.queue(group_id)
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
            self.tally.count_thrown_away(item for item in running.results.values() if item is not None)
        else:
            group, _ = self.finished.pop(group_id)
            prompt, num = group.prompt, len(group.trajectories)
            self.tally.count_thrown_away(group.trajectories)
        for _ in range(num):
            self.tally.drop(reason, message, prompt)

    def state_dict(self) -> dict[str, Any]:
        """Positions in flight and groups not yet trained on; plain Python."""
        in_flight = sorted([*self.running, *self._queued, *self._again])
        begun = self.begun | {key: (item.started_version, item.results) for key, item in self.running.items()}
        return {
            "groups_per_iteration": self.settings.groups_per_iteration,
            "num_consumed": self.num_consumed,
            "in_flight": in_flight,
            "max_staleness": self.settings.max_staleness,
            "group_size": self.settings.group_size,
            "begun": [
                [position, version, [_state_of(*result) for result in sorted(results.items())]]
                for position, (version, results) in sorted(begun.items())
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
        self._queued = sorted(state["in_flight"])
        self._redraws, self.finished = dict(state["redraws"]), {}
        for record in state["finished"]:
            self._keep(Group.from_json(record))
        # With a smaller bound what was begun might be too old when it is done, so it starts again.
        is_in_time = state.get("max_staleness", 0) <= self.settings.max_staleness
        goes_on = is_in_time and state.get("group_size") == self.settings.group_size
        for position, version, results in state["begun"] if goes_on else []:
            done = {sample: None if item is None else Trajectory.from_json(item) for sample, item in results}
            self.begun[position] = (version, done)


def _state_of(sample: int, trajectory: Trajectory | None) -> list[Any]:
    return [sample, None if trajectory is None else trajectory.state_dict()]


def num_admissible(
    settings: RolloutSettings, weight_version: int, running: int, accepted: int, max_concurrent: int | None
) -> int:
    """How many groups may start now.

    A group may start while `accepted + running < (η + v + 1)·P`: then it is trained on by version v + η. With
    over-sampling a few more may start; `pass_over` gives up those that would hold a batch back.

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


def pass_over(
    settings: RolloutSettings, weight_version: int, finished: Mapping[int, int], running: Mapping[int, int]
) -> Batch:
    """The P finished groups of the oldest versions, unless too much that they leave over would come too late.

    An over-sampled group that would be late is given up. Giving up as many as admission lets in beyond the window
    always suffices.

    Args:
        weight_version: v, of the trainer.
        finished, running: group id → version of its oldest token, or of the weights that served when it started.
    """
    size = settings.groups_per_iteration
    taken = set(_oldest_first(finished)[:size])
    if len(taken) < size:
        return Batch(None, sorted(running))
    left_over = {**finished, **running}
    for group_id in taken:
        del left_over[group_id]
    late = find_late(settings, weight_version + 1, left_over, running)
    if len(late) > settings.num_oversampled:
        return Batch(None, [group_id for group_id in late if group_id in running])
    return Batch(sorted(taken), [], late)


def find_late(
    settings: RolloutSettings, weight_version: int, versions: Mapping[int, int], running: Collection[int] = ()
) -> list[int]:
    """As few of these groups as possible, so that the others can be trained on in time, running ones first.

    Without over-sampling and redrawing there are none, except after a resume with a smaller η or P.

    Args:
        weight_version: of the next batch, which takes the P groups of the oldest versions; later ones follow.
        versions: group id → version.
        running: those of the groups that are not finished.
    """
    late: list[int] = []
    kept: list[int] = []
    for group_id in _oldest_first(versions):
        kept.append(group_id)
        trained_at = weight_version + (len(kept) - 1) // settings.groups_per_iteration
        if trained_at > versions[group_id] + settings.max_staleness:
            late.append(next((one for one in kept if one in running), group_id))
            kept.remove(late[-1])
    return sorted(late)


def _oldest_first(versions: Mapping[int, int]) -> list[int]:
    return sorted(versions, key=lambda group_id: (versions[group_id], group_id))


def _versions(finished: Mapping[int, tuple[Group, int]], weight_version: int) -> dict[int, int]:
    # A group in which the policy wrote nothing has version -1 and cannot be stale.
    return {key: version if version >= 0 else weight_version for key, (_, version) in finished.items()}
