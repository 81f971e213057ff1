"""Microbatches larger than their limit: cut into pieces of rows, they have the loss and the gradient of the whole."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import assert_same, every_algorithm, experience_for, make_module
from strategy_cases import results_of, with_branches
from tiny import gradients, tiny_model
from torch import Tensor

from lightrl.experience import Experience
from lightrl.loops.update import MinibatchLoss, values_of
from lightrl.models.optimizer import own_parameters
from lightrl.strategies import LogprobSettings, Microbatches, Ranks, ShardedExperience, SingleModel, single
from lightrl.strategies.layouts.pieces import forward, forward_backward
from lightrl.strategies.layouts.shared_prefix import Prefixes
from lightrl.strategies.single import Form

CPU = torch.device("cpu")


class Watched:
    """A model that remembers the number of tokens of each microbatch that goes through it with gradient."""

    def __init__(self, model: SingleModel) -> None:
        self.model, self.sizes, self.num_without_gradient = model, list[int](), 0
        self.packed_sizes: list[int] = []  # common prefixes counted once
        self.shares_prefixes = model.shares_prefixes

    def forward(self, microbatches: Sequence[Experience], *, topk: int = 0) -> Any:
        self.num_without_gradient += len(microbatches)
        return self.model.forward(microbatches, topk=topk)

    def forward_backward(self, microbatches: Sequence[Experience], loss: Any, backward: Any) -> None:
        self.sizes += [int(part.forward_tokens.sum()) for part in microbatches]
        self.packed_sizes += [Prefixes.of(part).tree().num_tokens for part in microbatches]
        self.model.forward_backward(microbatches, loss, backward)


def trained(
    module: Any, minibatch: Experience, *, max_tokens: int, form: Form | None = None, unit: Any = None
) -> tuple[tuple[dict[str, Tensor], dict[str, float]], list[Watched]]:
    """The gradient and metrics of one minibatch as a single microbatch of every trained model, and the models."""
    settings = LogprobSettings(
        temperature=module.sampling.temperature, entropy_needs_gradient=module.needs_entropy_gradient
    )
    metrics: dict[str, float] = {}
    models = []
    for call in module.train_calls():
        head = module.value_head if call.role == "policy" else None
        models.append(Watched(SingleModel(getattr(module, call.role), settings, value_head=head, form=form)))
        losses = MinibatchLoss(module, minibatch, role=str(call.role))
        batches = Microbatches(ShardedExperience.of(minibatch), [[*range(len(minibatch))]], CPU)
        model: Any = models[-1]
        forward_backward(
            model, batches, losses, Tensor.backward,
            max_tokens=max_tokens, unit=unit or module.loss_unit, ranks=Ranks(),
            own=[*own_parameters(module).values()],
        )  # fmt: skip
        metrics |= values_of(losses.parts)
    return (gradients(module), metrics), models


@pytest.mark.parametrize("form", ["rectangles", "packed"])
@every_algorithm
def test_the_branches_of_a_trajectory_train_in_pieces_as_they_do_together(algorithm: str, form: Form) -> None:
    """Ratios of sequences, means over trajectories and critics too: every loss gets the trajectories complete."""
    module = make_module(algorithm, loss_reduction="sequence")
    minibatch = with_branches(experience_for(algorithm, completion_tokens=(4, 8)))
    expected, whole = trained(module, minibatch, max_tokens=10**6, form=form)
    found, pieces = trained(module, minibatch, max_tokens=30, form=form)
    assert_same(found, expected)
    num_tokens = int(minibatch.forward_tokens.sum())
    for before, after in zip(whole, pieces, strict=True):
        assert (before.sizes, before.num_without_gradient) == ([num_tokens], 0)
        assert sum(after.sizes) == num_tokens
        assert len(after.sizes) == after.num_without_gradient > 3
        assert max(after.packed_sizes if form == "packed" else after.sizes) <= 30


@pytest.mark.parametrize("unit", ["group", "pair"])
def test_the_trajectories_of_a_loss_unit_train_in_pieces_as_they_do_together(unit: Any) -> None:
    module = make_module("GRPO")
    module.loss = lambda experience, outputs: {  # type: ignore[method-assign]
        "loss": outputs.logprobs.sum(1) * outputs.logprobs.exp().sum()
    }
    minibatch = experience_for("GRPO", group_size=4, completion_tokens=(4, 8))
    expected, _ = trained(module, minibatch, max_tokens=10**6, unit=unit, form="rectangles")
    found, (model,) = trained(module, minibatch, max_tokens=20, unit=unit, form="rectangles")
    assert max(model.sizes) <= 20 < int(minibatch.forward_tokens.sum())
    assert_same(found, expected)


def test_trajectories_of_one_row_are_never_cut() -> None:
    minibatch = experience_for("GRPO", completion_tokens=(4, 8))
    _, (model,) = trained(make_module(), minibatch, max_tokens=3)
    assert (model.sizes, model.num_without_gradient) == ([int(minibatch.forward_tokens.sum())], 0)


def test_the_gradient_of_pieces_differs_by_the_rounding_of_their_sum() -> None:
    """A sum of N terms, added in any order, is off by at most N · ε · Σ |term|; here, the terms are the N tokens'."""
    model, minibatch = tiny_model(), with_branches(experience_for("GRPO", completion_tokens=(4, 8)))
    parts: list[dict[str, Tensor]] = []

    def backward(loss: Tensor) -> None:
        before = {name: value.grad for name, value in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        loss.backward()
        for name, value in model.named_parameters():
            parts[-1][name] = parts[-1].get(name, torch.zeros(())) + value.grad.abs().double()
            earlier = before[name]
            value.grad = value.grad if earlier is None else value.grad + earlier

    found = []
    for max_tokens in (10**6, 30):
        parts.append({})
        batches = Microbatches(ShardedExperience.of(minibatch), [[*range(len(minibatch))]], CPU)
        forward_backward(
            SingleModel(model, LogprobSettings(), form="rectangles"), batches,
            lambda part, out: (out.logprobs * part.advantages).sum(), backward,
            max_tokens=max_tokens, unit="trajectory", ranks=Ranks(),
        )  # fmt: skip
        found.append(gradients(model))
    num_terms = int(minibatch.forward_tokens.sum())
    for name, value in found[1].items():
        bound = 2 * num_terms * torch.finfo(torch.float32).eps * (parts[0][name] + parts[1][name]).max()
        assert float((value - found[0][name]).abs().max()) <= bound, name


@pytest.mark.parametrize("form", ["rectangles", "packed", None])
def test_outputs_of_pieces_are_those_of_whole_trajectories(form: Form | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single, "MIN_SEGMENT_TOKENS", 1)
    minibatch = with_branches(experience_for("GRPO"))
    model = SingleModel(tiny_model(), LogprobSettings(), form=form)
    rows = [[0, 2, 5], [1], [3, 4], [6, 7, 8]]
    batches = Microbatches(ShardedExperience.of(minibatch), rows, CPU)
    whole = list(model.forward(list(batches), topk=3))
    pieces = list(forward(model, batches, max_tokens=25, ranks=Ranks(), topk=3))
    assert len(pieces) == len(whole)
    for part, expected in zip(pieces, whole, strict=True):
        for name in ("logprobs", "entropy", "teacher_topk"):
            torch.testing.assert_close(getattr(part, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
    assert any(torch.is_tensor(part.teacher_topk_ids) for part in pieces)


def test_a_tree_that_fits_once_its_prefixes_are_shared_is_not_cut() -> None:
    one = experience_for("GRPO", prompt_tokens=(40, 40)).select([0])
    module, minibatch, length = make_module(), with_branches(one, 6), int(one.lengths[0])
    shared = length // 2
    held = shared + 6 * (length - 1 - shared) + 6 * shared / 8  # the last tokens predict nothing
    assert held < 0.8 * int(minibatch.forward_tokens.sum())

    def num_pieces(form: Form, max_tokens: int) -> int:
        return trained(module, minibatch, max_tokens=max_tokens, form=form)[1][0].num_without_gradient

    assert num_pieces("packed", math.ceil(held)) == 0 < num_pieces("packed", math.ceil(held) - 1)
    assert num_pieces("rectangles", math.ceil(held)) > 0


def test_a_microbatch_without_loss_tokens_in_a_piece_still_trains() -> None:
    minibatch = with_branches(experience_for("GRPO", completion_tokens=(4, 8)))
    mask = minibatch.loss_mask & (torch.arange(minibatch.loss_mask.shape[1]) < 6)
    minibatch = replace(minibatch, loss_mask=mask)
    expected, _ = trained(make_module(), minibatch, max_tokens=10**6, form="rectangles")
    found, _ = trained(make_module(), minibatch, max_tokens=20, form="rectangles")
    assert_same(found, expected)


def test_a_parameter_of_the_loss_gets_its_gradient_from_pieces_too() -> None:
    found = []
    for max_tokens in (10**6, 20):
        module = make_module()
        module.scale, plain = torch.nn.Parameter(torch.tensor([0.3])), module.loss
        module.loss = lambda experience, outputs, module=module, plain=plain: {  # type: ignore[method-assign]
            "loss": module.scale.exp() * plain(experience, outputs)["loss"]
        }
        minibatch = with_branches(experience_for("GRPO", completion_tokens=(4, 8)))
        found.append(trained(module, minibatch, max_tokens=max_tokens, form="rectangles")[0])
    assert found[0][0]["scale"].abs() > 1e-3
    assert_same(found[1], found[0])


RANK_CASES = ["one tree", "a tree beside rows", "trees beside trees", "one row of tokens"]


def test_ranks_with_unlike_numbers_of_pieces_have_the_gradient_of_separate_rows_in_one_process() -> None:
    """In float64, whose rounding is 1e-16; a rank without rows joins in with blank ones, of two tokens."""
    results = results_of("pieces_run.py", RANK_CASES)
    assert [result["case"] for result in results] == RANK_CASES
    for result in results:
        assert max(result["errors"]) < 1e-11, result
        assert len(result["sizes"][0]) == len(result["sizes"][1]), result
    assert results[0]["sizes"][1] == [2] * 5
    assert len(results[0]["sizes"][0]) == 5 < sum(results[0]["sizes"][0]) // 3
