"""An agent's request and its answer: what the three protocols have in common.

    body ─► Exchange.read ─► AgentRequest: messages, tools ─► AgentSession ─► Answer ─► Exchange.body, or .events

chat_protocol.py, messages_protocol.py and responses_protocol.py each subclass `Exchange`. Everything here is a pure
function of the request and the answer; session.py keeps the state, and endpoint.py runs the HTTP server.

Each field of a request is served, refused (if the agent would not get what it asks for) or ignored. `temperature`,
`top_p` and `seed` are ignored: the run's `sampling` applies, since the behavior logprobs would be wrong otherwise.
`tool_choice` and a response format are served if the engine can constrain the policy (constraints.py), or ignored if
the workflow's `ignore` names them.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from lightrl.checks.bounds import check_choice
from lightrl.engines.engine import Completion
from lightrl.trajectory import JsonMapping, JsonObject, content_text, split_thinking

_MAX_DEPTH = 100
_MAX_CHOICES = 128  # the largest `n`, as in OpenAI's API
_MAX_STOPS, _MAX_STOP_CHARS = 64, 1_000
_MAX_SCHEMA_CHARS = 100_000
_KEY_CHARS = 256  # longest content in a message's key; longer content is hashed
MODEL = "policy"
IGNORABLE = ("tool_choice", "response_format")
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
    """A validated chat request, in the same form for all protocols."""

    messages: list[JsonObject]  # for chat templates: content is text or parts, call arguments are objects
    tools: list[JsonObject] = field(default_factory=list)  # functions with JSON schemas that the policy may call
    max_new_tokens: int | None = None
    wants_logprobs: bool = False
    has_parallel_calls: bool = True  # if False, an answer contains only the policy's first call
    stop: tuple[str, ...] = ()  # texts that end the visible part of an answer
    num_choices: int = 1
    schema: JsonMapping | None = None  # the JSON schema of the answer
    forced_tool: str | None = None  # a tool that the policy must call; "" for any of them
    hidden_tools: list[JsonObject] = field(default_factory=list)  # tools that tool_choice forbids
    model: str = MODEL  # the name that the agent used
    sampling: JsonMapping = field(default_factory=dict)  # set by evaluations; for agents, the run's settings apply
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def system(self) -> str:
        return content_text(self.messages[0]["content"]) if self.messages[0]["role"] == "system" else ""


@dataclass(frozen=True)
class RequestPattern:
    """Describes requests from an agent. A request matches if it contains a match for each pattern that is set.

    Args:
        model: a regular expression for the model's name in the request, which may be an alias.
        system: a regular expression for the system prompt.
        tools: a regular expression for the tools' names, separated by spaces; `^$` finds requests without tools.
    """

    model: str | None = None
    system: str | None = None
    tools: str | None = None

    def __post_init__(self) -> None:
        patterns = {item.name: getattr(self, item.name) for item in fields(self)}
        if not any(patterns.values()):
            raise ValueError("Each pattern in untrained needs model, system or tools.")
        for name, pattern in patterns.items():
            try:
                re.compile(pattern or "")
            except re.error as error:
                raise ValueError(f"untrained has {name}: {pattern!r}, which is not a valid regex: {error}.") from error

    def matches(self, request: AgentRequest) -> bool:
        tools = " ".join(str(tool.get("function", tool).get("name")) for tool in request.tools + request.hidden_tools)
        texts = {"model": request.model, "system": request.system, "tools": tools}
        return all(re.search(getattr(self, name) or "", text) for name, text in texts.items())


@dataclass(frozen=True)
class RequestRules:
    """The workflow's settings for requests.

    Args:
        models: the names by which agents may request the policy.
        ignore: fields to ignore, from `IGNORABLE`.
        untrained: requests whose answers are not trained on.
        keeps_unsent_thinking: whether a conversation continues with thinking that the agent did not send back.
    """

    models: Collection[str] = (MODEL,)
    ignore: Collection[str] = ()
    untrained: Sequence[RequestPattern] = ()
    keeps_unsent_thinking: bool = True

    def __post_init__(self) -> None:
        for name in self.ignore:
            check_choice(IGNORABLE, ignore=name)

    def trains(self, request: AgentRequest) -> bool:
        return not any(pattern.matches(request) for pattern in self.untrained)


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
    stopped_by: str | None = None  # the request's stop text that ended it
    siblings: Sequence[Answer] = ()  # the other choices of the request

    @property
    def message(self) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": self.content}
        message |= {"reasoning_content": self.reasoning} if self.reasoning else {}
        return message | ({"tool_calls": self.calls} if self.calls else {})


class Exchange(ABC):
    """One request and its response; each subclass implements a protocol.

    Args:
        body: the request's JSON.
        rules: the workflow's settings.
        items: output items of the session's responses, by id; later requests may refer to them, and answers add more.

    Raises:
        RequestRefused: if the request is malformed, or requests something that cannot be served.
    """

    served: ClassVar[str]  # fields that are served, refused for some values, or harmless
    refused: ClassVar[Refusals]
    last_line: ClassVar[str] = ""  # ends a stream

    def __init__(self, body: object, rules: RequestRules, items: dict[str, JsonObject]) -> None:
        if not isinstance(body, Mapping):
            raise RequestRefused(f"The request must be a JSON object, got {body!r:.80}.")
        self.fields = {str(name): value for name, value in body.items() if value is not None}
        self.rules, self.items = rules, items
        self.model = str(self.fields.get("model", MODEL))
        if self.model not in rules.models:
            raise no_such_model(self.model)
        for name, (allowed, alternative) in self.refused.items():
            if name in self.fields and self.fields[name] not in allowed:
                raise RequestRefused(f"{name}={self.fields[name]!r:.80} is not supported. {alternative}")
        self.created = int(time.time())
        self.is_streamed = bool(self.fields.get("stream", False))
        # Names of the fields that have no effect.
        self.ignored = sorted(self.fields.keys() - {"model", "stream"} - set(self.served.split()) - self.refused.keys())
        self.request = self.read()
        self.id = self.request.id

    @classmethod
    def of_json(cls, data: bytes, rules: RequestRules, items: dict[str, JsonObject]) -> Self:
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
        return cls(body, rules, items)

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

    def tool_choice(self) -> tuple[bool, str | None]:
        """Returns whether the policy may call tools, and which tool it must call: "" for any, None for none."""
        choice: Any = self.fields.get("tool_choice", "auto")
        kind = choice.get("type") if isinstance(choice, Mapping) else choice
        if kind in ("auto", "none"):
            return kind == "auto", None
        if kind not in ("required", "any", "function", "custom", "tool"):
            raise RequestRefused(f"tool_choice must be auto, none, required or the name of a tool, got {choice!r:.80}.")
        if "tool_choice" in self.rules.ignore:
            self.ignored.append("tool_choice")
            return True, None
        if not isinstance(choice, Mapping) or kind in ("required", "any"):
            return True, ""
        function = choice.get("function")
        function = function if isinstance(function, Mapping) else choice
        return True, full_name(choice.get("namespace"), function.get("name"))

    def schema_of(self, form: object) -> JsonMapping | None:
        """Returns the JSON schema that a response format asks for; None for text, or if the workflow ignores it."""
        kind = form.get("type") if isinstance(form, Mapping) else None
        if not isinstance(form, Mapping) or kind == "text":
            return None
        if "response_format" in self.rules.ignore:
            self.ignored.append("the response format")
            return None
        inner = form.get("json_schema")
        schema = (inner if isinstance(inner, Mapping) else form).get("schema")
        schema = {"type": "object"} if kind == "json_object" else schema
        if kind not in ("json_object", "json_schema") or not isinstance(schema, Mapping):
            raise RequestRefused(f"A response format must be text, json_object or json_schema, got {form!r:.80}.")
        if problem := _schema_problem(json.dumps(schema)):
            raise RequestRefused(f"The response format must have a valid JSON schema: {problem}.")
        return schema

    def stop_of(self, name: str) -> tuple[str, ...]:
        """Returns the texts that end an answer."""
        value = self.fields.get(name, ())
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise RequestRefused(f"{name} must be a string or a list of strings, got {value!r:.80}.")
        if len(texts) > _MAX_STOPS or any(len(text) > _MAX_STOP_CHARS for text in texts):
            limits = f"at most {_MAX_STOPS} texts of at most {_MAX_STOP_CHARS:,} characters"
            raise RequestRefused(f"{name} must have {limits}, got {len(texts)} texts.")
        return tuple(text for text in texts if text)

    def num_choices(self) -> int:
        num = self.fields.get("n", 1)
        if not isinstance(num, int) or isinstance(num, bool) or not 1 <= num <= _MAX_CHOICES:
            raise RequestRefused(f"n must be an integer from 1 to {_MAX_CHOICES}, got {num!r:.80}.")
        return num


def no_such_model(name: object) -> RequestRefused:
    return RequestRefused(
        f"There is no model {name!r:.80}. The policy's name is {MODEL!r}: set it as the agent's model, or add the name "
        "to the workflow's models.",
        status=404,
        code="model_not_found",
    )


def message_key(message: JsonMapping) -> MessageKey:
    """Returns a key that ignores call ids, thinking, and whitespace around the policy's text."""
    calls = tuple(
        (str(call["function"]["name"]), json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls", [])
    )
    content = message["content"]
    if message["role"] == "assistant":
        content = split_thinking(content_text(content), has_opening=True)[1].strip()
    content = content if isinstance(content, str) else json.dumps(content)
    if len(content) > _KEY_CHARS:
        content = hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()
    return str(message["role"]), content, calls


def thinking_of(message: JsonMapping) -> str:
    """Returns the thinking of an assistant's message, even if it is part of the text."""
    thinking = message.get("reasoning_content") or split_thinking(content_text(message["content"]), has_opening=True)[0]
    return str(thinking).strip()


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
        raise RequestRefused(f"The arguments of the tool {name!r:.80} must have a valid JSON schema: {problem}.")
    parameters = {"type": "object", "properties": {}} if schema is None else schema
    return {"type": "function", "function": {"name": name, "description": description or "", "parameters": parameters}}


@functools.lru_cache(maxsize=1024)
def _schema_problem(text: str) -> str | None:
    import jsonschema

    if len(text) > _MAX_SCHEMA_CHARS:
        return f"it has {len(text):,} characters, more than {_MAX_SCHEMA_CHARS:,}"
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
    parts = content_of(content)
    if isinstance(parts, str):
        return parts
    raise RequestRefused("Only user messages and tool results may have images.")


def content_of(content: object) -> str | list[JsonObject]:
    """Returns a message's content: text, or text and images as chat templates read them; refuses anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [_part_of(part) for part in (content if isinstance(content, list) else [content])]
    return joined_content(parts)


def joined_content(parts: Sequence[JsonObject], separator: str = "") -> str | list[JsonObject]:
    """Returns parts as one text if none of them is an image."""
    if all(part["type"] == "text" for part in parts):
        return separator.join(part["text"] for part in parts)
    return list(parts)


def _part_of(part: object) -> JsonObject:
    """Converts a part of a message in any of the protocols to text or an image."""
    if isinstance(part, Mapping):
        if isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        kind, source = part.get("type"), part.get("source")
        if kind in ("image", "image_url", "input_image"):
            url = part.get("image_url")
            url = url.get("url") if isinstance(url, Mapping) else url
            if isinstance(source, Mapping):
                url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
            if isinstance(url, str) and url.startswith("data:"):  # a path would read this machine's files
                return {"type": "image", "image": url}
            raise RequestRefused(f"An image must be part of the request, in base64, got {part!s:.120}.")
        if kind == "document" and isinstance(source, Mapping) and source.get("type") in ("text", "content"):
            inner = source.get("data") if source["type"] == "text" else source.get("content")
            return {"type": "text", "text": text_of(inner)}
        if kind in ("document", "file", "input_file"):
            return {"type": "text", "text": _text_of_file(part)}
    raise RequestRefused(f"The content of a message must be text or images, got {part!r:.120}.")


def _text_of_file(part: JsonMapping) -> str:
    """Returns the text of a text file in base64; refuses other files."""
    inner = next(each for each in (part.get("file"), part.get("source"), part) if isinstance(each, Mapping))
    name, data = (str(inner.get(key, "")) for key in ("filename", "data" if "data" in inner else "file_data"))
    head, _, encoded = data.rpartition(",")
    kind = str(inner.get("media_type") or head.removeprefix("data:").partition(";")[0])
    with contextlib.suppress(ValueError):
        if kind.startswith("text/"):
            return base64.b64decode(encoded, validate=True).decode()
    raise RequestRefused(f"The policy cannot read {name!r:.80} of type {kind!r:.80}. Send text, or pages as images.")


def with_one_system_message(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """Merges leading system messages and turns later ones into user messages, as strict chat templates require."""
    start = next((index for index, each in enumerate(messages) if each["role"] != "system"), len(messages))
    first = [{"role": "system", "content": "\n\n".join(content_text(each["content"]) for each in messages[:start])}]
    later = [{**each, "role": "user"} if each["role"] == "system" else each for each in messages[start:]]
    return [*first, *later] if start else later


def sealed(reasoning: str) -> str:
    """Encodes thinking as the opaque text that clients send back: a block's signature, or its encrypted content."""
    return base64.b64encode(reasoning.encode()).decode()


def unsealed(text: object) -> str:
    """Decodes the result of `sealed`; returns an empty string for any other text."""
    try:
        return base64.b64decode(str(text), validate=True).decode()
    except ValueError:
        return ""


def full_name(namespace: object, name: object) -> str:
    """Returns the tool name that the policy sees."""
    return f"{namespace}.{name}" if namespace else str(name)
