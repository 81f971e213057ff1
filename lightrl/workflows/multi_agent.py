"""MultiAgent: an episode with several named agents, played by the policy; becomes one trajectory, with a row per agent.

    reset(prompt) ─► (agent, observation) ─► that agent's turn ─► step(completion) ─► (next agent, observation) ─► …

Each agent has its own conversation: the prompt, what the environment shows it, and its own turns. The trajectory
concatenates these conversations, as branches of a tree that share no tokens.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lightrl.checks.bounds import check_bounds, check_positive, finite_number
from lightrl.columns import AGENTS, COPIES, TokenArray
from lightrl.concurrency.abandon import wait_or_abandon
from lightrl.engines.engine import Completion
from lightrl.errors import RolloutError
from lightrl.trajectory import Prompt, Trajectory
from lightrl.workflows.multi_turn import (
    Conversation,
    Environment,
    Observation,
    TurnRenderer,
    answer_or_replay,
    as_messages,
    call_environment,
    checked_metrics,
)
from lightrl.workflows.workflow import Generate, Workflow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Move: TypeAlias = tuple[str, Observation]  # the agent whose turn it is, and what it reads first
Rewards: TypeAlias = Mapping[str, float]  # agent → reward, added to that agent's latest turn

# Generates a turn with an older policy: (prompt, session, turn number, token ids, maximum number of new tokens).
Opponent = Callable[[Prompt, str, int, list[int], int], Awaitable[Completion]]
Seat = Callable[[str, Sequence[str]], str | None]  # chooses the opponent's role: (session, agents) → role or None


class AgentEnvironment(Environment):
    """An environment in which several agents take turns. As with Environment, each trajectory gets a new instance.

    `agents` lists their names, such as `("x", "o")`. Several agents with the same role are named `solver/0`,
    `solver/1`, …. For simultaneous moves, ask the agents one after the other, and reveal no move until all have moved.
    """

    agents: Sequence[str] = ()

    @abstractmethod
    def reset(self, prompt: Prompt) -> Move | Awaitable[Move]:  # type: ignore[override]
        """Starts the episode; returns the agent that begins, and what it reads after the prompt."""

    @abstractmethod
    def step(self, completion: str) -> tuple[str | None, Observation, Rewards] | Awaitable[Any]:  # type: ignore[override]
        """Takes the current agent's turn; returns the next agent, what it reads, and rewards by agent.

        Returning None as the next agent ends the episode. Any agent that has had a turn may get a reward.
        """


class _Seat(NamedTuple):
    """One agent of a running episode."""

    conversation: Conversation
    rewards: list[float]  # one for each of its turns
    is_opponent: bool


class MultiAgent(Workflow):
    """Runs an episode in which agents take turns. The policy plays all of them, unless SelfPlay adds an opponent.

    The trajectory has the `agents` column, and rewards per token: an agent's reward is on the last token of its turn.
    Use the `lightrl.rewards.environment_reward` reward: the trajectory's reward is the sum over the agents that the
    policy plays (0 in a zero-sum game without an opponent), and each role's mean is logged as `rollout/reward_<role>`.
    GRPO then compares an agent with the same agent in the other trajectories in its group, and agents with the same
    role with each other within their episode. No trajectory contains an opponent's tokens.

    Source: self-play with role-conditioned advantages, SPIRAL, https://arxiv.org/abs/2506.24119.

    Args:
        tokenizer: the policy's tokenizer.
        environment: a class, or a function without arguments, that makes a new AgentEnvironment for each episode.
        max_turns: maximum number of turns for all agents together.
        max_tokens: maximum number of tokens in one agent's conversation; by default, the model's context.
        truncated_reward: the reward of a turn that was cut off, which ends the episode.
        time_limit_s: time limit for one episode; an episode that exceeds it is dropped.
        step_timeout_s: deadline for one call to the environment.
    """

    has_agents = True  # the algorithm needs a baseline for each agent
    own_timeout_s = None  # step_timeout_s bounds each call to the environment

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        environment: Callable[[], AgentEnvironment],
        *,
        max_turns: int = 16,
        max_tokens: int | None = None,
        truncated_reward: float = 0.0,
        time_limit_s: float = 1800.0,
        step_timeout_s: float = 60.0,
    ) -> None:
        self.check_settings(max_turns=max_turns, max_tokens=max_tokens)
        self.check_settings(time_limit_s=time_limit_s, step_timeout_s=step_timeout_s)
        self.make_environment = environment
        self.max_turns, self.max_tokens, self.truncated_reward = max_turns, max_tokens, truncated_reward
        self.time_limit_s, self.step_timeout_s = time_limit_s, step_timeout_s
        self.template: TurnRenderer = TurnRenderer(tokenizer)
        self.template.check_template("user", [])
        self._opponent: Opponent | None = None
        self._seat: Seat | None = None
        self.continues = self._new_environment().keeps_state

    @classmethod
    def check_settings(cls, **settings: Any) -> None:
        check_bounds(1, **{name: settings.get(name) for name in ("max_turns", "max_tokens")})
        check_positive(**{name: settings.get(name) for name in ("time_limit_s", "step_timeout_s")})

    def invite(self, opponent: Opponent, seat: Seat) -> None:
        """Lets `opponent` play the role that `seat` chooses for a session; None leaves all roles to the policy."""
        self._opponent, self._seat = opponent, seat

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Runs one episode; each call to the environment has a deadline, and the environment is always closed."""
        environment = self._new_environment()
        playing = asyncio.ensure_future(self._play(environment, prompt, generate))
        try:
            await wait_or_abandon(playing, within_s=self.time_limit_s)
            if not playing.done():
                raise RolloutError(f"The episode of {prompt.id!r} exceeded time_limit_s={self.time_limit_s:g}.")
            return playing.result()
        finally:
            try:
                await call_environment(environment, "close", timeout_s=self.step_timeout_s)
            except RolloutError as error:
                log.warning("Closing the environment for prompt %r failed: %s", prompt.id, error)

    async def _play(self, environment: AgentEnvironment, prompt: Prompt, generate: Generate) -> Trajectory:
        name, turn_log = type(environment).__name__, getattr(generate, "turn_log", None)
        session = str(getattr(getattr(generate, "generate", generate), "session", ""))  # names run, prompt and sample
        opponent_role = None if self._seat is None else self._seat(session, environment.agents)
        max_tokens = sys.maxsize if self.max_tokens is None else self.max_tokens
        seats: dict[str, _Seat] = {}
        is_truncated = True  # unless the environment or max_turns ends the episode

        async def answer(method: str, argument: object) -> Any:
            if turn_log is None or not self.continues:
                return await call_environment(environment, method, argument, timeout_s=self.step_timeout_s)
            within_s = self.step_timeout_s
            return await answer_or_replay(turn_log, environment, method, prompt, argument, timeout_s=within_s)

        agent, shown = _checked_move(await answer("reset", prompt), f"{name}.reset", environment.agents)
        for turn in range(self.max_turns):
            messages = as_messages(shown, name)
            if agent not in seats:
                seats[agent] = _Seat(Conversation(self.template, prompt, messages), [], _role(agent) == opponent_role)
                conversation = seats[agent].conversation
            else:
                conversation = seats[agent].conversation
                observed = conversation.encode_observation(messages)
                if len(conversation.token_ids) + len(observed.token_ids) >= max_tokens:
                    break
                conversation.add_observation(observed)
            token_ids, seat = list(conversation.token_ids), seats[agent]
            if (max_new := max_tokens - len(token_ids)) <= 0:
                break
            if seat.is_opponent and self._opponent is not None:
                completion = await self._opponent(prompt, session, turn, token_ids, max_new)
            else:
                completion = await generate(token_ids, max_new_tokens=max_new, images=conversation.images)
            if not completion.token_ids:
                break
            text = conversation.add_completion(completion)
            seat.rewards.append(0.0)
            if completion.finish_reason != "stop":
                seat.rewards[-1] = self.truncated_reward
                break
            following, shown, earned = _checked_step(await answer("step", text), name, environment.agents)
            for earner, reward in earned.items():
                if earner not in seats or not seats[earner].rewards:
                    raise RolloutError(f"{name}.step rewards {earner!r}, which has had no turn. Reward it later.")
                seats[earner].rewards[-1] += reward
            if following is None or turn + 1 == self.max_turns:
                is_truncated = False
                break
            agent = following
        numbers = checked_metrics(
            await call_environment(environment, "metrics", timeout_s=self.step_timeout_s), f"{name}.metrics"
        )
        return self._trajectory(environment, prompt, seats, numbers, is_truncated=is_truncated)

    def _trajectory(
        self,
        environment: AgentEnvironment,
        prompt: Prompt,
        seats: Mapping[str, _Seat],
        metrics: dict[str, float],
        *,
        is_truncated: bool,
    ) -> Trajectory:
        """Joins the conversations of the agents that the policy played, in the order of their first turns."""
        roles: dict[str, list[float]] = {}
        parts: list[tuple[Conversation, list[float]]] = []
        for agent, seat in seats.items():
            if not seat.rewards:
                continue
            roles.setdefault(_role(agent), []).append(sum(seat.rewards))
            if not seat.is_opponent:
                parts.append((_with_agent(seat.conversation, environment.agents, agent), seat.rewards))
        if not parts:
            raise RolloutError(f"The policy had no turn in the episode for prompt {prompt.id!r}.")
        whole, rewards = parts[0][0], list(parts[0][1])
        for conversation, more in parts[1:]:
            whole.add_branch(conversation, 0, -1)
            rewards += more
        earned = {f"reward_{role}": sum(values) / len(values) for role, values in roles.items()}
        num_turns = float(sum(len(seat.rewards) for seat in seats.values()))
        opponents = float(any(seat.is_opponent for seat in seats.values()))
        return whole.trajectory(
            rewards,
            is_truncated=is_truncated,
            metrics={"turns": num_turns, "opponent_fraction": opponents, **earned, **metrics},
        )

    def _new_environment(self) -> AgentEnvironment:
        environment: object = self.make_environment() if callable(self.make_environment) else None
        if not isinstance(environment, AgentEnvironment) or len(environment.agents) < 1:
            raise TypeError(
                "environment must make a new AgentEnvironment with names in `agents` for each episode, but "
                f"{self.make_environment!r} returned {environment!r:.80}."
            )
        return environment


def _role(agent: str) -> str:
    return agent.partition("/")[0]


def _with_agent(conversation: Conversation, roles: Sequence[str], agent: str) -> Conversation:
    """Adds the `agents` column to a conversation, and returns it."""
    copy = agent.partition("/")[2]
    code = list(roles).index(_role(agent)) * COPIES + (int(copy) if copy else 0)
    runs: list[tuple[int, int]] = []
    end = 0
    for turn in conversation.turns:
        runs += [(-1, turn.start - end), (code, turn.end - turn.start)]
        end = turn.end
    runs.append((-1, len(conversation.token_ids) - end))
    conversation.columns = {**conversation.columns, AGENTS.name: TokenArray.of_runs(runs, AGENTS.code)}
    return conversation


def _check_agent(agent: object, name: str, roles: Sequence[str]) -> str:
    role, slash, copy = str(agent).partition("/")
    if role not in roles or (slash and not (copy.isdecimal() and int(copy) < COPIES)):
        raise RolloutError(f"{name} must name one of the agents {list(roles)}, or `<agent>/<number>`, got {agent!r}.")
    return str(agent)


def _checked_move(value: Any, name: str, roles: Sequence[str]) -> Move:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise RolloutError(f"{name} must return (agent, observation), got {value!r:.200}.")
    return _check_agent(value[0], name, roles), value[1]


def _checked_step(value: Any, name: str, roles: Sequence[str]) -> tuple[str | None, Observation, dict[str, float]]:
    name = f"{name}.step"
    if not isinstance(value, tuple | list) or len(value) != 3 or not isinstance(value[2], Mapping):
        raise RolloutError(f"{name} must return (next agent, observation, rewards by agent), got {value!r:.200}.")
    rewards = {_check_agent(agent, name, roles): finite_number(reward) for agent, reward in value[2].items()}
    numbers = {agent: reward for agent, reward in rewards.items() if reward is not None}
    if numbers != rewards:
        raise RolloutError(f"{name} must return finite rewards, got {value[2]!r:.200}.")
    return (None if value[0] is None else _check_agent(value[0], name, roles)), value[1], numbers
