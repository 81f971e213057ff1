"""Rewards of pattern, tags, length, repetition and JSON, by paper and pencil."""

import pytest
import torch
from reward_functions import trajectory_that

from lightrl.rewards.text_rewards import (
    OverlongPenalty,
    json_schema,
    overlong_penalty,
    regex_match,
    repetition_penalty,
    tag_format,
)


@pytest.mark.parametrize(
    ("completion", "is_full", "reward"),
    [("Answer: 42\n", True, 1.0), ("So.\nAnswer: 42", True, 0.0), ("So.\nAnswer: 42", False, 1.0), ("42", False, 0.0)],
)
def test_a_pattern_matches_all_or_a_part(completion, is_full, reward):
    assert regex_match(trajectory_that(completion), pattern=r"Answer: \d+", is_full=is_full) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        *[("<think>\na\n</think>\n<answer>b</answer>\n", 1.0), ("<think>a</think><answer>b</answer> c", 0.0)],
        *[("a <think>a</think><answer>b</answer>", 0.0), ("<answer>b</answer><think>a</think>", 0.0)],
        *[("<think>a</think><answer>b</answer><answer>b</answer>", 0.0), ("<think>a<answer>b</answer>", 0.0)],
        *[("<think></think> so <answer>b</answer>", 0.0), ("", 0.0), ("\na\n</think>\n<answer>b</answer>", 1.0)],
        *[("a</think></think><answer>b</answer>", 0.0), ("a<think>b</think><answer>b</answer>", 0.0)],
        ("a</think>b</answer>", 0.0),
    ],
)
def test_tags_stand_in_order_once_and_alone(completion, reward):
    assert tag_format(trajectory_that(completion)) == reward


def test_the_first_tag_may_be_opened_by_the_prompt_whatever_it_is():
    assert tag_format(trajectory_that("a</reason><answer>b</answer>"), tags=["reason", "answer"]) == 1.0
    assert tag_format(trajectory_that("a"), tags=[]) == 0.0


@pytest.mark.parametrize("text", ["你好世界", "今日はいい天気です。", "สวัสดีชาวโลก", "hello big wide world "])
def test_repetition_costs_in_every_script(text):
    assert repetition_penalty(trajectory_that(text * 50)) < -0.9
    assert repetition_penalty(trajectory_that(text)) == 0.0


@pytest.mark.parametrize(("num_tokens", "reward"), [(0, 0.0), (12, 0.0), (14, -0.5), (16, -1.0), (20, -1.0)])
def test_the_overlong_penalty_falls_in_a_straight_line(num_tokens, reward):
    trajectory = trajectory_that()
    trajectory.loss_mask = [False] * 5 + [True] * num_tokens
    assert overlong_penalty(trajectory, max_tokens=16, buffer_tokens=4) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("a b c d", 0.0), ("a b a b a b", 2 / 5 - 1), ("a a a a a", 1 / 4 - 1), ("A a", 0.0), ("a", 0.0), ("", 0.0)],
)
def test_repeated_pairs_of_words_cost_their_fraction(completion, reward):
    assert repetition_penalty(trajectory_that(completion), ngram_words=2) == pytest.approx(reward)


def test_text_rewards_read_the_answer_and_rewards_of_format_the_whole_completion():
    thinks = "<think>yes yes yes yes yes</think>\n\nno"
    assert regex_match(trajectory_that(thinks), pattern="yes|no") == 1.0
    assert regex_match(trajectory_that(thinks), pattern="yes", is_full=False) == 0.0
    assert regex_match(trajectory_that("<think>yes"), pattern="yes", is_full=False) == 0.0
    for pattern in (r"<think>.*</think>\s*no", r"</?think>.*no", r"<(think|x)>.*no"):
        assert regex_match(trajectory_that(thinks), pattern=pattern) == 1.0
    assert regex_match(trajectory_that("I think"), pattern="I think") == 1.0
    assert tag_format(trajectory_that("<think>a</think><answer>b</answer>")) == 1.0
    assert repetition_penalty(trajectory_that(thinks), ngram_words=1) == pytest.approx(4 / 6 - 1)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        *[("The age is 7.\n</think>\n3", 1.0), ('<think>```json\n"x"\n```</think>3', 1.0)],
        *[("<think>```json\n3\n```</think>No.", 0.0), ("<think>3", 0.0), ("So:\n~~~json\n3\n~~~", 1.0)],
        *[("- So:\n\n  ```json\n  3\n  ```\n", 1.0), ("```python\nx\n```\n```JSON\n3\n", 1.0)],
    ],
)
def test_json_is_read_from_the_last_block_of_the_answer(completion, reward):
    assert json_schema(trajectory_that(completion), schema={"const": 3})["reward"] == reward


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "pattern": "^[a-z]+$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "note": {"anyOf": [{"type": "null"}, {"type": "number"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("completion", "reward", "is_json"),
    [
        ('{"name": "x", "age": 3}', 1.0, 1.0),
        ('Here:\n```json\n{"name": "x", "age": 3.0, "tags": ["a", "b"], "note": null}\n```', 1.0, 1.0),
        *[('{"name": "x"}', 0.0, 1.0), ('{"name": "x", "age": true}', 0.0, 1.0)],
        *[('{"name": "x", "age": 200}', 0.0, 1.0), ('{"name": "X", "age": 3}', 0.0, 1.0)],
        ('{"name": "x", "age": 3, "tags": ["c"]}', 0.0, 1.0),
        ('{"name": "x", "age": 3, "tags": ["a", "a", "a"]}', 0.0, 1.0),
        *[('{"name": "x", "age": 3, "note": "n"}', 0.0, 1.0), ('{"name": "x", "age": 3, "more": 1}', 0.0, 1.0)],
        *[("[]", 0.0, 1.0), ("{", 0.0, 0.0), ("[" * 100_000, 0.0, 0.0), ("NaN", 0.0, 0.0)],
    ],
)
def test_json_is_held_against_its_schema(completion, reward, is_json):
    result = json_schema(trajectory_that(completion), schema=SCHEMA)
    assert (result["reward"], result["is_json"]) == (reward, is_json)


def test_the_overlong_penalty_is_the_papers():
    """DAPO's own setting: 16,384 expected tokens, a buffer of 4,096 more, generation limit 20,480."""
    num_tokens = [0, 16384, 16385, 18432, 20480, 30000]
    expected = [0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0]
    penalty = OverlongPenalty(4096)
    assert [penalty(num, 20480) for num in num_tokens] == expected
    assert penalty(torch.tensor(num_tokens), 20480).tolist() == expected


def test_the_overlong_penalty_grows_with_the_factor():
    assert OverlongPenalty(4, factor=0.5)(torch.tensor([6, 8, 10]), 10).tolist() == [0.0, -0.25, -0.5]


def test_the_schema_may_be_the_prompts():
    assert json_schema(trajectory_that("3", schema={"const": 3}))["reward"] == 1.0
    assert json_schema(trajectory_that("true", schema='{"const": 1}'))["reward"] == 0.0


def test_a_recursive_schema_follows_a_completion_as_deep_as_it_goes():
    tree = {"type": "array", "items": {"$ref": "#"}}
    assert json_schema(trajectory_that("[[], [[]]]"), schema=tree)["reward"] == 1.0
    assert json_schema(trajectory_that("[" * 900 + "]" * 900), schema=tree)["reward"] == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: json_schema(t), "'train-3' has no JSON schema, got None"),
        (lambda t: json_schema(t, schema={"oneOf": []}), r"not valid at \$\.oneOf: \[\] should be non-empty"),
        (lambda t: json_schema(t, schema={"type": "text"}), r"not valid at \$\.type: 'text'"),
        (lambda t: json_schema(t, schema={"$ref": "#/nowhere"}), r"\$ref to '.*nowhere'"),
        (lambda t: json_schema(t, schema={"$ref": "http://127.0.0.1:9/x"}), r"\$ref to 'http://127.0.0.1:9/x'"),
        (lambda t: regex_match(t, pattern="("), "not a regular expression"),
        (lambda t: repetition_penalty(t, ngram_words=0), "ngram_words must be >= 1, got 0"),
        (lambda t: overlong_penalty(t, max_tokens=4, buffer_tokens=5), "buffer_tokens=5 .* at most the length limit"),
        (lambda t: OverlongPenalty(0), "buffer_tokens in the overlong penalty must be >= 1, got 0"),
        (lambda t: OverlongPenalty(4, factor=-1.0), "factor in the overlong penalty must be >= 0, got -1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(trajectory_that("1"))
