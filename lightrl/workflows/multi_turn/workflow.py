"""MultiTurn: a conversation between the policy and an environment, as one trajectory.

reset(prompt) ─► policy's turn ─► step(completion) ─► observation ─► policy's turn ─► … ─► done, or a limit
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from lightrl.checks.bounds import check_bounds, check_positive
from lightrl.concurrency.abandon import wait_or_abandon
from lightrl.engines.engine import Completion
from lightrl.errors import RolloutError
from lightrl.models.images import self_contained
from lightrl.trajectory import Prompt, Trajectory
from lightrl.workflows.multi_turn.conversation import Conversation, TurnRenderer
from lightrl.workflows.multi_turn.environment import (
    CheckedStep,
    Environment,
    as_messages,
    call_environment,
    checked_metrics,
)
from lightrl.workflows.workflow import Generate, TurnLog, Workflow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class MultiTurn(Workflow):
    """Alternates policy turns and environment answers until the environment is done or a limit is reached.

    The loss mask is True only on the policy's tokens. `Trajectory.rewards` contains the reward of turn k (from 0),
    times `discount**k`, on the last token of that turn. The reward function `lightrl.rewards.environment_reward` uses
    these rewards; any other reward function replaces them, as for a single turn.

    A trajectory is truncated if a completion was cut off (`sampling.max_new_tokens`), `max_tokens` leaves no room
    for another completion, or the time limit has expired. Reaching `max_turns` does not count as truncation.

    Args:
        tokenizer: the policy's tokenizer.
        environment: a class, or a function without arguments, that makes a new environment for each trajectory.
        max_turns: maximum number of policy turns in one trajectory.
        max_tokens: maximum number of tokens in the trajectory; the default and upper limit is the model's context.
        discount: each reward is multiplied by this factor once for every earlier turn.
        truncated_reward: the reward of a completion that was cut off; the environment does not see that completion.
        time_limit_s: time limit for one trajectory. When it expires, an unfinished completion is discarded, and a
            trajectory without a finished turn is dropped.
        step_timeout_s: deadline for one call to the environment; a call that misses it drops the trajectory.

    Raises:
        ValueError: if a limit is out of range, or the chat template does not work for several turns.
        TypeError: if `environment` does not return an Environment.
    """

    own_timeout_s = None  # step_timeout_s bounds each call to the environment

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        environment: Callable[[], Environment],
        *,
        max_turns: int = 4,
        max_tokens: int | None = None,
        discount: float = 1.0,
        truncated_reward: float = 0.0,
        time_limit_s: float = 1800.0,
        step_timeout_s: float = 60.0,
    ) -> None:
        self.check_settings(max_turns=max_turns, max_tokens=max_tokens, discount=discount)
        self.check_settings(time_limit_s=time_limit_s, step_timeout_s=step_timeout_s)
        self.make_environment = environment
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self.discount = discount
        self.truncated_reward = truncated_reward
        self.time_limit_s = time_limit_s
        self.step_timeout_s = step_timeout_s
        self.template: TurnRenderer = TurnRenderer(tokenizer)
        first = self._new_environment()
        self.continues = first.keeps_state
        self.tools = first.tool_schemas()
        self.template.check_template("tool" if self.tools else "user", self.tools)

    @classmethod
    def check_settings(cls, **settings: Any) -> None:
        check_bounds(1, **{name: settings.get(name) for name in ("max_turns", "max_tokens")})
        check_positive(**{name: settings.get(name) for name in ("time_limit_s", "step_timeout_s")})
        if not 0 < settings.get("discount", 1.0) <= 1:
            raise ValueError(f"discount must be above 0 and at most 1, got {settings['discount']}.")

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Runs one conversation; waits alternately for the environment and the policy, each with a deadline.

        On cancellation, the call to the environment is cancelled (a thread is abandoned) and the environment is closed.
        """
        environment = self._new_environment()
        try:
            return await self._converse(environment, prompt, generate, getattr(generate, "turn_log", None))
        finally:
            try:
                await self._ask(environment, "close")
            except RolloutError as error:
                log.warning("Closing the environment for prompt %r failed: %s", prompt.id, error)

    async def _converse(
        self, environment: Environment, prompt: Prompt, generate: Generate, turn_log: TurnLog | None
    ) -> Trajectory:
        name = type(environment).__name__
        deadline = asyncio.get_running_loop().time() + self.time_limit_s

        async def answer(method: str, argument: object) -> object:
            if turn_log is None or not self.continues:
                return await self._ask(environment, method, argument)
            within_s = self.step_timeout_s
            return await answer_or_replay(turn_log, environment, method, prompt, argument, timeout_s=within_s)

        opening = as_messages(await answer("reset", prompt), f"{name}.reset")
        conversation = Conversation(self.template, prompt, opening, self.tools or None)
        rewards: list[float] = []
        is_truncated = True  # unless the environment or max_turns ends the trajectory
        max_tokens = sys.maxsize if self.max_tokens is None else self.max_tokens  # None: context unknown
        while (max_new := max_tokens - len(conversation.token_ids)) > 0:
            generating = generate(list(conversation.token_ids), max_new_tokens=max_new, images=conversation.images)
            completion = await _within(deadline, generating)
            if completion is None or not completion.token_ids:
                break
            text = conversation.add_completion(completion)
            if completion.finish_reason != "stop":
                rewards.append(self.truncated_reward)
                break
            step = CheckedStep.of(await answer("step", text), name)
            rewards.append(step.reward)
            if step.is_done or len(rewards) == self.max_turns:
                is_truncated = False
                break
            observed = conversation.encode_observation(step.messages)
            if len(conversation.token_ids) + len(observed.token_ids) >= max_tokens:
                break
            conversation.add_observation(observed)
        if not rewards:
            raise RolloutError(
                f"No turn for prompt {prompt.id!r} finished within time_limit_s={self.time_limit_s:g} and "
                f"max_tokens={self.max_tokens} (the prompt has {len(conversation.token_ids)} tokens). Increase a "
                "limit, or shorten the prompt."
            )
        numbers = checked_metrics(await self._ask(environment, "metrics"), name)
        metrics = {"turns": float(len(rewards)), **numbers}
        discounted = [reward * self.discount**turn for turn, reward in enumerate(rewards)]
        return conversation.trajectory(discounted, is_truncated=is_truncated, metrics=metrics)

    def _new_environment(self) -> Environment:
        environment: object = self.make_environment() if callable(self.make_environment) else None
        if not isinstance(environment, Environment):
            raise TypeError(
                f"environment must make a new Environment for each trajectory, but {self.make_environment!r} returned "
                f"{environment!r:.80}. Pass its class, or a function: environment=lambda: MyEnvironment(3)."
            )
        return environment

    async def _ask(self, environment: Environment, method: str, *arguments: object) -> object:
        return await call_environment(environment, method, *arguments, timeout_s=self.step_timeout_s)


async def answer_or_replay(
    turn_log: TurnLog, environment: Environment, method: str, prompt: Prompt, *arguments: object, timeout_s: float
) -> Any:
    """Returns the environment's answer; does not call the environment if the earlier run recorded the answer.

    Raises RolloutError if the call fails, or if its answer or the environment's state cannot be stored as JSON.
    """
    name = f"{type(environment).__name__}.{method}"
    if turn_log.num_given < len(turn_log.answers):
        recorded_method, answer, state = turn_log.answers[turn_log.num_given]
        if recorded_method != method:
            raise RolloutError(f"The resumed run calls {name} where the earlier run called {recorded_method!r}.")
        environment.load_state_dict(prompt, state)
    else:
        returned = await call_environment(environment, method, *arguments, timeout_s=timeout_s)
        try:
            answer, state = json.loads(json.dumps([self_contained(returned), environment.state_dict()]))
        except (TypeError, ValueError) as error:
            raise RolloutError(
                f"{name} returned {returned!r:.200}, but this value or the environment's state is not JSON ({error}). "
                "An environment with state_dict must return only values that JSON can store."
            ) from error
        turn_log.answers.append((method, answer, state))
    turn_log.num_given += 1
    return answer


async def _within(deadline: float, completing: Awaitable[Completion]) -> Completion | None:
    """Returns the completion, or cancels it at the deadline (in the event loop's time) and returns None."""
    task = asyncio.ensure_future(completing)
    await wait_or_abandon(task, within_s=max(0.0, deadline - asyncio.get_running_loop().time()))
    return task.result() if task.done() else None
