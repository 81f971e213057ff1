"""OpenAI's chat-completions protocol, as far as a policy in training can serve it: requests in, answers out.

Source: https://platform.openai.com/docs/api-reference/chat. Everything here is a pure function; agent_session.py has
the state, openai_endpoint.py the HTTP server.

Fields of a request are of three kinds. Served: `messages`, `tools`, `tool_choice` (auto or none), `max_tokens`,
`max_completion_tokens`, `stream`, `logprobs`. Refused, because the agent would not get what it requests: `stop`, `n`
above 1, `response_format`, other values of `tool_choice`, images and sound. Ignored: `temperature`, `top_p`, `seed`
and all others; the run's `sampling` decides, or the behavior logprobs would be wrong.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.engines.engine import Completion
from lightrl.trajectory import JsonMapping, JsonObject
from lightrl.workflows.tools import ToolCall, ToolParser, without_thinking

MODEL = "policy"

_SERVED = {
    "messages", "model", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stream", "stream_options",
    "logprobs", "top_logprobs", "n", "stop", "response_format", "functions", "function_call", "modalities",
}  # fmt: skip
_HARMLESS = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"}
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Each with the values that request nothing, and what to do instead.
_REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), "Send several requests."),
    "stop": (([], ""), "Cut the text in the agent, or set sampling.stop_token_ids in the run."),
    "response_format": (({"type": "text"},), "Parse the text in the agent, and let the reward check the format."),
    "functions": (([],), "Use tools."),
    "function_call": (("none",), "Use tools."),
    "modalities": ((["text"],), "Leave it out."),
    "top_logprobs": ((0,), "Leave it out; logprobs=True gives those of the sampled tokens."),
}

# Role, text and tool calls: two messages are the same if these are.
MessageKey = tuple[str, str, tuple[tuple[str, str], ...]]


class RequestRefused(Exception):
    """A request that gets an error as its answer; the agent's client raises it.

    Args:
        message: what is wrong and how to fix it.
        status: of HTTP; the official client retries 408, 409, 429 and 5xx by default.
        code: one word for programs.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def to_json(self) -> JsonObject:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True)
class ChatRequest:
    """A request that can be served."""

    messages: list[JsonObject]  # for chat templates: contents are text, arguments of calls are objects
    keys: list[MessageKey]  # one for each message
    tools: list[JsonObject]  # JSON schemas; empty with tool_choice="none"
    max_new_tokens: int | None
    is_streamed: bool
    includes_usage: bool  # at the end of a stream
    wants_logprobs: bool
    ignored: tuple[str, ...]  # fields that have no effect

    @classmethod
    def of_json(cls, data: bytes) -> ChatRequest:
        """Reads the body of a request; raises RequestRefused as `of` does, and if it is not JSON in UTF-8."""
        try:
            body = json.loads(data.decode())
            if b"\\u" in data:
                json.dumps(body, ensure_ascii=False).encode()  # a lone surrogate, which no tokenizer takes
        except (ValueError, RecursionError) as error:
            problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise RequestRefused(f"The request must be a JSON object in UTF-8: {problem}.") from error
        return cls.of(body)

    @classmethod
    def of(cls, body: object) -> ChatRequest:
        """
        Args:
            body: the request's JSON.

        Raises:
            RequestRefused: if it is malformed, or requests something that cannot be served.
        """
        if not isinstance(body, Mapping):
            raise RequestRefused(f"The request must be a JSON object, got {body!r:.80}.")
        fields = {str(name): value for name, value in body.items() if value is not None}
        for name, (allowed, alternative) in _REFUSED.items():
            if name in fields and fields[name] not in allowed:
                raise RequestRefused(f"{name}={fields[name]!r:.80} is not supported. {alternative}")
        choice = fields.get("tool_choice", "auto")
        if choice not in ("auto", "none"):
            raise RequestRefused(f"tool_choice must be auto or none, got {choice!r:.80}.")
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RequestRefused(f"messages must be a list with at least one message, got {messages!r:.80}.")
        tools = fields.get("tools", [])
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise RequestRefused(f"tools must be a list of JSON schemas, got {tools!r:.80}.")
        read = [_read_message(message) for message in messages]
        options = fields.get("stream_options")
        return cls(
            messages=read,
            keys=[message_key(message) for message in read],
            tools=[] if choice == "none" else [dict(tool) for tool in tools],
            max_new_tokens=_max_new_tokens(fields),
            is_streamed=bool(fields.get("stream", False)),
            includes_usage=isinstance(options, Mapping) and bool(options.get("include_usage")),
            wants_logprobs=bool(fields.get("logprobs", False)),
            ignored=tuple(sorted(fields.keys() - _SERVED - _HARMLESS)),
        )


def _max_new_tokens(fields: JsonMapping) -> int | None:
    limits = [fields[name] for name in ("max_tokens", "max_completion_tokens") if name in fields]
    if any(not isinstance(value, int) or isinstance(value, bool) or value < 1 for value in limits):
        raise RequestRefused(f"max_tokens must be an integer >= 1, got {limits[0]!r:.80}.")
    return min(limits, default=None)


def _read_message(message: object) -> JsonObject:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(role, str) or role not in _ROLES:
        raise RequestRefused(f"The role of a message must be one of {', '.join(_ROLES)}, got {message!r:.120}.")
    read: JsonObject = {"role": _ROLES[role], "content": _text(message.get("content"))}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            read[name] = message[name]
    calls = message.get("tool_calls") or []
    if calls:
        read["tool_calls"] = [_read_call(call) for call in calls]
    return read


def _text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Any] = content if isinstance(content, list) else [content]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise RequestRefused(f"The content of a message must be text, got {content!r:.120}.")
    return "".join(part["text"] for part in parts)


def _read_call(call: object) -> JsonObject:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestRefused(f"A tool call must have a function with a name, got {call!r:.120}.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # otherwise it is the agent's own text, shown as it is
            arguments = json.loads(arguments)
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def message_key(message: JsonMapping) -> MessageKey:
    """Equal for equivalent messages: call ids, and white space around the policy's text, do not count."""
    calls = tuple(
        (str(call["function"]["name"]), json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls", [])
    )
    content = str(message["content"])
    return str(message["role"]), content.strip() if message["role"] == "assistant" else content, calls


@dataclass(frozen=True)
class Answer:
    """The policy's completion, as the agent sees it."""

    completion: Completion
    text: str  # without end tokens
    calls: list[ToolCall]
    num_prompt_tokens: int
    token_texts: list[str]  # a text for each token; empty unless logprobs are requested

    @property
    def content(self) -> str | None:
        """The text; with calls, the part before the first one."""
        if not self.calls:
            return self.text
        return self.text[: len(without_thinking(self.text).partition("<tool_call>")[0])].strip() or None

    def message(self) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
                }
                for call in self.calls
            ]
        return message

    def key(self) -> MessageKey:
        """The key of the message when the agent sends it back."""
        return message_key(_read_message(self.message()))


def find_calls(text: str, completion: Completion, tools: Sequence[JsonMapping], parser: ToolParser) -> list[ToolCall]:
    """The tool calls of a completion; none if one of them is malformed: then the agent gets all of the text."""
    if not tools or completion.finish_reason != "stop":
        return []
    calls = parser(without_thinking(text))
    return [] if any(call.error is not None for call in calls) else calls


def render_completion(answer: Answer, request: ChatRequest) -> JsonObject:
    """The body of an unstreamed answer."""
    choice = {
        "index": 0,
        "message": answer.message(),
        "logprobs": _logprobs(answer) if request.wants_logprobs else None,
        "finish_reason": _finish_reason(answer),
    }
    return {**_envelope(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def render_chunks(answer: Answer, request: ChatRequest) -> Iterator[JsonObject]:
    """The events of a stream; the text comes in one piece, because the engine returns whole completions."""
    envelope = _envelope(answer, "chat.completion.chunk")
    message = answer.message()
    calls = [{"index": index, **call} for index, call in enumerate(message.pop("tool_calls", []))]
    logprobs = _logprobs(answer) if request.wants_logprobs else None
    deltas: list[JsonObject] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": message["content"]}] if message["content"] is not None else []
    deltas += [{"tool_calls": calls}] if calls else []
    for delta in deltas:
        own = logprobs if delta is deltas[1] else None
        yield {**envelope, "choices": [{"index": 0, "delta": delta, "logprobs": own, "finish_reason": None}]}
    last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": _finish_reason(answer)}
    yield {**envelope, "choices": [last]}
    if request.includes_usage:
        yield {**envelope, "choices": [], "usage": _usage(answer)}


def render_models() -> JsonObject:
    """The list of models: the policy."""
    return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "lightrl"}]}


def _envelope(answer: Answer, kind: str) -> JsonObject:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "system_fingerprint": f"weight-version-{answer.completion.weight_versions[-1]}",
    }


def _finish_reason(answer: Answer) -> str:
    return "tool_calls" if answer.calls else answer.completion.finish_reason


def _usage(answer: Answer) -> dict[str, int]:
    num_generated = len(answer.completion.token_ids)
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": num_generated,
        "total_tokens": answer.num_prompt_tokens + num_generated,
    }


def _logprobs(answer: Answer) -> JsonObject:
    sampled = zip(answer.token_texts, answer.completion.logprobs, strict=True)
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in sampled
    ]
    return {"content": content, "refusal": None}
