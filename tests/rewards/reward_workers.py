"""Reward workers while they run, and what they give for trajectories: what the tests of workers share."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from lightrl.errors import RewardError
from lightrl.rewards.supervisor import Supervisor

Worker = TypeVar("Worker", bound=Supervisor)


@contextmanager
def started(worker: Worker) -> Iterator[Worker]:
    worker.start()
    try:
        yield worker
    finally:
        worker.close()


def outcomes(worker: Supervisor, *trajectories: object) -> list[object]:
    """A RewardResult or an exception for each trajectory, all asked for at the same time."""

    async def gathered() -> list[object]:
        return await asyncio.gather(*worker.compute_rewards(trajectories), return_exceptions=True)

    return asyncio.run(gathered())


def reasons(results: list[object]) -> list[object]:
    return [result.reason if isinstance(result, RewardError) else result.reward for result in results]
