"""RewardHook: calls a reward function in a thread of this process, with a deadline; RewardWorker: its protocol.

A thread that hangs cannot be killed: it is replaced, and keeps its resources. C code that holds the GIL blocks the
whole trainer. A function given by its dotted path (pool.py) has neither problem.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from typing import Protocol, runtime_checkable

from lightrl.checks.bounds import check_effect
from lightrl.rewards.parts import Reward, RewardPart, check_takes_trajectory
from lightrl.rewards.pool import RewardPool
from lightrl.rewards.reward_result import Outcome, RewardFunction, RewardResult, Runner
from lightrl.rewards.supervisor import Supervisor
from lightrl.trajectory import Trajectory

_logger = logging.getLogger(__name__)
_JOIN_TIMEOUT_S = 5.0
REWARD_THREAD = "reward-hook"


class RewardHook(Supervisor[Trajectory]):
    """Computes rewards with a callable of this process; sync calls run one after another, async calls concurrently.

    The function gets a trajectory whose per-token fields are lists; its other fields are the original objects.

    Args:
        function: takes a Trajectory; returns what RewardPool's functions return; may be async.
        timeout_s: deadline for one call, in seconds. A thread that misses it is abandoned; only the first is logged.
    """

    def __init__(self, function: RewardFunction, *, timeout_s: float = 30.0) -> None:
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self._has_warned = False
        check_takes_trajectory(function, name)

        def make_worker() -> _WorkerThread:
            return _WorkerThread(Runner(function, name=name, timeout_s=timeout_s), self._warn)

        super().__init__(name, make_worker, workers=1, timeout_s=timeout_s, startup_timeout_s=timeout_s)

    def _request_of(self, trajectory: Trajectory) -> tuple[Trajectory, int]:
        return trajectory.with_lists(), 0

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "Reward function %s missed its deadline. Its thread cannot be killed and is abandoned. A reward that "
                "is given as a dotted path runs in a process, which can be killed.",
                self.name,
            )


class _WorkerThread:
    def __init__(self, runner: Runner, warn: Callable[[], None]) -> None:
        self.runs_together = runner.runs_together
        self._runner = runner
        self._warn = warn
        self._batches: queue.SimpleQueue[Sequence[Trajectory] | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        self._num_unfinished = 0
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._serve, name=REWARD_THREAD, daemon=True)
        self._thread.start()

    def is_ready(self, wait_s: float) -> bool:
        return True

    def is_alive(self) -> bool:
        return True

    def send(self, requests: Sequence[Trajectory]) -> None:
        self._num_unfinished = len(requests)
        self._batches.put(requests)

    def receive(self, wait_s: float) -> list[tuple[int, Outcome]]:
        try:
            outcomes = [self._outcomes.get(timeout=wait_s)]
            while not self._outcomes.empty():
                outcomes.append(self._outcomes.get_nowait())
        except queue.Empty:
            return []
        self._num_unfinished -= len(outcomes)
        return outcomes

    def stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        lines = traceback.format_stack(frame) if frame is not None else []
        return "".join(line for line in lines if "lightrl/rewards/" not in line and "threading.py" not in line).rstrip()

    def end(self) -> None:
        self._is_abandoned = True
        self._batches.put(None)
        if self._num_unfinished:
            self._warn()
        else:
            self._thread.join(_JOIN_TIMEOUT_S)

    def _serve(self) -> None:
        try:
            while (batch := self._batches.get()) is not None:
                for outcome in self._runner.outcomes(batch):
                    if self._is_abandoned:  # another thread computes the remaining rewards
                        return
                    self._outcomes.put(outcome)
        finally:
            self._runner.close()


@runtime_checkable
class RewardWorker(Protocol):
    """Computes rewards. Call `start` once, then `compute_rewards` any number of times, then `close`."""

    def start(self) -> None:
        """Starts workers; raises ValueError if loading the function fails. Called before training, from any thread."""
        ...

    def compute_rewards(self, trajectories: Sequence[Trajectory]) -> list[asyncio.Future[RewardResult]]:
        """Returns one future per trajectory, with its result or RewardError; called on the event loop."""
        ...

    def close(self) -> None: ...


def make_reward_worker(
    reward: Reward | RewardFunction,
    *,
    workers: int = 1,
    timeout_s: float = 30.0,
    search_paths: Sequence[str] = (),
    memory_limit_mib: int | None = 4096,
    recycle_after: int | None = None,
) -> RewardWorker:
    """Returns a RewardPool if another process can import the reward, or else a RewardHook, which uses only `timeout_s`.

    Args:
        reward: `package.module.function`, RewardParts, or a callable; methods, lambdas, closures and functions from
            the main script run in this process.
        workers, timeout_s, search_paths, memory_limit_mib, recycle_after: as in RewardPool.
    """
    if not isinstance(reward, str | RewardPart | Sequence):
        path = dotted_path(reward, search_paths)
        if path is None:
            unused = {"reward_workers": (workers, 1), "reward_recycle_after": (recycle_after, None)}
            check_effect("on a reward that no other process can import", **unused)
            return RewardHook(reward, timeout_s=timeout_s)
        reward = path
    return RewardPool(
        reward,
        workers=workers,
        timeout_s=timeout_s,
        search_paths=search_paths,
        memory_limit_mib=memory_limit_mib,
        recycle_after=recycle_after,
    )


def dotted_path(function: Callable[..., object], search_paths: Sequence[str] = ()) -> str | None:
    """Returns the path by which another process can import this function; None if it cannot."""
    if not inspect.isfunction(function) or function.__module__ == "__main__" or "<" in function.__qualname__:
        return None
    target: object = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        target = getattr(target, part, None)
    package = function.__module__.partition(".")[0]
    if target is not function or PathFinder.find_spec(package, [*search_paths, *sys.path]) is None:
        return None
    return f"{function.__module__}.{function.__qualname__}"
