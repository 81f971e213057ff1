"""Microbatches of each kind of algorithm, and offloaded state: where the host may wait for the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from algorithm_cases import experience_for, make_module
from lightning import LightningModule
from lightning.pytorch.plugins.precision import Precision
from rank_scripts import ROUNDING
from tiny import tiny_model, with_supports
from torch import Tensor

from lightrl.loops.update import MinibatchLoss
from lightrl.strategies import FSDP2Strategy, LogprobSettings, Microbatches, ShardedExperience, SingleModel, fsdp2

ALGORITHMS = (
    "GRPO with KL and entropy",
    "GSPO",
    "M2PO",
    "PPO on one body",
    "GRPO by the product of a trajectory's weights",
    "Distillation of the likeliest tokens",
)
SETTINGS = LogprobSettings(temperature=0.9, min_new_tokens=1, stop_token_ids=(1, 5))


def gradients(algorithm: str, device: torch.device, no_waits: AbstractContextManager[None]) -> dict[str, Tensor]:
    """The policy's, of microbatches and a forward without gradient, in the context once kernels were tried."""
    module = make_module(algorithm)
    minibatch = experience_for(algorithm)
    is_stop = (minibatch.token_ids == 1) | (minibatch.token_ids == 5)  # which SETTINGS forbid at the start
    minibatch = replace(minibatch, token_ids=torch.where(is_stop, 6, minibatch.token_ids))
    if algorithm == "GSPO":
        minibatch, _ = with_supports(minibatch)
    calls = [str(call.role) for call in module.train_calls()]
    losses = [MinibatchLoss(module, minibatch, role=role) for role in calls]
    models = []
    for role in calls:
        head = module.value_head if role == "policy" else None
        model = getattr(module, role).to(device)
        head = None if head is None else head.to(device)
        models.append(SingleModel(model, SETTINGS, value_head=head, form="packed"))
    rows, _ = minibatch.microbatch_rows(40)
    assert len(rows) > 1
    parts = Microbatches(ShardedExperience.of(minibatch), rows, device)
    for model in models:
        list(model.forward(parts))
    with no_waits:
        for model, loss in zip(models, losses, strict=True):
            model.forward_backward(parts, loss, Tensor.backward)
            list(model.forward(parts))
    return {name: item.grad.cpu() for name, item in module.policy.named_parameters() if item.grad is not None}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_microbatch_waits_and_gradients_are_those_of_the_cpu(
    device: torch.device, algorithm: str, no_waits: AbstractContextManager[None], only_pretended: None
) -> None:
    actual = gradients(algorithm, device, no_waits)
    expected = gradients(algorithm, torch.device("cpu"), nullcontext())
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] - value).abs().max() < ROUNDING * value.abs().max().clamp(min=1e-6)


@pytest.mark.parametrize("read", [Tensor.item, Tensor.nonzero, Tensor.cpu, lambda tensor: tensor[tensor > 0]])
def test_what_waits_is_noticed(
    device: torch.device, read: Any, no_waits: AbstractContextManager[None], only_cuda: None
) -> None:
    tensor = torch.ones(1, device=device)
    with no_waits, pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        read(tensor)


class Plain(Precision):
    """Without a Trainer, whose hooks Lightning's calls."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **_: Any) -> Any:
        return optimizer.step(closure)


def trained(device: torch.device, *offloads: Any) -> tuple[list[Tensor], set[str]]:
    """Weights after two updates, and where the optimizer's state waits."""
    model = tiny_model().to(device)
    strategy = FSDP2Strategy(offload_to_cpu=offloads)
    strategy.parallel_devices = [device]
    strategy.shard(model)
    strategy.precision_plugin = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    token_ids = torch.arange(3, 13).view(2, 5).to(device)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=token_ids).logits.square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        strategy.optimizer_step(optimizer, closure, LightningModule())
    return list(model.parameters()), {state["momentum_buffer"].device.type for state in optimizer.state.values()}


def test_what_waits_in_host_memory_changes_no_weight(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, only_cuda: None
) -> None:
    monkeypatch.setattr(fsdp2, "fully_shard", lambda *_, **__: None)
    weights, _ = trained(device)
    offloaded, places = trained(device, "optimizer", "activations")
    assert all(map(torch.equal, weights, offloaded))
    assert places == {"cpu"}
