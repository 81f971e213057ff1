"""DropTally: what was left out and why, and when that is too much to go on. All is synchronous."""

from __future__ import annotations

import collections
import contextlib
from dataclasses import dataclass

from lightrl.errors import RewardError, RolloutError
from lightrl.rollout.group_filter import ADVICE, OTHER_ADVICE
from lightrl.trajectory import Group, Prompt

MAX_DROPPED_ITERATIONS = 10  # times P: the default bound on dropped groups


@dataclass(frozen=True)
class Drop:
    """A trajectory that was left out, and why."""

    reason: str  # one word, for counting
    message: str
    prompt_id: str


class DropTally:
    """Counts since the last batch was taken, against two bounds; keeps what nobody has asked for yet.

    Args:
        group_size: G.
        groups_per_iteration: P.
        max_failed_fraction: of an iteration's trajectories that may fail.
        max_dropped_groups: for P groups that are kept; 10·P if None.
    """

    def __init__(
        self, *, group_size: int, groups_per_iteration: int, max_failed_fraction: float, max_dropped_groups: int | None
    ) -> None:
        self.num_trajectories = group_size * groups_per_iteration
        self.groups_per_iteration = groups_per_iteration
        self.max_failed_fraction = max_failed_fraction
        if max_dropped_groups is None:
            max_dropped_groups = MAX_DROPPED_ITERATIONS * groups_per_iteration
        self.max_dropped_groups = max_dropped_groups
        self.last = Drop("none", "nothing was dropped", "")
        self._drops: collections.deque[Drop] = collections.deque()  # the main thread takes from its left end
        self._group_drops: collections.Counter[str] = collections.Counter()  # since they were drained
        self._num_done = 0  # trajectories, since the last batch was taken
        self._num_failed = 0  # of them
        self._num_kept = 0  # groups, since then
        self._num_dropped: collections.Counter[str] = collections.Counter()  # groups, since then

    def begin_iteration(self) -> None:
        """A batch was taken: counts anew."""
        self._num_done = self._num_failed = self._num_kept = 0
        self._num_dropped.clear()

    def check_evaluation(self, num_judged: int, num_asked: int) -> None:
        """Raises RolloutError if more of a validation batch failed than may: a mean over the rest would flatter."""
        num_failed = num_asked - num_judged
        if num_failed > self.max_failed_fraction * num_asked:
            raise RolloutError(
                f"{num_failed} of {num_asked} validation trajectories failed, expected at most max_failed_fraction="
                f"{self.max_failed_fraction} of them. Mend what fails; the last one: {self.last.reason}: "
                f"{self.last.message}"
            )

    def drop(self, reason: str, message: str, prompt: Prompt) -> None:
        """A trajectory is left out."""
        self.last = Drop(reason, message, prompt.id)
        self._drops.append(self.last)

    def drop_failed(self, error: RewardError | RolloutError, prompt: Prompt) -> None:
        """A trajectory is left out because its rollout or its reward raised this."""
        self.drop(f"reward_{error.reason}" if isinstance(error, RewardError) else "rollout", str(error), prompt)

    def drop_all(self, group: Group, reason: str, message: str) -> None:
        """The trajectories that a group still has are left out."""
        for _ in group.trajectories:
            self.drop(reason, message, group.prompt)

    def count_trajectory(self, *, is_failed: bool) -> None:
        """A trajectory is done.

        Raises:
            RolloutError: if too many have failed.
        """
        self._num_done += 1
        self._num_failed += is_failed
        total = max(self._num_done, self.num_trajectories)  # async: up to η + 1 iterations' worth
        if is_failed and self._num_failed > self.max_failed_fraction * total:
            raise RolloutError(
                f"{self._num_failed} of {total} trajectories failed since the last batch was taken, expected at "
                f"most max_failed_fraction={self.max_failed_fraction} of them. Mend what fails; the last one: "
                f"{self.last.reason}: {self.last.message}"
            )

    def count_kept(self) -> None:
        """A group is kept."""
        self._num_kept += 1

    def count_given_up(self, reason: str) -> None:
        """A group that was started in excess is left out; that is no failure of its own."""
        self._group_drops[reason] += 1

    def count_dropped(self, reason: str, message: str) -> None:
        """A group is left out and another prompt takes its place.

        Raises:
            RolloutError: if too many were.
        """
        self._group_drops[reason] += 1
        self._num_dropped[reason] += 1
        num = sum(self._num_dropped.values())
        if num > self.max_dropped_groups * max(1.0, self._num_kept / self.groups_per_iteration):
            advice = [ADVICE.get(reason, OTHER_ADVICE) for reason, _ in self._num_dropped.most_common()]
            raise RolloutError(
                f"{num} groups were dropped since the last batch was taken and {self._num_kept} kept "
                f"({dict(self._num_dropped)}), expected at most max_dropped_groups_per_iteration="
                f"{self.max_dropped_groups} for {self.groups_per_iteration} that are kept. To mend it, "
                f"{'; or '.join(dict.fromkeys(advice))}. The last one: {message}"
            )

    def drain(self) -> list[Drop]:
        """The trajectories left out since the last call; from any thread."""
        drops: list[Drop] = []
        with contextlib.suppress(IndexError):
            while True:
                drops.append(self._drops.popleft())
        return drops

    def drain_groups(self) -> dict[str, int]:
        """How many groups were left out since the last call, by reason."""
        drops, self._group_drops = dict(self._group_drops), collections.Counter()
        return drops
