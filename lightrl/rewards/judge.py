"""Judge: gives rewards to trajectories; make_judge: in processes or a thread, whichever the function allows."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from typing import Any, Protocol, runtime_checkable

from lightrl.checks.bounds import check_effect
from lightrl.rewards.hook import RewardHook
from lightrl.rewards.judgment import Judgment
from lightrl.rewards.parts import Reward, RewardPart
from lightrl.rewards.pool import RewardPool
from lightrl.trajectory import Trajectory


class Judge(Protocol):
    """Gives each trajectory a Judgment. Call `start` once, then `score` any number of times, then `close`."""

    def start(self) -> None:
        """Raises ValueError if there is no such reward function; called before training, from any thread."""
        ...

    async def score(self, trajectory: Trajectory) -> Judgment:
        """Raises RewardError if the function failed; called on the event loop."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class JudgesGroups(Judge, Protocol):
    """A Judge that takes trajectories together, which spares the event loop a task for each of them."""

    def score_group(self, trajectories: Sequence[Trajectory]) -> list[asyncio.Future[Judgment]]:
        """Futures of what `score` returns, or with the RewardError that it raises; called on the event loop."""
        ...


def make_judge(
    reward: Reward | Callable[[Trajectory], Any],
    *,
    workers: int = 1,
    timeout_s: float = 30.0,
    startup_timeout_s: float = 120.0,
    search_paths: Sequence[str] = (),
    memory_limit_mib: int | None = 4096,
    recycle_after: int | None = None,
) -> JudgesGroups:
    """A RewardPool for a dotted path or a function that another process can import, else a RewardHook.

    Args:
        reward: `package.module.function`, RewardParts, or a callable; methods, lambdas, closures and functions of the
            main script stay in this process.
        workers, timeout_s, startup_timeout_s, search_paths, memory_limit_mib, recycle_after: as in RewardPool; a
            RewardHook only uses `timeout_s`.
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
        startup_timeout_s=startup_timeout_s,
        search_paths=search_paths,
        memory_limit_mib=memory_limit_mib,
        recycle_after=recycle_after,
    )


def dotted_path(function: Callable[..., Any], search_paths: Sequence[str] = ()) -> str | None:
    """The path by which another process can import this function; None if it cannot."""
    if not inspect.isfunction(function) or function.__module__ == "__main__" or "<" in function.__qualname__:
        return None
    target: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        target = getattr(target, part, None)
    package = function.__module__.partition(".")[0]
    if target is not function or PathFinder.find_spec(package, [*search_paths, *sys.path]) is None:
        return None
    return f"{function.__module__}.{function.__qualname__}"
