"""Which library parses a completion, and that thinking, text, calls and errors come out the same from all of them."""

from typing import Any

import pytest
from chat_texts import CHATML, chat_tokenizer, ids

from lightrl.workflows.agent_workflow.completion_parser import ParsedCompletion, completion_parser, parse_text
from lightrl.workflows.tools import ToolCall, parse_hermes

QWEN_XML = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "text"},
            },
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
HERMES = {
    **QWEN_XML,
    "fields": {
        **QWEN_XML["fields"],  # type: ignore[dict-item]
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def parse(text: str, response_template: Any = None, prompt: str = PROMPT, **settings: Any) -> ParsedCompletion:
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.response_template = response_template
    parser = completion_parser(tokenizer, **{"tool_parser": None, "renderer": None, **settings})
    return parser(ids(prompt), ids(text), text.removesuffix("<|im_end|>"), [ADD])


def test_the_tokenizers_response_template_gives_arguments_the_types_of_the_schema() -> None:
    call = "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n</function>\n"
    parsed = parse(f"<think>\nTwo.\n</think>\n\nI add.\n{call}</tool_call><|im_end|>", QWEN_XML)
    assert parsed == ParsedCompletion("I add.", "Two.", [ToolCall("add", {"a": 2, "b": "3"})])


def test_thinking_that_the_prompt_opens_is_thinking_for_the_response_template() -> None:
    parsed = parse("Two.\n</think>\n\nDone.<|im_end|>", QWEN_XML, prompt=PROMPT + "<think>\n")
    assert parsed == ParsedCompletion("Done.", "Two.", [])


@pytest.mark.parametrize(
    ("call", "says"),
    [
        pytest.param("{oh", "the call cannot be read: json parser could not parse", id="not JSON"),
        pytest.param('{"arguments": {}}', "needs a name and an arguments object, got None", id="no name"),
        pytest.param('{"name": "add", "arguments": 3}', "an arguments object, got 'add', 3", id="a number"),
    ],
)
def test_what_the_response_template_cannot_read_is_a_call_with_an_error(call: str, says: str) -> None:
    (called,) = parse(f"<tool_call>{call}</tool_call><|im_end|>", HERMES).calls
    assert says in (called.error or "")


def test_without_a_template_thinking_and_calls_are_read_in_hermes_form() -> None:
    text = '<think>Two.</think>I add.\n<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    assert parse(text) == ParsedCompletion("I add.", "Two.", [ToolCall("add", {"a": 2})])


@pytest.mark.parametrize("text", ["</tool_call>", "<tool_call>{}</tool_call>", "<think>x</think>", "</think>"])
@pytest.mark.parametrize("template", [HERMES, QWEN_XML], ids=["JSON", "XML"])
def test_a_quoted_tag_is_an_argument_or_an_error_but_never_cuts_it_for_a_response_template(text: str, template: Any):
    as_json = f'<tool_call>{{"name": "add", "arguments": {{"b": "{text}"}}}}</tool_call>'
    as_xml = f"<tool_call>\n<function=add>\n<parameter=b>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (called,) = parse(f"So.\n{as_json if template is HERMES else as_xml}<|im_end|>", template).calls
    if called.error is None:
        assert called.arguments == {"b": text}
    else:
        assert (template, "</tool_call>" in text, "quote </tool_call>" in called.error) == (QWEN_XML, True, True)
    answer = f"Write {text.replace('tool_call', 'b')} now."
    assert parse(f"<think>a</think>{answer}<|im_end|>", template) == ParsedCompletion(answer, "a", [])


def test_an_answer_that_quotes_the_end_of_a_call_keeps_its_call_for_a_response_template() -> None:
    text = 'End with `</tool_call>`. <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>'
    assert parse(text, HERMES) == ParsedCompletion("End with `</tool_call>`.", "", [ToolCall("add", {"a": 2})])


def test_a_parser_of_the_users_own_goes_before_the_template() -> None:
    parsed = parse("<think>no</think>add", QWEN_XML, tool_parser=lambda text: [ToolCall(text.strip())])
    assert parsed.calls == [ToolCall("add")]
    assert parsed.reasoning == "no"


def test_a_renderer_that_is_not_there_or_comes_with_a_parser_is_refused() -> None:
    with pytest.raises(ValueError, match="Set renderer or tool_parser, not both"):
        parse("x", tool_parser=parse_hermes, renderer="auto")
    with pytest.raises(ValueError, match=r"renderer='nobody'.*(lightrl\[renderers\]|No renderer config)"):
        parse("x", renderer="nobody")


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ('{"name": "add", "arguments": {"a": 2}}', [ToolCall("add", {"a": 2})]),
        ("{oh", [ToolCall(error="the call is malformed (invalid_json): {oh")]),
    ],
    ids=["a call", "malformed"],
)
def test_the_package_renderers_parses_the_format_of_a_model(body: str, calls: list[ToolCall]) -> None:
    pytest.importorskip("renderers")
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]}
    )
    tokenizer.add_tokens(["</tool_response>"])

    def encoded(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    parser = completion_parser(tokenizer, None, "qwen3")
    text = f"<think>\nTwo.\n</think>\n\nI add.\n<tool_call>\n{body}\n</tool_call><|im_end|>"
    parsed = parser(encoded(PROMPT), encoded(text), text, [ADD])
    assert (parsed.content.strip(), parsed.reasoning.strip()) == ("I add.", "Two.")
    assert [call.error and call.error[:45] for call in parsed.calls] == [
        call.error and call.error[:45] for call in calls
    ]
    assert [dict(call.arguments) for call in parsed.calls] == [dict(call.arguments) for call in calls]


def test_a_tag_in_quotes_stays_in_the_text():
    text = "Write `<tool_call>` and `</tool_call>`."
    parsed = parse_text(text + ' <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>', parse_hermes)
    assert (parsed.content, [call.name for call in parsed.calls]) == (text, ["add"])
