"""Optimizer state in host memory: copied while the device computes, and the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import NAME
from resharded_run import ADAPTED, SPEC, TinyPPO
from several_run import InBF16
from tiny_run import Digits, TinyGRPO, make_trainer
from torch import Tensor

from lightrl import FSDP2Strategy, RLCallback
from lightrl.strategies import local

SETTINGS: dict[str, Any] = {"num_minibatches": 2, "microbatch_tokens": 20}
MODULES = {
    "two roles": lambda: TinyPPO(microbatch_tokens=20),
    "adapters": lambda: TinyPPO(microbatch_tokens=20, **ADAPTED),
    "BF16AdamW": lambda: InBF16(SPEC, **SETTINGS),
    "Muon": lambda: TinyGRPO(SPEC, optimizer="muon", **SETTINGS),
}


class Watch(RLCallback):
    """Where moments are, how many have left, and the state; breaks the gradient of the fifth update."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.update = error, 0
        self.on_device: list[list[float]] = [[]]  # update → when a backward pass reaches the first layer
        self.left: list[list[float]] = [[]]  # update → after each forward pass of a layer
        self.states: list[dict[str, Any]] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.optimizer, self.strategy = trainer.optimizers[0], trainer.strategy
        for role in module.trained_roles():
            for index, layer in enumerate(getattr(module, role).model.layers):
                layer.register_forward_hook(lambda *call, index=index: self.after_layer(call[-1], index))

    def after_layer(self, output: Tensor, index: int) -> None:
        if output.requires_grad:
            copies = self.strategy._state_copies
            events = copies._left if copies is not None else []
            self.left[-1].append(sum(event.query() for event in events) / max(1, len(events)))
            output.register_hook(self.before_first) if index == 0 else None

    def before_first(self, gradient: Tensor) -> Tensor:
        places = [moment.is_cuda for moment in moments(self.optimizer)]
        self.on_device[-1].append(sum(places) / max(1, len(places)))
        if self.update == 4 and self.error is not None:
            raise self.error
        return gradient * torch.nan if self.update == 4 else gradient

    def on_minibatch_end(self, trainer: Any, module: Any, metrics: Any, index: int, total: int) -> None:
        self.update += 1
        self.on_device.append([])
        self.left.append([])
        if index == 1:
            state = trainer.strategy.optimizer_state(self.optimizer)
            self.states.append({name: copied(value) for name, value in state.items()})


def moments(optimizer: Any) -> list[Tensor]:
    values = (value for state in optimizer.state.values() for value in state.values())
    return [local(value.detach()) for value in values if isinstance(value, Tensor) and value.dim()]


def copied(value: Any) -> Any:
    return local(value.detach()).cpu().clone() if isinstance(value, Tensor) else value


def trained(make: Any, folder: Path, accelerator: str, error: Any = None, **settings: Any) -> tuple[Watch, Any]:
    watch, module = Watch(error), make()
    flags = {"accelerator": accelerator, "precision": "32-true", "devices": 1, "max_steps": 4, "gradient_clip_val": 0.1}
    trainer = make_trainer(folder, strategy=FSDP2Strategy(**settings), callbacks=[watch], **flags)
    trainer.fit(module, datamodule=Digits())
    return watch, {name: copied(value) for name, value in module.state_dict().items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "reduces"), [(name, name != "two roles") for name in MODULES] + [("two roles", True)])
def test_moments_come_and_leave_during_the_update_with_the_same_bits(
    name: str, reduces: bool, accelerator: str, tmp_path: Path, only_cuda: None
) -> None:
    settings = {"reduce_every_microbatch": reduces}
    kept, expected = trained(MODULES[name], tmp_path, accelerator, **settings)
    watch, weights = trained(MODULES[name], tmp_path, accelerator, offload_to_cpu=["optimizer"], **settings)
    assert expected.keys() == weights.keys() and all(torch.equal(expected[key], weights[key]) for key in weights)
    for before, after in zip(kept.states, watch.states, strict=True):
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before if isinstance(before[key], Tensor))
    assert watch.update == 8
    for fractions in watch.on_device[1:-1]:
        assert len(fractions) > 1 and not any(fractions[:-1])
        assert 0 < fractions[-1] < 1
    for fractions in watch.left[1:-1:2]:  # no state was read before them
        assert fractions[:2] == [0.5, 1] or (NAME == "cuda" and fractions[0] >= 0.5 and fractions[1] == 1)


@pytest.mark.filterwarnings("ignore")
def test_moments_are_the_same_after_an_error_in_the_backward_pass(
    accelerator: str, tmp_path: Path, only_cuda: None
) -> None:
    error = RuntimeError("in the backward pass")
    with pytest.raises(RuntimeError, match="in the backward pass") as caught:
        trained(MODULES["two roles"], tmp_path, accelerator, error, offload_to_cpu=["optimizer"])
