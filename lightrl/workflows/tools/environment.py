"""Tools: Python functions that the policy may call between its turns. Two are included, `calculator` and `python`.

    def search(query: str) -> str:
        '''Finds a passage in the library.

        Args:
            query: a few words to look for
        '''
        return library.find(query)

    MultiTurn(tokenizer, environment=lambda: ToolEnvironment([search, "lightrl.workflows.tools.calculator"]))

The chat template shows each function's name, types and docstring to the policy. In Qwen's and Hermes' format, a call is
`<tool_call>{"name": "search", "arguments": {"query": "Ada"}}</tool_call>`. A failed call does not end the trajectory:
the policy reads the error and may try again.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import inspect
import json
import math
import operator
import queue
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightrl.checks.user_code import function_of, user_code
from lightrl.concurrency.in_thread import CallTimeout, call_within
from lightrl.errors import LightRLError, RolloutError
from lightrl.rewards.sandbox import Limits, LocalSandbox
from lightrl.trajectory import CLOSED_THOUGHT, LEADING_THOUGHTS, JsonMapping, JsonObject, Prompt
from lightrl.workflows.multi_turn import CheckedStep, Environment, Observation, Step, call_environment

_T = TypeVar("_T")
# A tag in quotation marks does not start a call.
CALL_START = re.compile("(?<![\"'`])<tool_call>|<tool_call>(?![\"'`])")
_CALL_OR_THOUGHT = re.compile(rf"(?:{CALL_START.pattern})\s*|{CLOSED_THOUGHT}", re.DOTALL)
_CALL_END = re.compile(r"\s*(?:</tool_call>|\Z)")
_JSON = json.JSONDecoder()
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@dataclass(frozen=True)
class ToolCall:
    """One call by the policy; if it is malformed, `error` says why and the other fields are ignored."""

    name: str = ""
    arguments: JsonMapping = field(default_factory=dict)
    error: str | None = None


ToolParser = Callable[[str], list[ToolCall]]


def without_thinking(completion: str) -> str:
    """Replaces thinking at the start of the completion, and later thinking that contains calls, with spaces.

    Any other text in thinking tags is a quotation and is kept.
    """
    return _read_calls(completion)[0]


def parse_hermes(completion: str) -> list[ToolCall]:
    """Returns a completion's calls in order; each is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    A call ends where its JSON ends, so its arguments may contain any tag. A call inside `<think>` does not count.

    Source: https://github.com/NousResearch/Hermes-Function-Calling, also the format of Qwen 2.5 and 3.
    """
    return _read_calls(completion)[1]


def _read_calls(completion: str) -> tuple[str, list[ToolCall]]:
    """Returns the completion with its thinking blanked out, and its calls in Hermes' format."""
    calls, position = [], 0
    text = LEADING_THOUGHTS.sub(_blank, completion)
    while (start := _CALL_OR_THOUGHT.search(text, position)) is not None:
        position = start.end()
        if start[0].startswith("<tool_call>"):
            call, position = _hermes_call(text, position)
            calls.append(call)
        elif "<tool_call>" in start[0]:
            text = text[: start.start()] + _blank(start) + text[position:]
    return text, calls


def _blank(part: re.Match[str]) -> str:
    return " " * len(part[0])


def _hermes_call(text: str, start: int) -> tuple[ToolCall, int]:
    """Returns the call whose JSON starts here, and its end; a malformed call ends at the next closing tag."""
    end = len(text) if (closing := text.find("</tool_call>", start)) < 0 else closing
    try:
        record, position = _JSON.raw_decode(text, start)
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()  # fails on NaN and lone surrogates
        after = _CALL_END.match(text, position)
        if after is None:
            raise ValueError(f"Extra data: {text[position : max(end, position + 1)]!r:.40}")
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the call is not valid JSON: {error}"), end
    arguments = record.get("arguments", {}) if isinstance(record, dict) else None
    if not isinstance(arguments, dict) or not isinstance(record.get("name"), str):
        return ToolCall(error='the call is not of the form {"name": "...", "arguments": {...}}'), after.end()
    return ToolCall(record["name"], arguments), after.end()


@dataclass(frozen=True)
class Tool:
    """A function with the JSON schema that the policy reads."""

    name: str
    function: Callable[..., object]
    schema: JsonObject

    @classmethod
    @functools.lru_cache(maxsize=256)
    def of(cls, source: str | Callable[..., object]) -> Tool:
        """Describes a function, or the function at a dotted path.

        Raises ValueError if it cannot be imported, or an argument has no type or no line under `Args:`.
        """
        from transformers.utils import get_json_schema

        def failed(error: BaseException) -> ValueError:
            return ValueError(
                f"The tool {source!r} cannot be described to the policy: {error}. Each argument needs a type, and a "
                "line under `Args:` in the docstring."
            )

        function = function_of(source, "tools")
        with user_code(failed):  # evaluates the function's type hints
            schema = get_json_schema(function)
        return cls(schema["function"]["name"], function, schema)

    def fitted(self, arguments: JsonMapping) -> JsonObject:
        """Converts a call's arguments to the schema's types, and leaves out optional arguments that are null.

        Raises ValueError if an argument does not fit; the policy reads the message.
        """
        fitted = _fitted_fields(arguments, self.schema["function"]["parameters"])
        try:
            inspect.signature(self.function).bind(**fitted)
        except TypeError as error:
            raise ValueError(str(error)) from error
        return fitted


def _types_of(schema: Any) -> set[str]:
    """Returns the types that a JSON schema allows; all types if it names none."""
    fields = schema if isinstance(schema, Mapping) else {}
    choices = [choice for name in ("anyOf", "oneOf") for choice in fields.get(name, ())]
    named = fields.get("type") or ([kind for choice in choices for kind in _types_of(choice)] or list(_TYPES))
    types = {named} if isinstance(named, str) else set(named)
    return types | {"null"} if fields.get("nullable") else types


def _fitted_fields(values: JsonMapping, schema: JsonMapping) -> JsonObject:
    """Converts values to this object schema's types; leaves out optional nulls that the schema does not allow."""
    schemas, required = schema.get("properties", {}), schema.get("required", ())
    return {
        name: _fitted(value, schemas.get(name), name)
        for name, value in values.items()
        if value is not None or name in required or "null" in _types_of(schemas.get(name))
    }


def _fitted(value: Any, schema: Any, name: str) -> Any:
    """Returns the value, converting 5.0 to 5 if the schema requires integers; raises ValueError for a wrong type."""
    types = _types_of(schema)
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return int(value)
    allowed = types - {"integer", "number"} if isinstance(value, bool) else types
    if types <= _TYPES.keys() and not any(isinstance(value, _TYPES[kind]) for kind in allowed):
        raise ValueError(f"argument {name!r} is {value!r:.80}, expected {' or '.join(sorted(types))}")
    inner = schema if isinstance(schema, Mapping) else {}
    if isinstance(value, list):
        return [_fitted(item, inner.get("items"), name) for item in value]
    return _fitted_fields(value, inner) if isinstance(value, dict) else value


class ToolServer(ABC):
    """Tools that run on a server. Each trajectory has a session; the first call opens it."""

    @abstractmethod
    def schemas(self) -> Sequence[JsonObject]:
        """Returns JSON schemas for the tools, as chat templates expect them; called when the run starts."""

    @abstractmethod
    def open(self) -> ToolServer:
        """Returns a ToolServer for a new session."""

    @abstractmethod
    async def call(self, name: str, /, **arguments: object) -> object:
        """Calls a tool.

        Raises:
            RolloutError: if the server failed, which drops the trajectory; raise it without a cause.
            ValueError: if the tool failed; the policy reads the message.
        """

    @abstractmethod
    async def close(self) -> None:
        """Closes the session; called once, even if no tool was called."""


def read_parts(content: Sequence[JsonMapping], *, is_error: bool, structured: object = None) -> str | list[JsonObject]:
    """Converts a tool's result from MCP's format to message content; raises ValueError if the result is an error.

    The policy reads only the names of audio and binary files.

    Args:
        structured: the result as JSON, shown if there is no text.
    """
    texts = [_part_text(part) for part in content]
    if structured is not None and not any("text" in part.get("resource", part) for part in content):
        content = [*content, {"type": "text"}]
        texts.append(json.dumps(structured, ensure_ascii=False))
    if is_error:
        raise ValueError("\n".join(texts) or "the tool gave no reason")
    if all(part["type"] != "image" for part in content):
        return "\n".join(texts)
    return [
        {"type": "image", "image": f"data:image/png;base64,{part['data']}"}  # readers detect the real format
        if part["type"] == "image"
        else {"type": "text", "text": f"{text}\n"}
        for text, part in zip(texts, content, strict=True)
    ]


def _part_text(part: JsonMapping) -> str:
    """Returns the text of a text part, an embedded resource or a resource link; describes any other part."""
    inner = part.get("resource", part)
    if isinstance(inner.get("text"), str):
        return str(inner["text"])
    names = [str(inner[key]) for key in ("name", "uri", "description") if inner.get(key)]
    return " ".join(names) if part["type"] == "resource_link" else f"({', '.join([part['type'], *names])}, not shown)"


def run_apart(work: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
    """Runs a coroutine on a new event loop in a thread; returns its result, or raises TimeoutError."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, asyncio.wait_for(work, timeout_s)).result()


class ToolEnvironment(Environment):
    """Runs the tools that a completion calls and shows their results; a completion without calls is the last turn.

    Args:
        tools: sync or async functions, their dotted paths, or servers with tools, such as MCPServer. To return images,
            a tool returns parts: `[{"type": "text", "text": "here:"}, {"type": "image", "image": path or data: URL}]`.
        environment: a class, or a function without arguments, that makes an environment to answer completions
            without calls. Such a completion then need not be the last turn.
        parser: finds the calls in a completion; a function or its dotted path.
        max_calls: maximum number of calls per completion; further calls are answered with an error.
        max_result_chars: longer results are cut.
        tool_timeout_s: deadline for one call; if a call misses it, the policy reads an error. `max_calls` times this
            deadline should be below the workflow's step_timeout_s.

    Raises:
        ValueError: if a tool cannot be described, or two have the same name.
    """

    def __init__(
        self,
        tools: Sequence[str | ToolServer | Callable[..., object]],
        environment: Callable[[], Environment] | None = None,
        *,
        parser: str | ToolParser = parse_hermes,
        max_calls: int = 4,
        max_result_chars: int = 4000,
        tool_timeout_s: float = 10.0,
    ) -> None:
        self.servers = [tool.open() for tool in tools if isinstance(tool, ToolServer)]
        described = [Tool.of(tool) for tool in tools if not isinstance(tool, ToolServer)]
        for server in self.servers:
            for schema in server.schemas():
                name = schema["function"]["name"]
                described.append(Tool(name, functools.partial(server.call, name), schema))
        self.tools = {tool.name: tool for tool in described}
        if not described or len(self.tools) < len(described):
            names = [tool.name for tool in described]
            raise ValueError(f"tools must contain at least one tool, with a different name for each, got {names}.")
        self.environment = environment() if environment is not None else None
        self.parser: ToolParser = function_of(parser, "parser")
        self.max_calls = max_calls
        self.max_result_chars = max_result_chars
        self.tool_timeout_s = tool_timeout_s
        self.num_calls = 0
        self.num_errors = 0

    def tool_schemas(self) -> list[JsonObject]:
        return [tool.schema for tool in self.tools.values()]

    async def reset(self, prompt: Prompt) -> Observation:
        return None if self.environment is None else await self._ask("reset", prompt)

    async def step(self, completion: str) -> Step:
        calls = self.parser(without_thinking(completion))
        if calls:
            return [await self._answer(call, index) for index, call in enumerate(calls)], 0.0, False
        if self.environment is None:
            return None, 0.0, True
        step = CheckedStep.of(await self._ask("step", completion), type(self.environment).__name__)
        return step.messages, step.reward, step.is_done

    @property
    def keeps_state(self) -> bool:
        return not self.servers and (self.environment is None or self.environment.keeps_state)

    def state_dict(self) -> JsonObject | None:
        inner = None if self.environment is None else self.environment.state_dict()
        return {"num_calls": self.num_calls, "num_errors": self.num_errors, "environment": inner}

    def load_state_dict(self, prompt: Prompt, state: JsonObject) -> None:
        self.num_calls, self.num_errors = state["num_calls"], state["num_errors"]
        if self.environment is not None:
            self.environment.load_state_dict(prompt, state["environment"])

    async def metrics(self) -> dict[str, float]:
        counts = {"tool_calls": float(self.num_calls), "tool_errors": float(self.num_errors)}
        return counts if self.environment is None else counts | dict(await self._ask("metrics"))

    async def close(self) -> None:
        for server in self.servers:
            await server.close()
        if self.environment is not None:
            await self._ask("close")

    async def _answer(self, call: ToolCall, index: int) -> JsonObject:
        """Runs a call and returns the message that the policy reads."""
        error = self._refusal(call, index)
        result: str | list[JsonObject] = ""
        if error is None:
            try:
                arguments = self.tools[call.name].fitted(call.arguments)
            except ValueError as raised:
                error = str(raised)
        if error is None:
            try:
                result = await self._run(call.name, arguments)
            except CallTimeout:
                error = f"no result in {self.tool_timeout_s:g} s"
            except RolloutError as raised:
                cause = raised.__cause__
                if cause is None or isinstance(cause, LightRLError):  # not the policy's fault
                    raise
                error = f"{type(cause).__name__}: {cause}"
        self.num_calls += 1
        self.num_errors += error is not None
        content = result if error is None else f"Error: {error}"
        return {"role": "tool", "name": call.name, "content": self._cut(content)}

    def _cut(self, content: str | list[JsonObject]) -> str | list[JsonObject]:
        if isinstance(content, list):
            return [{**part, "text": self._cut(part["text"])} if "text" in part else part for part in content]
        is_long = len(content) > self.max_result_chars
        return f"{content[: self.max_result_chars]}… ({len(content)} characters, cut)" if is_long else content

    def _refusal(self, call: ToolCall, index: int) -> str | None:
        """Returns the reason not to run this call, which the policy reads; None if the call may run."""
        if index >= self.max_calls:
            return f"more than {self.max_calls} calls in one turn; this one was not run"
        if call.error is not None:
            return call.error
        if call.name not in self.tools:
            return f"there is no tool {call.name!r:.80}, only {', '.join(self.tools)}"
        return None

    async def _run(self, name: str, arguments: JsonObject) -> str | list[JsonObject]:
        function = functools.partial(self.tools[name].function, **arguments)
        result = await call_within(function, timeout_s=self.tool_timeout_s, name=name)
        kinds = [isinstance(part, dict) and part.get("type") for part in result] if isinstance(result, list) else []
        has_images = "image" in kinds and all(kind in ("text", "image") for kind in kinds)
        is_content = isinstance(result, str) or has_images
        return result if is_content else json.dumps(result, default=str, ensure_ascii=False)

    async def _ask(self, method: str, *arguments: object) -> Any:
        assert self.environment is not None
        # No deadline here: the workflow's step_timeout_s bounds the whole step.
        return await call_environment(self.environment, method, *arguments, timeout_s=None)


_MAX_EXPRESSION_CHARS = 200
_MAX_ABS = 1e100
_MAX_POWER_BITS = 400  # maximum size of an integer power; checked before computing the power
_OPERATORS: dict[type, Callable[..., complex]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def _round(value: float, digits: int = 0) -> float:
    if abs(digits) > 100:  # rounding to 10**50 digits computes 10**(10**50)
        raise ValueError("round takes at most 100 digits")
    return round(value, digits) if digits else round(value)


_FUNCTIONS: dict[str, Callable[..., float]] = {"abs": abs, "max": max, "min": min, "round": _round, "sqrt": math.sqrt}


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: numbers, + - * / // % **, parentheses, and abs, max, min, round, sqrt; for example (3 + 4) * 2.5
    """
    names = set(re.findall(r"[A-Za-z_]+", expression))
    if len(expression) > _MAX_EXPRESSION_CHARS or not names <= _FUNCTIONS.keys() | {"e", "E"}:
        raise ValueError(
            f"expected at most {_MAX_EXPRESSION_CHARS} characters and no words other than {', '.join(_FUNCTIONS)}"
        )
    if not re.fullmatch(r"[0-9A-Za-z.+\-*/%(), ]+", expression):
        raise ValueError("expected numbers, + - * / // % ** and parentheses only")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError("this is not a complete expression") from error
    value = _value(tree.body)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.10g}"
    return str(value)


def _value(node: ast.expr) -> int | float:
    """Evaluates a node with only the operators and functions above; no value may exceed `_MAX_ABS`."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _bounded(_OPERATORS[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _bounded(_power(_value(node.left), _value(node.right)))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _bounded(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        return _bounded(function(*map(_value, node.args)) if function is not None else math.nan)
    raise ValueError("expected numbers, + - * / // % ** and parentheses only")


def _power(base: int | float, exponent: int | float) -> complex:
    are_integers = isinstance(base, int) and isinstance(exponent, int) and abs(base) > 1
    if are_integers and int(base).bit_length() * abs(exponent) > _MAX_POWER_BITS:
        raise ValueError("the power is too large")
    return base**exponent


def _bounded(value: Any) -> int | float:
    if isinstance(value, complex) or not abs(value) <= _MAX_ABS:  # NaN is also refused
        raise ValueError("the result is not a real number of at most 100 digits")
    return value  # type: ignore[no-any-return]


_PYTHON_LIMITS = Limits(cpu_s=4.0, wall_s=5.0, memory_mib=256, output_kib=16)  # below ToolEnvironment.tool_timeout_s
_idle_sandboxes: queue.SimpleQueue[LocalSandbox] = queue.SimpleQueue()  # reused by later calls


def python(code: str) -> str:
    """Runs a Python program in a sandbox without network access and shows what it prints.

    Args:
        code: the program; print what you want to see. Nothing is kept between calls
    """
    try:
        sandbox = _idle_sandboxes.get_nowait()
    except queue.Empty:
        sandbox = LocalSandbox()
    try:
        run = sandbox.run(code, "", _PYTHON_LIMITS)
    finally:
        _idle_sandboxes.put(sandbox)
    shown = "\n".join(text.strip() for text in (run.stdout, run.stderr) if text.strip())
    if run.stopped_by is not None:
        raise ValueError(f"the program was stopped by its {run.stopped_by} limit; it printed: {shown}")
    return shown or "(nothing was printed)"
