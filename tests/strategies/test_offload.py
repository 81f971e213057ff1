"""What waits in host memory changes no bit of a gradient; tests/gpu has another device than the host."""

from __future__ import annotations

import weakref

import pytest
import torch
from lightning import LightningModule
from moe_cases import moe_model
from strategy_cases import on_cpus
from tiny import tiny_model

from lightrl.strategies import FSDP2Strategy, fsdp2
from lightrl.strategies.offload import offload_activations


def gradients(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, **settings: object) -> dict[str, torch.Tensor]:
    monkeypatch.setattr(fsdp2, "fully_shard", lambda *_, **__: None)
    on_cpus(FSDP2Strategy(**settings)).shard(model)
    model(input_ids=torch.arange(3, 13).view(2, 5)).logits.square().sum().backward()
    return {name: value.grad for name, value in model.named_parameters()}


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("make", [tiny_model, moe_model], ids=["dense", "experts"])
def test_offloaded_activations_change_no_bit_of_a_gradient(make, recomputes, monkeypatch):
    settings = {"activation_checkpointing": recomputes}
    expected = gradients(make(), monkeypatch, **settings)
    found = gradients(make(), monkeypatch, **settings, offload_to_cpu=["activations"])
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Projections(torch.nn.Module):
    """Three of one input, which changes in place before the last of them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.clone()
        outputs = self.q(hidden) + self.k(hidden)
        return outputs + self.v(hidden.add_(1))


def test_what_several_operations_save_is_copied_once_and_freed_with_the_last(monkeypatch):
    copies = []

    def copy(tensor, *_, **__):
        copied = tensor.clone()
        copies.append(weakref.ref(copied))
        return copied

    monkeypatch.setattr(torch.Tensor, "to", copy)
    layer, hidden = Projections(), torch.randn(2, 3, 4)
    offload_activations(layer)
    output = layer.forward(hidden)
    assert [reference() is None for reference in copies] == [False, False]  # before the change, and after it
    output.sum().backward()
    assert all(reference() is None for reference in copies)
    before, after = (value.sum((0, 1)).expand(4, 4) for value in (hidden, hidden + 1))
    for project, expected in ((layer.q, before), (layer.k, before), (layer.v, after)):
        torch.testing.assert_close(project.weight.grad, expected)


def test_offloaded_parameters_stay_on_the_host_of_a_module_on_the_device():
    module, strategy = LightningModule(), FSDP2Strategy(offload_to_cpu=["parameters"])
    module.value_head = torch.nn.BatchNorm1d(2)  # a part of a model; the module's own parameters are on the device
    strategy.connect(module)
    strategy.parallel_devices = [torch.device("meta")]
    strategy.model_to_device()
    assert module.device.type == "meta"  # where batches go
    assert {value.device.type for value in module.parameters()} == {"cpu"}
    assert {value.device.type for value in module.buffers()} == {"meta"}


@pytest.mark.parametrize("value", [True, "parameters", ["weights"]])
def test_what_cannot_be_offloaded_is_refused_with_what_can(value):
    with pytest.raises(ValueError, match="offload_to_cpu must be a list of parameters, optimizer, activations, got"):
        FSDP2Strategy(offload_to_cpu=value)
