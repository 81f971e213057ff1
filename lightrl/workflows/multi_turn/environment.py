"""Environment: answers the policy between its turns; RetryWithFeedback: an environment built on any reward function.

class GuessNumber(Environment):
    def reset(self, prompt):
        self.secret = int(prompt.fields["secret"])

    def step(self, completion):
        guess = int(completion)  # a ValueError drops the trajectory and is counted
        if guess == self.secret:
            return None, 1.0, True
        return "higher" if guess < self.secret else "lower", 0.0, False
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightrl.checks.bounds import finite_number, names_of
from lightrl.checks.user_code import function_of
from lightrl.concurrency.in_thread import call_within
from lightrl.errors import RolloutError
from lightrl.rewards import RewardResult
from lightrl.trajectory import JsonMapping, JsonObject, Prompt, Trajectory

# What the policy reads next: the text of a user turn, one chat message, or several; None adds nothing. For a policy
# that reads images, a message's content may be a list with `{"type": "image", "image": path or data: URL}` parts.
Observation: TypeAlias = str | JsonMapping | Sequence[JsonMapping] | None
# observation, the turn's reward, done
Step: TypeAlias = tuple[Observation, float, bool]
_MAX_CHARS = 4_000_000  # per observation, which is encoded on the rollout's event loop


class Environment(ABC):
    """The other side of one conversation. Each trajectory gets a new instance, which may keep state in `self`.

    Every method may be async; a sync method runs in a thread, so it may block. The workflow's `step_timeout_s` bounds
    each call. A call that raises or hangs drops its trajectory, and the drop is counted.

    A resumed run restarts conversations that a checkpoint or the end of the process interrupted. With `state_dict` and
    `load_state_dict`, they continue instead: a `reset` or `step` that has returned is not repeated. After `kill -9`,
    they continue from the last checkpoint, so a `step` with external effects may run twice.
    """

    @property
    def keeps_state(self) -> bool:
        """Whether the environment can continue in another process."""
        return type(self).state_dict is not Environment.state_dict

    def state_dict(self) -> JsonObject | None:
        """Returns everything that the next `step` depends on, as JSON; called after `reset` and after each `step`."""
        return None

    def load_state_dict(self, prompt: Prompt, state: JsonObject) -> None:
        """Restores this state in a new environment, instead of repeating the calls; `close` is called as usual."""
        raise NotImplementedError(f"{type(self).__name__} overrides state_dict but not load_state_dict.")

    def reset(self, prompt: Prompt) -> Observation | Awaitable[Observation]:
        """Starts the environment; called once, before the first turn.

        Returns:
            What the policy reads after the prompt; None, the default, adds nothing.
        """
        return None

    @abstractmethod
    def step(self, completion: str) -> Step | Awaitable[Step]:
        """Answers one turn.

        Args:
            completion: the policy's text, without special tokens. `step` never gets a completion that was cut off.

        Returns:
            What the policy reads next (ignored when done), this turn's reward, and whether it was the last turn.
        """

    def metrics(self) -> Mapping[str, float] | Awaitable[Mapping[str, float]]:
        """Returns this trajectory's metrics to log, keyed by name; called once, at the end."""
        return {}

    def close(self) -> Awaitable[None] | None:
        """Releases what `reset` acquired; called once at the end of every started trajectory, even a failed one."""
        return None

    def tool_schemas(self) -> list[JsonObject]:
        """Returns JSON schemas for the tools that the chat template shows in the prompt; they must never change."""
        return []


@dataclass(frozen=True)
class CheckedStep:
    """The checked return value of `step`."""

    messages: list[JsonObject]  # the observation
    reward: float
    is_done: bool

    @classmethod
    def of(cls, value: object, name: str) -> CheckedStep:
        """Raises RolloutError unless `value` is (observation, finite number, bool), with an observation unless done."""
        if not isinstance(value, tuple | list) or len(value) != 3:
            raise RolloutError(f"{name}.step must return (observation, reward, done), got {value!r:.200}.")
        observation, reward, done = value
        number = finite_number(reward)
        if number is None or not hasattr(type(done), "__bool__"):
            raise RolloutError(
                f"{name}.step must return (observation, reward, done), with a finite number up to 1e15 as reward and "
                f"True or False as done, got reward={reward!r:.200} and done={done!r:.200}."
            )
        messages = as_messages(observation, f"{name}.step")
        if not messages and not done:
            raise RolloutError(f"{name}.step returned no observation and done=False. Return some text, or done=True.")
        return cls(messages, number, bool(done))


def checked_metrics(value: object, name: str) -> dict[str, float]:
    """Checks the return value of `metrics`; raises RolloutError unless it is a dict whose values are finite numbers."""
    numbers = {str(key): finite_number(item) for key, item in value.items()} if isinstance(value, Mapping) else None
    metrics = {key: item for key, item in (numbers or {}).items() if item is not None}
    if metrics != numbers or len(metrics) > 1000:
        raise RolloutError(
            f"{name}.metrics must return a dict of at most 1,000 names and numbers up to 1e15, got {value!r:.200}."
        )
    return metrics


def as_messages(observation: object, name: str) -> list[JsonObject]:
    """Returns an observation as chat messages; raises RolloutError if it is not an Observation, or too long."""
    if observation is None:
        return []
    if isinstance(observation, str):
        if len(observation) > _MAX_CHARS:
            raise RolloutError(
                f"The observation from {name} has {len(observation):,} characters. Return at most {_MAX_CHARS:,}."
            )
        return [{"role": "user", "content": observation}]
    messages = [observation] if isinstance(observation, Mapping) else observation
    if not isinstance(messages, Sequence) or not all(
        isinstance(message, Mapping) and "role" in message and "content" in message for message in messages
    ):
        raise RolloutError(
            f"The observation from {name} must be text, a chat message with role and content, a list of them, or "
            f"None, got {observation!r:.200}."
        )
    return [dict(message) for message in messages]


async def call_environment(environment: Environment, method: str, *arguments: object, timeout_s: float | None) -> Any:
    """Calls a method with a deadline and returns its result; methods that are not overridden run without a thread."""
    function = getattr(environment, method)
    if getattr(type(environment), method) is getattr(Environment, method):
        return function(*arguments)
    name = f"{type(environment).__name__}.{method}"
    return await call_within(function, *arguments, timeout_s=timeout_s, name=name)


class _Values(dict[str, Any]):
    """Values for a format string; a placeholder without a value is left unchanged."""

    def __missing__(self, name: str) -> object:
        return _Literal(name)


class _Literal(str):
    def __format__(self, spec: str) -> str:
        return f"{{{self!s}{spec and f':{spec}'}}}"


class RetryWithFeedback(Environment):
    """Tells the policy that its completion is wrong and lets it try again, until the reward is high enough.

    Each turn earns its improvement over the best reward so far. Without a discount, a trajectory's rewards
    sum to its best reward, so failing at first never pays off.

    Args:
        reward: computes each completion's reward: a sync function of a Trajectory, or its dotted path. The Trajectory
            has `prompt` and `completion` but no token ids. The function runs in a thread, with a step's deadline.
        feedback: what the policy reads after a wrong completion; a format string that may use the reward function's
            metrics, such as `{format}`. Other placeholders are left unchanged, as in `End with {answer}`.
        solved_reward: a completion with at least this reward ends the trajectory.
    """

    def __init__(
        self,
        reward: str | Callable[[Trajectory], object] = "lightrl.rewards.math_answer",
        *,
        feedback: str = "That is not right. Try again.",
        solved_reward: float = 1.0,
    ) -> None:
        self.reward = function_of(reward, "reward")
        if inspect.iscoroutinefunction(self.reward):
            raise ValueError(f"reward={reward!r} must be a sync function. Write an Environment to await an async one.")
        if parts := [name for name in names_of(feedback, "feedback") if "." in name or "[" in name]:
            raise ValueError(
                f"feedback must name metrics, such as {{format}}, got {{{parts[0]}}}, which names part of one metric."
            )
        self.feedback = feedback
        self.solved_reward = solved_reward
        self.best: float | None = None
        self.accuracies: list[float] = []

    def reset(self, prompt: Prompt) -> None:
        self.prompt = prompt

    def step(self, completion: str) -> Step:
        result = self._compute_reward(completion)
        earned = result.reward if self.best is None else max(0.0, result.reward - self.best)
        self.best = result.reward if self.best is None else max(self.best, result.reward)
        solved = result.reward >= self.solved_reward
        self.accuracies.append(result.metrics.get("accuracy", float(solved)))
        return self.feedback.format_map(_Values(result.metrics, reward=result.reward)), earned, solved

    def state_dict(self) -> JsonObject:
        return {"best": self.best, "accuracies": self.accuracies}

    def load_state_dict(self, prompt: Prompt, state: JsonObject) -> None:
        self.prompt, self.best, self.accuracies = prompt, state["best"], list(state["accuracies"])

    async def metrics(self) -> dict[str, float]:
        first = self.accuracies[0] if self.accuracies else 0.0  # empty if the first turn was cut off
        return {"accuracy": max(self.accuracies, default=0.0), "first_turn_accuracy": first}

    def _compute_reward(self, completion: str) -> RewardResult:
        trajectory = Trajectory.of_text(self.prompt, completion)
        return RewardResult.of(self.reward(trajectory), trajectory)
