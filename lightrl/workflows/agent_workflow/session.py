"""AgentSession: records the tokens of an agent's requests to the policy as a trajectory. Tokens in, tokens out.

A request that continues an answer (an earlier request's messages, our answer to it, then new messages) reuses the exact
tokens of that request and answer; only the new messages are encoded. Any other request starts a new branch: the agent
has rewritten history, started another conversation, or sent the same request twice.

    request A ─► answer ─┬─► request B (A + answer + tool result) ─► answer          a row of 2 turns
                         └─► request C (A + answer + another question) ─► answer     a row of 2 turns
    request D (A, shortened) ─► answer                                               a row of 1 turn

All rows are trained on, as one trajectory that contains the tokens of a shared prefix only once (`Trajectory.rows`).
Every answer is a new sample: a request that is sent twice gets two completions.

An answer ends at the token that completes a stop text. Tokens up to that one are trained on; later ones are discarded.

A malformed call never reaches the agent: the policy reads what is wrong and tries again, in turns that the agent does
not see. After three such turns in a row, the agent gets the text unchanged.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from lightrl.checks.user_code import user_code
from lightrl.columns import cut
from lightrl.concurrency.abandon import abandon, wait_or_abandon
from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.engine import Completion
from lightrl.engines.servers.connection import ServerRefused
from lightrl.errors import LightRLError, RolloutError
from lightrl.models.images import read_with_pillow
from lightrl.trajectory import LEADING_THOUGHTS, FinishReason, JsonMapping, JsonObject, Prompt, Trajectory, content_text
from lightrl.workflows.agent_workflow.command import AgentLimits
from lightrl.workflows.agent_workflow.completion_parser import CompletionParser, has_hermes_calls, parse_text
from lightrl.workflows.agent_workflow.constraints import grammar_of, way_out
from lightrl.workflows.agent_workflow.protocol import (
    AgentRequest,
    Answer,
    MessageKey,
    RequestRefused,
    RequestRules,
    message_key,
    thinking_of,
    tool_call,
)
from lightrl.workflows.multi_turn import Conversation, TurnRenderer
from lightrl.workflows.workflow import Generate

_MAX_CORRECTIONS = 3
_LONG_CHARS = 1 << 15  # in a request's messages; encoding this many takes about 30 ms
_MAX_IMAGES, _MAX_PIXELS = 64, 100 * 10**6  # in a request's new messages
_T = TypeVar("_T")
_Ids = np.ndarray[Any, np.dtype[Any]]


@dataclass(eq=False)
class _Snapshot:
    """The conversation after one answer; requests that continue it work on copies."""

    conversation: Conversation
    keys: list[MessageKey]  # one per message; the answer's key is the last
    tools: list[JsonObject]
    identity: tuple[object, ...]  # the answer's text and the ids of its calls
    thinking: list[str]  # one text per policy message; the last belongs to the answer
    answer_id: str  # the request's id; choices after the first append their index
    is_trained: bool
    num_prompt_tokens: int  # the request's tokens; the answer's tokens follow them
    num_row_tokens: int  # all tokens; 0 if untrained, or if a longer trained conversation continues this one
    parent: _Snapshot | None


@dataclass(frozen=True)
class EncodedRequest:
    """A request as tokens."""

    request: AgentRequest
    conversation: Conversation  # ends with the request's last message
    keys: list[MessageKey]  # one per message
    num_prompt_tokens: int
    parent: _Snapshot | None  # the conversation that it continues
    grammar: str = ""  # constrains the answer
    choice: int = 0  # the answer's index among `num_choices`

    @property
    def row(self) -> _Snapshot | None:
        """The latest trained answer that the request continues, if that answer ends its row; None if it adds a row."""
        last = self.parent
        while last is not None and not last.is_trained:
            last = last.parent
        return last if last is not None and last.num_row_tokens else None


@dataclass(eq=False)
class AgentSession:
    """An agent's growing trajectory; created and used on one event loop."""

    prompt: Prompt  # the agent's task; its requests may contain other messages
    generate: Generate
    renderer: TurnRenderer  # shared by all sessions; has a chat template
    parser: CompletionParser
    max_tokens: int  # limit for one branch, at most the model's context
    limits: AgentLimits = field(default_factory=AgentLimits)
    rules: RequestRules = field(default_factory=RequestRules)
    exceeds_limit: bool = False  # whether a request was refused because of max_tokens or a limit

    def __post_init__(self) -> None:
        # The error that fails the trajectory, whatever the agent does; set once.
        self.failure: asyncio.Future[LightRLError] = asyncio.get_running_loop().create_future()
        self._snapshots: list[_Snapshot] = []
        # Maps an answer's text and call ids to its key, because an agent may add default arguments to a call.
        self._keys: dict[tuple[object, ...], MessageKey] = {}
        # A similar map for answers together with the stop text that ended them, which some agents send back.
        self._stopped_keys: dict[tuple[object, ...], list[MessageKey]] = {}
        self._pending: dict[asyncio.Task[Completion], EncodedRequest] = {}
        self._num_forwarded = 0
        self._num_tokens = 0  # in all rows
        self.items: dict[str, JsonObject] = {}  # output items of responses, by id
        self._is_closed = False

    async def prepare(self, request: AgentRequest) -> EncodedRequest:
        """Encodes a request.

        Raises:
            RequestRefused: if the session is over, the chat template fails on the request, the policy cannot read the
                images, or the constraint is impossible. If the template rewrites history, `failure` is also set.
        """
        with self._recording_failure(), user_code(_template_failed, RequestRefused, LightRLError):
            keys: list[MessageKey] = []
            for message in request.messages:
                keys.append(self._key_of(message, keys))
            parent = self._find_parent(keys, request)
            new = request.messages if parent is None else request.messages[len(parent.keys) :]
            try:
                bare, images = await self._encoded(request, self._take_images, new)
            except RolloutError as error:
                raise RequestRefused(str(error)) from error
            if parent is None:
                prompt = replace(self.prompt, messages=bare, token_ids=None, images=images)
                conversation = await self._encoded(request, Conversation, self.renderer, prompt, (), request.tools)
            else:
                conversation = parent.conversation.copy()
                conversation.add_observation(await self._encoded(request, conversation.encode_observation, new))
            token_ids = conversation.token_ids
            opening = self.renderer.opened_thinking(conversation.prompt, token_ids)
            grammar = grammar_of(
                request,
                opening,
                may_think="<think>" in str(self.renderer.chat_template),
                is_hermes=has_hermes_calls(self.parser),
            )
            return EncodedRequest(request, conversation, keys, len(token_ids), parent, grammar)

    async def answer(self, encoded: EncodedRequest) -> Answer:
        """Waits for the engine and returns the policy's first answer, with the other answers as its `siblings`.

        On cancellation, the engine drops the completions.

        Raises:
            RequestRefused: if the request is too long, the session is over, or generation fails and sets `failure`.
        """
        with self._recording_failure():
            if encoded.request.num_choices == 1:
                return await self._answer(encoded)
            choices = [
                replace(encoded, conversation=encoded.conversation.copy(), choice=choice)
                for choice in range(encoded.request.num_choices)
            ]
            tasks = [asyncio.ensure_future(self._answer(choice)) for choice in choices]
            try:
                first, *siblings = await asyncio.gather(*tasks)
            finally:
                abandon(tasks)
            return replace(first, siblings=siblings)

    def close(self) -> None:
        """Cancels pending completions; later requests are refused. Safe to call twice."""
        self._is_closed = True
        for task in self._pending:
            task.cancel()

    def count_forwarded(self) -> None:
        """Counts a request to a frozen model; raises RequestRefused if the session is over or has no requests left."""
        if self._is_closed:
            raise _session_over()
        self._check_limit("requests", self._num_requests, "answers")
        self._num_forwarded += 1

    @property
    def has_answers(self) -> bool:
        """Whether the policy gave an answer that is trained on."""
        return any(snapshot.is_trained for snapshot in self._snapshots)

    def trajectory(
        self, reward: float | None, *, rewards: Mapping[str, float] | None = None, is_truncated: bool = False
    ) -> Trajectory:
        """Returns all requests and answers as one trajectory, without answers that are not trained on.

        Args:
            reward: placed on the last token; None without `rewards` leaves `Trajectory.rewards` unset.
            rewards: additional rewards by answer id, each placed on the answer's last token.
            is_truncated: whether a limit ended the agent, rather than only refusing a request.

        Raises:
            RolloutError: if no answer is trained on, a reward's answer does not exist, or several rows have images.
        """
        trained = [snapshot for snapshot in self._snapshots if snapshot.is_trained]
        if not trained:
            raise RolloutError(
                f"The agent finished prompt {self.prompt.id!r} without an answer from the policy to train on. It must "
                "use the base_url and api_key that it gets, and untrained must not match all of its requests."
            )
        joined, num_rows, last_turns = _join(trained)
        if num_rows > 1 and any(map(_has_images, (one.conversation for one in trained))):
            raise RolloutError(
                f"The answers to prompt {self.prompt.id!r} are in {num_rows} rows and have images, but the trainer "
                "supports images only in a single row. Let the agent continue the conversation that has the images."
            )
        num_turns = len(joined.turns)
        turn_rewards = [0.0] * num_turns
        turn_rewards[-1] = reward or 0.0
        turn_of = {_bare_id(one.answer_id): turn for one, turn in zip(trained, last_turns, strict=True)}
        for answer_id, value in (rewards or {}).items():
            if _bare_id(answer_id) not in turn_of:
                raise RolloutError(
                    f"The agent rewards the answer {answer_id!r:.80} of prompt {self.prompt.id!r}, but no answer that "
                    "is trained on has this id. Use the ids of the policy's responses."
                )
            turn_rewards[turn_of[_bare_id(answer_id)]] += value
        trajectory = joined.trajectory(
            turn_rewards,
            is_truncated=is_truncated or joined.turns[-1].finish_reason == "length",
            metrics={"turns": float(num_turns), "rows": float(num_rows)},
        )
        trajectory.prompt = replace(trajectory.prompt, messages=self.prompt.messages)
        if reward is None and not rewards:
            trajectory.rewards = None
        return trajectory

    @contextmanager
    def _recording_failure(self) -> Iterator[None]:
        """If the block fails, sets `failure`, so that the trajectory fails, and refuses the request."""

        def failed(error: BaseException) -> RolloutError:
            return RolloutError(
                f"Parsing a completion for prompt {self.prompt.id!r} raised {type(error).__name__}: {error}. Fix the "
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
        is_trained = self.rules.trains(request)
        self._check_limits(encoded, is_trained=is_trained)
        for num_corrections in range(_MAX_CORRECTIONS + 1):
            prompt_ids = conversation.token_ids
            completion = await self._request_completion(encoded, conversation)
            completion, stopped_by = self._cut_at_stop(completion, conversation, request.stop)
            text = conversation.add_completion(completion, has_end=stopped_by is None, is_trained=is_trained)
            if stopped_by is not None:
                text = text[: _find_stop(text, request.stop)[0]]
            parsed = self.parser(prompt_ids, completion.token_ids, text, request.tools)
            if stopped_by is not None:
                start, _ = _find_stop(parsed.content, request.stop)
                parsed = replace(parsed, content=parsed.content if start < 0 else parsed.content[:start])
            if parsed.calls and not (request.tools and completion.finish_reason == "stop"):
                parsed = parse_text(text)
            if not request.has_parallel_calls:
                parsed = replace(parsed, calls=parsed.calls[:1])
            errors = [call.error for call in parsed.calls if call.error is not None]
            if not errors:
                break
            parsed = parse_text(text)
            if stopped_by is not None:  # the stop text is inside the call
                break
            corrected = conversation.copy()
            observation = [{"role": "tool", "content": f"Error: {error}; no call was run"} for error in errors]
            try:
                with user_code(_template_failed, LightRLError):
                    corrected.add_observation(corrected.encode_observation(observation))
            except RequestRefused:  # the template cannot render tool messages
                break
            if num_corrections == _MAX_CORRECTIONS or self._num_tokens_left(encoded, corrected) < 1:
                break
            conversation = corrected
        token_bytes = self.renderer.token_bytes(completion.token_ids) if request.wants_logprobs else []
        num_reasoning = min(len(self.renderer.encode(parsed.reasoning)), len(completion.token_ids))
        calls = [tool_call(f"call_{uuid.uuid4().hex[:24]}", call.name, dict(call.arguments)) for call in parsed.calls]
        answer = Answer(
            completion,
            parsed.content,
            parsed.reasoning,
            calls,
            encoded.num_prompt_tokens,
            num_reasoning,
            token_bytes,
            stopped_by,
        )
        key, identity = message_key(answer.message), _identity(answer.message)
        if calls:
            self._keys[identity] = key
        if stopped_by is not None:
            written_back = _identity({**answer.message, "content": answer.content + stopped_by})
            self._stopped_keys.setdefault(written_back, []).append(key)
        thinking = [thinking_of(each) for each in request.messages if each["role"] == "assistant"]
        keys, tools, parent = [*encoded.keys, key], request.tools, encoded.parent
        if is_trained and (row := encoded.row) is not None:  # this conversation replaces the row
            self._num_tokens -= row.num_row_tokens
            row.num_row_tokens = 0
        if parent is not None:  # share the tokens that the parent already stores
            conversation.compact(parent.conversation)
            keys, tools = [*parent.keys, *keys[len(parent.keys) :]], parent.tools
        snapshot = _Snapshot(
            conversation,
            keys,
            tools,
            identity,
            [*thinking, parsed.reasoning.strip()],
            f"{request.id}/{encoded.choice}" if encoded.choice else request.id,
            is_trained,
            encoded.num_prompt_tokens,
            len(conversation.token_ids) if is_trained else 0,
            parent,
        )
        self._num_tokens += snapshot.num_row_tokens
        self._snapshots.append(snapshot)
        return answer

    def _cut_at_stop(
        self, completion: Completion, conversation: Conversation, stops: Sequence[str]
    ) -> tuple[Completion, str | None]:
        """Returns the completion up to the token that completes a stop text, and that text.

        Thinking is not searched, because the agent does not see it as text.
        """
        ids, renderer = completion.token_ids, self.renderer
        opening = renderer.opened_thinking(conversation.prompt, conversation.token_ids)

        def stop_in(num: int) -> str | None:
            return _find_stop(opening + renderer.text_of(ids[:num]), stops)[1]

        if not stops or stop_in(len(ids)) is None:
            return completion, None
        num = bisect.bisect_left(range(1, len(ids)), True, key=lambda num: stop_in(num) is not None) + 1
        return cut_completion(completion, num, "stop"), stop_in(num)

    def _check_limits(self, encoded: EncodedRequest, *, is_trained: bool) -> None:
        """Refuses a request that exceeds one of the agent's limits; requests waiting for the engine also count."""
        self._check_limit("requests", self._num_requests, "answers")
        num_turns = [role for role, _, _ in encoded.keys].count("assistant")
        self._check_limit("turns", num_turns, "answers in one conversation")
        if not is_trained:
            return
        num_tokens = self._num_other_tokens(encoded) + encoded.num_prompt_tokens
        self._check_limit("total_tokens", num_tokens, "tokens in all its rows")
        pending = [each for each in self._pending.values() if self.rules.trains(each.request)]
        rows = [one for one in self._snapshots if one.num_row_tokens]
        # The first request that continues a row extends it; each later one adds a row.
        num_rows, num_then = (
            len(rows) + len(asked) - len({each.row for each in asked} - {None})
            for asked in (pending, [*pending, encoded])
        )
        conversations = [row.conversation for row in rows] + [one.conversation for one in (*pending, encoded)]
        if num_then > 1 and any(map(_has_images, conversations)):
            raise RequestRefused(
                "The trainer supports images only if all answers are in one row. Send requests one at a time, without "
                "`n`, in the conversation that has the images, or exclude other requests with `untrained`.",
                code="images_in_rows",
            )
        if num_then > num_rows:
            self._check_limit("rows", num_rows, "rows")

    @property
    def _num_requests(self) -> int:
        return len(self._snapshots) + len(self._pending) + self._num_forwarded

    def _check_limit(self, name: str, number: int, what: str) -> None:
        limit = getattr(self.limits, name)
        if limit is not None and number >= limit:
            raise self._limit_exceeded(name, number, what)

    def _key_of(self, message: JsonObject, before: list[MessageKey]) -> MessageKey:
        """Returns a message's key, given the keys of the messages before it."""
        identity = _identity(message)
        if identity in self._keys:
            return self._keys[identity]
        key = message_key(message)
        for candidate in (key, *stopped) if (stopped := self._stopped_keys.get(identity)) else ():
            keys = [*before, candidate]
            if any(snapshot.keys[: len(keys)] == keys for snapshot in self._snapshots):
                return candidate
        return key

    def _take_images(self, messages: Sequence[JsonObject]) -> tuple[list[JsonObject], tuple[str, ...]]:
        """Returns messages without their images, and the images; refuses too many images or pixels before decoding."""
        contents = [message["content"] for message in messages if isinstance(message["content"], list)]
        images = [part["image"] for parts in contents for part in parts if part["type"] == "image"]
        if self.renderer.image_reader is not None:
            try:
                sizes = [read_with_pillow(image, lambda opened: opened.size) for image in images[: _MAX_IMAGES + 1]]
            except ValueError as error:
                raise RequestRefused(str(error)) from error
            if len(images) > _MAX_IMAGES or (num_pixels := sum(map(math.prod, sizes))) > _MAX_PIXELS:
                number = f"{len(images)} images" if len(images) > _MAX_IMAGES else f"{num_pixels:,} pixels"
                raise RequestRefused(
                    f"The new messages have {number}, but at most {_MAX_IMAGES} images with {_MAX_PIXELS:,} pixels in "
                    "total are supported. Send fewer or smaller images."
                )
        return self.renderer.take_images(messages)

    async def _encoded(self, request: AgentRequest, encode: Callable[..., _T], *args: object) -> _T:
        """Returns the result of `encode`; long messages and images run in a thread, so that other sessions continue."""
        contents = [message["content"] for message in request.messages]
        has_images = any(isinstance(content, list) for content in contents)
        if not has_images and sum(len(content_text(content)) for content in contents) < _LONG_CHARS:
            return encode(*args)
        encoded = await in_thread(encode, *args, name="lightrl-encode")
        if self._is_closed:
            raise _session_over()
        return encoded

    def _find_parent(self, keys: list[MessageKey], request: AgentRequest) -> _Snapshot | None:
        """Returns the longest conversation that a request continues; call ids, thinking and recency break ties."""
        ids = [_identity(message) for message in request.messages]
        thinking = [thinking_of(each) for each in request.messages if each["role"] == "assistant"]
        parents = [
            snapshot
            for snapshot in reversed(self._snapshots)
            if snapshot.tools == request.tools
            and len(snapshot.keys) < len(keys)
            and snapshot.keys == keys[: len(snapshot.keys)]
            and (self.rules.keeps_unsent_thinking or snapshot.thinking == thinking[: len(snapshot.thinking)])
        ]

        def likeness(snapshot: _Snapshot) -> tuple[int, bool, int]:
            num_equal = sum(map(str.__eq__, snapshot.thinking, thinking))
            return len(snapshot.keys), snapshot.identity == ids[len(snapshot.keys) - 1], num_equal

        return max(parents, key=likeness, default=None)

    def _num_other_tokens(self, encoded: EncodedRequest) -> int:
        """Returns the number of tokens in all rows except the one that this request continues."""
        return self._num_tokens - (0 if encoded.row is None else encoded.row.num_row_tokens)

    async def _request_completion(self, encoded: EncodedRequest, conversation: Conversation) -> Completion:
        """Returns the policy's completion for a conversation: the request's, or a longer one after corrections."""
        request, token_ids = encoded.request, conversation.token_ids
        if len(token_ids) >= self.max_tokens:
            self.exceeds_limit = True
            raise RequestRefused(
                f"prompt is too long: {len(token_ids)} tokens > {self.max_tokens - 1} maximum. "  # Anthropic's wording
                f"The messages have {len(token_ids)} tokens, but must have fewer than the workflow's "
                f"max_tokens={self.max_tokens}.",
                code="context_length_exceeded",
            )
        max_new = self._num_tokens_left(encoded, conversation)
        max_new = max_new if request.max_new_tokens is None else min(max_new, request.max_new_tokens)
        settings: dict[str, Any] = {"grammar": encoded.grammar} if encoded.grammar else {}
        if images := (*conversation.prompt.images, *conversation.images):
            settings["images"] = images
        task = asyncio.ensure_future(self.generate(list(token_ids), max_new_tokens=max_new, **settings))
        self._pending[task] = encoded
        try:
            await wait_or_abandon(task)
        finally:
            del self._pending[task]
        if task.cancelled():
            raise _session_over()
        try:
            completion = task.result()
        # The engine refuses ids outside the vocabulary or beyond the context; its server refuses a bad grammar.
        except (ValueError, ServerRefused) as error:
            if isinstance(error, ServerRefused) and not (encoded.grammar and error.status == 400):
                raise
            hint = f" {way_out(request)}" if encoded.grammar else ""
            raise RequestRefused(f"{error}{hint}") from error
        if not completion.token_ids:
            raise RolloutError(f"The policy generated no tokens for prompt {self.prompt.id!r}.")
        left = self._num_tokens_left(encoded, conversation)  # other answers may have arrived in the meantime
        if left < 1:
            used = self._num_other_tokens(encoded) + len(token_ids)
            raise self._limit_exceeded("total_tokens", used, "tokens in all its rows")
        return completion if len(completion.token_ids) <= left else cut_completion(completion, left, "length")

    def _num_tokens_left(self, encoded: EncodedRequest, conversation: Conversation) -> int:
        """Returns how many tokens the limits let the policy add to a conversation."""
        left = self.max_tokens - len(conversation.token_ids)
        if self.limits.total_tokens is None or not self.rules.trains(encoded.request):
            return left
        return min(left, self.limits.total_tokens - self._num_other_tokens(encoded) - len(conversation.token_ids))

    def _limit_exceeded(self, name: str, number: int, what: str) -> RequestRefused:
        self.exceeds_limit = True
        limit = f"limits.{name}={getattr(self.limits, name)}"
        text = f"The agent has used up {limit} with {number} {what}. Finish without this request."
        return RequestRefused(text, code="limit_exceeded")


def cut_completion(completion: Completion, num: int, finish_reason: FinishReason) -> Completion:
    """Returns the first `num` tokens of a completion."""
    ids, logprobs, versions = completion.token_ids, completion.logprobs, completion.weight_versions
    columns = cut(completion.columns, len(ids), 0, num)
    return Completion(ids[:num], logprobs[:num], versions[:num], finish_reason, columns)


def _find_stop(text: str, stops: Sequence[str]) -> tuple[int, str | None]:
    """Returns where the first stop text after the thinking begins, and that text; -1 and None if there is none."""
    thought = LEADING_THOUGHTS.match(text)
    start = 0 if thought is None else thought.end()
    return min(((at, stop) for stop in stops if (at := text.find(stop, start)) >= 0), default=(-1, None))


def _has_images(conversation: Conversation) -> bool:
    return bool(conversation.prompt.images or conversation.images)


def _bare_id(answer_id: str) -> str:
    return re.sub(r"^(chatcmpl-|msg_|resp_)", "", answer_id)


def _identity(message: JsonMapping) -> tuple[object, ...]:
    ids = (call.get("id") for call in message.get("tool_calls", []))
    return message["role"], content_text(message["content"]).strip(), *ids


def _join(requests: Sequence[_Snapshot]) -> tuple[Conversation, int, list[int]]:
    """Joins the conversations, each as a branch after the longest prefix shared with a row.

    Returns:
        The joined conversation, its number of rows, and the index of each request's last turn.
    """
    joined = requests[0].conversation.copy()
    last_turns = [len(joined.turns) - 1]
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
        last_turns.append(len(joined.turns) - 1)
        longer = ids, np.concatenate([positions[:start], new_positions])
        # A conversation that continues a whole row replaces it; any other adds a row.
        rows[row : row + 1] = [longer] if start == len(old_ids) else [rows[row], longer]
    return joined, len(rows), last_turns


def _num_equal(left: _Ids, right: _Ids) -> int:
    """Returns the length of the longest common prefix."""
    num = min(len(left), len(right))
    differ = left[:num] != right[:num]
    return int(differ.argmax()) if differ.any() else num


def _template_failed(error: BaseException) -> RequestRefused:
    return RequestRefused(f"The chat template raised {type(error).__name__}: {error}. Send messages it can render.")


def _session_over() -> RequestRefused:
    return RequestRefused(
        "The session is over: the agent's function has returned. Await all requests before it returns.",
        status=404,
        code="session_not_found",
    )
