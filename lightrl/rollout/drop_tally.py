"""DropTally: counts what is dropped and why, and ends the run when it is too much. All calls are synchronous."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from lightrl.errors import RewardError, RolloutError
from lightrl.rollout.group_filter import ADVICE, OTHER_ADVICE
from lightrl.rollout.settings import RolloutSettings
from lightrl.trajectory import Prompt, Trajectory

MAX_DROPPED_ITERATIONS = 10  # times P: the default bound on dropped groups


@dataclass(frozen=True)
class Drop:
    """A trajectory that was dropped, and why."""

    reason: str  # one word, for counting
    message: str
    prompt_id: str


class DropTally:
    """Counts since the last batch was taken, against the bounds of the settings; keeps drops until they are drained."""

    def __init__(self, settings: RolloutSettings) -> None:
        self.settings = settings
        self.last = Drop("none", "nothing was dropped", "")
        self._drops: collections.deque[Drop] = collections.deque()  # the main thread takes from its left end
        self._group_drops: collections.Counter[str] = collections.Counter()  # since they were drained
        self.thrown_away: dict[str, float] = collections.defaultdict(float)  # see `count_thrown_away`
        self._num_done = 0  # trajectories, since the last batch was taken
        self._num_failed = 0  # of them
        self._num_kept = 0  # groups, since then
        self._num_dropped: collections.Counter[str] = collections.Counter()  # groups, since then

    def begin_iteration(self) -> None:
        """A batch was taken: the counts start again."""
        self._num_done = self._num_failed = self._num_kept = 0
        self._num_dropped.clear()

    def drop(self, reason: str, message: str, prompt: Prompt) -> None:
        """A trajectory is dropped."""
        self.last = Drop(reason, message, prompt.id)
        self._drops.append(self.last)

    def count_thrown_away(self, trajectories: Iterable[Trajectory]) -> None:
        """What these finished trajectories of a dropped group were like, in sums since the start."""
        for trajectory in trajectories:
            self.thrown_away["thrown_away_trajectories"] += 1
            self.thrown_away["thrown_away_tokens"] += trajectory.num_loss_tokens
            self.thrown_away["thrown_away_correct"] += trajectory.accuracy

    def drop_failed(self, error: RewardError | RolloutError, prompt: Prompt) -> None:
        """A trajectory is dropped because its workflow or its reward raised this."""
        self.drop(f"reward_{error.reason}" if isinstance(error, RewardError) else "rollout", str(error), prompt)

    def count_trajectory(self, *, is_failed: bool) -> None:
        """A trajectory is done.

        Raises:
            RolloutError: if too many have failed.
        """
        self._num_done += 1
        self._num_failed += is_failed
        num_expected = self.settings.group_size * self.settings.groups_per_iteration
        if is_failed:
            total = max(self._num_done, num_expected)  # async: up to η + 1 iterations' worth
            self._check_failed(self._num_failed, total, "trajectories failed since the last batch was taken")

    def check_evaluation(self, num_judged: int, num_requested: int) -> None:
        """Raises RolloutError if too many of a validation batch failed: a mean over the rest would flatter."""
        self._check_failed(num_requested - num_judged, num_requested, "validation trajectories failed")

    def _check_failed(self, num_failed: int, total: int, what: str) -> None:
        max_fraction = self.settings.max_failed_fraction
        if num_failed > max_fraction * total:
            raise RolloutError(
                f"Aborting: {num_failed} of {total} {what} (max_failed_fraction={max_fraction:g}). "
                f"Last failure: {self.last.reason}: {self.last.message}"
            )

    def count_kept(self) -> None:
        """A group is kept."""
        self._num_kept += 1

    def count_given_up(self, reason: str) -> None:
        """An over-sampled group is dropped; that does not count as a failure."""
        self._group_drops[reason] += 1

    def count_dropped(self, reason: str, message: str) -> None:
        """A group is dropped and another prompt takes its place.

        Raises:
            RolloutError: if too many were dropped.
        """
        self._group_drops[reason] += 1
        self._num_dropped[reason] += 1
        size, max_dropped = self.settings.groups_per_iteration, self.settings.max_dropped_groups
        if max_dropped is None:
            max_dropped = MAX_DROPPED_ITERATIONS * size
        if self._num_dropped.total() > max_dropped * max(1.0, self._num_kept / size):
            advice = dict.fromkeys(ADVICE.get(reason, OTHER_ADVICE) for reason, _ in self._num_dropped.most_common())
            raise RolloutError(
                f"Aborting: {self._num_dropped.total()} groups were dropped ({dict(self._num_dropped)}) and "
                f"{self._num_kept} kept since the last batch was taken; max_dropped_groups_per_iteration={max_dropped} "
                f"per {size} kept. To fix this, {'; or '.join(advice)}. Last drop: {message}"
            )

    def drain(self) -> list[Drop]:
        """The trajectories dropped since the last call; from any thread."""
        drops: list[Drop] = []
        with contextlib.suppress(IndexError):
            while True:
                drops.append(self._drops.popleft())
        return drops

    def drain_groups(self) -> dict[str, int]:
        """How many groups were dropped since the last call, by reason."""
        drops, self._group_drops = dict(self._group_drops), collections.Counter()
        return drops
