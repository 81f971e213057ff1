"""Environment: what answers the policy between its turns; and RetryWithFeedback, one that any reward function makes.

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
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightrl.checks.dotted_path import function_of
from lightrl.errors import RolloutError
from lightrl.rewards import Judgment
from lightrl.trajectory import Prompt, Trajectory

# What the policy reads next: the text of a user's turn, one chat message, or several; None adds nothing.
Observation: TypeAlias = str | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
# observation, reward of the turn, whether the trajectory ends here
Step: TypeAlias = tuple[Observation, float, bool]


class Environment(ABC):
    """The other side of one conversation; a fresh one plays each trajectory, so it may keep what it likes in itself.

    Every method may be async. One that is not runs in a thread, so it may block. Each call has the workflow's
    `step_timeout_s`; one that raises or hangs drops its trajectory, which is counted.
    """

    def reset(self, prompt: Prompt) -> Observation | Awaitable[Observation]:
        """Begins; called once, before the first turn.

        Returns:
            What the policy reads after the prompt; None, the default, adds nothing.
        """
        return None

    @abstractmethod
    def step(self, completion: str) -> Step | Awaitable[Step]:
        """Answers one turn.

        Args:
            completion: what the policy wrote, special tokens left out. A completion that was cut off does not come
                here: it ends the trajectory.

        Returns:
            What the policy reads next (not looked at when done), the reward of this turn, whether this was the last.
        """

    def metrics(self) -> Mapping[str, float] | Awaitable[Mapping[str, float]]:
        """Numbers to log for this trajectory, by name; asked for once, at the end."""
        return {}

    def close(self) -> Awaitable[None] | None:
        """Gives back what `reset` took; called once at the end of every trajectory that began, however it ended."""
        return None

    def tool_schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools that the chat template shows to the policy in the prompt; the same every time."""
        return []


@dataclass(frozen=True)
class CheckedStep:
    """What `step` returned, checked."""

    messages: list[dict[str, Any]]  # of the observation
    reward: float
    is_done: bool

    @classmethod
    def of(cls, value: object, name: str) -> CheckedStep:
        """
        Raises:
            RolloutError: if it is no tuple of an observation, a finite number and a bool, or is not done and has no
                observation.
        """
        if not isinstance(value, tuple | list) or len(value) != 3:
            raise RolloutError(f"{name}.step returned {value!r:.200}, expected (observation, reward, done). Return it.")
        observation, reward, done = value
        is_number = hasattr(type(reward), "__float__") and math.isfinite(float(reward))
        if not is_number or isinstance(done, str):
            raise RolloutError(
                f"{name}.step returned reward={reward!r} and done={done!r}, expected a finite number and True or "
                "False. Return (observation, reward, done), in this order."
            )
        messages = as_messages(observation, f"{name}.step")
        if not messages and not done:
            raise RolloutError(
                f"{name}.step returned no observation and done=False, expected what the policy reads next. Return "
                "some text, or done=True."
            )
        return cls(messages, float(reward), bool(done))


def as_messages(observation: object, name: str) -> list[dict[str, Any]]:
    """The chat messages that an observation stands for.

    Raises:
        RolloutError: if it is none of the forms above.
    """
    if observation is None:
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    messages = [observation] if isinstance(observation, Mapping) else observation
    if not isinstance(messages, Sequence) or not all(
        isinstance(message, Mapping) and "role" in message and "content" in message for message in messages
    ):
        raise RolloutError(
            f"{name} returned the observation {observation!r:.200}, expected text, a chat message with role and "
            "content, a list of them, or None. Return one of these."
        )
    return [dict(message) for message in messages]


class RetryWithFeedback(Environment):
    """Tells the policy that it is wrong and lets it try again, until a reward function is content.

    Each turn earns what it adds to the best reward so far, so the rewards of a trajectory sum to its best one (less the
    discount), and failing first never pays.

    Args:
        reward: what judges each completion: a sync function of a Trajectory or its dotted path. It sees `prompt` and
            `completion`, no token ids, and runs in a thread of this process, with the deadline of a step.
        feedback: what the policy reads after a completion that is not solved; a format string with any number that the
            reward function names, such as `{format}`.
        solved_reward: a completion with at least this reward ends the trajectory.
    """

    def __init__(
        self,
        reward: str | Callable[[Trajectory], Any] = "lightrl.rewards.math_answer",
        *,
        feedback: str = "That is not right. Try again.",
        solved_reward: float = 1.0,
    ) -> None:
        self.reward = function_of(reward, "reward")
        if inspect.iscoroutinefunction(self.reward):
            raise ValueError(f"reward={reward!r} is async, expected a sync function. Write an Environment to await it.")
        self.feedback = feedback
        self.solved_reward = solved_reward
        self.best: float | None = None
        self.accuracies: list[float] = []

    def reset(self, prompt: Prompt) -> None:
        self.prompt = prompt

    def step(self, completion: str) -> Step:
        judgment = self._judge(completion)
        earned = judgment.reward if self.best is None else max(0.0, judgment.reward - self.best)
        self.best = judgment.reward if self.best is None else max(self.best, judgment.reward)
        solved = judgment.reward >= self.solved_reward
        self.accuracies.append(judgment.metrics.get("accuracy", float(solved)))
        return self.feedback.format_map({**judgment.metrics, "reward": judgment.reward}), earned, solved

    async def metrics(self) -> dict[str, float]:
        first = self.accuracies[0] if self.accuracies else 0.0  # a first turn that was cut off does not come here
        return {"accuracy": max(self.accuracies, default=0.0), "first_turn_accuracy": first}

    def _judge(self, completion: str) -> Judgment:
        trajectory = Trajectory(
            self.prompt,
            group_id=-1,
            sample=-1,
            token_ids=[],
            loss_mask=[],
            behavior_logprobs=[],
            weight_versions=[],
            completion_ids=[],
            completion=completion,
        )
        return Judgment.of(self.reward(trajectory), trajectory)
