"""An iteration's Experience without padding; tests/trainer/test_layouts.py has it between ranks."""

import pytest
import torch
from tiny import random_experience, random_trajectories

from lightrl.columns import as_columns
from lightrl.experience import Experience
from lightrl.strategies import Microbatches, ShardedExperience


def assert_same(found: Experience, expected: Experience) -> None:
    left, right = found.tensors(), expected.tensors()
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name], right[name]), name


def test_it_reads_as_the_padded_experience() -> None:
    experience = random_experience(topk=3)
    sharded = ShardedExperience.of(experience)
    assert_same(sharded.local, experience)
    assert all(torch.equal(sharded[name], experience[name]) for name in experience.tensors())
    assert_same(sharded.dense([3, 1, 7]), experience.select([3, 1, 7]))
    assert torch.equal(sharded.loss_token_counts, experience.loss_token_counts)
    assert all(map(torch.equal, sharded.version_bounds, experience.version_bounds))


def test_routes_are_padded_and_unknown_where_a_trajectory_has_none() -> None:
    items = random_trajectories()[:3]
    items[0].columns = as_columns({"routes": [1, 2] * len(items[0].token_ids)})
    padded, sharded = Experience.from_trajectories(items), ShardedExperience.from_trajectories(items)
    assert_same(sharded.local, padded)
    assert padded.routes[0, : len(items[0].token_ids)].unique().tolist() == [1, 2]
    assert padded.routes[1:].unique().tolist() == [255]
    longer = sharded.rollout_part(torch.tensor([True, False, True])).dense()
    assert longer["routes"][0, len(items[0].token_ids)].tolist() == [255, 255]
    assert "routes" not in sharded.rollout_part(is_sampler=False).names()
    assert sharded.blank_row(torch.device("cpu"))["routes"].unique().tolist() == [255]
    items[1].columns = as_columns({"routes": [1] * len(items[1].token_ids)})
    with pytest.raises(ValueError, match=r"numbers of routes per token, \[1, 2\]"):
        Experience.from_trajectories(items)
    items[1].columns = as_columns({"routes": [1] * (len(items[1].token_ids) + 1)})
    with pytest.raises(ValueError, match="each token needs the same number"):
        Experience.from_trajectories(items)


def test_microbatches_are_made_when_they_are_read() -> None:
    experience = random_experience()
    made: list[list[int]] = []

    class Watched(Microbatches):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            made.append(list(self.rows[index]))
            return super().__getitem__(index)

    parts = iter(Watched(ShardedExperience.of(experience), [[0], [1, 2], [3]], torch.device("cpu")))
    assert_same(next(parts), experience.select([0]))
    assert made == [[0], [1, 2]]  # one ahead
    assert_same(next(parts), experience.select([1, 2]))
