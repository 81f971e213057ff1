"""Judgment: what a reward function gave for one trajectory, checked; Runner: calls the function, raises never.

Both sides use this file, the worker process and the thread of rank 0, so that a reward means the same in both.
T is the number of tokens of the trajectory.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightrl.errors import RewardError
from lightrl.trajectory import Trajectory

_MAX_TRACEBACK_CHARS = 8_000  # the end of a traceback says what happened; a message is also stored in logs
_CANCEL_TIMEOUT_S = 1.0
_OWN_FILES = {__file__, str(Path(__file__).with_name("parts.py"))}


@dataclass(frozen=True)
class Judgment:
    """What a reward function says about one trajectory; every number is finite.

    Example:
        Judgment(reward=1.0, metrics={"accuracy": 1.0, "format": 1.0})
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)  # what the function named beside the reward
    rewards: list[float] | None = None  # [T], for rewards per token; then `reward` is their sum
    extracted: str | None = None  # what the function read out of the completion; shown by `replay`, logged nowhere

    @classmethod
    def of(cls, value: object, trajectory: Trajectory) -> Judgment:
        """The judgment that a reward function's return value stands for.

        Args:
            value: a number, or a dict with `reward` (a number) or `rewards` (T numbers) and further named numbers, and
                perhaps `extracted` (text or None); a Judgment is itself.
            trajectory: which was judged.

        Raises:
            RewardError: reason `not_finite` for NaN and infinities, `raised` for everything else that is no judgment.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            return cls(_number(value, "its return value", trajectory))
        texts = {"rewards", "extracted"}
        extracted = None if value.get("extracted") is None else str(value["extracted"])
        metrics = {name: _number(item, f"{name!r}", trajectory) for name, item in value.items() if name not in texts}
        for name in metrics:
            if not isinstance(name, str):
                raise RewardError(
                    f"The reward function named a number {name!r} for {_called(trajectory)}, expected names to be "
                    "strings. Rename it."
                )
        rewards = value.get("rewards")
        if rewards is None:
            if "reward" not in metrics:
                raise RewardError(
                    f"The reward function returned a dict with {sorted(map(str, value))} for {_called(trajectory)}, "
                    'expected a key "reward". Add it.'
                )
            return cls(metrics.pop("reward"), metrics, extracted=extracted)
        per_token = _numbers(rewards, trajectory)
        total = math.fsum(per_token)
        reward = metrics.pop("reward", total)
        if not math.isclose(reward, total, rel_tol=1e-4, abs_tol=1e-6):
            raise RewardError(
                f"The reward function returned reward={reward} and rewards that sum to {total} for "
                f"{_called(trajectory)}, expected the sum. Leave out one of the two."
            )
        return cls(total, metrics, per_token, extracted)

    def apply_to(self, trajectory: Trajectory) -> None:
        """Writes reward, rewards per token and metrics into the trajectory."""
        trajectory.reward = self.reward
        trajectory.rewards = self.rewards
        trajectory.metrics.update(self.metrics)


Outcome = Judgment | RewardError


class Runner:
    """Calls one reward function; whatever it does while the process lives becomes a Judgment or a RewardError.

    A sync function gets one trajectory after the other. An async one gets all of a batch at once, on an event loop that
    lives as long as the Runner, and each of its calls is cancelled after `timeout_s`. A sync call that hangs is ended
    from outside, by the process or thread that watches.

    Args:
        function: takes a Trajectory; may be async.
        name: how messages call it, for example its dotted path.
        timeout_s: deadline of one async call in seconds.
    """

    def __init__(self, function: Callable[[Trajectory], Any], *, name: str, timeout_s: float) -> None:
        self.name = name
        self.runs_together = is_async(function)
        self._function = function
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None

    def outcomes(self, trajectories: Iterable[Trajectory]) -> Iterator[tuple[int, Outcome]]:
        """(position, outcome) of each trajectory, as soon as it is known; positions in order for a sync function."""
        if not self.runs_together:
            for index, trajectory in enumerate(trajectories):
                yield index, self._judge(trajectory)
            return
        loop = self._event_loop()
        pending = {loop.create_task(self._judge_async(index, item)) for index, item in enumerate(trajectories)}
        while pending:
            done, pending = loop.run_until_complete(asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED))
            for task in done:
                yield task.result()

    def close(self) -> None:
        """Cancels what async calls left behind and closes the event loop; called by the thread of the calls."""
        if self._loop is None:
            return
        if hasattr(self._function, "aclose"):
            self._loop.run_until_complete(asyncio.wait_for(self._function.aclose(), _CANCEL_TIMEOUT_S))
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT_S))
        self._loop.close()

    def _judge(self, trajectory: Trajectory) -> Outcome:
        try:
            value = self._function(trajectory)
            if inspect.isawaitable(value):  # a plain function that returns a coroutine, as a lambda may
                value = self._event_loop().run_until_complete(self._within_deadline(value, trajectory))
            return Judgment.of(value, trajectory)
        except RewardError as error:
            return error
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the border of user code
            return raised_error(self.name, error, trajectory)

    async def _judge_async(self, index: int, trajectory: Trajectory) -> tuple[int, Outcome]:
        try:
            value = await self._within_deadline(self._function(trajectory), trajectory)
            return index, Judgment.of(value, trajectory)
        except RewardError as error:
            return index, error
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the border of user code
            return index, raised_error(self.name, error, trajectory)

    async def _within_deadline(self, awaitable: Awaitable[Any], trajectory: Trajectory) -> Any:
        task = asyncio.ensure_future(_caught(awaitable))
        done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        if not done:
            task.cancel()  # and not awaited: it may ignore the cancellation
            raise timeout_error(self.name, self._timeout_s, "", trajectory)
        value, error = task.result()
        if error is not None:
            raise error
        return value

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop


def is_async(function: Callable[..., Any]) -> bool:
    """Whether its calls give coroutines: an async function, or an object with an async `__call__`."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def raised_error(name: str, error: BaseException, trajectory: Trajectory) -> RewardError:
    if isinstance(error, MemoryError):
        return RewardError(
            f"Reward function {name} ran out of memory for {_called(trajectory)}, expected it to stay below the pool's "
            f"memory_limit_mib. Mend the function or raise the limit:\n{_traceback(error)}",
            reason="killed",
        )
    return RewardError(
        f"Reward function {name} raised {type(error).__name__} for {_called(trajectory)}, expected a number. "
        f"Mend the function:\n{_traceback(error)}"
    )


def timeout_error(name: str, timeout_s: float, stack: str, trajectory: Trajectory) -> RewardError:
    where = f"\nIt was here:\n{stack}" if stack else ""
    return RewardError(
        f"Reward function {name} did not finish {_called(trajectory)} within timeout_s={timeout_s:g}, expected a "
        f"number by then. Mend the function or raise timeout_s.{where}",
        reason="timeout",
    )


def killed_error(name: str, how: str, trajectory: Trajectory) -> RewardError:
    return RewardError(
        f"The worker of reward function {name} ended while it judged {_called(trajectory)}: {how}. Expected it to "
        "return. Mend the function, or give it less to do.",
        reason="killed",
    )


async def _caught(awaitable: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    # SystemExit would leave a task through the event loop instead of through its result.
    try:
        return await awaitable, None
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the border of user code
        return None, error


def _traceback(error: BaseException) -> str:
    lines = traceback.format_exception(type(error), error, _without_own_frames(error))
    return "".join(lines)[-_MAX_TRACEBACK_CHARS:].rstrip()


def _without_own_frames(error: BaseException) -> Any:
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename in _OWN_FILES:
        frames = frames.tb_next
    return frames


def _called(trajectory: Trajectory) -> str:
    return f"prompt {trajectory.prompt.id!r}, sample {trajectory.sample}"


def _number(value: object, what: str, trajectory: Trajectory) -> float:
    if not hasattr(type(value), "__float__"):
        raise RewardError(
            f"The reward function gave {value!r:.200} ({type(value).__name__}) as {what} for {_called(trajectory)}, "
            'expected a number, or a dict with "reward" and named numbers. Return one.'
        )
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError) as error:  # an array of several numbers
        raise RewardError(
            f"The reward function gave {value!r:.200} ({type(value).__name__}) as {what} for {_called(trajectory)}, "
            f"expected one number: {error}. Return a float."
        ) from error
    if not math.isfinite(number):
        raise RewardError(
            f"The reward function gave {number} as {what} for {_called(trajectory)}, expected a finite number. "
            "Look for a division by zero or a logarithm of zero.",
            reason="not_finite",
        )
    return number


def _numbers(values: object, trajectory: Trajectory) -> list[float]:
    num_tokens = len(trajectory.token_ids)
    if hasattr(values, "tolist"):  # an array of numpy or torch
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise RewardError(
            f"The reward function gave {values!r:.200} as 'rewards' for {_called(trajectory)}, expected a list of "
            f"{num_tokens} numbers, one for each token. Return a list."
        )
    if len(values) != num_tokens:
        raise RewardError(
            f"The reward function gave {len(values)} rewards for {_called(trajectory)}, expected {num_tokens}, one for "
            "each entry of token_ids, the prompt's included. Put 0 where there is none."
        )
    return [_number(value, f"rewards[{index}]", trajectory) for index, value in enumerate(values)]
