"""Microbatches on a second device that counts waits; prints a JSON line with the counts of each algorithm.

A process of its own: the device stays registered, and code that looks for an accelerator would find it.
"""

import json
import warnings
from dataclasses import replace
from typing import Any

import torch
from algorithm_cases import experience_for, make_module
from fake_device import SYNCS, fake_device, values
from lightning import LightningModule
from lightning.pytorch.plugins.precision import Precision
from tiny import tiny_model, with_supports
from torch import Tensor

from lightrl.loops.update import MinibatchLoss
from lightrl.strategies import (
    FSDP2Strategy,
    LogprobSettings,
    Microbatches,
    ShardedExperience,
    SingleModel,
    fsdp2,
    packed_attention,
)

warnings.simplefilter("ignore")
ALGORITHMS = (
    "GRPO with KL and entropy",
    "GSPO",
    "M2PO",
    "PPO on one body",
    "GRPO by the product of a trajectory's weights",
    "Distillation of the likeliest tokens",
)
SETTINGS = LogprobSettings(temperature=0.9, min_new_tokens=1, stop_token_ids=(1, 5))


def play(algorithm: str, device: torch.device) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Waits within the microbatches and the forward without gradient, and the gradients of the policy."""
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
    SYNCS.clear()
    for model, loss in zip(models, losses, strict=True):
        model.forward_backward(parts, loss, Tensor.backward)
        list(model.forward(parts))
    waits = dict(SYNCS)
    return waits, {name: values(item.grad) for name, item in module.policy.named_parameters() if item.grad is not None}


class Plain(Precision):
    """Without a Trainer, whose hooks Lightning's calls."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **_: Any) -> Any:
        return optimizer.step(closure)


def trained(device: torch.device, *offloads: Any) -> tuple[list[Tensor], list[str], int]:
    """Weights after two updates, where the optimizer's state waits, and how often something went to the host."""
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

    SYNCS.clear()
    for _ in range(2):
        strategy.optimizer_step(optimizer, closure, LightningModule())
    places = {state["momentum_buffer"].device.type for state in optimizer.state.values()}
    return [values(value) for value in model.parameters()], sorted(places), SYNCS["copy to the host"]


def main() -> None:
    for name in packed_attention.KERNELS.keys() - {"sdpa"}:  # they need a GPU, and would try to compile
        del packed_attention.KERNELS[name]
    device = fake_device()
    found = {}
    for algorithm in ALGORITHMS:
        waits, gradients = play(algorithm, device)
        _, expected = play(algorithm, torch.device("cpu"))
        assert gradients.keys() == expected.keys()
        pairs = [(gradients[name], value) for name, value in expected.items()]
        sizes = [(actual - value).abs().max() / value.abs().max().clamp(min=1e-6) for actual, value in pairs]
        found[algorithm] = {"waits": waits, "difference": float(torch.stack(sizes).max())}
    fsdp2.fully_shard = lambda *_, **__: None
    weights, _, num_copied = trained(device)
    offloaded, places, num_offloaded = trained(device, "optimizer", "activations")
    found["offloaded"] = {
        "is_equal": all(map(torch.equal, weights, offloaded)), "places": places, "copies": [num_copied, num_offloaded],
    }  # fmt: skip
    SYNCS.clear()
    seen = torch.ones(3).to(device)
    if seen.sum() > 0 and len(seen.nonzero()) == 3 and seen.cpu().sum() == 3:
        found["each kind"] = {"waits": dict(SYNCS), "difference": 0.0}
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
