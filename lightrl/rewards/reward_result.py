"""RewardResult: a reward function's checked result for a trajectory; Runner: calls the function and never raises.

Worker processes and the thread on rank 0 both use this file, and compute the same rewards. T: a trajectory's tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import math
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from lightrl.checks.bounds import real_number
from lightrl.checks.printable import count_text
from lightrl.checks.user_code import user_code, user_traceback
from lightrl.concurrency.in_thread import end_if_forked
from lightrl.errors import RewardError
from lightrl.trajectory import Trajectory

_CANCEL_TIMEOUT_S = 1.0
_LARGEST_REWARD = 1e15  # the sum of squares of an iteration's rewards stays finite in float32
_LARGEST_METRIC = 1e38  # float32
RewardFunction = Callable[[Trajectory], Any]  # may be async; `RewardResult.of` lists what it may return
_invalid = functools.partial(RewardError, reason="invalid")
_MAX_NAMES = 1_000  # in a returned dict
_RESERVED_NAMES = ("reward", "rewards", "extracted")


@dataclass(frozen=True)
class RewardResult:
    """The result of a reward function for one trajectory; every number is finite.

    Example:
        RewardResult(reward=1.0, metrics={"accuracy": 1.0, "format": 1.0})
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)  # other numbers that the function returned, by name
    rewards: list[float] | None = None  # [T], rewards per token, whose sum is `reward`
    extracted: str | None = None  # the answer that the function found; shown by `replay`, never logged

    @classmethod
    def of(cls, value: object, trajectory: Trajectory) -> RewardResult:
        """Checks what a reward function returned.

        Args:
            value: a number; a dict with `reward` (a number) or `rewards` (T numbers), optionally `extracted` (text or
                None), and other named numbers; or a RewardResult (also checked: it may come from a worker).
            trajectory: the function's argument.

        Raises:
            RewardError: reason `not_finite` for NaN, infinities and numbers that are too large; otherwise `invalid`.
        """
        if not isinstance(value, cls | Mapping):
            return cls(_number(value, "its return value", trajectory))
        items: Mapping[Any, Any] = vars(value) if isinstance(value, cls) else value  # type: ignore[assignment]
        named = {key: items[key] for key in items if key not in _RESERVED_NAMES}
        named = items["metrics"] if isinstance(value, cls) else named
        extracted = None if items.get("extracted") is None else str(items["extracted"])
        if len(named) > _MAX_NAMES:
            raise _invalid(
                f"The reward function returned a dict with {len(items):,} names for {label(trajectory)}. Each is "
                f"logged: return at most {_MAX_NAMES:,}."
            )
        metrics = {name: _number(item, repr(name), trajectory, _LARGEST_METRIC) for name, item in named.items()}
        for name in metrics:
            if not isinstance(name, str):
                raise _invalid(
                    f"The reward function returned a dict with the key {name!r} for {label(trajectory)}. Keys must be "
                    "strings."
                )
        reward = _number(items["reward"], "'reward'", trajectory) if "reward" in items else None
        rewards = items.get("rewards")
        if rewards is None:
            if reward is None:
                raise _invalid(
                    f"The reward function returned a dict with {sorted(map(str, items))} for {label(trajectory)}; it "
                    'needs the key "reward" or "rewards".'
                )
            return cls(reward, metrics, extracted=extracted)
        per_token = _numbers(rewards, trajectory)
        total = math.fsum(per_token)
        if reward is not None and not math.isclose(reward, total, rel_tol=1e-4, abs_tol=1e-6):
            raise _invalid(
                f"The reward function returned reward={reward}, but rewards that sum to {total}, for "
                f"{label(trajectory)}. Return one of the two."
            )
        return cls(total, metrics, per_token, extracted)

    def apply_to(self, trajectory: Trajectory) -> None:
        """Writes reward, rewards per token and metrics into the trajectory."""
        trajectory.reward = self.reward
        trajectory.rewards = self.rewards
        trajectory.metrics.update(self.metrics)


Outcome = RewardResult | RewardError


@dataclass(eq=False)
class Runner:
    """Calls one reward function; as long as the process lives, every call ends in a RewardResult or a RewardError.

    A sync function is called for one trajectory after another; the supervising process or thread ends a call that
    hangs. An async function is called for the whole batch concurrently, on an event loop that lives as long as the
    Runner; each call is cancelled after `timeout_s`.
    """

    function: RewardFunction
    _: KW_ONLY
    name: str  # the function's name in messages, for example its dotted path
    timeout_s: float  # deadline for one async call, in seconds

    def __post_init__(self) -> None:
        self.runs_together = is_async(self.function)
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None

    def outcomes(self, trajectories: Iterable[Trajectory]) -> Iterator[tuple[int, Outcome]]:
        """Yields (position, outcome) of each trajectory when it is done; a sync function keeps their order."""
        if not self.runs_together:
            for index, trajectory in enumerate(trajectories):
                outcome = self._compute(trajectory)
                end_if_forked(self._process)
                yield index, outcome
            return
        loop = self._event_loop()
        pending = {loop.create_task(self._compute_async(index, item)) for index, item in enumerate(trajectories)}
        while pending:
            done, pending = loop.run_until_complete(asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED))
            end_if_forked(self._process)
            for task in done:
                yield task.result()

    def close(self) -> None:
        """Cancels tasks that async calls left behind and closes the loop; call it in the thread that runs the calls."""
        if self._loop is None:
            return
        if hasattr(self.function, "aclose"):
            self._loop.run_until_complete(asyncio.wait_for(self.function.aclose(), _CANCEL_TIMEOUT_S))
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CANCEL_TIMEOUT_S))
        self._loop.close()

    def _compute(self, trajectory: Trajectory) -> Outcome:
        try:
            with self._named_errors(trajectory):
                value = self.function(trajectory)
                if isinstance(value, float | dict) or not inspect.isawaitable(value):
                    return RewardResult.of(value, trajectory)
        except RewardError as error:
            return error
        # a sync function that returned a coroutine, for example a lambda
        return self._event_loop().run_until_complete(self._within_deadline(value, trajectory))

    async def _compute_async(self, index: int, trajectory: Trajectory) -> tuple[int, Outcome]:
        async def call() -> object:
            return await self.function(trajectory)

        return index, await self._within_deadline(call(), trajectory)

    async def _within_deadline(self, awaitable: Awaitable[object], trajectory: Trajectory) -> Outcome:
        task = asyncio.ensure_future(self._await_result(awaitable, trajectory))
        done, _ = await asyncio.wait({task}, timeout=self.timeout_s)
        if not done:
            task.cancel()  # not awaited, because it may ignore the cancellation
            return timeout_error(self.name, self.timeout_s, "", trajectory)
        return task.result()

    async def _await_result(self, awaitable: Awaitable[object], trajectory: Trajectory) -> Outcome:
        try:
            with self._named_errors(trajectory):
                return RewardResult.of(await awaitable, trajectory)
        except RewardError as error:
            return error

    def _named_errors(self, trajectory: Trajectory) -> contextlib.AbstractContextManager[None]:
        return user_code(lambda error: raised_error(self.name, error, trajectory), RewardError)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop


def is_async(function: Callable[..., object]) -> bool:
    """Returns whether calls return coroutines: an async function, or an object with an async `__call__`."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def raised_error(name: str, error: BaseException, trajectory: Trajectory) -> RewardError:
    if isinstance(error, MemoryError):
        return RewardError(
            f"Reward function {name} ran out of memory for {label(trajectory)}. Reduce what it allocates, or increase "
            f"memory_limit_mib (reward_memory_mib in a config):\n{user_traceback(error)}",
            reason="killed",
        )
    return RewardError(
        f"Reward function {name} raised {type(error).__name__} for {label(trajectory)}:\n{user_traceback(error)}"
    )


def timeout_error(name: str, timeout_s: float, stack: str, trajectory: Trajectory) -> RewardError:
    where = f" It was at:\n{stack}" if stack else ""
    return RewardError(
        f"Reward function {name} did not finish {label(trajectory)} within timeout_s={timeout_s:g}. Make it faster, "
        f"or increase the timeout.{where}",
        reason="timeout",
    )


def killed_error(name: str, how: str, trajectory: Trajectory) -> RewardError:
    return RewardError(f"The worker for reward function {name} died on {label(trajectory)}: {how}.", reason="killed")


def label(trajectory: Trajectory) -> str:
    """Returns the trajectory's name in messages: `prompt 'train-3', sample 0`."""
    return f"prompt {trajectory.prompt.id!r}, sample {trajectory.sample}"


def _number(value: object, what: str, trajectory: Trajectory, largest: float = _LARGEST_REWARD) -> float:
    if type(value) in (float, int, bool) and abs(value) <= largest:  # type: ignore[arg-type]  # the fast, usual case
        return float(value)  # type: ignore[arg-type]
    return _checked_number(value, what, trajectory, largest)


def _checked_number(value: Any, what: str, trajectory: Trajectory, largest: float) -> float:
    problem = f"The reward function must return a number, or a dict of numbers; for {label(trajectory)}, {what} is"
    shown = f"{value!r:.200} ({type(value).__name__})"
    try:
        number = real_number(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError) as error:
        raise _invalid(f"{problem} {shown}: {error}.") from error
    if not math.isfinite(number):
        raise RewardError(
            f"{problem} {number}. It must be finite: look for a division by zero or a logarithm of zero.",
            reason="not_finite",
        )
    if abs(number) > largest:
        raise RewardError(
            f"{problem} {number:g}. It must be at most {largest:g}, or training would overflow.", reason="not_finite"
        )
    return number


def _numbers(values: Any, trajectory: Trajectory) -> list[float]:
    if hasattr(values, "tolist"):  # a numpy or torch array
        values = values.tolist()
    num_tokens = len(trajectory.token_ids)
    is_list = type(values) is list and len(values) == num_tokens
    if is_list and all(type(each) is float and abs(each) <= _LARGEST_REWARD for each in values):  # fast, usual case
        return list(values)
    if not isinstance(values, list | tuple) or len(values) != num_tokens:
        shown = count_text(len(values), "number") if isinstance(values, list | tuple) else f"{values!r:.200}"
        raise _invalid(
            f"'rewards' must be a list of {count_text(num_tokens, 'number')} for {label(trajectory)}, one for each "
            f"entry of token_ids, prompt included; got {shown}. Use 0 for tokens without a reward."
        )
    return [_number(value, f"rewards[{index}]", trajectory) for index, value in enumerate(values)]
