"""Which prompts share what, by hand; that sharing is exact is tested with the other forms in test_single.py."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_experience, tiny_model
from torch.testing import assert_close

from lightrl.experience import Experience
from lightrl.functional import predicting_positions
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.strategies.layouts import shared_prefix
from lightrl.strategies.layouts.shared_prefix import (
    LAYOUTS,
    Row,
    find_shared_prompts,
    packed,
    shared_hidden,
    shared_rows,
)


def experience(*rows: tuple[int, Sequence[int], Sequence[int]]) -> Experience:
    """Rows of (group, token ids, places in the loss mask)."""
    num, width = len(rows), max(len(token_ids) for _, token_ids, _ in rows)
    token_ids, loss_mask = torch.zeros(num, width, dtype=torch.int64), torch.zeros(num, width, dtype=torch.bool)
    for row, (_, ids, trained) in enumerate(rows):
        token_ids[row, : len(ids)] = torch.tensor(ids)
        loss_mask[row, list(trained)] = True
    return Experience(
        token_ids=token_ids,
        loss_mask=loss_mask,
        behavior_logprobs=torch.zeros(num, width),
        weight_versions=torch.where(loss_mask, 0, -1),
        rewards=torch.zeros(num),
        group_ids=torch.tensor([group for group, _, _ in rows]),
        is_truncated=torch.zeros(num, dtype=torch.bool),
        lengths=torch.tensor([len(ids) for _, ids, _ in rows]),
    )


def test_a_group_shares_its_prompt() -> None:
    prompts = find_shared_prompts(experience((0, [3, 4, 5], [2]), (0, [3, 4, 6, 7], [2, 3])))
    assert prompts == [Row(num_prompt_tokens=2, members=[0, 1], sizes=[0, 1])]


def test_equal_prompts_of_different_groups_are_kept_apart() -> None:
    assert len(find_shared_prompts(experience((0, [3, 4, 5], [2]), (1, [3, 4, 5], [2])))) == 2


def test_a_group_whose_prompts_differ_shares_what_is_equal() -> None:
    prompts = find_shared_prompts(experience((0, [3, 4, 5], [2]), (0, [3, 9, 5], [2]), (0, [3, 9, 6], [2])))
    assert [prompt.members for prompt in prompts] == [[0], [1, 2]]


def test_the_prompt_of_several_turns_ends_before_the_first_loss_token() -> None:
    assert find_shared_prompts(experience((0, [3, 4, 5, 8, 6], [2, 4]))) == [Row(2, [0], [2])]


def test_a_packed_row_has_a_prompt_once_before_its_completions() -> None:
    layout = packed([Row(2, [0, 1], [1, 2])], (2, 5))
    assert (layout.rows.tolist(), layout.columns.tolist()) == ([0, 0, 0, 1, 1], [0, 1, 2, 2, 3])
    assert (layout.lengths, layout.prompts) == ([2, 1, 2], [-1, 0, 0])
    assert layout.flat_indices.tolist() == [[0, 1, 2, -1, -1], [-1, 1, 3, 4, -1]]


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 150))
def test_every_completion_is_in_one_row_which_is_short_where_it_can_be(sizes: list[int], num_prompt: int) -> None:
    rows = [row for part in shared_rows([Row(num_prompt, list(range(len(sizes))), sizes)]) for row in part]
    assert sorted(member for row in rows for member in row.members) == list(range(len(sizes)))
    for row in rows:
        assert row.sizes == [sizes[member] for member in row.members]
        assert row.num_tokens == num_prompt + sum(row.sizes)
        assert row.num_tokens <= shared_prefix.MAX_ROW_TOKENS or len(row.members) == 1


@pytest.mark.parametrize("overhead_tokens", [0, 256])
@pytest.mark.parametrize("max_tokens", [1, 8, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hidden_states_do_not_depend_on_the_rows(layout, max_tokens, overhead_tokens, monkeypatch):
    monkeypatch.setattr(shared_prefix, "MAX_ROW_TOKENS", max_tokens)
    monkeypatch.setattr(shared_prefix, "CALL_OVERHEAD_TOKENS", overhead_tokens)
    model, made = tiny_model(), random_experience(num_groups=4)
    plan = LAYOUTS[layout](find_shared_prompts(made))
    whole = model.base_model(input_ids=made.token_ids, use_cache=False).last_hidden_state
    places: list[list[int]] = []
    at = predicting_positions(made.loss_mask)
    for rows, columns, hidden in shared_hidden(model, made.token_ids, at, plan, lambda _, ids: {"input_ids": ids}):
        assert_close(hidden, whole[rows, columns])
        places += torch.stack([rows, columns], 1).tolist()
    assert sorted(places) == torch.stack(at, 1).tolist()


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"), [(8, 4, "shared_rows"), (600, 100, "shared_keys"), (2, 600, "rectangles")]
)
def test_the_cheapest_form_is_taken(prompt: int, completion: int, expected: str) -> None:
    """Four samples of each of four prompts; rows of a mask are short, and a prompt of two tokens is worth no call."""
    trained = range(prompt, prompt + completion)
    rows = [(group, [group] * (prompt + completion), trained) for group in range(4) for _ in range(4)]
    form, _ = SingleModel(tiny_model(), LogprobSettings()).choose(experience(*rows))
    assert form == expected
