"""Which prompts are shared, by hand; that sharing is exact is tested with the other forms in test_single.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightrl.experience import Experience
from lightrl.strategies.shared_prefix import SharedPrompt, find_shared_prompts, sharing_costs


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
    found = find_shared_prompts(experience((0, [3, 4, 5], [2]), (0, [3, 4, 6, 7], [2, 3])))
    assert found == [SharedPrompt(num_tokens=2, first_rows=[0], rows=[0, 1], prompt_of_row=[0, 0])]


def test_prompts_of_one_length_are_one_part_and_others_another() -> None:
    rows = [(0, [3, 4, 5], [2]), (1, [8, 5], [1]), (2, [6, 7, 5], [2]), (0, [3, 4, 9], [2])]
    assert find_shared_prompts(experience(*rows)) == [
        SharedPrompt(num_tokens=1, first_rows=[1], rows=[1], prompt_of_row=[0]),
        SharedPrompt(num_tokens=2, first_rows=[0, 2], rows=[0, 2, 3], prompt_of_row=[0, 1, 0]),
    ]


def test_equal_prompts_of_different_groups_are_told_apart() -> None:
    (part,) = find_shared_prompts(experience((0, [3, 4, 5], [2]), (1, [3, 4, 5], [2])))
    assert part.first_rows == [0, 1]


def test_a_group_whose_prompts_differ_shares_what_is_equal() -> None:
    (part,) = find_shared_prompts(experience((0, [3, 4, 5], [2]), (0, [3, 9, 5], [2]), (0, [3, 9, 6], [2])))
    assert part.prompt_of_row == [0, 1, 1]


def test_the_prompt_of_several_turns_ends_before_the_first_loss_token() -> None:
    (part,) = find_shared_prompts(experience((0, [3, 4, 5, 8, 6], [2, 4])))
    assert part.num_tokens == 2


def test_rows_that_train_nothing_count_as_prompts_less_their_last_token() -> None:
    found = find_shared_prompts(experience((0, [3, 4, 5], []), (0, [3], [])))
    assert [(part.num_tokens, part.rows) for part in found] == [(1, [1]), (2, [0])]


def test_costs_count_each_prompt_once_and_each_call() -> None:
    # Two trajectories of 10 tokens, 6 of them a shared prompt; the last token predicts nothing.
    rows = [(0, [3] * 6 + [4] * 4, range(6, 10)), (0, [3] * 6 + [5] * 4, range(6, 10))]
    shared = find_shared_prompts(experience(*rows))
    # Shared: a call over 6, a call over 2 x 3. Plain: a call over 2 x 9.
    assert sharing_costs(shared, [10, 10], overhead_tokens=1) == (6 + 1 + 6 + 1, 18 + 1)


def test_a_completion_of_one_token_costs_no_second_call() -> None:
    shared = find_shared_prompts(experience((0, [3, 4, 5], [2]), (0, [3, 4, 6], [2])))
    assert sharing_costs(shared, [3, 3], overhead_tokens=10) == (2 + 10, 4 + 10)
