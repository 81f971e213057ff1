"""Tools: how they are described, called and answered; the calculator's bounds."""

import asyncio
import json
import threading
from typing import Any

import pytest
from chat_texts import END, WITH_TOOLS, Scripted, chat_prompt, chat_tokenizer, ids, letters, played, writes
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrl.errors import RewardError, RolloutError
from lightrl.trajectory import Prompt, split_thinking
from lightrl.workflows import MultiTurn, ToolEnvironment
from lightrl.workflows.tools import Tool, ToolCall, calculator, parse_hermes, python, without_thinking

PATH = "lightrl.workflows.tools.calculator"


def call(name: str = "calculator", **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answers(environment: ToolEnvironment, completion: str) -> list[str]:
    observation, reward, done = asyncio.run(environment.step(completion))
    assert (reward, done) == (0.0, False)
    assert {message["role"] for message in observation} == {"tool"}  # type: ignore[union-attr, index]
    return [message["content"] for message in observation]  # type: ignore[union-attr, index]


def halve(number: int, times: int = 1) -> float:
    """Divides by two.

    Args:
        number: what to divide
        times: how often
    """
    return number / 2**times


def test_the_policy_calls_reads_the_result_and_answers():
    flow = MultiTurn(chat_tokenizer(WITH_TOOLS), lambda: ToolEnvironment([PATH]), max_turns=3)
    said = letters(call(expression="12*34"))
    engine = writes([*said, END], [*letters("408"), END])
    trajectory = played(flow, engine, chat_prompt("12*34?"))
    first, second = trajectory.turns
    assert trajectory.token_ids[first.start : first.end] == [*said, END]
    between = "\n<|im_start|>tool\n408<|im_end|>\n<|im_start|>assistant\n"
    assert trajectory.token_ids[first.end : second.start] == ids(between)
    assert trajectory.completion == "408"
    assert trajectory.metrics == {"turns": 2.0, "tool_calls": 1.0, "tool_errors": 0.0}


def test_the_prompt_shows_the_tools_schema():
    flow = MultiTurn(chat_tokenizer(WITH_TOOLS), lambda: ToolEnvironment([halve]))
    trajectory = played(flow, writes([END]))
    shown = chat_tokenizer().decode(trajectory.prompt.token_ids or []).splitlines()[0]
    (schema,) = json.loads(shown)
    assert schema["function"]["name"] == "halve"
    assert schema["function"]["parameters"]["required"] == ["number"]
    number = schema["function"]["parameters"]["properties"]["number"]
    assert number == {"type": "integer", "description": "what to divide"}


def test_completions_without_calls_go_to_the_environment_beside_the_tools():
    inner = Scripted(("again", 0.0, False), (None, 1.0, True))
    flow = MultiTurn(chat_tokenizer(WITH_TOOLS), lambda: ToolEnvironment([PATH], lambda: inner), max_turns=5)
    turns = ["3", call(expression="1+1"), "2"]
    trajectory = played(flow, writes(*([*letters(text), END] for text in turns)))
    assert inner.heard == ["3", "2"]
    assert [turn for turn in (trajectory.rewards or []) if turn] == [1.0]
    assert len(trajectory.turns) == 3


CALL = '<tool_call>{"name": "halve", "arguments": {"number": 4}}</tool_call>'


@pytest.mark.parametrize(
    ("completion", "num_calls"),
    [
        pytest.param(f"<think>I could {CALL}, but no.</think>I will not.", 0, id="only considered"),
        pytest.param(f"{CALL}Then I close with </think>.", 1, id="a closing tag of no thinking"),
        pytest.param(f"<think>still thinking {CALL}", 0, id="thinking that never ends"),
        pytest.param(f"<think>a</think>b<think>{CALL}</think>", 0, id="thinking again"),
        pytest.param(f"<think>like <tool_call>…</tool_call></think>{CALL}", 1, id="a form that is quoted"),
        pytest.param(f"{CALL}<think>enough?</think>{CALL}", 2, id="thinking between two calls"),
    ],
)
def test_thinking_is_not_acting(completion: str, num_calls: int):
    assert [called.error for called in parse_hermes(completion)] == [None] * num_calls
    heard: list[str] = []

    def parser(text: str) -> list[ToolCall]:
        heard.append(text)
        return []

    asyncio.run(ToolEnvironment([halve], parser=parser).step(completion))
    assert heard[0].count(CALL) == num_calls


def pages(first: int, last: int | None = None, marks: list[int] | None = None, step: int = 1, at: float = 0) -> str:
    """Shows pages.

    Args:
        first: page
        last: page
        marks: pages
        step: between pages
        at: place
    """
    return json.dumps([first, last, marks, step, at])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"first": 1, "last": None, "marks": None, "step": None}, "[1, null, null, 1, 0]"),
        ({"first": 5.0, "marks": [2.0, 3], "at": 2.0}, "[5, null, [2, 3], 1, 2.0]"),
        ({"first": None}, "Error: argument 'first' is None, expected integer"),
        ({"first": 1.5}, "Error: argument 'first' is 1.5, expected integer"),
        ({"first": 1, "last": "2"}, "Error: argument 'last' is '2', expected integer or null"),
        ({"first": 1, "marks": ["2"]}, "Error: argument 'marks' is '2', expected integer"),
    ],
)
def test_null_and_integral_numbers_reach_a_tool_as_its_schema_has_them(arguments: dict[str, Any], shown: str):
    assert answers(ToolEnvironment([pages]), call("pages", **arguments)) == [shown]


@pytest.mark.parametrize("schema", [None, True, {"$ref": "#/a"}, {"anyOf": [{"type": "integer"}, {"$ref": "#/a"}]}])
def test_an_argument_of_a_servers_tool_may_have_any_schema(schema: Any):
    tool = Tool("f", lambda **given: "", {"function": {"parameters": {"properties": {"a": schema}}}})
    assert tool.fitted({"a": {"b": [1.0, None]}, "c": None}) == {"a": {"b": [1.0, None]}, "c": None}


def test_an_optional_field_within_an_argument_may_be_null_too():
    inner = {"type": "object", "properties": {"low": {"type": "integer"}, "high": {"type": "integer"}}}
    schema = {"properties": {"range": inner | {"required": ["low"]}}}
    tool = Tool("f", lambda **given: "", {"function": {"parameters": schema}})
    assert tool.fitted({"range": {"low": 1.0, "high": None}}) == {"range": {"low": 1}}
    with pytest.raises(ValueError, match="'low' is None, expected integer"):
        tool.fitted({"range": {"low": None}})


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"'])
def test_a_call_with_what_json_or_a_tokenizer_cannot_write_is_malformed(value: str):
    (made,) = parse_hermes(CALL.replace("4", value))
    assert made.error is not None


def test_a_tag_in_quotes_begins_no_call():
    assert parse_hermes("Write `<tool_call>` and `</tool_call>`. ") == []


QUOTES = ["<think>x</think>", "</think>", "<think>", "a </tool_call> b", '"</tool_call>\\', f"<think>{CALL}</think>"]


@pytest.mark.parametrize("text", QUOTES)
def test_a_tag_that_a_call_quotes_is_its_argument_and_one_that_an_answer_quotes_is_its_text(text: str):
    quoted = call(text=text)
    called = ToolCall("calculator", {"text": text})
    assert parse_hermes(quoted) == [called]
    assert parse_hermes(f"<think>So {CALL}?</think>\n{quoted}\n{quoted} done") == [called, called]
    assert without_thinking(quoted) == quoted
    assert split_thinking(f"<think>So.</think>Write {text} now.", has_opening=True) == ("So.", f"Write {text} now.")
    assert split_thinking(f"Write {text} now.", has_opening=True) == ("", f"Write {text} now.")


def test_a_call_in_thinking_that_the_template_opened_does_not_run():
    template = WITH_TOOLS.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    flow = MultiTurn(chat_tokenizer(template), lambda: ToolEnvironment([halve]))
    trajectory = played(flow, writes([*letters(CALL), END]), Prompt("a", messages=[{"role": "user", "content": "4"}]))
    assert (len(trajectory.turns), trajectory.metrics["tool_calls"]) == (1, 0.0)


@pytest.mark.parametrize(
    ("completion", "says"),
    [
        (call("search", query="x"), "there is no tool 'search', only calculator, halve"),
        (call(expression="1/0"), "ZeroDivisionError: division by zero"),
        (call(words="1"), "missing a required argument: 'expression'"),
        (call("halve", number="4"), "argument 'number' is '4', expected integer"),
        (call("halve", number=True), "argument 'number' is True, expected integer"),
        ("<tool_call>11</tool_call>", "not of the form"),
        ("<tool_call>{1}</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "calculator"', "not valid JSON"),
        ('<tool_call>{"name": "calculator", "arguments": "1"}</tool_call>', "not of the form"),
    ],
    ids=[
        *["unknown tool", "tool raises", "wrong name", "wrong type", "bool as int", "no object", "no JSON", "open"],
        "text",
    ],
)
def test_what_is_wrong_with_a_call_is_told_to_the_policy(completion: str, says: str):
    environment = ToolEnvironment([calculator, halve])
    (content,) = answers(environment, completion)
    assert content.startswith("Error: ")
    assert says in content
    assert asyncio.run(environment.metrics()) == {"tool_calls": 1.0, "tool_errors": 1.0}


def test_several_calls_are_answered_in_order_and_at_most_so_many():
    environment = ToolEnvironment([halve], max_calls=2)
    completion = "".join(call("halve", number=number) for number in (2, 4, 6))
    error = "Error: more than 2 calls in one turn; this one was not run"
    assert answers(environment, completion) == ["1.0", "2.0", error]


def test_a_long_result_is_cut():
    environment = ToolEnvironment([PATH], max_result_chars=5)
    assert answers(environment, call(expression="10**20")) == ["10000… (21 characters, cut)"]


def test_a_tool_that_hangs_is_told_and_the_conversation_goes_on():
    release = threading.Event()

    def wait_for_ever() -> str:
        """Waits."""
        release.wait()
        return ""

    environment = ToolEnvironment([wait_for_ever], tool_timeout_s=0.05)
    assert answers(environment, call("wait_for_ever")) == ["Error: no result in 0.05 s"]
    release.set()


def test_an_async_tool_is_awaited_and_its_result_written_as_json():
    async def look_up(key: str) -> dict[str, str]:
        """Looks up.

        Args:
            key: of what
        """
        await asyncio.sleep(0)
        return {key: "é"}

    assert answers(ToolEnvironment([look_up]), call("look_up", key="a")) == ['{"a": "é"}']


def test_a_parser_of_your_own_finds_the_calls():
    def after_question_mark(completion: str) -> list[ToolCall]:
        return [ToolCall("calculator", {"expression": completion[1:]})] if completion.startswith("?") else []

    environment = ToolEnvironment([calculator], parser=after_question_mark)
    assert answers(environment, "?2*3") == ["6"]
    assert asyncio.run(environment.step("6"))[2]


def test_a_tool_without_described_arguments_is_refused():
    def bare(number: int) -> int:
        return number

    with pytest.raises(ValueError, match=r"bare.*cannot be described.*Args:"):
        ToolEnvironment([bare])


def test_a_path_that_names_nothing_and_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"'lightrl.workflows.tools' has no 'abacus'"):
        ToolEnvironment(["lightrl.workflows.tools.abacus"])
    with pytest.raises(ValueError, match="a different name for each"):
        ToolEnvironment([calculator, PATH])


def test_a_tool_is_described_once():
    assert Tool.of(PATH) is Tool.of(PATH)


def test_calls_are_found_in_order_with_text_around_them():
    text = f'First {call(expression="1")} then\n<tool_call>\n{{"name": "f"}}\n</tool_call> done'
    assert parse_hermes(text) == [ToolCall("calculator", {"expression": "1"}), ToolCall("f", {})]
    assert parse_hermes("nothing here") == []


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        *[("12 * 34", "408"), ("(3 + 4) * 2.5", "17.5"), ("-2 ** 2", "-4"), ("7 // 2 + 7 % 4", "6"), ("8 / 2", "4")],
        *[("0.1 + 0.2", "0.3"), ("1e3", "1000"), ("max(1, sqrt(16), abs(-3))", "4"), ("round(2.567, 2)", "2.57")],
        ("10 ** 20", "100000000000000000000"),
    ],
)
def test_the_calculator_computes(expression: str, result: str):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')", "().__class__", "open", "1 if 1 else 2", "x", "e", "max", "'a' * 9", "[1]", "1, 2", "1; 2",
        "", "9 ** 9 ** 9", "2 ** 1000", "2 ** -1000", "round(5, -10 ** 50)", "10 ** 60 * 10 ** 60", "1e400",
        "(-8) ** 0.5", "1e99 * 1e99", "1e400 - 1e400", "(" * 199 + "1", "1" * 201, "1 2", "007", "max(key=1)",
        "1(2)", "round(1, 2, 3)",
    ],
)  # fmt: skip
def test_the_calculator_refuses_what_is_no_bounded_arithmetic(expression: str):
    with pytest.raises((ValueError, TypeError)):
        calculator(expression)


@pytest.mark.parametrize(
    ("code", "shows"),
    [
        ("print(6 * 7)", "42"),
        ("x = 1", "(nothing was printed)"),
        ("print(1)\n1 / 0", "ZeroDivisionError: division by zero"),
        ("while True: pass", "Error: ValueError: the program was stopped by its time limit"),
    ],
    ids=["prints", "prints nothing", "raises", "runs for ever"],
)
def test_the_policy_runs_python_in_a_sandbox_and_reads_what_it_prints(code: str, shows: str):
    (content,) = answers(ToolEnvironment([python]), call("python", code=code))
    assert shows in content


def test_a_sandbox_that_fails_drops_the_trajectory_instead_of_being_told():
    def broken(code: str) -> str:
        """Runs.

        Args:
            code: what
        """
        raise RewardError("no sandbox here")

    with pytest.raises(RolloutError, match="no sandbox here"):
        asyncio.run(ToolEnvironment([broken]).step(call("broken", code="1")))


TAGS = st.sampled_from(["<tool_call>", "</tool_call>", "<think>", "</think>", '"', "\\", "{", "}", "\n", "a", " "])
TEXTS = st.lists(TAGS, max_size=8).map("".join)


@settings(deadline=None)
@given(quoted=st.lists(st.one_of(TEXTS, st.lists(TEXTS), st.dictionaries(TEXTS, TEXTS)), max_size=3))
def test_calls_are_read_whatever_tags_their_arguments_quote(quoted: list[object]):
    assert parse_hermes("".join(call(value=each) for each in quoted)) == [
        ToolCall("calculator", {"value": each}) for each in quoted
    ]
