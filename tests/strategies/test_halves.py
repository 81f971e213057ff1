"""Two halves in two threads give the gradient of the whole, and the same bits each time."""

from typing import Any

import pytest
import torch
from tiny import gradients, random_experience, tiny_model
from torch import Tensor

from lightrl.experience import Experience
from lightrl.models import Outputs
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.strategies.layouts import halves
from lightrl.strategies.layouts.halves import cut_in_halves


@pytest.fixture
def experience() -> Experience:
    return random_experience(num_groups=4)


@pytest.fixture
def _in_halves(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(halves, "MIN_TOKENS", 1)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def loss(part: Experience, outputs: Outputs) -> Tensor:
    values = 0.0 if outputs.values is None else outputs.values
    return -((outputs.logprobs + values) * part.loss_mask * (1 + part.lengths[:, None])).sum()


def gradient_of(microbatches: list[Experience], *, calls: list[float] | None = None) -> dict[str, Tensor]:
    policy = tiny_model()
    torch.manual_seed(0)
    critic = torch.nn.Linear(policy.config.hidden_size, 1)
    model = SingleModel(policy, LogprobSettings(), value_head=critic)

    def backward(total: Tensor) -> None:
        if calls is not None:
            calls.append(total.item())
        total.backward()

    model.forward_backward(microbatches, loss, backward)
    return {**gradients(policy), **{f"critic.{name}": value for name, value in gradients(critic).items()}}


def test_halves_are_whole_groups_of_about_as_many_tokens(experience: Experience) -> None:
    halves = cut_in_halves(experience)
    groups = [set(half.group_ids.tolist()) for half in halves]
    assert (groups[0] | groups[1], groups[0] & groups[1]) == ({0, 1, 2, 3}, set())
    assert sum(len(half) for half in halves) == len(experience)
    largest = max(int(experience.select(rows).lengths.sum()) for rows in experience.units("group"))
    assert abs(int(halves[0].lengths.sum()) - int(halves[1].lengths.sum())) <= largest


def test_one_group_is_not_cut(experience: Experience) -> None:
    assert cut_in_halves(experience.select([0, 1, 2])) is None


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.usefixtures("_in_halves")
def test_the_gradient_is_that_of_the_whole_to_the_bit_each_time(experience, num_microbatches, monkeypatch):
    size = 12 // num_microbatches
    microbatches = [experience.select(range(start, start + size)) for start in range(0, 12, size)]
    calls: list[float] = []
    first = gradient_of(microbatches, calls=calls)
    assert len(calls) == num_microbatches  # Lightning's backward, with its hooks, once for each microbatch
    for _ in range(5):
        again = gradient_of(microbatches)
        assert all(torch.equal(first[name], again[name]) for name in first)
    monkeypatch.setattr(halves, "MIN_TOKENS", 2**40)
    whole_calls: list[float] = []
    whole = gradient_of(microbatches, calls=whole_calls)
    assert calls == pytest.approx(whole_calls, rel=1e-5)
    largest = max(float(value.abs().max()) for value in whole.values())
    for name, expected in whole.items():
        torch.testing.assert_close(first[name], expected, rtol=1e-4, atol=1e-5 * largest, msg=name)


@pytest.mark.usefixtures("_in_halves")
def test_an_error_in_the_second_half_is_raised(experience: Experience) -> None:
    calls = []

    class Failing(SingleModel):
        def _outputs(self, part: Experience, more: Any = 0) -> Outputs:
            calls.append(torch.get_num_threads())
            if 3 in part.group_ids:
                raise FloatingPointError("in a half")
            return super()._outputs(part, more)

    model = Failing(tiny_model(), LogprobSettings())
    with pytest.raises(FloatingPointError, match="in a half"):
        model.forward_backward([experience], loss, Tensor.backward)
    assert (calls, torch.get_num_threads()) == ([1, 1], 2)
