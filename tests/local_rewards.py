"""Rewards that are computed on the controller's event loop, for tests of the rollout."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from lightrl.rewards import RewardResult
from lightrl.trajectory import Trajectory


class LocalRewards:
    """Gives the rewards of a function, one tick of the event loop later."""

    def __init__(self, function: Callable[[Trajectory], Any] = lambda trajectory: 1.0) -> None:
        self.function = function

    def start(self) -> None: ...

    def compute_rewards(self, trajectories: Sequence[Trajectory]) -> list[asyncio.Future[RewardResult]]:
        return [asyncio.ensure_future(self.compute(trajectory)) for trajectory in trajectories]

    async def compute(self, trajectory: Trajectory) -> RewardResult:
        await asyncio.sleep(0)
        return RewardResult.of(self.function(trajectory), trajectory)

    def close(self) -> None: ...
