"""RewardPart: a reward function with arguments and a weight; the reward from several parts is their weighted sum.

    reward:                                       # in YAML
      - {path: lightrl.rewards.math_answer, name: math, arguments: {format_reward: 0.2}}
      - {path: my_rewards.brevity, weight: 0.1}

Each part's unweighted reward is logged under its name, and its metrics as `<name>_<metric>`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrl.checks.printable import did_you_mean
from lightrl.checks.user_code import user_code
from lightrl.errors import RewardError
from lightrl.rewards.reward_result import RewardFunction, RewardResult, is_async, raised_error
from lightrl.trajectory import Trajectory


@dataclass(frozen=True)
class RewardPart:
    """A reward function with arguments, alone or in a sum.

    Args:
        path: `package.module.function`, or a class, which is instantiated once per process and then called.
        weight: factor of this reward in the sum.
        name: the name in logs; None means the last part of the path.
        arguments: keyword arguments in addition to the trajectory.

    Example:
        RewardPart("lightrl.rewards.math_answer", weight=2.0, name="math", arguments={"format_reward": 0.2})
    """

    path: str
    weight: float = 1.0
    name: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.name or self.path.rpartition(".")[2]


Reward = str | RewardPart | Sequence[RewardPart]


def parts_of(reward: Reward) -> list[RewardPart]:
    """Returns the parts of a reward, each with a different name.

    Raises:
        ValueError: if there are no parts, or two have the same name.
    """
    if isinstance(reward, str):
        return [RewardPart(reward)]
    parts = [reward] if isinstance(reward, RewardPart) else list(reward)
    labels = [part.label for part in parts]
    if not parts or len(set(labels)) < len(labels):
        raise ValueError(f"reward needs at least one part, and a different name for each, got {labels}. Set `name`.")
    return parts


def bound(part: RewardPart, function: Callable[..., object]) -> RewardFunction:
    """Returns the function with the part's arguments bound, or an instance if it is a class.

    Raises:
        ValueError: if it does not accept the arguments, or the class cannot be instantiated or called.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        pass
    else:
        _check_arguments(part, signature)
    if not inspect.isclass(function):
        function = functools.partial(function, **part.arguments) if part.arguments else function
        return check_takes_trajectory(function, part.path)

    def failed(error: BaseException) -> ValueError:
        return ValueError(f"reward={part.path!r} could not be instantiated with {part.arguments}: {error!r}")

    with user_code(failed):
        instance: object = function(**part.arguments)
    if not callable(instance):
        raise ValueError(f"reward={part.path!r} is a class without `__call__(self, trajectory)`. Add it.")
    return check_takes_trajectory(instance, part.path)


def check_takes_trajectory(function: Callable[..., object], name: str) -> RewardFunction:
    """Returns the function; raises ValueError if it cannot be called with only a trajectory."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function
    try:
        signature.bind(None)
    except TypeError as error:
        raise ValueError(
            f"reward={name!r} is called with only a Trajectory, but its signature is {signature}: {error}. Give its "
            "other parameters defaults, or set them as the reward's `arguments`."
        ) from error
    return function


def summed(parts: Sequence[RewardPart], functions: Sequence[RewardFunction]) -> RewardFunction:
    """Returns a reward function that adds up the weighted rewards of the parts; it is async if any part is.

    A RewardError names the failed part. If one returns rewards per token, other rewards go to the policy's last token.
    """
    if len(parts) == 1 and parts[0].weight == 1.0 and parts[0].name is None:
        return functions[0]
    pairs = list(zip(parts, functions, strict=True))
    if not any(map(is_async, functions)):

        def compute_sum(trajectory: Trajectory) -> RewardResult:
            return _sum(parts, [_compute(part, trajectory, function) for part, function in pairs], trajectory)

        return compute_sum

    async def compute_sum_async(trajectory: Trajectory) -> RewardResult:
        calls = (_compute_async(part, trajectory, function) for part, function in pairs)
        return _sum(parts, await asyncio.gather(*calls), trajectory)

    return compute_sum_async


def _check_arguments(part: RewardPart, signature: inspect.Signature) -> None:
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    for name in part.arguments:
        if name not in signature.parameters:
            hint = did_you_mean(name, signature.parameters, num=1, form="{!r}")
            hint = hint or f" It has {list(signature.parameters)[:12]}."
            raise ValueError(f"reward={part.path!r} has no argument {name!r}.{hint}")


def _compute(part: RewardPart, trajectory: Trajectory, function: RewardFunction) -> RewardResult:
    with _named_errors(part, trajectory):
        return RewardResult.of(function(trajectory), trajectory)


async def _compute_async(part: RewardPart, trajectory: Trajectory, function: RewardFunction) -> RewardResult:
    with _named_errors(part, trajectory):
        value = function(trajectory)
        return RewardResult.of(await value if is_async(function) else value, trajectory)


@contextlib.contextmanager
def _named_errors(part: RewardPart, trajectory: Trajectory) -> Iterator[None]:
    """Converts exceptions in the block to a RewardError that names the part."""
    try:
        with user_code(lambda error: raised_error(part.path, error, trajectory), RewardError):
            yield
    except RewardError as error:
        raise RewardError(f"Part {part.label!r} of the reward failed. {error}", reason=error.reason) from error


def _sum(parts: Sequence[RewardPart], results: Sequence[RewardResult], trajectory: Trajectory) -> RewardResult:
    """Adds up the weighted rewards of the parts, per token if a part returned rewards per token."""
    metrics: dict[str, float] = {}
    for part, result in zip(parts, results, strict=True):
        metrics[part.label] = result.reward
        for name, value in result.metrics.items():
            if name == "accuracy":  # if several parts have an accuracy, the first counts
                metrics.setdefault(name, value)
            else:
                metrics[name if len(parts) == 1 else f"{part.label}_{name}"] = value
    shown = [result.extracted for result in results if result.extracted is not None]
    extracted = "\n".join(shown) if shown else None
    reward = sum(part.weight * result.reward for part, result in zip(parts, results, strict=True))
    if all(result.rewards is None for result in results):
        return RewardResult(reward, metrics, extracted=extracted)
    per_token = [0.0] * len(trajectory.token_ids)
    last = max((index for index, trains in enumerate(trajectory.loss_mask) if trains), default=len(per_token) - 1)
    for part, result in zip(parts, results, strict=True):
        if result.rewards is None:
            per_token[last] += part.weight * result.reward
            continue
        for index, value in enumerate(result.rewards):
            per_token[index] += part.weight * value
    return RewardResult(reward, metrics, per_token, extracted)
