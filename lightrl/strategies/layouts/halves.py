"""Runs a microbatch as two halves of its groups, each in a thread with half of the cores.

A small model's operations are too short to be divided among torch's threads: with a second thread, a model with 1 M
parameters decodes at half the speed. Two halves, each an ordinary microbatch, use both cores. Their losses are computed
one after the other, and a gradient is always (previous gradient) + (first + second), whichever half finishes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightrl.concurrency.in_thread import side_by_side
from lightrl.experience import Experience
from lightrl.models import Backward, LossFunction, Outputs

# Below this model size, torch's threads do not help; two halves do, if the microbatch has at least MIN_TOKENS.
SMALL_MODEL_PARAMETERS = 10_000_000
MIN_TOKENS = 2048

_Half = TypeVar("_Half")
_T = TypeVar("_T")


def halves_pay(model: torch.nn.Module, experience: Experience, num_cores: int) -> bool:
    """Whether two halves are faster than the whole microbatch, with the same results.

    The forward pass must not depend on torch's per-thread state (autocast, no gradients), nor sample anything.
    """
    return (
        experience.token_ids.device.type == "cpu"
        and num_cores > 1
        and int(experience.lengths.sum()) >= MIN_TOKENS
        and sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL_PARAMETERS
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not model.training
    )


def cut_in_halves(experience: Experience) -> list[Experience] | None:
    """Cuts an experience into two halves of whole groups with similar token counts; None if it has only one group."""
    groups, lengths = experience.units("group"), experience.lengths.tolist()
    if len(groups) < 2:
        return None
    rows: list[list[int]] = [[], []]
    tokens = [0, 0]
    for size, index in sorted(((-sum(lengths[row] for row in group), index) for index, group in enumerate(groups))):
        smaller = tokens.index(min(tokens))
        rows[smaller] += groups[index]
        tokens[smaller] -= size
    return [experience.select(sorted(part)) for part in rows]


def forward_backward_halves(
    halves: Sequence[Experience],
    outputs_of: Callable[[Experience], Outputs],
    loss_fn: LossFunction,
    backward: Backward,
    parameters: Sequence[Tensor],
) -> None:
    """Runs `ParallelModel.forward_backward` for one microbatch, whose loss is the sum of the halves' losses.

    `outputs_of`, the forward pass, is called in two threads concurrently; `parameters` get the gradients.
    """
    outputs = _on_half_the_cores(outputs_of, halves)
    losses = [loss_fn(half, output) for half, output in zip(halves, outputs, strict=True)]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None  # so only two gradients are added; a sum of three would depend on the order
    backward(_Sum.apply(torch.zeros((), requires_grad=True), tuple(losses)))  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(parameters, before, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


class _Sum(torch.autograd.Function):
    """Adds two losses; the backward pass runs both losses' backward passes concurrently."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, losses: tuple[Tensor, Tensor]) -> Tensor:
        ctx.losses = losses
        return losses[0].detach() + losses[1].detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        losses = ctx.losses
        del ctx.losses
        _on_half_the_cores(lambda loss: loss.backward(gradient), losses)
        return None, None


def _on_half_the_cores(function: Callable[[_Half], _T], halves: Sequence[_Half]) -> list[_T]:
    num_threads = torch.get_num_threads()

    def run(half: _Half) -> _T:
        torch.set_num_threads(max(1, num_threads // 2))
        with torch.enable_grad():
            return function(half)

    try:
        return side_by_side(run, halves, name="lightrl-half")
    finally:
        torch.set_num_threads(num_threads)
