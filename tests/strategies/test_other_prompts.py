"""A model that reads other prompts than the policy, compared with trajectories that have these prompts."""

from typing import Any

import numpy as np
import pytest
import torch

from lightrl.columns import EVERY_TOKEN
from lightrl.functional import encode_supports
from lightrl.strategies import Ranks, ShardedExperience
from lightrl.strategies.sharded_experience import TokenRows
from lightrl.strategies.sharded_experience.other_prompts import SAME, OtherPrompts
from lightrl.trajectory import Prompt, Trajectory

ANSWERS = ([7, 5, 1], [6, 1], [5, 5, 5, 1])


def made(prompt: list[int], answer: list[int], **columns: Any) -> Trajectory:
    num = len(prompt)
    ids = np.array([[0, token] for token in answer])  # two tokens could be sampled
    codes = encode_supports(np.arange(len(answer)).repeat(2), ids.ravel(), ids[:, 1], 9)
    return Trajectory(
        Prompt("p", token_ids=prompt),
        group_id=0,
        sample=0,
        token_ids=[*prompt, *answer],
        loss_mask=[False] * num + [True] * len(answer),
        behavior_logprobs=[0.0] * num + [-1.0] * len(answer),
        weight_versions=[-1] * num + [0] * len(answer),
        completion_ids=answer,
        completion="",
        reward=1.0,
        columns={"supports": list(EVERY_TOKEN * num + b"".join(codes)), **columns},
    )


def test_the_model_reads_what_a_trajectory_with_its_prompt_would_hold() -> None:
    """The second row is not read, the third with the policy's own prompt."""
    experience = ShardedExperience.from_trajectories([made([2, 3], answer) for answer in ANSWERS])
    others = OtherPrompts.share(lambda items: [[4, 8, 2, 3], None, SAME], [made([2, 3], a) for a in ANSWERS], Ranks())
    expected = ShardedExperience.from_trajectories([made([4, 8, 2, 3], ANSWERS[0]), made([2, 3], ANSWERS[2])])
    actual, wanted = others.read(experience).dense().tensors(), expected.rollout_part().dense().tensors()
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(actual[name], value), name

    outputs = {
        "teacher_logprobs": TokenRows([np.arange(7, dtype=np.float32), np.arange(6, dtype=np.float32)], np.zeros(0))
    }
    rows = others.completed(outputs, experience, ("teacher_logprobs",), 0)["teacher_logprobs"].rows
    assert [row.tolist() for row in rows] == [[0, 0, 4, 5, 6], [0] * 4, [0, 1, 2, 3, 4, 5]]


def test_a_later_call_keeps_what_an_earlier_one_computed_for_other_rows() -> None:
    items = [made([2, 3], answer) for answer in ANSWERS[:2]]
    experience = ShardedExperience.from_trajectories(items)
    first = OtherPrompts.share(lambda items: [SAME, None], items, Ranks())
    ones = {"teacher_logprobs": TokenRows([np.ones(5, np.float32)], np.zeros(0, np.float32))}
    names = ("teacher_logprobs", "teacher_topk_ids")
    experience = experience.with_tensors(first.completed(ones, experience, names, 2))
    second = OtherPrompts.share(lambda items: [None, None], items, Ranks())
    rows = second.completed({}, experience, names, 2)
    assert [row.tolist() for row in rows["teacher_logprobs"].rows] == [[1] * 5, [0] * 4]
    assert [row.shape for row in rows["teacher_topk_ids"].rows] == [(5, 2), (4, 2)]


def test_a_trajectory_of_several_conversations_gets_no_other_prompt() -> None:
    tree = [made([2, 3], ANSWERS[0], gaps=[0, 0, 0, 3, 0])]
    assert OtherPrompts.share(lambda items: [SAME], tree, Ranks()).rows == [0]
    with pytest.raises(ValueError, match="has several conversations"):
        OtherPrompts.share(lambda items: [[4]], tree, Ranks())
