"""RewardPart: one reward function with its arguments and weight; a list of them is a reward that is their weighted sum.

    reward:                                       # in YAML
      - {path: lightrl.rewards.math_answer, name: math, arguments: {format_reward: 0.2}}
      - {path: my_rewards.brevity, weight: 0.1}

Each part is logged by its name, unweighted; what it names itself comes as `<name>_<what>`.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrl.errors import RewardError
from lightrl.rewards.judgment import Judgment, is_async, raised_error
from lightrl.trajectory import Trajectory


@dataclass(frozen=True)
class RewardPart:
    """One reward function of a sum, or alone with arguments.

    Args:
        path: `package.module.function`, or of a class that is made once per process and whose objects are called.
        weight: what its reward is multiplied by in the sum.
        name: under which its reward is logged; the last part of the path if None.
        arguments: its keyword arguments beside the trajectory.

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
    """The parts of a reward, with labels that differ.

    Raises:
        ValueError: if there are none, or two share a label.
    """
    if isinstance(reward, str):
        return [RewardPart(reward)]
    parts = [reward] if isinstance(reward, RewardPart) else list(reward)
    labels = [part.label for part in parts]
    if not parts or len(set(labels)) < len(labels):
        raise ValueError(
            f"reward has parts named {labels}, expected at least one and different names. Give each a name."
        )
    return parts


def bound(part: RewardPart, function: Callable[..., Any]) -> Callable[[Trajectory], Any]:
    """The function with the part's arguments; an object, if it is a class.

    Raises:
        ValueError: if it takes no such arguments.
    """
    if not part.arguments and not inspect.isclass(function):
        return function
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        signature = None
    if signature is not None:
        _check_arguments(part, signature)
    if not inspect.isclass(function):
        return functools.partial(function, **part.arguments)
    made = function(**part.arguments)
    if not callable(made):
        raise ValueError(
            f"reward={part.path!r} is a class whose objects cannot be called, expected a function or a class with "
            "`__call__(self, trajectory)`. Name another."
        )
    called: Callable[[Trajectory], Any] = made
    return called


def summed(
    parts: Sequence[RewardPart], functions: Sequence[Callable[[Trajectory], Any]]
) -> Callable[[Trajectory], Any]:
    """A reward function that is the weighted sum of these; async if one of them is.

    A part that fails is a RewardError that names it. Where a part gives rewards per token, the rewards of the others
    stand at the policy's last token.
    """
    if len(parts) == 1 and parts[0].weight == 1.0 and parts[0].name is None:
        return functions[0]
    pairs = list(zip(parts, functions, strict=True))
    if not any(map(is_async, functions)):

        def judge(trajectory: Trajectory) -> Judgment:
            return _sum(parts, [_judged(part, trajectory, function) for part, function in pairs], trajectory)

        return judge

    async def judge_async(trajectory: Trajectory) -> Judgment:
        calls = (_judged_async(part, trajectory, function) for part, function in pairs)
        return _sum(parts, await asyncio.gather(*calls), trajectory)

    return judge_async


def _check_arguments(part: RewardPart, signature: inspect.Signature) -> None:
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    for name in part.arguments:
        if name not in signature.parameters:
            nearest = difflib.get_close_matches(name, signature.parameters, n=1)
            raise ValueError(
                f"reward={part.path!r} got the argument {name!r}, expected some of {list(signature.parameters)[:12]}. "
                f"{f'Did you mean {nearest[0]!r}?' if nearest else 'Mend the name.'}"
            )


def _judged(part: RewardPart, trajectory: Trajectory, function: Callable[[Trajectory], Any]) -> Judgment:
    with _named_errors(part, trajectory):
        return Judgment.of(function(trajectory), trajectory)


async def _judged_async(part: RewardPart, trajectory: Trajectory, function: Callable[[Trajectory], Any]) -> Judgment:
    with _named_errors(part, trajectory):
        given = function(trajectory)
        return Judgment.of(await given if is_async(function) else given, trajectory)


@contextlib.contextmanager
def _named_errors(part: RewardPart, trajectory: Trajectory) -> Iterator[None]:
    """What is raised inside is a RewardError that names the part; running out of memory is the worker's affair."""
    try:
        yield
    except MemoryError:
        raise
    except RewardError as error:
        raise _named(part, error) from error
    except (Exception, SystemExit) as error:  # the border of user code
        raise _named(part, raised_error(part.path, error, trajectory)) from error


def _named(part: RewardPart, error: RewardError) -> RewardError:
    return RewardError(f"Part {part.label!r} of the reward failed. {error}", reason=error.reason)


def _sum(parts: Sequence[RewardPart], judgments: Sequence[Judgment], trajectory: Trajectory) -> Judgment:
    metrics: dict[str, float] = {}
    for part, judgment in zip(parts, judgments, strict=True):
        metrics[part.label] = judgment.reward
        for name, value in judgment.metrics.items():
            if name == "accuracy":  # the first part that says what is right says it for the whole
                metrics.setdefault(name, value)
            else:
                metrics[name if len(parts) == 1 else f"{part.label}_{name}"] = value
    shown = [judgment.extracted for judgment in judgments if judgment.extracted is not None]
    extracted = "\n".join(shown) if shown else None
    reward = sum(part.weight * judgment.reward for part, judgment in zip(parts, judgments, strict=True))
    if all(judgment.rewards is None for judgment in judgments):
        return Judgment(reward, metrics, extracted=extracted)
    per_token = [0.0] * len(trajectory.token_ids)
    last = max((index for index, trains in enumerate(trajectory.loss_mask) if trains), default=len(per_token) - 1)
    for part, judgment in zip(parts, judgments, strict=True):
        if judgment.rewards is None:
            per_token[last] += part.weight * judgment.reward
            continue
        for index, value in enumerate(judgment.rewards):
            per_token[index] += part.weight * value
    return Judgment(reward, metrics, per_token, extracted)
