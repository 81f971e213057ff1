"""Microbatches on a second device that counts waits; prints a JSON line with the counts of each algorithm.

A process of its own: the device stays registered, and code that looks for an accelerator would find it.
"""

import json
import warnings
from dataclasses import replace

import torch
from algorithm_cases import experience_for, make_module
from fake_device import SYNCS, fake_device, values
from torch import Tensor

from lightrl.loops.update import MinibatchLoss
from lightrl.strategies import LogprobSettings, Microbatches, ShardedExperience, SingleModel, packed_attention

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
    SYNCS.clear()
    seen = torch.ones(3).to(device)
    if seen.sum() > 0 and len(seen.nonzero()) == 3 and seen.cpu().sum() == 3:
        found["each kind"] = {"waits": dict(SYNCS), "difference": 0.0}
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
