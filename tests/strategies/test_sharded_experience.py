"""An iteration's Experience without padding; tests/trainer/test_layouts.py has it between ranks."""

import pytest
import torch
from tiny import random_experience

from lightrl.experience import Experience
from lightrl.strategies import Microbatches, ShardedExperience


def assert_same(found: Experience, expected: Experience) -> None:
    left, right = found.tensors(), expected.tensors()
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name], right[name]), name


def test_an_attribute_that_was_renamed_says_its_new_name() -> None:
    experience = random_experience()
    for shown in (experience, ShardedExperience.of(experience)):
        with pytest.raises(AttributeError, match="no attribute 'own': it is now called 'local'"):
            getattr(shown, "own")  # noqa: B009


def test_it_reads_as_the_padded_experience() -> None:
    experience = random_experience(topk=3)
    sharded = ShardedExperience.of(experience)
    assert_same(sharded.local, experience)
    assert all(torch.equal(sharded[name], experience[name]) for name in experience.tensors())
    assert_same(sharded.dense([3, 1, 7]), experience.select([3, 1, 7]))
    assert torch.equal(sharded.loss_token_counts, experience.loss_token_counts)
    assert all(map(torch.equal, sharded.version_bounds, experience.version_bounds))


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
