"""A world of processes that share the packed rows of tiny models, and the same in each process alone, and compares.

    python tests/strategies/context_parallel_run.py '[[2, 2, "qwen3", "plain"], …]'

A case is a number of processes, cp, a model, and what is special. It prints a JSON line for each: the largest relative
differences of outputs, and of a parameter's gradient, to one process.
"""

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from moe_cases import moe_model
from rank_scripts import fork_runs, print_compared
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from world_3d import SETTINGS, TOPK, difference, loss_of, make_model, parts

from lightrl.experience import Experience
from lightrl.strategies import Ranks, ShardedExperience, SingleModel, whole
from lightrl.strategies.fsdp2_model import FSDP2Model
from lightrl.strategies.layouts.probes import decoder_layers

FIELDS = ("logprobs", "entropy", "values", "teacher_topk")


def model_of(family: str) -> tuple[Any, torch.nn.Linear | None]:
    """A model, and the critic's head on its body if it has one."""
    if family == "shared critic":
        head = torch.nn.Linear(16, 1, bias=False)
        torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(3))
        return make_model("qwen3"), head
    is_mixture = family in ("deepseek_v3", "qwen3_moe")
    return moe_model(family) if is_mixture else make_model(family), None


def shard(model: Any, head: torch.nn.Linear | None, *, checkpoints: bool) -> None:
    for layer in decoder_layers(model):
        if checkpoints:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=False)
    if head is not None:
        fully_shard(head)


def with_one_token(experience: Experience) -> Experience:
    """The experience, of whose first trajectory only the first token is left."""
    lengths = experience.lengths.clone()
    lengths[0] = 1
    columns = torch.arange(experience.token_ids.shape[1])
    return replace(experience, lengths=lengths, loss_mask=experience.loss_mask & (columns < lengths[:, None]))


def compare(case: list[Any]) -> dict[str, Any]:
    size, cp, family, form = case
    (one, head), (cut, cut_head) = model_of(family), model_of(family)
    mesh = init_device_mesh("cpu", (size // cp, cp), mesh_dim_names=("dp", "cp"))
    shard(cut, cut_head, checkpoints=form == "checkpointed")
    alone = SingleModel(one, SETTINGS, form="rectangles", value_head=head)
    group = mesh["cp"].get_group()
    spread = FSDP2Model(cut, SETTINGS, ranks=Ranks(), value_head=cut_head, context_group=group)
    everything = parts(seed=0, is_truncated=form == "truncated")
    if form == "one token":
        everything = [with_one_token(part) for part in everything]
    dp, share = size // cp, everything[mesh["dp"].get_local_rank() :: size // cp]
    found = {"outputs": 0.0, "gradients": 0.0}
    topk = 0 if form == "truncated" else TOPK
    for made, expected in zip(spread.forward(share, topk=topk), alone.forward(share, topk=topk), strict=True):
        if expected.teacher_topk_ids is not None:
            assert torch.equal(made.teacher_topk_ids, expected.teacher_topk_ids)
        pairs = [(getattr(made, name), getattr(expected, name)) for name in FIELDS if hasattr(expected, name)]
        errors = [difference(left, right) for left, right in pairs if right is not None and bool(right.any())]
        found["outputs"] = max(found["outputs"], *errors)
    blank = ShardedExperience.of(share[0]).blank_row(torch.device("cpu"))
    spread.forward_backward([*share, blank], loss_of, lambda loss: (loss * dp).backward())
    alone.forward_backward(everything, loss_of, Tensor.backward)
    modules = [(one, cut)] + ([] if head is None or cut_head is None else [(head, cut_head)])
    for expected_module, module in modules:
        gradients = {name: value.grad for name, value in module.named_parameters()}
        for name, value in expected_module.named_parameters():
            if value.grad is not None and bool(value.grad.any()):
                found["gradients"] = max(found["gradients"], difference(whole(gradients[name]), value.grad))
    numbers = torch.tensor(list(found.values()))
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return {"case": case, **dict(zip(found, numbers.tolist(), strict=True))}


def main(cases: list[list[Any]]) -> int:
    sizes = sorted({case[0] for case in cases})
    return fork_runs(sizes, lambda size: print_compared(compare, [case for case in cases if case[0] == size]))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
