"""Which completions share a row, by hand; that it is exact is tested with the other forms in test_single.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_experience, tiny_model
from torch.testing import assert_close

from lightrl.experience import Experience
from lightrl.strategies import LogprobSettings, SingleModel, bundles
from lightrl.strategies.bundles import Bundle, bundled_hidden, find_bundles, mask_of
from lightrl.strategies.shared_prefix import SharedPrompt, find_shared_prompts


def group_of(*lengths: int, prompt: int = 2) -> SharedPrompt:
    return SharedPrompt(prompt, first_rows=[0], rows=list(range(len(lengths))), prompt_of_row=[0] * len(lengths))


def test_completions_share_a_row_without_their_last_token() -> None:
    assert find_bundles([group_of(5, 4)], [5, 4]) == [Bundle(0, 2, [0, 1], num_tokens=2 + 2 + 1)]


@settings(deadline=None, max_examples=50, derandomize=True)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 150))
def test_every_completion_is_in_one_row_which_is_short_where_it_can_be(rests: list[int], num_prompt: int) -> None:
    lengths = [num_prompt + rest + 1 for rest in rests]
    rows = find_bundles([group_of(*lengths, prompt=num_prompt)], lengths)
    assert sorted(member for row in rows for member in row.members) == list(range(len(rests)))
    for row in rows:
        assert row.num_tokens == num_prompt + sum(rests[member] for member in row.members)
        assert row.num_tokens <= bundles.MAX_TOKENS or len(row.members) == 1


def test_a_completion_sees_the_prompt_and_what_precedes_in_itself() -> None:
    mask = mask_of(torch.tensor([[0, 0, 1, 1, 2, -1]]), torch.float32)
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],  # padding sees something, since a softmax over nothing is NaN
    ]


@pytest.mark.parametrize("max_tokens", [1, 8, 128])
def test_hidden_states_do_not_depend_on_how_completions_are_bundled(
    max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "MAX_TOKENS", max_tokens)
    model, experience = tiny_model(), random_experience(num_groups=4)
    rows = find_bundles(find_shared_prompts(experience), experience.lengths.tolist())
    assert len(rows) >= 4
    whole = model.base_model(input_ids=experience.token_ids, use_cache=False).last_hidden_state
    found = 0
    for at, columns, hidden in bundled_hidden(model, experience, rows, overhead_tokens=0):
        assert_close(hidden, whole[at, columns])
        found += len(at)
    assert found == int(experience.loss_mask[:, 1:].sum())


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"), [(8, 4, "bundles"), (600, 100, "shared_prefix"), (2, 600, "rectangles")]
)
def test_the_cheapest_form_is_taken(prompt: int, completion: int, expected: str) -> None:
    """Four samples of each of four prompts; rows of a mask are short, and a prompt of two tokens is worth no call."""
    num, width = 16, prompt + completion
    loss_mask = torch.zeros(num, width, dtype=torch.bool)
    loss_mask[:, prompt:] = True
    group_ids = torch.arange(4).repeat_interleave(4)
    experience = Experience(
        token_ids=group_ids[:, None].expand(num, width).clone(),
        loss_mask=loss_mask,
        behavior_logprobs=torch.zeros(num, width),
        weight_versions=torch.where(loss_mask, 0, -1),
        rewards=torch.zeros(num),
        group_ids=group_ids,
        is_truncated=torch.zeros(num, dtype=torch.bool),
        lengths=torch.full((num,), width),
    )
    form, _, _ = SingleModel(tiny_model(), LogprobSettings())._choose(experience)
    assert form == expected


def test_pictures_are_refused_by_the_form_that_would_leave_them_out() -> None:
    experience = random_experience()
    shown = experience.with_tensors(
        {"pixel_values": torch.zeros(1, 3, 2, 2), "image_rows": torch.zeros(len(experience), 1, dtype=torch.int64)}
    )
    with pytest.raises(ValueError, match=r"form='bundles' takes no pictures"):
        next(iter(SingleModel(tiny_model(), LogprobSettings(), form="bundles").forward([shown])))
