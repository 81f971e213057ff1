"""The parts of Anthropic's Messages protocol, which Claude Code uses, that a policy in training can serve.

Source: https://docs.anthropic.com/en/api/messages. Tools that the model's provider would run (a `type` other than
`custom`) are left out. A tool with `defer_loading` is shown only where a tool result refers to it, as in the API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import ClassVar

from lightrl.trajectory import JsonMapping, JsonObject
from lightrl.workflows.agent_workflow.protocol import (
    AgentRequest,
    Answer,
    Exchange,
    Refusals,
    RequestRefused,
    content_of,
    joined_content,
    objects_of,
    sealed,
    text_of,
    tool_call,
    tool_of,
    unsealed,
    with_one_system_message,
)


class MessagesExchange(Exchange):
    """A request to `messages`, or to `messages/count_tokens`."""

    served = (
        "messages system tools tool_choice max_tokens thinking output_config metadata context_management service_tier "
        "cache_control stop_sequences"
    )
    refused: ClassVar[Refusals] = {
        "mcp_servers": (([],), "Let the agent call them as tools."),
        "container": ((), "Leave it out."),
    }

    def read(self) -> AgentRequest:
        may_call, forced_tool = self.tool_choice()
        output = self.fields.get("output_config")
        messages, sent_tools = objects_of(self.fields.get("messages"), "messages"), self.fields.get("tools", [])
        if not messages:
            raise RequestRefused("messages must be a list with at least one message, got [].")
        tools = {
            str(tool.get("name")): tool_of(tool.get("name"), tool.get("description"), tool.get("input_schema"))
            for tool in objects_of(sent_tools, "tools")
            if tool.get("type", "custom") == "custom"
        }
        parsed = [{"role": "system", "content": text_of(self.fields["system"])}] if "system" in self.fields else []
        for message in messages:
            parsed += _read_message(message, tools)
        self.ignored += [f"the tool {tool['type']}" for tool in sent_tools if tool.get("type", "custom") != "custom"]
        deferred = {tool.get("name") for tool in sent_tools if tool.get("defer_loading")}
        shown = [tool for name, tool in tools.items() if name not in deferred]
        return AgentRequest(
            with_one_system_message(parsed),
            shown if may_call else [],
            self.limit_of("max_tokens"),
            has_parallel_calls=self.has_parallel_calls(),
            stop=self.stop_of("stop_sequences"),
            schema=self.schema_of(output.get("format") if isinstance(output, Mapping) else None),
            forced_tool=forced_tool,
            hidden_tools=[] if may_call else shown,
            model=self.model,
        )

    def body(self, answer: Answer) -> JsonObject:
        usage = {"input_tokens": answer.num_prompt_tokens, "output_tokens": len(answer.completion.token_ids)}
        message = self._message(answer.num_prompt_tokens)
        return {**message, "content": self._blocks(answer), "stop_reason": _stop_reason(answer), "usage": usage} | {
            "stop_sequence": answer.stopped_by
        }

    def start_events(self, num_prompt_tokens: int) -> list[JsonObject]:
        return [{"type": "message_start", "message": self._message(num_prompt_tokens)}]

    def events(self, answer: Answer) -> Iterator[JsonObject]:
        for index, block in enumerate(self._blocks(answer)):
            empty: JsonObject = {"type": "text", "text": ""}
            deltas: list[JsonObject] = [{"type": "text_delta", "text": block.get("text")}]
            if block["type"] == "thinking":
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}] if block["thinking"] else []
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
            elif block["type"] == "tool_use":
                empty = {**block, "input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
            yield {"type": "content_block_start", "index": index, "content_block": empty}
            for delta in deltas:
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        usage = {"output_tokens": len(answer.completion.token_ids)}
        delta = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stopped_by}
        yield {"type": "message_delta", "delta": delta, "usage": usage}
        yield {"type": "message_stop"}

    def waiting_event(self) -> JsonObject | None:
        return {"type": "ping"}

    def _message(self, num_prompt_tokens: int) -> JsonObject:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": num_prompt_tokens, "output_tokens": 0},
        }

    def _blocks(self, answer: Answer) -> list[JsonObject]:
        """Returns the content blocks. Includes thinking only if enabled, and without text for `display: omitted`."""
        thinking = self.fields.get("thinking")
        options = thinking if isinstance(thinking, Mapping) else {"type": "disabled"}
        blocks: list[JsonObject] = []
        if answer.reasoning and options.get("type") != "disabled":
            shown = "" if options.get("display") == "omitted" else answer.reasoning
            blocks.append({"type": "thinking", "thinking": shown, "signature": sealed(answer.reasoning)})
        if answer.content or not answer.calls:
            blocks.append({"type": "text", "text": answer.content})
        for call in answer.calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
        return blocks


def _read_message(message: JsonMapping, tools: Mapping[str, JsonMapping]) -> list[JsonObject]:
    """Returns the message, with each tool result as a separate message before the user's text."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RequestRefused(f"The role of a message must be user, assistant or system, got {message!r:.120}.")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": text_of(content)}]
    results: list[JsonObject] = []
    turn: JsonObject = {"role": role, "content": ""}
    parts: list[JsonObject] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result" and role == "user":
            result = _result_content(block.get("content"), tools)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        elif kind == "tool_use" and role == "assistant" and isinstance(block.get("name"), str):
            turn.setdefault("tool_calls", []).append(tool_call(block.get("id"), block["name"], block.get("input", {})))
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            thought = block.get("thinking") or unsealed(block.get("signature") or block.get("data"))
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text_of(thought)
        else:
            inner = content_of([block])
            parts.append({"type": "text", "text": inner} if isinstance(inner, str) else inner[0])
    turn["content"] = joined_content(parts) if role == "user" else text_of(parts)
    return [*results, *([] if results and not turn["content"] else [turn])]


def _result_content(content: object, tools: Mapping[str, JsonMapping]) -> str | list[JsonObject]:
    """Returns the content of a tool's result, with the schemas of the tools that it refers to."""
    parts: list[JsonObject] = []
    for part in content if isinstance(content, list) else [{"text": text_of(content)}]:
        is_reference = isinstance(part, Mapping) and part.get("type") == "tool_reference"
        inner = json.dumps(tools.get(str(part.get("tool_name")))) if is_reference else content_of([part])
        parts += [{"type": "text", "text": inner}] if isinstance(inner, str) else inner
    return joined_content(parts, "\n")


def _stop_reason(answer: Answer) -> str:
    if answer.calls:
        return "tool_use"
    if answer.stopped_by is not None:
        return "stop_sequence"
    return "max_tokens" if answer.completion.finish_reason == "length" else "end_turn"
