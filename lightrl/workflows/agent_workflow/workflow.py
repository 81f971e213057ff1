"""AgentWorkflow: trains any agent that calls its model through OpenAI's or Anthropic's API at a given base_url.

client = AsyncOpenAI(api_key="set by run")  # shared by all trajectories

async def run(prompt, base_url, api_key):
    policy = client.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": prompt.fields["question"]}]
    answer = await policy.chat.completions.create(model="policy", messages=messages)
    return float(answer.choices[0].message.content == prompt.fields["answer"])
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from lightrl.checks.bounds import check_bounds, check_choice, check_effect, check_positive, finite_number
from lightrl.checks.user_code import function_of
from lightrl.concurrency.abandon import wait_or_abandon
from lightrl.concurrency.in_thread import CallTimeout, call_within
from lightrl.errors import RolloutError
from lightrl.trajectory import Prompt, Trajectory
from lightrl.workflows.agent_workflow.command import (
    OF_PROGRAM,
    AgentCommand,
    AgentFailed,
    AgentLimits,
    AgentResult,
    StartProgram,
    check_command,
    delete_workspace,
    timeout_of,
)
from lightrl.workflows.agent_workflow.completion_parser import completion_parser
from lightrl.workflows.agent_workflow.endpoint import LOOPBACK, OpenAIEndpoint, is_every_address
from lightrl.workflows.agent_workflow.frozen_models import FrozenModel
from lightrl.workflows.agent_workflow.protocol import MODEL, RequestPattern, RequestRules
from lightrl.workflows.agent_workflow.session import AgentSession
from lightrl.workflows.multi_turn import TurnRenderer
from lightrl.workflows.tools import ToolParser
from lightrl.workflows.workflow import Generate, Workflow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Agent = Callable[[Prompt, str, str], Any]  # a float, None, an AgentResult, or an awaitable of one of these


class AgentWorkflow(Workflow):
    """Runs an agent once per trajectory. Each run calls a separate base_url, where the policy's tokens are recorded.

    The agent's requests become one trajectory, which is a tree if they form several conversations (session.py).
    The loss mask is True only on the policy's tokens. The function's return value is stored in `Trajectory.rewards`, on
    the last token: with `reward: lightrl.rewards.environment_reward` it is the reward; any other reward function
    replaces it. None leaves `Trajectory.rewards` unset.

    The trajectory is dropped and counted if the function raises, hangs, sends no request or returns something that is
    not a number or None, or if the program fails. A program's folder, `Trajectory.workspace`, is kept for the reward.

    Args:
        tokenizer: the policy's tokenizer.
        agent: `run(prompt, base_url, api_key) -> float | None`, or its dotted path. An async function shares the event
            loop with the engine and must not block it; a sync one runs in a thread. At the deadline, an async function
            is cancelled; a thread cannot be cancelled, so it is abandoned and its session is closed.
        command: a program and its arguments, instead of `agent`; docs/train-an-agent.md describes its environment. At
            the deadline the program and its children are killed. If the kernel allows it, they reach only the endpoint.
        workspace_template: a folder; each program runs in a copy of it.
        environment: additional environment variables for the program, which inherits only PATH from this process.
            `{env:NAME}` inserts a variable of this process, for secrets.
        readable: additional files and folders that the program may read.
        network: `none`, `allow` (this machine's network), or hosts that the program may reach through an HTTP proxy.
        limits: limits for each agent.
        agent_timeout_s: deadline for one agent run; a column with this name overrides it for its row.
        max_agents: how many agents may run at once; each uses two open files, and a sync function also uses a thread.
        max_tokens: maximum number of tokens in a conversation; by default and at most the model's context. A longer
            request is refused (`context_length_exceeded`), and the trajectory is truncated.
        models: additional model names that agents use, such as `{claude-haiku-4-5: policy, judge: {url: ...}}`: each is
            an alias for `policy` or names a `FrozenModel`, whose answers are not trained on.
        untrained: patterns of requests whose answers are not trained on: `[{system: "Write a title"}, {tools: ^$}]`.
        ignore: request fields to ignore: `tool_choice`, if it forces a call, and `response_format` (the JSON schemas of
            all protocols). Otherwise they constrain the policy, or are refused if the engine cannot use a grammar.
        unsent_thinking: `keep` continues a conversation with the thinking that the agent does not send back; `drop`
            starts a new branch without it, which is what the policy will read after training, but adds rows.
        endpoint_host: an address of this machine that agents can reach. Use one other than 127.0.0.1 for agents in
            containers or on other machines; requests are not encrypted.
        truncated_reward: the reward if the agent fails after a request beyond `max_tokens` or `limits` was refused.
        failed_reward: the reward if the agent raises, or its program fails, after the policy has answered; None drops
            the trajectory. If bad answers make agents fail, dropping the trajectory hides that from the policy.
        tool_parser: finds the calls in a completion's text; a function or its dotted path. None uses the tokenizer's
            response template or, if there is none, Hermes' format (Qwen 2.5 and 3).
        renderer: a format from the `renderers` package, such as `qwen3.5`, to parse completions instead of
            `tool_parser`; `auto` chooses the format by the tokenizer's name. Needs `pip install renderers`.

    Raises:
        ValueError: for a limit out of range, an unknown path or renderer, or a chat template that fails after a turn.
    """

    own_timeout_s = None  # agent_timeout_s bounds the whole call
    start_program: StartProgram | None = None  # a method of a subclass that runs programs elsewhere

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        agent: str | Agent | None = None,
        *,
        command: Sequence[str] | None = None,
        workspace_template: str | None = None,
        environment: Mapping[str, str] | None = None,
        readable: Sequence[str] = (),
        network: Literal["none", "allow"] | list[str] = "none",
        limits: AgentLimits | None = None,
        agent_timeout_s: float = 600.0,
        max_agents: int = 64,
        max_tokens: int | None = None,
        models: Mapping[str, Literal["policy"] | FrozenModel] | None = None,
        untrained: Sequence[RequestPattern] = (),
        ignore: Sequence[str] = (),
        unsent_thinking: Literal["keep", "drop"] = "keep",
        endpoint_host: str = LOOPBACK,
        truncated_reward: float = 0.0,
        failed_reward: float | None = None,
        tool_parser: str | ToolParser | None = None,
        renderer: str | None = None,
    ) -> None:
        command_settings: dict[str, Any] = {"command": command, "workspace_template": workspace_template}
        command_settings |= {"environment": environment, "readable": readable, "network": network, "limits": limits}
        others: dict[str, Any] = {"endpoint_host": endpoint_host, "unsent_thinking": unsent_thinking}
        others |= {"agent_timeout_s": agent_timeout_s, "max_agents": max_agents, "max_tokens": max_tokens}
        self.check_settings(agent=agent, **command_settings, **others)
        self.limits = limits or AgentLimits()
        self.agent_name = agent if isinstance(agent, str) else getattr(agent, "__qualname__", type(agent).__qualname__)
        self.is_program = command is not None
        if command is not None:
            self.agent_name = command[0]
            settings = (command, workspace_template, environment or {}, readable, network, self.limits)
            agent = AgentCommand(*settings, agent_timeout_s, tokenizer.decode, start=self.start_program).run
        self.agent = function_of(agent or "", "agent")
        self.agent_timeout_s = agent_timeout_s
        self.max_tokens = max_tokens
        self.truncated_reward = truncated_reward
        self.failed_reward = failed_reward
        parse_calls = None if tool_parser is None else function_of(tool_parser, "tool_parser")
        self.parser = completion_parser(tokenizer, parse_calls, renderer)
        self.template: TurnRenderer = TurnRenderer(tokenizer)
        if self.template.chat_template is None:
            raise ValueError(
                "The tokenizer has no chat template for agents' messages. Set data.chat_template to a Jinja file."
            )
        self.template.check_template("user", [])
        names = models or {}
        aliases = [name for name, model in names.items() if model == MODEL]
        frozen = {name: model for name, model in names.items() if isinstance(model, FrozenModel)}
        if unknown := names.keys() - {*aliases, *frozen}:
            name = min(unknown)
            raise ValueError(f"models.{name} must be {MODEL} or a frozen model with a url, got {names[name]!r}.")
        policy_names = (*dict.fromkeys([MODEL, *aliases]),) if MODEL not in frozen else (*aliases,)
        self.rules = RequestRules(policy_names, ignore, untrained, unsent_thinking == "keep")
        self.endpoint = OpenAIEndpoint(max_sessions=max_agents, host=endpoint_host, frozen=frozen)

    @classmethod
    def check_settings(cls, **settings: Any) -> None:
        command = settings.get("command")
        if (settings.get("agent") is None) == (command is None):
            raise ValueError("Set either agent (a function) or command (a program with its arguments).")
        template, environment = settings.get("workspace_template"), settings.get("environment")
        readable, network = settings.get("readable") or (), settings.get("network") or "none"
        if command is None:
            limits = settings.get("limits") or AgentLimits()
            of_program = {f"limits.{name}": (getattr(limits, name), getattr(AgentLimits, name)) for name in OF_PROGRAM}
            check_effect("without command", workspace_template=(template, None), environment=(environment, None))
            check_effect("without command", readable=(tuple(readable), ()), network=(network, "none"), **of_program)
        check_command(command, template, environment or {}, readable, network)
        host = settings.get("endpoint_host", LOOPBACK)
        if is_every_address(host):
            raise ValueError(
                f"endpoint_host={host!r} must be the address at which agents reach this machine, since it is part of "
                "their base_url. For Docker's containers it is 172.17.0.1 by default."
            )
        if command is not None and network != "allow":  # the guard forwards connections
            check_effect("with command, unless network is allow,", endpoint_host=(host, LOOPBACK))
        check_choice(("keep", "drop"), unsent_thinking=settings.get("unsent_thinking") or "keep")
        check_positive(agent_timeout_s=settings.get("agent_timeout_s"))
        check_bounds(1, max_agents=settings.get("max_agents"))
        check_bounds(2, max_tokens=settings.get("max_tokens"))  # the prompt has at least one token

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Runs one trajectory; waits for the agent until its deadline, and fails immediately if the engine fails.

        On cancellation, the agent is cancelled (a thread is abandoned), and so are its pending completions.
        """
        if prompt.images:
            raise RolloutError(
                f"Prompt {prompt.id!r} has images, but an agent sends its own. Rename the image column, so that the "
                "agent finds it in prompt.fields."
            )
        await self.endpoint.start()
        max_tokens = sys.maxsize if self.max_tokens is None else self.max_tokens  # None: context unknown
        session = AgentSession(prompt, generate, self.template, self.parser, max_tokens, self.limits, self.rules)
        try:
            async with self.endpoint.serving(session) as (base_url, api_key):
                result = await self._run_agent(session, base_url, api_key)
        except RolloutError as error:
            if session.has_answers:
                error.trajectory = failed = session.trajectory(None)
                failed.agent_output = error.result.output if isinstance(error, AgentFailed) else ""
            raise
        try:
            trajectory = session.trajectory(result.reward, rewards=result.rewards, is_truncated=result.is_truncated)
        except RolloutError as error:
            delete_workspace(result.workspace)
            printed = "" if result.workspace is None else f" It printed {result.output[-300:]!r}."
            raise RolloutError(f"{error}{printed}") from error
        trajectory.workspace, trajectory.agent_output = result.workspace, result.output
        return trajectory

    def clean_up(self, trajectory: Trajectory) -> None:
        delete_workspace(trajectory.workspace)
        trajectory.workspace = None

    async def _run_agent(self, session: AgentSession, base_url: str, api_key: str) -> AgentResult:
        name = f"The agent {self.agent_name}"
        # A copy, so that `prompt.messages.append(...)` does not affect the other trajectories in the group.
        arguments = (copy.deepcopy(session.prompt), base_url, api_key)
        timeout_s = timeout_of(session.prompt, self.agent_timeout_s)
        running = asyncio.ensure_future(call_within(self.agent, *arguments, timeout_s=timeout_s, name=name))
        await wait_or_abandon(running, session.failure)
        if session.failure.done():
            if running.done() and not running.cancelled():
                delete_workspace(getattr(running.exception() or running.result(), "workspace", None))
            raise session.failure.result()
        try:
            returned = running.result()
        except RolloutError as error:
            left = error.result if isinstance(error, AgentFailed) else AgentResult()
            # A program's failure counts as the policy's; a failure of the guard around it does not.
            is_own = isinstance(error, AgentFailed) if self.is_program else not isinstance(error, CallTimeout)
            if is_own and session.exceeds_limit:
                return replace(left, reward=self.truncated_reward, is_truncated=True)
            if is_own and self.failed_reward is not None and session.has_answers:
                return replace(left, reward=self.failed_reward)
            delete_workspace(left.workspace)
            raise
        result = returned if isinstance(returned, AgentResult) else AgentResult(returned)
        number = finite_number(result.reward)
        are_numbers = all(finite_number(value) is not None for value in result.rewards.values())
        if (number is None and result.reward is not None) or not are_numbers:
            delete_workspace(result.workspace)
            raise RolloutError(
                f"{name} must return a finite number or None, got {returned!r:.80} for prompt {session.prompt.id!r}."
            )
        return replace(result, reward=number)
