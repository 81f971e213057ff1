"""GroupRuns: starts the groups that the book admits, and reports their trajectories to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from lightrl.errors import RolloutError
from lightrl.rollout.group_book import GroupBook, RunningGroup
from lightrl.rollout.group_filter import success_rate
from lightrl.rollout.group_player import GroupPlayer
from lightrl.rollout.prompt_cursor import PromptCursor
from lightrl.rollout.tasks import Tasks
from lightrl.trajectory import Prompt, Sampling, Trajectory


@dataclass(eq=False)
class GroupRuns:
    """Belongs to the controller's event loop.

    Args:
        sampling: of training rollouts.
        on_done: called when all trajectories of a group are done.
        on_news: called when a trajectory is done.
    """

    book: GroupBook
    cursor: PromptCursor
    player: GroupPlayer
    tasks: Tasks
    sampling: Sampling
    on_done: Callable[[], object]
    on_news: Callable[[], object]
    _running: dict[int, tuple[str, list[asyncio.Task[None]]]] = field(default_factory=dict, init=False)  # by group

    def start(self, position: int, prompt: Prompt, weight_version: int, run_seed: int) -> None:
        """Starts a queued position; what a checkpoint has of it is not generated again."""
        running = self.book.start(position, prompt, weight_version)
        parts = self.player.parts(
            running.group,
            [sample for sample in range(self.book.settings.group_size) if sample not in running.results],
            self.sampling,
            run_seed,
            running.seed_name,
            judge_now=not self.book.settings.judges_later,
        )
        tasks = [self.tasks.spawn(self._play(running, part)) for part in parts]
        self._running[position] = (running.seed_name, tasks)

    def redraw(self, group_id: int) -> Prompt:
        """Gives up a running group, which is queued to start again with this prompt."""
        self.give_up([group_id])
        return self.book.redraw(group_id)

    def give_up(self, group_ids: Iterable[int]) -> None:
        """Cancels what still runs of these groups."""
        for group_id in group_ids:
            seed_name, tasks = self._running.pop(group_id, ("", []))
            self.player.written.forget(seed_name)
            self.tasks.give_up(tasks)

    def _report(self, running: RunningGroup, sample: int, trajectory: Trajectory | None) -> None:
        """Tells the book that a trajectory is done; None was dropped."""
        group = running.group
        try:
            is_done = self.book.record(running, sample, trajectory)
            if is_done and group.trajectories:
                self.cursor.observe(group.id, group.prompt.id, success_rate(group))
            if is_done:
                self.book.settle(group)
        except RolloutError as error:  # before anything else starts
            self.tasks.fail(error)
        if len(running.results) == self.book.settings.group_size:
            self._running.pop(group.id, None)
            self.player.written.forget(running.seed_name)
            self.tasks.changed.set()
            self.on_done()

    async def _play(self, running: RunningGroup, part: AsyncIterator[tuple[int, Trajectory | None]]) -> None:
        """Plays a part of a group."""
        async for sample, trajectory in part:
            if self.book.running.get(running.group.id) is not running:
                return  # it was redrawn or given up, and the workflow did not let itself be cancelled
            self.on_news()
            self._report(running, sample, trajectory)
