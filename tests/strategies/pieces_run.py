"""Two processes that share a tiny model in float64 and train its trees in pieces, against separate rows in one process.

    python tests/strategies/pieces_run.py '["one tree", …]'

Prints a JSON line for each case: the largest relative differences of outputs, of the model's gradients and of that of a
parameter outside it, and the numbers of tokens of the microbatches that go through the model on each rank.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from rank_scripts import fork_runs, print_compared
from strategy_cases import with_branches
from tiny import random_experience, tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightrl.experience import Experience
from lightrl.models import Outputs
from lightrl.strategies import LogprobSettings, Microbatches, Ranks, ShardedExperience, SingleModel, whole
from lightrl.strategies.fsdp2_model import FSDP2Model
from lightrl.strategies.layouts.pieces import forward, forward_backward
from lightrl.strategies.layouts.probes import decoder_layers

CPU = torch.device("cpu")
BRANCHES = (5, 1, 1, 3, 2, 1)  # rows of each trajectory
# For each rank, the trajectories of each of its microbatches. "one row of tokens" is shared by two context ranks.
CASES: dict[str, list[list[list[int]]]] = {
    "one tree": [[[0]], [[]]],
    "a tree beside rows": [[[0], [1, 2]], [[5], [4]]],
    "trees beside trees": [[[4, 0], [1]], [[3], [2, 5]]],
    "one row of tokens": [[[0], [4, 1]], [[0], [4, 1]]],
}
SETTINGS = LogprobSettings(entropy_needs_gradient=True)


class World(Ranks):
    """All processes."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def total(self, values: Tensor, operation: Any = "sum") -> Tensor:
        result = values.clone()
        dist.all_reduce(result, dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX)
        return result


class Watched(FSDP2Model):
    """Keeps the number of tokens of each microbatch that goes through it with gradient."""

    sizes: Sequence[int] = ()

    def forward_backward(self, microbatches: Sequence[Experience], *args: Any) -> None:
        self.sizes = [int(part.forward_tokens.sum()) for part in microbatches]
        super().forward_backward(microbatches, *args)


def difference(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max() / right.abs().max())


def compare(name: str) -> dict[str, Any]:
    rows, cp = CASES[name], 2 if name == "one row of tokens" else 1
    experience = with_branches(random_experience(num_groups=2, completion_tokens=(4, 8)), BRANCHES)
    one, cut = tiny_model(dtype=torch.float64), tiny_model(dtype=torch.float64)
    factors = [torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64)) for _ in range(2)]
    for layer in decoder_layers(cut):
        fully_shard(layer)
    fully_shard(cut, reshard_after_forward=False)
    group = init_device_mesh("cpu", (2 // cp, cp), mesh_dim_names=("dp", "cp"))["cp"].get_group()
    alone = SingleModel(one, SETTINGS, form="rectangles")
    spread = Watched(cut, SETTINGS, ranks=World(), context_group=group if cp > 1 else None)
    batches = Microbatches(ShardedExperience.of(experience), rows[dist.get_rank()], CPU)
    everything = [experience.select(index) for part in (rows if cp == 1 else rows[:1]) for index in part if index]

    outputs = 0.0
    for index, found in zip(batches.rows, forward(spread, batches, max_tokens=1, ranks=World()), strict=True):
        (expected,) = alone.forward([experience.select(index)]) if index else [None]
        for field in ("logprobs", "entropy") if expected is not None else ():
            outputs = max(outputs, difference(getattr(found, field), getattr(expected, field)))

    def loss_of(factor: Tensor) -> Any:
        def loss(part: Experience, result: Outputs) -> Tensor:  # of whole trajectories: it is no sum over tokens
            totals = (result.logprobs * part.advantages).sum(1)
            return factor.exp() * (totals.square() + totals * result.entropy.sum(1)).sum() / 100

        return loss

    forward_backward(
        spread, batches, loss_of(factors[1]), lambda loss: (loss * (2 // cp)).backward(),
        max_tokens=1, unit="trajectory", ranks=World(), own=factors[1:],
    )  # fmt: skip
    alone.forward_backward(everything, loss_of(factors[0]), Tensor.backward)
    gradients = {key: whole(value.grad) for key, value in cut.named_parameters() if value.grad is not None}
    expected_gradients = {key: value.grad for key, value in one.named_parameters() if value.grad is not None}
    assert gradients.keys() == expected_gradients.keys()
    own = World().total(torch.zeros((), dtype=torch.float64) if factors[1].grad is None else factors[1].grad) / 2
    errors = torch.tensor([
        outputs,
        max(difference(gradients[key], value) for key, value in expected_gradients.items()),
        difference(own, factors[0].grad),
    ], dtype=torch.float64)  # fmt: skip
    sizes: list[Any] = [None, None]
    dist.all_gather_object(sizes, spread.sizes)
    return {"case": name, "errors": World().total(errors, "max").tolist(), "sizes": sizes}


if __name__ == "__main__":
    sys.exit(fork_runs([2], lambda size: print_compared(compare, json.loads(sys.argv[1]))))
