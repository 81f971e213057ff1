"""The parts of OpenAI's Responses protocol, which Codex uses, that a policy in training can serve.

Source: https://platform.openai.com/docs/api-reference/responses. Nothing is stored: each request contains all items.
Tools that the model's provider would run, such as `web_search`, are left out; tools of a namespace are called
`namespace.name`; a `custom` tool has one argument, its input as text.
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
    full_name,
    objects_of,
    sealed,
    text_of,
    tool_call,
    tool_of,
    unsealed,
    with_one_system_message,
)

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}  # custom tools


class ResponsesExchange(Exchange):
    """A request to `responses`."""

    served = (
        "input instructions tools tool_choice parallel_tool_calls max_output_tokens reasoning include "
        "metadata client_metadata store user safety_identifier prompt_cache_key prompt_cache_retention "
        "service_tier stream_options truncation text"
    )
    refused: ClassVar[Refusals] = {
        "previous_response_id": ((), "Send all items; nothing is stored."),
        "conversation": ((), "Send all items; nothing is stored."),
        "background": ((False,), "Await the response."),
        "prompt": ((), "Send instructions and input."),
    }

    def read(self) -> AgentRequest:
        may_call, forced_tool = self.tool_choice()
        text = self.fields.get("text")
        self.num_events = 0
        self.wire_names: dict[str, tuple[str, str, str]] = {}  # the policy's name for a tool → kind, namespace, name
        tools = [each for tool in objects_of(self.fields.get("tools", []), "tools") for each in self._read_tools(tool)]
        items = self.fields.get("input", [])
        items = [{"role": "user", "content": items}] if isinstance(items, str) else objects_of(items, "input")
        messages = [{"role": "system", "content": text_of(self.fields.get("instructions"))}]
        messages = messages if messages[0]["content"] else []
        for item in items:
            _add_item(messages, self._referred(item))
        if not messages:
            raise RequestRefused("input must be text, or a list with at least one item.")
        return AgentRequest(
            with_one_system_message(messages),
            tools if may_call else [],
            self.limit_of("max_output_tokens"),
            has_parallel_calls=self.has_parallel_calls(),
            schema=self.schema_of(text.get("format") if isinstance(text, Mapping) else None),
            forced_tool=forced_tool,
            hidden_tools=[] if may_call else tools,
            model=self.model,
        )

    def body(self, answer: Answer) -> JsonObject:
        num_generated = len(answer.completion.token_ids)
        usage = {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_generated,
            "output_tokens_details": {"reasoning_tokens": answer.num_reasoning_tokens},
            "total_tokens": answer.num_prompt_tokens + num_generated,
        }
        status: JsonObject = {"status": "completed"}
        if answer.completion.finish_reason == "length":
            status = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        return {**self._response(), **status, "output": self._items(answer), "usage": usage}

    def start_events(self, num_prompt_tokens: int) -> list[JsonObject]:
        return [self._event("created", response=self._response()), self.waiting_event()]

    def events(self, answer: Answer) -> Iterator[JsonObject]:
        response = self.body(answer)
        for index, item in enumerate(response["output"]):
            yield from self._item_events(index, item)
        yield self._event(response["status"], response=response)

    def waiting_event(self) -> JsonObject:
        return self._event("in_progress", response=self._response())

    def error_event(self, error: RequestRefused) -> JsonObject:
        failure = {"status": "failed", "error": {"code": error.code, "message": str(error)}}
        return self._event("failed", response={**self._response(), **failure})

    def _item_events(self, index: int, item: JsonObject) -> Iterator[JsonObject]:
        """Yields events for an item without its text, then for the text, then for the complete item."""
        position = {"item_id": item["id"], "output_index": index}
        name, event, text = {
            "reasoning": ("content", "reasoning_text", ""),
            "message": ("content", "output_text", ""),
            "function_call": ("arguments", "function_call_arguments", item.get("arguments")),
            "custom_tool_call": ("input", "custom_tool_call_input", item.get("input")),
        }[item["type"]]
        parts = item[name] if name == "content" else []
        empty = {**item, "status": "in_progress", name: [] if parts else ""}
        yield self._event("output_item.added", output_index=index, item=empty)
        if not parts:
            yield self._event(f"{event}.delta", **position, delta=text)
            yield self._event(f"{event}.done", **position, **{name: text}, name=item["name"])
        for part in parts:
            position["content_index"] = 0
            yield self._event("content_part.added", **position, part={**part, "text": ""})
            yield self._event(f"{event}.delta", **position, delta=part["text"], logprobs=[])
            yield self._event(f"{event}.done", **position, text=part["text"], logprobs=[])
            yield self._event("content_part.done", **position, part=part)
        yield self._event("output_item.done", output_index=index, item=item)

    def _event(self, kind: str, **fields: Any) -> JsonObject:
        self.num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self.num_events - 1, **fields}

    def _response(self) -> JsonObject:
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": "in_progress",
            "output": [],
            "parallel_tool_calls": self.has_parallel_calls(),
            "tool_choice": "auto",
            "tools": self.fields.get("tools", []),
            **dict.fromkeys(("error", "incomplete_details", "instructions", "temperature", "top_p", "usage")),
        }

    def _items(self, answer: Answer) -> list[JsonObject]:
        items: list[JsonObject] = []
        if answer.reasoning:
            text = [{"type": "reasoning_text", "text": answer.reasoning}]
            reasoning = {"id": f"rs_{self.id}", "type": "reasoning", "summary": [], "content": text}
            is_kept_by_client = "reasoning.encrypted_content" in str(self.fields.get("include"))
            items.append(reasoning | ({"encrypted_content": sealed(answer.reasoning)} if is_kept_by_client else {}))
        if answer.content or not answer.calls:
            part = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
            items.append({"id": f"msg_{self.id}", "type": "message", "role": "assistant", "content": [part]})
        for call in answer.calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            kind, namespace, name = self.wire_names.get(name, ("function", "", name))
            item = {"id": f"fc_{call['id']}", "call_id": call["id"], "type": f"{kind}_call", "name": name}
            item |= {"namespace": namespace} if namespace else {}
            if kind == "custom":
                items.append(item | {"type": "custom_tool_call", "input": str(arguments.get("input", ""))})
            else:
                items.append(item | {"arguments": json.dumps(arguments)})
        items = [{**item, "status": "completed"} for item in items]
        self.items.update({item["id"]: item for item in items})
        return items

    def _referred(self, item: JsonMapping) -> JsonMapping:
        """Returns the item from an earlier response that this item refers to, or the item itself."""
        if item.get("type") != "item_reference":
            return item
        if (referred := self.items.get(str(item.get("id")))) is None:
            raise RequestRefused(
                f"No response in this session has the item {item.get('id')!r:.80}. Send the item itself.",
                status=404,
                code="item_not_found",
            )
        return referred

    def _read_tools(self, tool: JsonMapping, namespace: str = "") -> Iterator[JsonObject]:
        """Yields the functions of a tool: the tool itself, the tools of a namespace, or none."""
        kind, name = tool.get("type"), tool.get("name")
        if kind == "namespace" and not namespace:
            for inner in objects_of(tool.get("tools", []), "The tools of a namespace"):
                yield from self._read_tools(inner, str(name))
        elif kind in ("function", "custom"):
            shown_name = full_name(namespace, name) if name else ""
            self.wire_names[shown_name] = kind, namespace, str(name)
            yield tool_of(shown_name, tool.get("description"), _INPUT if kind == "custom" else tool.get("parameters"))
        else:
            self.ignored.append(f"the tool {kind}")


def _add_item(messages: list[JsonObject], item: JsonMapping) -> None:
    """Appends an item to the messages; one answer's thinking, text and calls become one message."""
    kind, role, name = item.get("type", "message"), item.get("role"), item.get("name")
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = content_of(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        return
    if kind == "message" and role != "assistant":
        if role not in list(_ROLES):
            raise RequestRefused(f"The role of a message must be one of {', '.join(_ROLES)}, got {role!r:.120}.")
        read = content_of if role == "user" else text_of
        messages.append({"role": _ROLES[role], "content": read(item.get("content"))})
        return
    answer: JsonObject = {"role": "assistant", "content": ""}
    continues_answer = bool(messages) and messages[-1]["role"] == "assistant"
    if continues_answer and not (kind == "reasoning" and (messages[-1]["content"] or "tool_calls" in messages[-1])):
        answer = messages.pop()
    if kind == "message":
        answer["content"] += text_of(item.get("content"))
    elif kind == "reasoning":
        thought = text_of(item.get("content")) or unsealed(item.get("encrypted_content"))
        answer["reasoning_content"] = answer.get("reasoning_content", "") + thought
    elif kind in ("function_call", "custom_tool_call") and isinstance(name, str):
        arguments = item.get("arguments", {}) if kind == "function_call" else {"input": item.get("input")}
        call = tool_call(item.get("call_id"), full_name(item.get("namespace"), name), arguments)
        answer.setdefault("tool_calls", []).append(call)
    else:
        raise RequestRefused(
            f"An input item of type {kind!r:.80} with the name {name!r:.80} is not supported. Send messages, "
            "reasoning, calls to functions and custom tools, and their outputs."
        )
    messages.append(answer)
