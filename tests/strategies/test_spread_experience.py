"""An iteration's Experience without padding; tests/trainer/test_layouts.py has it between ranks."""

import torch
from tiny import random_experience

from lightrl.experience import Experience
from lightrl.strategies import Microbatches, SpreadExperience


def assert_same(found: Experience, expected: Experience) -> None:
    left, right = found.tensors(), expected.tensors()
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name], right[name]), name


def test_it_reads_as_the_padded_experience() -> None:
    experience = random_experience(topk=3)
    spread = SpreadExperience.of(experience)
    assert_same(spread, experience)
    assert_same(spread.own, experience)
    assert_same(spread.dense([3, 1, 7]), experience.select([3, 1, 7]))
    assert torch.equal(spread.loss_token_counts, experience.loss_token_counts)
    assert all(map(torch.equal, spread.version_bounds, experience.version_bounds))


def test_microbatches_are_made_when_they_are_read() -> None:
    experience = random_experience()
    made: list[list[int]] = []

    class Watched(Microbatches):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            made.append(list(self.rows[index]))
            return super().__getitem__(index)

    parts = iter(Watched(SpreadExperience.of(experience), [[0], [1, 2], [3]], torch.device("cpu")))
    assert_same(next(parts), experience.select([0]))
    assert made == [[0], [1, 2]]  # one ahead
    assert_same(next(parts), experience.select([1, 2]))
