import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import random_experience

from lightrl.experience import Experience
from lightrl.trajectory import Prompt, Trajectory


def trajectory(**changes: Any) -> Trajectory:
    fields = {
        "prompt": Prompt(id="sum-1", token_ids=[5, 6]), "group_id": 12, "sample": 0, "token_ids": [5, 6, 7, 1],
        "loss_mask": [False, False, True, True], "behavior_logprobs": [0.0, 0.0, -1.5, -0.25],
        "weight_versions": [-1, -1, 4, 5], "completion_ids": [7, 1], "completion": "7", "reward": 1.0,
    }  # fmt: skip
    return Trajectory(**{**fields, **changes})


def test_rows_are_padded_on_the_right_with_what_means_nothing() -> None:
    short = trajectory(
        token_ids=[5, 7], loss_mask=[False, True], behavior_logprobs=[0.0, -1.0], weight_versions=[-1, 3], reward=0.0,
        group_id=13, is_truncated=True,
    )  # fmt: skip
    experience = Experience.from_trajectories([trajectory(), short])
    assert experience.token_ids.tolist() == [[5, 6, 7, 1], [5, 7, 0, 0]]
    assert experience.loss_mask.tolist() == [[False, False, True, True], [False, True, False, False]]
    assert experience.behavior_logprobs.tolist() == [[0.0, 0.0, -1.5, -0.25], [0.0, -1.0, 0.0, 0.0]]
    assert experience.weight_versions.tolist() == [[-1, -1, 4, 5], [-1, 3, -1, -1]]
    assert experience.rewards.tolist() == [1.0, 0.0]
    assert experience.group_ids.tolist() == [12, 13]
    assert experience.is_truncated.tolist() == [False, True]
    assert experience.lengths.tolist() == [4, 2]
    assert experience.token_rewards is None
    assert experience.num_loss_tokens == 3


def test_a_reward_of_the_whole_goes_to_the_last_loss_token_where_others_have_one_per_token() -> None:
    per_token = trajectory(columns={"rewards": [0.0, 0.0, 0.5, 0.25]}, reward=0.75)
    whole = trajectory(loss_mask=[False, True, True, False], reward=2.0)
    experience = Experience.from_trajectories([per_token, whole])
    assert experience.token_rewards.tolist() == [[0.0, 0.0, 0.5, 0.25], [0.0, 0.0, 2.0, 0.0]]


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        ([], "This iteration has no trajectories"),
        ([trajectory(reward=None)], "prompt 'sum-1' has no reward"),
        (
            [trajectory(loss_mask=[False, True])],
            r"'sum-1' needs one entry of loss_mask for each of its 4 token_ids, got 2",
        ),
        (
            [trajectory(columns={"rewards": [1.0]})],
            r"'sum-1' needs one entry of rewards for each of its 4 token_ids, got 1",
        ),
        ([trajectory(loss_mask=[True] * 4)], "trains on its first token, which nothing predicts"),
    ],
    ids=["none", "unrewarded", "short mask", "short rewards", "no prompt"],
)
def test_trajectories_that_cannot_train_are_refused(trajectories: list[Trajectory], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Experience.from_trajectories(trajectories)


def test_a_field_of_another_shape_is_refused() -> None:
    experience = random_experience()
    with pytest.raises(ValueError, match=r"advantages must have shape \(9, .* got \(9, 2\)\. Align it"):
        replace(experience, advantages=torch.zeros(9, 2))


def test_selected_rows_come_in_the_order_asked_for_and_cut_to_the_longest() -> None:
    experience = random_experience()
    rows = experience.lengths.argsort()[:3].flip(0)
    picked = experience.select(rows)
    assert torch.equal(picked.lengths, experience.lengths[rows])
    assert picked.token_ids.shape == (3, int(picked.lengths.max()))
    assert torch.equal(picked.advantages, experience.advantages[rows, : picked.token_ids.shape[1]])


@pytest.mark.parametrize("max_tokens", [1, 12, 25, 60, 10**6])
def test_microbatches_keep_to_the_budget_and_lose_nothing(max_tokens: int) -> None:
    experience = random_experience(num_groups=5, completion_tokens=(1, 15))
    rows, parts = experience.microbatch_rows(max_tokens)
    assert sorted(row for part in rows for row in part) == list(range(len(experience)))
    for picked, part in zip(rows, parts, strict=True):
        assert len(part) == 1 or int(part.lengths.sum()) <= max_tokens
        one, other = part.tensors(), experience.select(picked).tensors()
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_microbatches_are_as_few_as_the_budget_allows_for_equal_lengths() -> None:
    experience = Experience.from_trajectories([trajectory() for _ in range(6)])
    assert [len(part) for part in experience.microbatch_rows(8)[1]] == [2, 2, 2]


def test_a_tensordict_gives_back_the_fields_that_are_set() -> None:
    pytest.importorskip("tensordict")
    experience = random_experience()
    tensors, found = experience.tensors(), pickle.loads(pickle.dumps(experience.to_tensordict()))
    assert set(found.keys()) == set(tensors)
    assert found.batch_size == (9,)
    assert all(torch.equal(found[[4, 1]][name], tensors[name][[4, 1]]) for name in tensors)


def with_extras() -> Experience:
    experience = random_experience()
    num, width = experience.token_ids.shape
    topk = experience.loss_mask[..., None] * torch.randn(num, width, 3)
    teacher = torch.where(experience.loss_mask, 1.0, 0.0)
    style = torch.arange(float(num))
    return experience.with_tensors({"style_rewards": style, "teacher_topk": topk, "teacher_logprobs": teacher})


def test_extras_travel_with_the_fields() -> None:
    experience = with_extras()
    picked = experience.select([4, 1])
    assert picked["style_rewards"].tolist() == [4.0, 1.0]
    assert torch.equal(picked["teacher_topk"], experience["teacher_topk"][[4, 1], : picked.token_ids.shape[1]])
    assert {value.device.type for value in experience.to("meta").tensors().values()} == {"meta"}


def test_a_key_is_read_by_its_name_whether_field_or_extra() -> None:
    experience = with_extras()
    assert experience["advantages"] is experience.advantages
    assert experience["style_rewards"] is experience.extras["style_rewards"]
    with pytest.raises(KeyError, match="Experience has no 'token_rewards'"):
        experience["token_rewards"]


def test_an_extra_may_neither_hide_a_field_nor_have_another_shape() -> None:
    experience = random_experience()
    with pytest.raises(ValueError, match="extras has the key 'values', which is a field"):
        replace(experience, extras={"values": experience.advantages})
    with pytest.raises(ValueError, match=r"style must have shape \(9,\), .* got \(4,\)"):
        experience.with_tensors({"style": torch.zeros(4)})


def in_pairs() -> Experience:
    """Four groups of four, apart from each other, with lengths from 2 to 20."""
    experience = random_experience(num_groups=4, group_size=4, completion_tokens=(1, 15))
    return experience.select([4 * (index % 4) + index // 4 for index in range(16)])


@pytest.mark.parametrize("unit", ["group", "pair"])
def test_microbatches_never_split_a_unit(unit: str) -> None:
    experience = replace(in_pairs(), rewards=torch.arange(16.0))
    partners = {row: set(rows) for rows in experience.units(unit) for row in rows}
    for max_tokens in (1, 40, 10**6):
        parts = experience.microbatch_rows(max_tokens, unit=unit)[1]
        found = [{int(row) for row in part.rewards} for part in parts]
        assert sorted(row for rows in found for row in rows) == list(range(16))
        assert all(partners[row] <= rows for rows in found for row in rows)


def test_microbatches_of_units_keep_to_the_budget() -> None:
    experience = in_pairs()
    longest = max(int(experience.lengths[rows].sum()) for rows in experience.units("pair"))
    parts = experience.microbatch_rows(longest, unit="pair")[1]
    assert sum(map(len, parts)) == len(experience)
    assert max(int(part.lengths.sum()) for part in parts) <= longest


def test_a_pair_is_two_rows_of_one_group_in_their_order() -> None:
    experience = replace(random_experience(num_groups=1, group_size=6), group_ids=torch.tensor([3, 3, 8, 3, 8, 3]))
    assert experience.units("pair") == [[0, 1], [2, 4], [3, 5]]
    assert experience.units("group") == [[0, 1, 3, 5], [2, 4]]


def test_an_odd_group_cannot_be_cut_into_pairs_and_an_unknown_unit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs an even number of trajectories per group, but group 0 has 3"):
        random_experience().units("pair")
    with pytest.raises(ValueError, match=r"loss_unit must be trajectory, group or pair, got 'token'"):
        random_experience().units("token")
