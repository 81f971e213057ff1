"""Converts a request's constraint on the policy's answer to a structural tag, the engine's format for grammars.

Source: XGrammar's structural tags, https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html, which SGLang and vLLM
read. The support of each sampled token is the set of tokens that the grammar allows, so training stays exact.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

from lightrl.trajectory import JsonObject
from lightrl.workflows.agent_workflow.protocol import AgentRequest, RequestRefused

_THINKING = ("<think>", "</think>")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_MAX_COUNT = 10_000  # largest count in a schema, and largest product of a regular expression's nested repetitions
_MAX_PATTERN_CHARS = 1_000
_MAX_GRAMMAR_CHARS = 200_000


def grammar_of(request: AgentRequest, opening: str, *, may_think: bool, is_hermes: bool) -> str:
    """Returns the structural tag as JSON text; an empty string if the request sets no constraint.

    Args:
        opening: the beginning of the thinking, if it is part of the prompt.
        may_think: whether the policy may start thinking without such an opening.
        is_hermes: whether calls use the Hermes format; no other format can be constrained.

    Raises:
        RequestRefused: if the constraint is impossible or too expensive.
    """
    if request.schema is None and request.forced_tool is None:
        return ""
    names = [tool["function"]["name"] for tool in request.tools if "function" in tool]
    if request.forced_tool is not None and (not names or request.forced_tool not in ("", *names)):
        required = f"the tool {request.forced_tool!r:.80}" if request.forced_tool else "a call"
        raise RequestRefused(f"tool_choice requires {required}, but the tools are {names!r:.200}.")
    if request.forced_tool is not None and not is_hermes:
        text = "tool_choice cannot force a call, because the policy does not use the Hermes tool-call format."
        raise RequestRefused(f"{text} {way_out(request)}")
    if opening and opening.strip() != _THINKING[0]:
        text = f"The policy's thinking begins with {opening.strip()!r}, and no constraint can follow that."
        raise RequestRefused(f"{text} {way_out(request)}")
    if request.schema is not None and names and not is_hermes:
        text = "With tools, a response format needs the Hermes tool-call format; it forbids calls in other formats."
        raise RequestRefused(f"{text} {way_out(request)}")
    answers: list[JsonObject] = []
    if request.schema is not None and request.forced_tool is None:
        answers.append({"type": "json_schema", "json_schema": request.schema})
    if is_hermes and names:
        answers.append(_calls(request))
    answer = answers[0] if len(answers) == 1 else {"type": "or", "elements": answers}
    thought = {"type": "tag", "begin": "" if opening else _THINKING[0], "content": {"type": "any_text"}}
    space = {"type": "regex", "pattern": r"\s*"}
    thinking = {"type": "sequence", "elements": [{**thought, "end": _THINKING[1]}, space, answer]}
    if opening:
        answer = thinking
    elif may_think:
        answer = {"type": "or", "elements": [answer, thinking]}
    grammar = json.dumps({"type": "structural_tag", "format": answer}, sort_keys=True)
    costs = _costs(answers) if len(grammar) <= _MAX_GRAMMAR_CHARS else iter([f"{len(grammar):,} characters"])
    if cost := next(costs, None):
        raise RequestRefused(f"The constraint is too expensive for the engine: it has {cost}. {way_out(request)}")
    return grammar


def _costs(value: object) -> Iterator[str]:
    """Yields the parts of a format or schema that could keep a server busy for long."""
    if isinstance(value, list):
        for item in value:
            yield from _costs(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name in _COUNTS and isinstance(item, int | float) and item > _MAX_COUNT:
                yield f"{name}={item}, more than {_MAX_COUNT:,}"
            is_named = name == "patternProperties" and isinstance(item, dict)
            for pattern in item if is_named else [item] if name == "pattern" else []:
                if isinstance(pattern, str) and _is_costly(pattern):
                    yield f"the pattern {pattern!r:.80}, with over {_MAX_PATTERN_CHARS} characters or many repetitions"
            yield from _costs(item)


def _is_costly(pattern: str) -> bool:  # for a server, which expands repetitions; an estimate
    counts = re.findall(r"(\)?)\{(\d*)(?:,(\d*))?\}", pattern)
    group_counts, other_counts = (
        [min(float(high or low or 1), 1e9) for group, low, high in counts if bool(group) == is_group]
        for is_group in (True, False)
    )
    num_repeated = math.prod(group_counts) * max(other_counts, default=1.0)  # groups may be nested
    return len(pattern) > _MAX_PATTERN_CHARS or num_repeated > _MAX_COUNT


def way_out(request: AgentRequest) -> str:
    """Returns advice on how to let the policy answer freely."""
    name = "response_format" if request.forced_tool is None else "tool_choice"
    return f"To let the policy answer freely, set `ignore: [{name}]` on the workflow."


def _calls(request: AgentRequest) -> JsonObject:
    """Returns the format of one or more calls to the tools that the policy may call."""
    tags = [
        {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": function.get("parameters") or {"type": "object"}},
            "end": "}\n</tool_call>",
        }
        for function in (tool["function"] for tool in request.tools if "function" in tool)
        if request.forced_tool in (None, "", function["name"])
    ]
    calls = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
    return {**calls, "stop_after_first": not request.has_parallel_calls}
