"""Requests of agents with an error: each is refused with status 400 and one message, and the trajectory goes on."""

import json

import pytest
from bad_input_rows import each, row
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrl.workflows.agent_workflow.chat_protocol import ChatExchange
from lightrl.workflows.agent_workflow.messages_protocol import MessagesExchange
from lightrl.workflows.agent_workflow.protocol import RequestRefused, RequestRules
from lightrl.workflows.agent_workflow.responses_protocol import ResponsesExchange

pytestmark = pytest.mark.bad_input

HI = {"role": "user", "content": "hi"}


def body(**fields):
    return json.dumps({"messages": [HI], **fields}).encode()


def said(*messages):
    return body(messages=list(messages))


REQUESTS = [
    row("request: nothing", b"", "must be a JSON object in UTF-8"),
    row("request: latin-1", '{"é": 1}'.encode("latin-1"), "must be a JSON object in UTF-8"),
    row("request: 100,000 deep", b"[" * 100_000, "nested too deeply"),
    row("request: messages 100,000 deep", b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    row("request: a number of 6,000 digits", b'{"max_tokens": ' + b"1" * 6000 + b"}", "must be a JSON object in UTF-8"),
    row("request: a lone surrogate", said({"role": "user", "content": "\ud800"}), "surrogates not allowed"),
    row("request: a list", b"[]", "must be a JSON object, got []"),
    row("request: no messages", b"{}", "messages must be a list", "at least one"),
    row("request: an empty list of messages", said(), "messages must be a list with at least one message"),
    row("request: messages that are a text", body(messages="hi"), "messages must be a list", "'hi'"),
    row("request: a message without role", said({"content": "hi"}), "The role of a message must be one of", "user"),
    row("request: an unknown role", said({"role": "usr", "content": "hi"}), "The role of a message must be one of", "usr"),
    row("request: a role that is a list", said({"role": [], "content": "hi"}), "The role of a message must be one of"),
    row("request: a content that is a number", said({"role": "user", "content": 3}), "content of a message must be text or images, got 3"),
    row("request: an image", said({"role": "user", "content": [{"type": "image_url"}]}), "An image must be part of the request, in base64"),
    row("request: a call that is a text", said({"role": "assistant", "tool_calls": ["x"]}), "A tool call must have a function"),
    row("request: a call without name", said({"role": "assistant", "tool_calls": [{"function": {}}]}), "function with a name"),
    row("request: tools that are an object", body(tools={}), "tools must be a list of JSON schemas"),
    row("request: no tokens", body(max_tokens=0), "max_tokens must be an integer >= 1, got 0"),
    row("request: true for tokens", body(max_tokens=True), "max_tokens must be an integer >= 1, got True"),
    row("request: no answers", body(n=0), "n must be an integer from 1 to 128, got 0"),
    row("request: a number to stop at", body(stop=3), "stop must be a string or a list of strings, got 3"),
    row("request: another format", body(response_format={"type": "x"}), "must be text, json_object or json_schema, got"),
    row("request: an unknown tool", body(tool_choice="x"), "tool_choice must be auto, none, required or the name of a tool"),
    row("request: functions", body(functions=[{}]), "functions=", "Use tools"),
    row("request: sound", body(modalities=["audio"]), "modalities=", "Leave it out"),
    row("request: other logprobs", body(top_logprobs=5), "top_logprobs=5 is not supported"),
]  # fmt: skip


@each(REQUESTS)
def test_a_request_is_refused(case):
    with pytest.raises(RequestRefused) as caught:
        ChatExchange.of_json(case.given, RequestRules(), {})
    case.check(str(caught.value))
    assert caught.value.status == 400


NAMES = ["messages", "role", "content", "tool_calls", "function", "name", "arguments", "tools", "n", "max_tokens"]
NAMES += ["text", "input", "type", "thinking", "namespace", "call_id", "output", "system"]
KINDS = ["user", "assistant", "tool_use", "tool_result", "reasoning"]
KINDS += ["function_call", "namespace", "custom", "function"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([*KINDS, "[", "\ud800", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=6,
)


ITEMS = st.lists(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4), max_size=2)
BODIES = st.dictionaries(st.sampled_from(["messages", "input", "tools"]), ITEMS, max_size=2)


@pytest.mark.parametrize("protocol", [ChatExchange, MessagesExchange, ResponsesExchange])
@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(st.one_of(st.binary(max_size=40), (JSON | BODIES).map(lambda value: json.dumps(value).encode())))
def test_whatever_is_sent_is_served_or_refused(protocol, data):
    problem = "", 400
    try:
        protocol.of_json(data, RequestRules(), {})
    except RequestRefused as error:
        problem = str(error), error.status
    assert problem[1] == 400
