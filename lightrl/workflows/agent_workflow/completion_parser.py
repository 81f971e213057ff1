"""CompletionParser: splits a completion into thinking, text and calls. It is one of three parsers:

    a `tool_parser`      the user's function, which gets the text without its thinking; `parse_hermes` by default
    a `renderer`         from the `renderers` package, chosen by name, or by the tokenizer's name for `auto`
    a response template  the tokenizer's, applied by transformers' `tokenizer.parse_response`

Each of them turns a malformed call into a `ToolCall` with an error. A library that searches for tags may mistake a
quoted tag for a real one, so its result is compared with the calls and the thinking that we find in the text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lightrl.trajectory import JsonMapping, split_thinking
from lightrl.workflows.tools import CALL_START, ToolCall, ToolParser, parse_hermes, without_thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ParsedCompletion:
    content: str  # the text; if there are calls, the part before the first one
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()


# Arguments: prompt token ids, completion token ids, the completion's text with the thinking the prompt opened, tools.
CompletionParser = Callable[[Sequence[int], Sequence[int], str, Sequence[JsonMapping]], ParsedCompletion]


def completion_parser(
    tokenizer: PreTrainedTokenizerBase, tool_parser: ToolParser | None, renderer: str | None
) -> CompletionParser:
    """Returns the parser that these settings select; raises ValueError if both are set, or for an unknown renderer."""
    if tool_parser is not None and renderer is not None:
        raise ValueError(f"renderer={renderer!r} already finds the calls. Set renderer or tool_parser, not both.")
    if renderer is not None:
        return functools.partial(_parse_with_renderer, _renderer(tokenizer, renderer))
    if tool_parser is None and getattr(tokenizer, "response_template", None) is not None:
        return functools.partial(_parse_with_template, tokenizer)
    return functools.partial(_parse_with_function, tool_parser or parse_hermes)


def has_hermes_calls(parser: CompletionParser) -> bool:
    """Returns whether a parser that `completion_parser` returned finds only calls in the Hermes format."""
    return getattr(parser, "args", ()) == (parse_hermes,)


def parse_text(text: str, tool_parser: ToolParser | None = None) -> ParsedCompletion:
    """Separates a text's thinking from the rest; without a tool parser, calls stay in the text."""
    reasoning, content = split_thinking(text, has_opening=True)
    calls = tool_parser(without_thinking(text)) if tool_parser is not None else []
    return ParsedCompletion(CALL_START.split(content, 1)[0].strip() if calls else content, reasoning, calls)


def _parse_with_function(
    parser: ToolParser, prompt_ids: Sequence[int], token_ids: Sequence[int], text: str, tools: Sequence[JsonMapping]
) -> ParsedCompletion:
    return parse_text(text, parser)


def _parse_with_template(
    tokenizer: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], text: str, tools: Sequence[JsonMapping]
) -> ParsedCompletion:
    try:
        message = tokenizer.parse_response(list(token_ids), prefix=list(prompt_ids), tools=list(tools))
    except ValueError as error:  # the template's content parsers raise it
        failed = replace(parse_text(text), calls=[ToolCall(error=f"the call cannot be read: {error}")])
        return _without_misread_tags(failed, text)
    reasoning = message.get("reasoning_content") or message.get("thinking") or ""
    functions = [call.get("function", call) for call in message.get("tool_calls") or []]
    calls = [_call_of(function.get("name"), function.get("arguments", {})) for function in functions]
    return _without_misread_tags(ParsedCompletion(message.get("content") or "", reasoning, calls), text)


def _parse_with_renderer(
    renderer: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], text: str, tools: Sequence[JsonMapping]
) -> ParsedCompletion:
    parsed = renderer.parse_response(list(token_ids), tools=list(tools), prompt_ids=list(prompt_ids))
    calls = [
        _call_of(call.name, call.arguments)
        if call.status in ("ok", "unknown_tool")  # the agent itself checks the name
        else ToolCall(error=f"the call is malformed ({call.status}): {call.raw:.200}")
        for call in parsed.tool_calls
    ]
    return _without_misread_tags(ParsedCompletion(parsed.content, parsed.reasoning_content or "", calls), text)


def _without_misread_tags(parsed: ParsedCompletion, text: str) -> ParsedCompletion:
    """Returns a library's result, corrected where the library mistook a quoted tag for a real one."""
    by_text = parse_text(text, parse_hermes)
    errors, text_errors = ([call.error for call in each.calls if call.error] for each in (parsed, by_text))
    if parsed.calls and not errors and "</tool_call>" in parsed.content:  # the call was cut at a quoted tag
        errors = ["the call's arguments quote </tool_call>, which ends a call in this format; write it differently"]
        parsed = replace(parsed, calls=[ToolCall(error=errors[0])])
    if errors and by_text.calls and not text_errors:
        return by_text
    if "<think>" in text and parsed.reasoning.strip() != by_text.reasoning:
        return replace(parsed, content=by_text.content, reasoning=by_text.reasoning)
    return parsed


def _renderer(tokenizer: PreTrainedTokenizerBase, name: str) -> Any:
    try:
        import renderers
    except ImportError as error:
        raise ValueError(f"renderer={name!r} needs the package renderers. Run `pip install renderers`.") from error
    try:
        renderer = renderers.create_renderer(tokenizer, renderers.config_from_name(name))
    except Exception as error:  # the type of the error varies with the tokenizer
        raise ValueError(f"renderer={name!r} does not fit the tokenizer: {error}") from error
    if isinstance(renderer, renderers.DefaultRenderer):
        raise ValueError(
            f"renderer={name!r} has no format for the tokenizer {tokenizer.name_or_path!r}. Set renderer to the name "
            "of its model's format, such as qwen3."
        )
    return renderer


def _call_of(name: object, arguments: object) -> ToolCall:
    if isinstance(name, str) and isinstance(arguments, Mapping):
        return ToolCall(name, arguments)
    return ToolCall(error=f"the call needs a name and an arguments object, got {name!r:.80}, {arguments!r:.80}")
