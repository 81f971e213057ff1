"""What waits in host memory changes no bit of a gradient; fake_device_run.py has another device than the host."""

from __future__ import annotations

import pytest
import torch
from moe_cases import moe_model
from strategy_cases import on_cpus
from tiny import tiny_model

from lightrl.strategies import FSDP2Strategy, fsdp2


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


@pytest.mark.parametrize("value", [True, "parameters", ["weights"]])
def test_what_cannot_be_offloaded_is_refused_with_what_can(value):
    with pytest.raises(ValueError, match="offload_to_cpu must be a list of parameters, optimizer, activations, got"):
        FSDP2Strategy(offload_to_cpu=value)
