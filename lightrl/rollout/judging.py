"""Judging: rewards of trajectories, each asked for as soon as its trajectory is written, and awaited when needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from lightrl.errors import RewardError, RolloutError
from lightrl.rewards import Judge
from lightrl.rollout.drop_tally import DropTally
from lightrl.rollout.trajectory_task import judge_trajectory
from lightrl.trajectory import Group, Prompt, Trajectory


class Judging:
    """Belongs to the controller's event loop. A trajectory without a reward is dropped, and the tally told.

    Args:
        judge: has been started.
        tally: counts what is dropped.
        on_error: called with what a judge raises that is not about one trajectory.
    """

    def __init__(self, judge: Judge, tally: DropTally, on_error: Callable[[BaseException], None]) -> None:
        self._judge = judge
        self._tally = tally
        self._on_error = on_error
        self._begun: dict[tuple[int, int], asyncio.Task[bool]] = {}  # by group and sample, until they are awaited

    async def judge(self, trajectory: Trajectory, prompt: Prompt) -> bool:
        """Sets the reward; False if the trajectory was dropped."""
        try:
            judgment = await judge_trajectory(self._judge, trajectory)
        except (RewardError, RolloutError) as error:
            self._tally.drop_failed(error, prompt)
            return False
        judgment.apply_to(trajectory)
        return True

    def begin(self, trajectory: Trajectory, prompt: Prompt) -> asyncio.Task[bool]:
        """As `judge`, in a task of its own, for `wait`."""
        task = asyncio.get_running_loop().create_task(self.judge(trajectory, prompt))
        task.add_done_callback(self._on_done)
        self._begun[trajectory.group_id, trajectory.sample] = task
        return task

    async def wait(self, groups: Sequence[Group], on_judged: Callable[[], None]) -> None:
        """Until all rewards of these groups are set, or for the first error; begins those that have not begun.

        A trajectory whose reward failed is taken out of its group.

        Args:
            groups: each trajectory's `group_id` is its group's.
            on_judged: called for each trajectory.

        Raises:
            RolloutError: if too many failed.
        """
        tasks: dict[tuple[int, int], asyncio.Task[bool]] = {}
        for group in groups:
            for item in group.trajectories:
                key = (item.group_id, item.sample)
                if item.reward is not None:
                    self._begun.pop(key, None)
                    on_judged()
                    continue
                tasks[key] = self._begun.get(key) or self.begin(item, group.prompt)
                tasks[key].add_done_callback(lambda task: on_judged())
        if not tasks:
            return
        done, _ = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()  # raises what it raised
        for key, task in tasks.items():
            self._begun.pop(key, None)
            self._tally.count_trajectory(is_failed=not task.result())
        self._tally.begin_iteration()
        for group in groups:
            group.trajectories = [item for item in group.trajectories if item.reward is not None]

    def _on_done(self, task: asyncio.Task[bool]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_error(error)
