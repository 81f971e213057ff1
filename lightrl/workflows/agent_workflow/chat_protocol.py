"""The parts of OpenAI's chat-completions protocol that a policy in training can serve.

Source: https://platform.openai.com/docs/api-reference/chat; `reasoning_content` follows SGLang and vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from lightrl.trajectory import JsonMapping, JsonObject
from lightrl.workflows.agent_workflow.protocol import (
    AgentRequest,
    Answer,
    Exchange,
    Refusals,
    RequestRefused,
    content_of,
    objects_of,
    text_of,
    tool_call,
    tool_of,
    with_one_system_message,
)

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ChatExchange(Exchange):
    """A request to `chat/completions`."""

    last_line = "data: [DONE]\n\n"
    served = (
        "messages tools tool_choice parallel_tool_calls max_tokens max_completion_tokens stream_options logprobs user "
        "stop n response_format metadata store safety_identifier prompt_cache_key service_tier"
    )
    refused: ClassVar[Refusals] = {
        "functions": (([],), "Use tools."),
        "function_call": (("none",), "Use tools."),
        "modalities": ((["text"],), "Leave it out."),
        "top_logprobs": ((0,), "Leave it out; logprobs=True returns the logprobs of the sampled tokens."),
    }

    def read(self) -> AgentRequest:
        may_call, forced_tool = self.tool_choice()
        messages = self.fields.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RequestRefused(f"messages must be a list with at least one message, got {messages!r:.80}.")
        tools = [_read_tool(tool) for tool in objects_of(self.fields.get("tools", []), "tools", "JSON schemas")]
        return AgentRequest(
            with_one_system_message([_read_message(message) for message in messages]),
            tools if may_call else [],
            self.limit_of("max_tokens", "max_completion_tokens"),
            wants_logprobs=bool(self.fields.get("logprobs", False)),
            has_parallel_calls=self.has_parallel_calls(),
            stop=self.stop_of("stop"),
            num_choices=self.num_choices(),
            schema=self.schema_of(self.fields.get("response_format")),
            forced_tool=forced_tool,
            hidden_tools=[] if may_call else tools,
            model=self.model,
        )

    def body(self, answer: Answer) -> JsonObject:
        choices = []
        for index, one in enumerate((answer, *answer.siblings)):
            calls = {"content": one.content or None, "tool_calls": _calls(one)} if one.calls else {}
            message, reason = {**one.message, **calls}, _finish_reason(one)
            choices.append(
                {"index": index, "message": message, "logprobs": self._logprobs(one), "finish_reason": reason}
            )
        return {**self._envelope("chat.completion", answer), "choices": choices, "usage": _usage(answer)}

    def start_events(self, num_prompt_tokens: int) -> list[JsonObject]:
        return [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self.request.num_choices)]

    def events(self, answer: Answer) -> Iterator[JsonObject]:
        for choice, one in enumerate((answer, *answer.siblings)):
            calls = [{"index": index, **call} for index, call in enumerate(_calls(one))]
            deltas: list[JsonObject] = [{"reasoning_content": one.reasoning}] if one.reasoning else []
            deltas += [{"content": one.content}] if one.content or not calls else []
            deltas += [{"tool_calls": calls}] if calls else []
            for index, delta in enumerate(deltas):
                yield self._chunk(choice, delta, logprobs=self._logprobs(one) if index == 0 else None)
            last = self._chunk(choice, {}, finish_reason=_finish_reason(one))
            yield last | self._envelope("chat.completion.chunk", one)
        options = self.fields.get("stream_options")
        if isinstance(options, Mapping) and options.get("include_usage"):
            yield {**self._chunk(0, {}), "choices": [], "usage": _usage(answer)}

    def _chunk(self, index: int, delta: JsonObject, **fields: Any) -> JsonObject:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **fields}
        return {**self._envelope("chat.completion.chunk"), "choices": [choice]}

    def _envelope(self, kind: str, answer: Answer | None = None) -> JsonObject:
        version = None if answer is None else f"weight-version-{answer.completion.weight_versions[-1]}"
        envelope = {"id": f"chatcmpl-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return {**envelope, "system_fingerprint": version}

    def _logprobs(self, answer: Answer) -> JsonObject | None:
        if not self.request.wants_logprobs:
            return None
        sampled = zip(answer.token_bytes, answer.completion.logprobs, strict=True)
        content = [
            {"token": token.decode(errors="replace"), "logprob": logprob, "bytes": list(token), "top_logprobs": []}
            for token, logprob in sampled
        ]
        return {"content": content, "refusal": None}


def _read_message(message: object) -> JsonObject:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(role, str) or role not in _ROLES:
        raise RequestRefused(f"The role of a message must be one of {', '.join(_ROLES)}, got {message!r:.120}.")
    read = content_of if role in ("user", "tool") else text_of
    parsed: JsonObject = {"role": _ROLES[role], "content": read(message.get("content"))}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            parsed[name] = message[name]
    details = [part for part in message.get("reasoning_details") or () if isinstance(part, Mapping) and "text" in part]
    if thinking := message.get("reasoning_content") or message.get("reasoning") or details:
        parsed["reasoning_content"] = text_of(thinking)
    calls = message.get("tool_calls") or []
    if calls:
        parsed["tool_calls"] = [_read_call(call) for call in calls]
    return parsed


def _read_call(call: object) -> JsonObject:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestRefused(f"A tool call must have a function with a name, got {call!r:.120}.")
    return tool_call(call.get("id"), function["name"], function.get("arguments", {}))


def _read_tool(tool: JsonMapping) -> JsonObject:
    if "function" in tool:
        function = tool["function"]
        if not isinstance(function, Mapping):
            raise RequestRefused(f"A tool's function must have a name, got {tool!r:.120}.")
        tool_of(function.get("name"), None, function.get("parameters"))
    return dict(tool)


def _calls(answer: Answer) -> list[JsonObject]:
    """Returns the calls with their arguments as JSON text."""
    calls = ((call, call["function"]) for call in answer.calls)
    return [{**call, "function": {**inner, "arguments": json.dumps(inner["arguments"])}} for call, inner in calls]


def _finish_reason(answer: Answer) -> str:
    return "tool_calls" if answer.calls else answer.completion.finish_reason


def _usage(answer: Answer) -> JsonObject:
    choices = (answer, *answer.siblings)
    num_generated = sum(len(one.completion.token_ids) for one in choices)
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": num_generated,
        "completion_tokens_details": {"reasoning_tokens": sum(one.num_reasoning_tokens for one in choices)},
        "total_tokens": answer.num_prompt_tokens + num_generated,
    }
