"""An agent's request and its answer: what the three protocols have in common.

    body ─► Exchange.read ─► AgentRequest: messages, tools ─► AgentSession ─► Answer ─► Exchange.body, or .events

chat_protocol.py, messages_protocol.py and responses_protocol.py each subclass `Exchange`. Everything here is a pure
function of the request and the answer; session.py keeps the state, and endpoint.py runs the HTTP server.

Each field of a request is served, refused (if the agent would not get what it asks for) or ignored. `temperature`,
`top_p` and `seed` are ignored: the run's `sampling` applies, since the behavior logprobs would be wrong otherwise.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from lightrl.engines.engine import Completion
from lightrl.trajectory import JsonMapping, JsonObject, split_thinking

_MAX_DEPTH = 100
MODEL = "policy"
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "server_error"}

# A refused field → the values that are accepted because they change nothing, and what to do instead.
Refusals = Mapping[str, tuple[tuple[Any, ...], str]]
# Role, text and tool calls; two messages with equal keys count as the same message.
MessageKey = tuple[str, str, tuple[tuple[str, str], ...]]


class RequestRefused(Exception):
    """Raised to answer a request with an error, which the agent's client then raises.

    Args:
        message: what is wrong and how to fix it.
        status: the HTTP status; the official clients retry 408, 409, 429 and 5xx by default.
        code: an identifier that programs can compare.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def to_json(self) -> JsonObject:
        """Returns the error in a format that clients of all protocols can read."""
        kind = _ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True)
class AgentRequest:
    """A request that can be served."""

    messages: list[JsonObject]  # for chat templates: content is text, call arguments are objects
    tools: list[JsonObject] = field(default_factory=list)  # functions with JSON schemas that the policy may call
    max_new_tokens: int | None = None
    wants_logprobs: bool = False
    has_parallel_calls: bool = True  # if False, an answer contains only the policy's first call


@dataclass(frozen=True)
class Answer:
    """The policy's completion, as the agent sees it."""

    completion: Completion
    content: str
    reasoning: str
    calls: list[JsonObject]  # each with a unique id
    num_prompt_tokens: int
    num_reasoning_tokens: int = 0
    token_bytes: Sequence[bytes] = ()  # one per token; empty unless logprobs are requested

    @property
    def message(self) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": self.content}
        message |= {"reasoning_content": self.reasoning} if self.reasoning else {}
        return message | ({"tool_calls": self.calls} if self.calls else {})


class Exchange(ABC):
    """One request and its response; each subclass implements a protocol.

    Raises:
        RequestRefused: if the request is malformed, or requests something that cannot be served.
    """

    served: ClassVar[str]  # fields that are served, refused for some values, or harmless
    refused: ClassVar[Refusals]
    last_line: ClassVar[str] = ""  # ends a stream

    def __init__(self, body: object) -> None:
        if not isinstance(body, Mapping):
            raise RequestRefused(f"The request must be a JSON object, got {body!r:.80}.")
        self.fields = {str(name): value for name, value in body.items() if value is not None}
        model = self.fields.get("model", MODEL)
        if model != MODEL:
            raise RequestRefused(
                f"There is no model {model!r:.80}. The policy's name is {MODEL!r}: set it as the agent's model.",
                status=404,
                code="model_not_found",
            )
        for name, (allowed, alternative) in self.refused.items():
            if name in self.fields and self.fields[name] not in allowed:
                raise RequestRefused(f"{name}={self.fields[name]!r:.80} is not supported. {alternative}")
        self.id = uuid.uuid4().hex
        self.created = int(time.time())
        self.is_streamed = bool(self.fields.get("stream", False))
        # Names of the fields that have no effect.
        self.ignored = sorted(self.fields.keys() - {"model", "stream"} - set(self.served.split()) - self.refused.keys())
        self.request = self.read()

    @classmethod
    def of_json(cls, data: bytes) -> Self:
        """Parses the body of a request, which must be JSON in UTF-8."""
        try:
            body = json.loads(data.decode())
            if b"\\u" in data:
                json.dumps(body, ensure_ascii=False).encode()  # fails on a lone surrogate, which no tokenizer accepts
        except (ValueError, RecursionError) as error:
            problem = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise RequestRefused(f"The request must be a JSON object in UTF-8: {problem}.") from error
        if _is_deep(body):
            raise RequestRefused(f"The request is nested too deeply: it has more than {_MAX_DEPTH} levels.")
        return cls(body)

    @abstractmethod
    def read(self) -> AgentRequest:
        """Converts `fields` to a request to the policy."""

    @abstractmethod
    def body(self, answer: Answer) -> JsonObject:
        """Returns the body of an answer that is not streamed."""

    @abstractmethod
    def start_events(self, num_prompt_tokens: int) -> list[JsonObject]:
        """Returns the first events of a stream, which are sent before there is an answer."""

    @abstractmethod
    def events(self, answer: Answer) -> Iterator[JsonObject]:
        """Yields the rest of a stream's events. The text is one event, since the engine returns whole completions."""

    def waiting_event(self) -> JsonObject | None:
        """Returns an event that shows a waiting client that the stream is alive, or None to send a comment."""
        return None

    def error_event(self, error: RequestRefused) -> JsonObject:
        """Returns the event that ends a stream if there is no answer."""
        return error.to_json()

    def limit_of(self, *names: str) -> int | None:
        """Returns the smallest limit on new tokens in these fields."""
        limits = [self.fields[name] for name in names if name in self.fields]
        if any(not isinstance(value, int) or isinstance(value, bool) or value < 1 for value in limits):
            raise RequestRefused(f"{names[0]} must be an integer >= 1, got {limits[0]!r:.80}.")
        return min(limits, default=None)

    def has_parallel_calls(self) -> bool:
        """Returns whether an answer may contain several calls."""
        choice = self.fields.get("tool_choice")
        is_disabled = isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use")
        return bool(self.fields.get("parallel_tool_calls", True)) and not is_disabled

    def may_call(self) -> bool:
        """Returns whether `tool_choice` lets the policy call tools; refuses a request that forces a call."""
        choice = self.fields.get("tool_choice", "auto")
        choice = choice.get("type") if isinstance(choice, Mapping) else choice
        if choice not in ("auto", "none"):
            raise RequestRefused(f"tool_choice must be auto or none, got {self.fields['tool_choice']!r:.80}.")
        return bool(choice == "auto")


def message_key(message: JsonMapping) -> MessageKey:
    """Returns a key that ignores call ids, thinking, and whitespace around the policy's text."""
    calls = tuple(
        (str(call["function"]["name"]), json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls", [])
    )
    content = str(message["content"])
    if message["role"] == "assistant":
        content = split_thinking(content, has_opening=True)[1].strip()
    return str(message["role"]), content, calls


def tool_call(call_id: object, name: str, arguments: object) -> JsonObject:
    """Returns a call as it appears in messages; arguments given as JSON text are parsed."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # other text is left unchanged
            loaded = json.loads(arguments)
            arguments = arguments if _is_deep(loaded) else loaded
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _is_deep(value: object) -> bool:
    """Returns whether JSON is nested more deeply than templates and schemas can handle."""
    level, depth = [value], 0
    while level and depth <= _MAX_DEPTH:
        parents = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level, depth = [inner for children in parents for inner in children], depth + 1
    return depth > _MAX_DEPTH


def tool_of(name: object, description: object, schema: object) -> JsonObject:
    """Returns a tool in the format that chat templates read; refuses a tool without a name or a valid JSON schema."""
    if not isinstance(name, str) or not name:
        raise RequestRefused(f"A tool must have a name, got {name!r:.80}.")
    problem = _schema_problem(json.dumps(schema)) if schema is not None else None
    if problem is not None:
        raise RequestRefused(f"The arguments of the tool {name!r:.80} must have a JSON schema: {problem}.")
    parameters = {"type": "object", "properties": {}} if schema is None else schema
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": parameters}}


@functools.lru_cache(maxsize=1024)
def _schema_problem(text: str) -> str | None:
    import jsonschema

    try:
        jsonschema.Draft202012Validator.check_schema(json.loads(text))
    except (jsonschema.SchemaError, RecursionError) as error:
        return f"{getattr(error, 'message', error)}"[:200]
    return None


def objects_of(value: object, name: str, item_kind: str = "objects") -> list[Any]:
    """Returns the value if it is a list of objects; refuses anything else."""
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        return value
    raise RequestRefused(f"{name} must be a list of {item_kind}, got {value!r:.80}.")


def text_of(content: object) -> str:
    """Returns a message's content, given as text or as text parts; refuses anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[Any] = content if isinstance(content, list) else [content]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise RequestRefused(f"The content of a message must be text, got {content!r:.120}.")
    return "".join(part["text"] for part in parts)


def with_one_system_message(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Merges leading system messages and turns later ones into user messages, as strict chat templates require."""
    start = next((index for index, each in enumerate(messages) if each["role"] != "system"), len(messages))
    first = [{"role": "system", "content": "\n\n".join(each["content"] for each in messages[:start])}]
    later = [{**each, "role": "user"} if each["role"] == "system" else each for each in messages[start:]]
    return [*first, *later] if start else later


def sealed(reasoning: str) -> str:
    """Encodes thinking as the opaque text that clients send back: a block's signature, or its encrypted content."""
    return base64.b64encode(reasoning.encode()).decode()


def unsealed(text: object) -> str:
    """Decodes the result of `sealed`; returns an empty text for any other text."""
    try:
        return base64.b64decode(str(text), validate=True).decode()
    except ValueError:
        return ""
