import copy
import gc
import json
import pickle
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny import random_trajectories

from lightrl.columns import TokenArray, as_columns
from lightrl.testing import make_trajectory
from lightrl.trajectory import Group, Prompt, Sampling, Trajectory, Turn, encode_json, sampling_seed, split_thinking


def rich_trajectory() -> Trajectory:
    """Every field is set; text that UTF-8 cannot hold; a call's output for each token."""
    trajectory = random_trajectories(num_groups=1, num_turns=2)[0]
    num = len(trajectory.token_ids)
    trajectory.prompt = replace(trajectory.prompt, fields={"answer": "½ \ud83d", "nested": [1, None]})
    trajectory.turns = [Turn(2, 5), Turn(7, 9, "length")]
    gaps = [0] * (num - 2) + [3, 0]
    trajectory.columns = as_columns({"supports": [200, 1, 0] * num, "routes": [3, 255] * num, "gaps": gaps})
    trajectory.rewards = [0.5] * num
    trajectory.metrics = {"accuracy": np.float32(0.5)}  # type: ignore[dict-item]  # as a reward may return it
    trajectory.call_outputs = {"score": 0.25, "logprobs": np.arange(num, dtype=np.float32)}
    return trajectory


def test_a_trajectory_survives_both_encodings() -> None:
    for trajectory in [rich_trajectory(), *random_trajectories(num_groups=1)]:
        lines = encode_json(trajectory)
        assert json.loads(lines) == trajectory.to_json()
        copies = [Trajectory.from_json(json.loads(lines)), Trajectory.from_bytes(trajectory.to_bytes())]
        copies.append(Trajectory.from_text(trajectory.to_text()))
        for made in copies:
            assert made == trajectory
            assert vars(made).keys() == vars(trajectory).keys()
            assert all(type(vars(made)[name]) is type(value) for name, value in vars(trajectory).items())
            is_shared = [isinstance(item.completion_ids._values, memoryview) for item in (made, trajectory)]
            assert is_shared[0] == is_shared[1]


def test_bytes_may_lack_the_prompt_supports_and_routes() -> None:
    trajectory = rich_trajectory()
    data = trajectory.to_bytes(b"", for_training=False)
    other = Prompt("other", token_ids=[1])
    made = Trajectory.from_bytes(data, other)
    assert made.prompt is other
    assert made.columns.keys() == {"rewards", "gaps"}
    assert made.token_ids == trajectory.token_ids
    assert Trajectory.from_bytes(trajectory.to_bytes(encode_json(other))).prompt == other


def test_what_json_cannot_hold_is_named() -> None:
    trajectory = rich_trajectory()
    trajectory.metrics = {"found": {1, 2}}  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"it contains \{1, 2\} \(set\)"):
        trajectory.to_bytes()


def test_a_copy_with_lists_makes_them_when_they_are_read_and_can_be_copied() -> None:
    trajectory = rich_trajectory()
    seen = trajectory.with_lists()
    assert not {"token_ids", "loss_mask", "columns"} & vars(seen).keys()
    assert type(seen.token_ids) is type(seen.rewards) is type(seen.loss_mask) is list
    assert seen.columns.keys() == {"rewards", "gaps"}
    seen.token_ids = seen.token_ids[:1]
    assert (type(seen.token_ids), len(trajectory.token_ids) > 1) == (list, True)
    seen = trajectory.with_lists()
    trajectory.columns = {name: trajectory.columns[name] for name in ("rewards", "gaps")}
    assert replace(seen, completion="x").token_ids == trajectory.token_ids
    assert pickle.loads(pickle.dumps(seen)) == copy.deepcopy(seen) == trajectory


def test_lists_that_user_code_puts_into_columns_are_encoded() -> None:
    trajectory = rich_trajectory()
    rewards = [0.5] * len(trajectory.token_ids)
    trajectory.columns["rewards"] = rewards
    assert Trajectory.from_bytes(trajectory.to_bytes()).rewards == trajectory.with_lists().rewards == rewards


def test_a_line_with_a_column_that_nobody_registered_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"neither a field nor a registered column.*import the module"):
        Trajectory.from_json({**rich_trajectory().to_json(), "doubts": [0.5]})


def test_rows_are_the_paths_of_a_tree() -> None:
    trajectory = rich_trajectory()
    num = len(trajectory.token_ids)
    for copied in (trajectory, trajectory.with_lists(), Trajectory.from_bytes(trajectory.to_bytes())):
        assert copied.rows == [[(0, num - 2)], [(0, num - 5), (num - 2, num)]]
        assert copied.first_branch == num - 2
    linear = replace(trajectory, columns={})
    assert (linear.rows, linear.first_branch) == ([[(0, num)]], num)


def test_a_group_survives_a_checkpoint_and_shares_its_prompt_again() -> None:
    trajectories = random_trajectories(num_groups=1)
    trajectories[1].rewards = [0.5] * len(trajectories[1].token_ids)
    trajectories[2].columns = as_columns({"supports": [200, 1, 0] * len(trajectories[2].token_ids)})
    group = Group(id=3, prompt=trajectories[0].prompt, trajectories=trajectories)
    trajectories[2].prompt = Prompt("other", token_ids=[1])
    restored = Group.from_state(json.loads(json.dumps(group.state_dict())))
    assert restored == group
    assert [item.prompt is restored.prompt for item in restored.trajectories[:3]] == [True, True, False]


def test_versions_are_those_of_the_tokens_that_the_policy_wrote() -> None:
    trajectory = random_trajectories(completion_tokens=(3, 3), prompt_tokens=(2, 2))[0]
    trajectory.weight_versions = [-1, -1, 4, 4, 6]
    assert (trajectory.oldest_version, trajectory.newest_version) == (4, 6)
    trajectory.weight_versions = [-1] * 5
    assert (trajectory.oldest_version, trajectory.newest_version) == (-1, -1)


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    first, second, third = random_trajectories(num_groups=1, completion_tokens=(1, 1), prompt_tokens=(1, 1))
    first.weight_versions, second.weight_versions, third.weight_versions = [-1, 7], [-1, 5], [-1, -1]
    assert Group(id=0, prompt=first.prompt, trajectories=[first, second, third]).oldest_version == 5
    assert Group(id=0, prompt=first.prompt).oldest_version == -1


def test_a_prompt_needs_messages_or_tokens() -> None:
    with pytest.raises(ValueError, match="Prompt 'empty' needs messages or token_ids"):
        Prompt(id="empty")


@pytest.mark.parametrize(
    "settings",
    [
        *[{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": 0}, {"top_k": 4001}, {"max_new_tokens": 0}],
        *[{"min_new_tokens": -1}, {"min_new_tokens": 9, "max_new_tokens": 8}],
    ],
    ids=str,
)
def test_sampling_out_of_range_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))} must be .*got {next(iter(settings.values()))}"):
        Sampling(**settings)


def test_a_truncated_draw_is_bounded_in_what_it_chooses_from() -> None:
    assert not Sampling(temperature=0, top_p=0.9, top_k=5).is_truncated
    assert Sampling().max_support == -1
    assert Sampling(top_p=0.9).max_support == 4000
    assert Sampling(grammar="{}").max_support == 64
    assert [Sampling(top_k=5, **settings).max_support for settings in ({"top_p": 0.9}, {"grammar": "{}"})] == [5, 5]


def test_another_seed_changes_nothing_else() -> None:
    sampling = Sampling(temperature=0.5, top_k=3, stop_token_ids=(7,), seed=1)
    assert sampling.with_seed(9) == replace(sampling, seed=9)
    assert sampling.seed == 1


def test_seeds_differ_by_each_of_their_parts_and_are_the_same_on_every_machine() -> None:
    seeds = {
        sampling_seed(run, prompt, sample, turn)
        for run in (0, 1)
        for prompt in "ab"
        for sample in (0, 1)
        for turn in (0, 1)
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)
    code = "from lightrl.trajectory import sampling_seed; print(sampling_seed(1, 'b', 2, 3))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) == sampling_seed(1, "b", 2, 3)


CODES = {"i": "int32", "f": "float32", "d": "float64", "?": "bool", "B": "uint8"}
NUMBERS: dict[str, list[float]] = {
    "i": [5, 5, -(2**31), 2**31 - 1], "f": [0.5, 0.1], "d": [0.1], "?": [True, False], "B": [0, 255],
}  # fmt: skip


@pytest.mark.parametrize("as_runs", [False, True], ids=["each number", "runs"])
@pytest.mark.parametrize("code", CODES, ids=CODES.values())
def test_an_array_reads_like_the_list_it_was_made_of(code: str, as_runs: bool) -> None:
    source = np.repeat(np.array(NUMBERS[code], CODES[code]), 9)
    numbers = source.tolist()
    arrays: list[TokenArray[float]] = [TokenArray(values, code, as_runs=as_runs) for values in (numbers, source)]
    arrays.append(TokenArray.of_runs(arrays[0].runs(), code))
    arrays += [pickle.loads(pickle.dumps(arrays[0])), copy.deepcopy(arrays[0])]
    arrays.append(TokenArray.of_text(arrays[0].text, code))
    arrays.append(TokenArray.joined([numbers[:4], arrays[0][4:]], code, as_runs=as_runs))
    for array in arrays:
        assert array == numbers == list(array) == array.tolist()
        assert [type(number) for number in array] == [type(number) for number in numbers]
        assert [array[place] for place in range(-len(numbers), len(numbers))] == numbers * 2
        assert (array[2:5], array[::-2], array[5:2]) == (numbers[2:5], numbers[::-2], [])
        assert ([*array, 1], array + [1], [1] + array) == ([*numbers, 1], numbers + [1], [1] + numbers)  # noqa: RUF005
        assert (repr(array), bool(array), sum(array), max(array)) == (repr(numbers), True, sum(numbers), max(numbers))
        assert array != [*numbers, 1]
        assert array != tuple(numbers)
        assert (len({array, arrays[0]}), array.index(numbers[-1])) == (1, numbers.index(numbers[-1]))
        assert np.asarray(array).dtype == CODES[code]
        assert np.asarray(array).tolist() == numbers
        with pytest.raises(IndexError):
            array[len(numbers)]
    assert not TokenArray([], code, as_runs=as_runs)


def test_only_equal_neighbours_are_stored_as_runs() -> None:
    assert TokenArray([True] * 1000 + [False] * 24, "?", as_runs=True).nbytes == 10
    assert TokenArray([True, False] * 512, "?", as_runs=True).nbytes == 1024
    assert TokenArray.of_runs([(1, 3), (1, 2), (0, 0), (2, 1)], "i").runs() == [(1, 5), (2, 1)]


@pytest.mark.parametrize(
    ("name", "values"),
    [("token_ids", [2**31]), ("token_ids", [0.5]), ("weight_versions", ["a"]), ("behavior_logprobs", [None])],
    ids=["an id too large", "half an id", "text", "nothing"],
)
def test_a_number_that_does_not_fit_is_refused_by_the_name_of_its_field(name: str, values: list[Any]) -> None:
    trajectory = random_trajectories()[0]
    with pytest.raises(ValueError, match=f"^{name} must be numbers of type (int32|float32), one for each token: "):
        replace(trajectory, **{name: values})


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 x 7?"}]}, "6 x 7?"),
        ({"messages": [{"content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]}, "How many?"),
        ({"token_ids": [1, 3]}, "AC"),
    ],
    ids=["message", "parts", "token ids"],
)
def test_the_text_of_a_prompt_is_its_last_message_or_its_tokens(asked: dict[str, Any], text: str) -> None:
    prompt = Prompt("a", **asked)
    assert prompt.text(lambda token_ids: "".join(chr(64 + id_) for id_ in token_ids)) == text
    assert prompt.text(None) == (text if prompt.messages else "1 3")


@pytest.mark.parametrize("as_runs", [False, True])
@pytest.mark.parametrize(("last", "is_end"), [([7, 9], False), ([9, 9], True), ([7] + [9] * 20, True), ([], False)])
def test_the_last_turn_is_a_view_if_it_ends_the_trajectory(last: list[int], is_end: bool, as_runs: bool) -> None:
    token_ids: TokenArray[int] = TokenArray([1, 7] + [9] * 20, "i", as_runs=as_runs)
    assert bool(token_ids.stored[1]) == as_runs
    prompt = Prompt("a", token_ids=[1])
    item = Trajectory(prompt, 0, 0, token_ids, [False] * 22, [0.0] * 22, [-1] * 22, last, "")
    assert item.completion_ids == last
    assert isinstance(item.completion_ids, TokenArray)
    assert isinstance(item.completion_ids.stored[0], bytes)
    assert isinstance(item.completion_ids._values, memoryview) == is_end


@pytest.mark.parametrize(("num_tokens", "most"), [(30_000, 8.1), (50, 60)])
def test_a_token_takes_eight_bytes_in_memory(num_tokens: int, most: float) -> None:
    """Of a group of two, all objects counted; 93 bytes with lists. In a short one the objects dominate."""
    draw = np.random.default_rng(0)

    def group() -> Group:
        prompt, written = Prompt("a", token_ids=[1] * 10), num_tokens - 10
        items = []
        for sample in range(2):
            token_ids = [1] * 10 + draw.integers(150_000, size=written).tolist()
            items.append(
                Trajectory(
                    prompt, 0, sample, token_ids, [False] * 10 + [True] * written,
                    [0.0] * 10 + (-draw.random(written)).tolist(), [-1] * 10 + [300] * (written - 5) + [301] * 5,
                    token_ids[10:], "", columns={"rewards": [0.0] * (num_tokens - 1) + [1.0]},
                    turns=[Turn(10, num_tokens)],
                )
            )  # fmt: skip
        return Group(0, prompt, items)

    group()
    tracemalloc.start()
    try:
        held = group()
        gc.collect()
        bytes_per_token = tracemalloc.get_traced_memory()[0] / (2 * num_tokens)
    finally:
        tracemalloc.stop()
    assert len(held.trajectories) == 2
    assert bytes_per_token <= most


def test_records_need_neither_torch_nor_numpy() -> None:
    code = "import sys, lightrl.trajectory; print(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        pytest.param("no thought", "", "no thought", id="none"),
        pytest.param("<think>a</think>b", "a", "b", id="at the start"),
        pytest.param("a</think>\n\nb", "a", "b", id="opened by the prompt"),
        pytest.param("<think>a</think>b<think>c</think>d", "a\nc", "bd", id="twice"),
        pytest.param("<think>never ends", "never ends", "", id="open"),
        pytest.param(
            'a<tool_call>"<think>"</tool_call>', "", 'a<tool_call>"<think>"</tool_call>', id="quoted by a call"
        ),
        *[
            pytest.param(f"{opens}\na\n{closes}\n\nb", "a", "b", id=opens)
            for opens, closes in [
                *[("<thinking>", "</thinking>"), ("<reasoning>", "</reasoning>"), ("[THINK]", "[/THINK]")],
                *[("<seed:think>", "</seed:think>"), ("<|channel>thought", "<channel|>"), ("◁think▷", "◁/think▷")],
            ]
        ],
        pytest.param("a[/THINK]b", "a", "b", id="Mistral's, opened by the prompt"),
        pytest.param("<|channel|>analysis<|message|>a", "a", "", id="of gpt-oss, open"),
        pytest.param(
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>{}",
            *("a", "{}"),
            id="of gpt-oss",
        ),
        pytest.param('<think>say "yes"</think>yes', 'say "yes"', "yes", id="ends in a quotation"),
        pytest.param('{"tag": "<think>"}', "", '{"tag": "<think>"}', id="quoted"),
        pytest.param("`</think>` ends it", "", "`</think>` ends it", id="an end that is quoted"),
        pytest.param("<think>a</think>```\nx = <think>\n```", "a", "```\nx = <think>\n```", id="after a fence"),
        pytest.param("<think>a</think>\n```\n<think>\n```", "a", "```\n<think>\n```", id="in a fence"),
        pytest.param("<think>\n```\na</think>b", "```\na", "b", id="a fence that the thinking leaves open"),
    ],
)
def test_thinking_is_told_from_the_answer(text: str, thinking: str, answer: str):
    trajectory = make_trajectory(text)
    assert (trajectory.thinking, trajectory.answer) == split_thinking(text) == (thinking, answer)


@pytest.mark.parametrize(
    ("text", "thinking", "rest"),
    [
        ("<think>a</think>\n<think>b</think>c<think>d</think>", "a\nb", "c<think>d</think>"),
        ("a</think>b", "", "a</think>b"),
        ("[THINK]a[/THINK] b", "a", "b"),
        ("<think>never ends", "never ends", ""),
    ],
    ids=["twice, then quoted", "a tag of no thinking", "Mistral's", "open"],
)
def test_with_what_the_prompt_opened_thinking_is_at_the_start(text: str, thinking: str, rest: str):
    assert split_thinking(text, has_opening=True) == (thinking, rest)
