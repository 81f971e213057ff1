"""AgentSession: records the tokens of an agent's requests to the policy as a trajectory. Tokens in, tokens out.

A request that continues an answer (an earlier request's messages, our answer to it, then new messages) reuses the exact
tokens of that request and answer; only the new messages are encoded. Any other request starts a new branch: the agent
has rewritten history, started another conversation, or sent the same request twice.

    request A ─► answer ─┬─► request B (A + answer + tool result) ─► answer          a row of 2 turns
                         └─► request C (A + answer + another question) ─► answer     a row of 2 turns
    request D (A, shortened) ─► answer                                               a row of 1 turn

All rows are trained on, as one trajectory that contains the tokens of a shared prefix only once (`Trajectory.rows`).
Every answer is a new sample: a request that is sent twice gets two completions.

A malformed call never reaches the agent: the policy reads what is wrong and tries again, in turns that the agent does
not see. After three such turns in a row, the agent gets the text unchanged.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from lightrl.checks.user_code import user_code
from lightrl.concurrency.abandon import wait_or_abandon
from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.engine import Completion
from lightrl.errors import LightRLError, RolloutError
from lightrl.trajectory import JsonMapping, JsonObject, Prompt, Trajectory
from lightrl.workflows.agent_workflow.command import AgentLimits
from lightrl.workflows.agent_workflow.completion_parser import CompletionParser, parse_text
from lightrl.workflows.agent_workflow.protocol import (
    AgentRequest,
    Answer,
    MessageKey,
    RequestRefused,
    message_key,
    tool_call,
)
from lightrl.workflows.multi_turn import Conversation, TurnRenderer
from lightrl.workflows.workflow import Generate

_MAX_CORRECTIONS = 3
_LONG_CHARS = 1 << 15  # in a request's messages; a tokenizer needs about 30 ms for this many
_T = TypeVar("_T")
_Ids = np.ndarray[Any, np.dtype[Any]]


@dataclass
class _Snapshot:
    """The conversation after one answer; requests that continue it work on copies."""

    conversation: Conversation
    keys: list[MessageKey]  # one per message; the answer's key is the last
    tools: list[JsonObject]
    identity: tuple[object, ...]  # the answer's text and the ids of its calls
    num_prompt_tokens: int  # the request's tokens; the answer's tokens follow them
    num_row_tokens: int  # all tokens, 0 if a longer conversation continues this one


@dataclass(frozen=True)
class EncodedRequest:
    """A request as tokens."""

    request: AgentRequest
    conversation: Conversation  # ends with the request's last message
    keys: list[MessageKey]  # one per message
    num_prompt_tokens: int
    parent: _Snapshot | None  # the conversation that it continues


@dataclass(eq=False)
class AgentSession:
    """An agent's growing trajectory; created and used on one event loop."""

    prompt: Prompt  # the agent's task; its requests may contain other messages
    generate: Generate
    renderer: TurnRenderer  # shared by all sessions; has a chat template
    parser: CompletionParser
    max_tokens: int  # limit of one branch, at most the model's context
    limits: AgentLimits = field(default_factory=AgentLimits)
    exceeds_limit: bool = False  # whether a request was refused because of max_tokens or a limit

    def __post_init__(self) -> None:
        # The error that fails the trajectory, whatever the agent does; set once.
        self.failure: asyncio.Future[LightRLError] = asyncio.get_running_loop().create_future()
        self._snapshots: list[_Snapshot] = []
        # Maps an answer's text and call ids to its key, because an agent may add default arguments to a call.
        self._keys: dict[tuple[object, ...], MessageKey] = {}
        self._pending: set[asyncio.Task[Completion]] = set()
        self._num_tokens = 0  # of all rows
        self._is_closed = False

    async def prepare(self, request: AgentRequest) -> EncodedRequest:
        """Encodes a request.

        Raises:
            RequestRefused: if the session is over or the chat template fails on the request. If the template rewrites
                history, `failure` is set too.
        """
        with self._recording_failure(), user_code(_template_failed, RequestRefused, LightRLError):
            keys = [self._keys.get(_identity(message), message_key(message)) for message in request.messages]
            parent = self._find_parent(keys, request)
            if parent is None:
                prompt = replace(self.prompt, messages=request.messages, token_ids=None)
                conversation = await self._encoded(request, Conversation, self.renderer, prompt, (), request.tools)
            else:
                conversation = parent.conversation.copy()
                new = request.messages[len(parent.keys) :]
                conversation.add_observation(await self._encoded(request, conversation.encode_observation, new))
            return EncodedRequest(request, conversation, keys, len(conversation.token_ids), parent)

    async def answer(self, encoded: EncodedRequest) -> Answer:
        """Waits for the engine and returns the policy's answer. On cancellation, the engine drops the completion.

        Raises:
            RequestRefused: if the request is too long, the session is over, or generation fails and sets `failure`.
        """
        with self._recording_failure():
            return await self._answer(encoded)

    def close(self) -> None:
        """Cancels pending completions; later requests are refused. Safe to call twice."""
        self._is_closed = True
        for task in self._pending:
            task.cancel()

    @property
    def has_answers(self) -> bool:
        return bool(self._snapshots)

    def trajectory(self, reward: float | None, *, is_truncated: bool = False) -> Trajectory:
        """Returns all requests and answers as one trajectory.

        Args:
            reward: the agent's reward, placed on the last token; None leaves `Trajectory.rewards` unset.
            is_truncated: whether a limit ended the agent, not only refused a request.

        Raises:
            RolloutError: if the agent sent no request.
        """
        if not self._snapshots:
            raise RolloutError(
                f"The agent finished prompt {self.prompt.id!r} without an answer from the policy. It must use the "
                "base_url and api_key that it gets."
            )
        joined, num_rows = _join(self._snapshots)
        num_turns = len(joined.turns)
        trajectory = joined.trajectory(
            [0.0] * (num_turns - 1) + [reward or 0.0],
            is_truncated=is_truncated or joined.turns[-1].finish_reason == "length",
            metrics={"turns": float(num_turns), "rows": float(num_rows)},
        )
        trajectory.prompt = replace(trajectory.prompt, messages=self.prompt.messages)
        if reward is None:
            trajectory.rewards = None
        return trajectory

    @contextmanager
    def _recording_failure(self) -> Iterator[None]:
        """If the block fails, sets `failure`, so that the trajectory fails, and refuses the request."""

        def failed(error: BaseException) -> RolloutError:
            return RolloutError(
                f"Parsing a completion of prompt {self.prompt.id!r} raised {type(error).__name__}: {error}. Fix the "
                "tool parser."
            )

        if self._is_closed:
            raise _session_over()
        try:
            with user_code(failed, RequestRefused, LightRLError):
                yield
        except LightRLError as error:
            if not self.failure.done():
                self.failure.set_result(error)
            raise RequestRefused(str(error), status=500, code="rollout_failed") from error

    async def _answer(self, encoded: EncodedRequest) -> Answer:
        """Generates until no call is malformed, or `_MAX_CORRECTIONS` are used up; records the last completion."""
        request, conversation = encoded.request, encoded.conversation
        self._check_limits(encoded)
        for num_corrections in range(_MAX_CORRECTIONS + 1):
            prompt_ids = conversation.token_ids
            completion = await self._request_completion(prompt_ids, request.max_new_tokens)
            text = conversation.add_completion(completion)
            parsed = self.parser(prompt_ids, completion.token_ids, text, request.tools)
            if parsed.calls and not (request.tools and completion.finish_reason == "stop"):
                parsed = parse_text(text)
            if not request.has_parallel_calls:
                parsed = replace(parsed, calls=parsed.calls[:1])
            errors = [call.error for call in parsed.calls if call.error is not None]
            if not errors:
                break
            parsed = parse_text(text)
            corrected = conversation.copy()
            observation = [{"role": "tool", "content": f"Error: {error}; no call was run"} for error in errors]
            try:
                with user_code(_template_failed, LightRLError):
                    corrected.add_observation(corrected.encode_observation(observation))
            except RequestRefused:  # the template cannot render tool messages
                break
            if num_corrections == _MAX_CORRECTIONS or len(corrected.token_ids) >= self.max_tokens:
                break
            conversation = corrected
        token_bytes = self.renderer.token_bytes(completion.token_ids) if request.wants_logprobs else []
        num_reasoning = min(len(self.renderer.encode(parsed.reasoning)), len(completion.token_ids))
        calls = [tool_call(f"call_{uuid.uuid4().hex[:24]}", call.name, dict(call.arguments)) for call in parsed.calls]
        answer = Answer(
            completion, parsed.content, parsed.reasoning, calls, encoded.num_prompt_tokens, num_reasoning, token_bytes
        )
        key, identity = message_key(answer.message), _identity(answer.message)
        if calls:
            self._keys[identity] = key
        keys, tools, num_prompt_tokens = [*encoded.keys, key], request.tools, encoded.num_prompt_tokens
        num_row_tokens, parent = len(conversation.token_ids), encoded.parent
        if parent is not None:  # this conversation replaces its row, and shares what it repeats
            self._num_tokens -= parent.num_row_tokens
            parent.num_row_tokens = 0
            conversation.compact(parent.conversation)
            keys, tools = [*parent.keys, *keys[len(parent.keys) :]], parent.tools
        snapshot = _Snapshot(conversation, keys, tools, identity, num_prompt_tokens, num_row_tokens)
        self._num_tokens += snapshot.num_row_tokens
        self._snapshots.append(snapshot)
        return answer

    def _check_limits(self, encoded: EncodedRequest) -> None:
        """Refuses a request beyond a limit of the agent; counts those that wait for the engine too."""
        parent_tokens = 0 if encoded.parent is None else encoded.parent.num_row_tokens
        used = {
            "requests": (len(self._snapshots) + len(self._pending), "answers"),
            "turns": ([role for role, _, _ in encoded.keys].count("assistant"), "answers in one conversation"),
            "total_tokens": (self._num_tokens - parent_tokens + encoded.num_prompt_tokens, "tokens in all its rows"),
        }
        for name, (number, what) in used.items():
            limit = getattr(self.limits, name)
            if limit is not None and number >= limit:
                self.exceeds_limit = True
                text = f"The agent has used up limits.{name}={limit} with {number} {what}. Finish without this request."
                raise RequestRefused(text, code="limit_exceeded")

    async def _encoded(self, request: AgentRequest, encode: Callable[..., _T], *args: object) -> _T:
        """Returns the result of `encode`; long messages use a thread, so that they do not block other sessions."""
        if sum(len(message["content"]) for message in request.messages) < _LONG_CHARS:
            return encode(*args)
        encoded = await in_thread(encode, *args, name="lightrl-encode")
        if self._is_closed:
            raise _session_over()
        return encoded

    def _find_parent(self, keys: list[MessageKey], request: AgentRequest) -> _Snapshot | None:
        """Returns the longest conversation that a request continues; prefers equal call ids, then later ones."""
        ids = [_identity(message) for message in request.messages]
        parents = [
            snapshot
            for snapshot in reversed(self._snapshots)
            if snapshot.tools == request.tools
            and len(snapshot.keys) < len(keys)
            and snapshot.keys == keys[: len(snapshot.keys)]
        ]
        return max(parents, key=lambda each: (len(each.keys), each.identity == ids[len(each.keys) - 1]), default=None)

    async def _request_completion(self, token_ids: Sequence[int], max_new_tokens: int | None) -> Completion:
        max_new = self.max_tokens - len(token_ids)
        if max_new < 1:
            self.exceeds_limit = True
            raise RequestRefused(
                f"prompt is too long: {len(token_ids)} tokens > {self.max_tokens - 1} maximum. "  # Anthropic's words
                f"The messages have {len(token_ids)} tokens, but must have fewer than the workflow's "
                f"max_tokens={self.max_tokens}.",
                code="context_length_exceeded",
            )
        max_new = max_new if max_new_tokens is None else min(max_new, max_new_tokens)
        task = asyncio.ensure_future(self.generate(list(token_ids), max_new_tokens=max_new))
        self._pending.add(task)
        try:
            await wait_or_abandon(task)
        finally:
            self._pending.discard(task)
        if task.cancelled():
            raise _session_over()
        try:
            completion = task.result()
        except ValueError as error:  # the engine refuses ids outside the vocabulary and more tokens than the context
            raise RequestRefused(str(error)) from error
        if not completion.token_ids:
            raise RolloutError(f"The policy generated no token for prompt {self.prompt.id!r}.")
        return completion


def _identity(message: JsonMapping) -> tuple[object, ...]:
    return str(message["content"]).strip(), *(call.get("id") for call in message.get("tool_calls", []))


def _join(requests: Sequence[_Snapshot]) -> tuple[Conversation, int]:
    """Joins the conversations, each as a branch after the longest prefix shared with a row; also counts the rows."""
    joined = requests[0].conversation.copy()
    ids = np.asarray(joined.token_ids)
    rows = [(ids, np.arange(len(ids)))]  # token ids of each row, and their positions in `joined`
    for request in requests[1:]:
        conversation, num = request.conversation, request.num_prompt_tokens
        ids = np.asarray(conversation.token_ids)
        shared = [_num_equal(ids[:num], row_ids) for row_ids, _ in rows]
        start = max(shared)
        row = len(rows) - 1 - shared[::-1].index(start)  # the last row that shares this many tokens
        old_ids, positions = rows[row]
        new_positions = np.arange(len(ids) - start) + len(joined.token_ids)
        joined.add_branch(conversation, start, int(positions[start - 1]) if start else -1)
        longer = ids, np.concatenate([positions[:start], new_positions])
        # A conversation that continues a whole row replaces it; any other adds a row.
        rows[row : row + 1] = [longer] if start == len(old_ids) else [rows[row], longer]
    return joined, len(rows)


def _num_equal(left: _Ids, right: _Ids) -> int:
    """Returns the length of the longest common prefix."""
    num = min(len(left), len(right))
    differ = left[:num] != right[:num]
    return int(differ.argmax()) if differ.any() else num


def _template_failed(error: BaseException) -> RequestRefused:
    return RequestRefused(
        f"The chat template raised {type(error).__name__}: {error}. Send messages that it can render."
    )


def _session_over() -> RequestRefused:
    return RequestRefused(
        "The session is over: the agent's function has returned. Await all requests before it returns.",
        status=404,
        code="session_not_found",
    )
