"""Optimizer state in host memory: copied while the device computes, and the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from resharded_run import ADAPTED, SPEC, TinyPPO
from several_run import InBF16
from tiny_run import Digits, make_trainer
from torch import Tensor

from lightrl import FSDP2Strategy, RLCallback
from lightrl.strategies import local

MODULES = {
    "two roles": lambda: TinyPPO(microbatch_tokens=20),
    "adapters": lambda: TinyPPO(microbatch_tokens=20, **ADAPTED),
    "BF16AdamW": lambda: InBF16(SPEC, num_minibatches=2, microbatch_tokens=20),
}


class Watch(RLCallback):
    """Where moments are, and the state after each iteration; the third update gets NaN or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.arrived: list[list[float]] = [[]]  # update → fraction when a backward pass reaches the first layer
        self.left: list[list[float]] = [[]]  # update → fraction after each forward pass of a layer
        self.states: list[list[Tensor]] = []
        self.places: list[list[int]] = []  # where the moments are after an update

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.optimizer, self.strategy = trainer.optimizers[0], trainer.strategy
        for role in module.trained_roles():
            for index, layer in enumerate(getattr(module, role).model.layers):
                layer.register_forward_hook(lambda *call, index=index: self.after_layer(call[-1], index))

    def after_layer(self, output: Tensor, index: int) -> None:
        if output.requires_grad:
            copies = self.strategy.state_copies
            self.left[-1].append(mean([event.query() for event in copies.left] if copies else []))
            output.register_hook(self.before_first_layer) if index == 0 else None

    def before_first_layer(self, gradient: Tensor) -> Tensor:
        self.arrived[-1].append(mean([moment.is_cuda for moment in moments(self.optimizer)]))
        if len(self.arrived) == 3 and self.error is not None:
            raise self.error
        return gradient * torch.nan if len(self.arrived) == 3 else gradient

    def on_minibatch_end(self, trainer: Any, module: Any, metrics: Any, index: int, total: int) -> None:
        self.arrived.append([])
        self.left.append([])
        self.places.append([moment.data_ptr() for moment in moments(self.optimizer)])
        if index == 1 and self.error is None:
            state = self.strategy.optimizer_state(self.optimizer)  # as a checkpoint does
            self.states.append([on_host(value) for value in state.values() if isinstance(value, Tensor)])
        elif index == 1:
            self.on_exception()

    def on_exception(self, *_: Any) -> None:
        self.optimizer.state_dict()
        self.states.append([on_host(moment) for moment in moments(self.optimizer)])
        self.parts_on_device = [moment for moment in moments(self.optimizer) if moment.is_cuda]
        self.hooks = [item._post_accumulate_grad_hooks for item in self.optimizer.param_groups[0]["params"]]


def mean(values: list[bool]) -> float:
    return sum(values) / max(1, len(values))


def moments(optimizer: Any) -> list[Tensor]:
    values = (value for state in optimizer.state.values() for value in state.values())
    return [local(value.detach()) for value in values if isinstance(value, Tensor) and value.dim()]


def on_host(value: Tensor) -> Tensor:
    return local(value.detach()).cpu().clone()


def trained(watch: Watch, name: str, folder: Path, accelerator: str, **settings: Any) -> list[Tensor]:
    module = MODULES[name]()
    flags = {"accelerator": accelerator, "precision": "32-true", "devices": 1, "max_steps": 2, "gradient_clip_val": 0.1}
    trainer = make_trainer(folder, strategy=FSDP2Strategy(**settings), callbacks=[watch], **flags)
    trainer.fit(module, datamodule=Digits())
    return [on_host(value) for value in module.state_dict().values()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "reduces"), [*((name, True) for name in MODULES), ("two roles", False)])
def test_moments_come_and_leave_during_updates_with_the_same_bits(
    name: str, reduces: bool, accelerator: str, tmp_path: Path, only_cuda: None
) -> None:
    run: dict[str, Any] = {"folder": tmp_path, "accelerator": accelerator, "reduce_every_microbatch": reduces}
    kept, watch = Watch(), Watch()
    weights = [trained(each, name, **run, offload_to_cpu=what) for each, what in ((kept, []), (watch, ["optimizer"]))]
    for before, after in zip([weights[0], *kept.states], [weights[1], *watch.states], strict=True):
        assert len(before) > 10
        assert all(map(torch.equal, before, after))
    assert watch.places[0] == watch.places[-1]  # memory of the host, which is pinned once
    for fractions in watch.arrived[1:4]:
        assert len(fractions) > 1
        assert not any(fractions[:-1])  # only in the last microbatch of the last role
        assert 0 < fractions[-1] < 1  # those for the other layers come later
    for fractions in watch.left[1:4:2]:  # the two layers of the first forward pass after an update
        assert fractions[:2] == [0.5, 1] or torch.cuda.get_device_name() != "pretended"


@pytest.mark.filterwarnings("ignore")
def test_moments_are_those_of_the_last_update_after_an_error_in_a_backward_pass(
    accelerator: str, tmp_path: Path, only_cuda: None
) -> None:
    watch = Watch(RuntimeError("in a backward pass"))
    with pytest.raises(RuntimeError, match="in a backward pass"):
        trained(watch, "two roles", tmp_path, accelerator, offload_to_cpu=["optimizer"])
    before, after = watch.states
    assert len(before) > 10
    assert all(map(torch.equal, before, after))
    assert not watch.parts_on_device
    assert not any(watch.hooks)
