"""A world of processes that trains tiny models split over them, and the same in each process alone, and compares.

    python tests/strategies/world_3d.py '[[2, 1, 1, "1F1B", "qwen3"], [2, 2, 1, "1F1B", "mixtral", "routes", 2, 1], …]'

starts as many processes as (pp · dp · cp · tp) says, a world for the cases of each size, all at once and forked from
this one, which has imported everything once. The last two numbers are ep and cp. It prints a JSON line for each case:
the largest relative differences to one process.
"""

import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from moe_cases import moe_model
from rank_scripts import fork_runs, print_compared
from second_device import second_device
from tiny import FAMILIES, random_experience, tiny_model, tiny_spec, with_supports, with_teacher_topk
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.families import FAMILIES as OF_KINDS
from lightrl.columns import NATIVE
from lightrl.experience import Experience
from lightrl.models import Outputs, scalar_head
from lightrl.models.expert_parallel import expert_mesh
from lightrl.models.routes import RouteLayout
from lightrl.models.tuning import held_tensors
from lightrl.strategies import LogprobSettings, ShardedExperience, SingleModel, whole
from lightrl.strategies.parallel_3d.stages import ends_group, split_model
from lightrl.strategies.parallel_3d.strategy import Parallel3DModel
from lightrl.strategies.ranks.processes import local, square_norm

NUM_UPDATES = 2
MAX_NORM = 0.5
SETTINGS = LogprobSettings(temperature=0.8, min_new_tokens=1, stop_token_ids=(1, 5), num_ids=16)
DENSE, MIXTURES = OF_KINDS["dense"], OF_KINDS["mixture of experts"]
TOPK = 12  # of the 17 tokens, of which a tensor rank has 9 or 8


def make_model(family: str) -> Any:
    changes: dict[str, Any] = {"num_hidden_layers": 4}
    if family == "gemma3 hybrid":  # the padding's row gets no gradient; it is zero, which multiplies roundings
        changes["pad_token_id"] = 6
    if family == "critic":
        spec = tiny_spec("qwen3", head="scalar")
        model = replace(spec, config={**(spec.config or {}), **changes}).load_model()
        head = scalar_head(model)
        torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(3))
        return model
    if family in MIXTURES:
        return moe_model(family, **changes)
    FAMILIES.setdefault(family, {**DENSE.get(family, DENSE["llama"]), "model_type": family})
    if "layer_types" in FAMILIES[family]:
        changes["layer_types"] = FAMILIES[family]["layer_types"] * 2
    return tiny_model(family, **changes)


def parts(seed: int, *, is_truncated: bool) -> list[Experience]:
    """Four microbatches of unlike shapes, without stop tokens where the settings forbid them."""
    experience = random_experience(num_groups=6, seed=seed)
    is_stop = (experience.token_ids == 1) | (experience.token_ids == 5)
    experience = replace(experience, token_ids=torch.where(is_stop, 6, experience.token_ids))
    experience = with_supports(experience)[0] if is_truncated else with_teacher_topk(experience, 3)
    return [experience.select(range(start, end)) for start, end in ((0, 3), (3, 9), (9, 14), (14, 18))]


def with_routes(experience: Experience, config: Any, known: float = 0.8) -> Experience:
    """Each token with two random experts in each block; known for this fraction of the tokens."""
    layout = RouteLayout.of(config)
    generator = torch.Generator().manual_seed(4)
    shape = (*experience.token_ids.shape, len(layout.layers), layout.num_experts)
    routes = torch.rand(shape, generator=generator).topk(2, -1).indices.to(torch.uint8).flatten(2)
    is_known = torch.rand(experience.token_ids.shape, generator=generator) < known
    return experience.with_tensors({"routes": torch.where(is_known[..., None], routes, NATIVE)})


def loss_of(experience: Experience, outputs: Outputs) -> Tensor:
    num, width = outputs.logprobs.shape
    weights = torch.linspace(-1, 2, num * 40).view(num, 40)[:, :width]
    loss = (weights * outputs.logprobs + weights.flip(1) * outputs.entropy).sum()
    if outputs.values is not None:
        loss = loss + (weights * outputs.values.square()).sum()
    if outputs.teacher_topk is not None:
        probabilities = torch.where(experience.loss_mask[..., None], outputs.teacher_topk.exp(), 0)
        loss = loss + (weights[..., None] * probabilities).sum()
    return loss / 100


def add_loss(losses: list[Tensor], experience: Experience, outputs: Outputs) -> Tensor:
    losses.append(loss_of(experience, outputs))
    return losses[-1]


def difference(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max() / right.abs().max().clamp(min=1e-6))


def compare(
    pp: int, dp: int, tp: int, schedule: str, family: str, form: str = "rectangles", ep: int = 1, cp: int = 1
) -> dict[str, Any]:
    single, split_one = make_model(family), make_model(family)
    mesh = init_device_mesh("cpu", (pp, dp * cp, tp), mesh_dim_names=("pp", "dp", "tp"))
    rows = init_device_mesh("cpu", (pp, dp, cp, tp), mesh_dim_names=("pp", "dp", "cp", "tp"))
    split = split_model(
        split_one,
        mesh,
        ends=ends_group(mesh),
        experts=expert_mesh("cpu", num_stages=pp, ep=ep) if ep > 1 else None,
        schedule=schedule,
        stages_per_rank=1 if schedule == "1F1B" else 2,
        checkpoint_activations="checkpointed" in form,
    )
    alone = SingleModel(single, SETTINGS)
    group = rows["cp"].get_group() if cp > 1 else None
    spread = Parallel3DModel(split, SETTINGS, is_packed="packed" in form, context_group=group)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in (single, split_one)]
    actual: dict[str, float] = {"outputs": 0.0, "loss": 0.0, "gradients": 0.0, "largest": 0.0, "norm": 0.0}
    for update in range(NUM_UPDATES):
        everything = parts(seed=update, is_truncated=form in ("truncated", "batch by batch"))
        if "routes" in form:
            everything = [with_routes(part, single.config) for part in everything]
        share = everything[rows["dp"].get_local_rank() :: dp]
        topk = 0 if form in ("truncated", "batch by batch") else TOPK
        for one, other in zip(spread.forward(share, topk=topk), alone.forward(share, topk=topk), strict=True):
            if other.teacher_topk_ids is not None and not torch.equal(one.teacher_topk_ids, other.teacher_topk_ids):
                actual["outputs"] = 1.0
            for name in ("logprobs", "entropy", "values", "teacher_topk"):
                if getattr(other, name) is not None and bool(getattr(other, name).any()):
                    actual["outputs"] = max(actual["outputs"], difference(getattr(one, name), getattr(other, name)))
        if form == "moved":
            with second_device():
                spread.move_to(torch.device("cpu"))
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses: list[Tensor] = []
        alone_losses: list[Tensor] = []
        spread_loss, alone_loss = partial(add_loss, losses), partial(add_loss, alone_losses)
        if form == "batch by batch":
            for part in share:
                (spread_loss(part, spread.measure(part)) * dp).backward()
        else:
            spread.forward_backward(
                [*share, ShardedExperience.of(share[0]).blank_row(torch.device("cpu"))],
                spread_loss,
                lambda loss: (loss * dp).backward(),
            )
        alone.forward_backward(everything, alone_loss, Tensor.backward)
        for name, value in split.held_tensors().items():
            expected_gradient = None if value.grad is None else single.get_parameter(name).grad
            if expected_gradient is not None:
                apart = float((whole(value.grad) - expected_gradient).norm() / expected_gradient.norm().clamp(min=1e-6))
                actual["gradients"] = max(actual["gradients"], apart)
                actual["largest"] = max(actual["largest"], difference(whole(value.grad), expected_gradient))
        total = torch.stack(losses).sum().detach()
        dist.all_reduce(total, group=rows["dp"].get_group())
        expected_losses = torch.stack(alone_losses).detach()
        apart = (total - expected_losses.sum()).abs() / expected_losses.abs().sum()
        actual["loss"] = max(actual["loss"], float(apart))

        norm = torch.nn.utils.clip_grad_norm_(single.parameters(), MAX_NORM)
        gradients = [value.grad for value in split_one.parameters() if value.grad is not None]
        square = square_norm(gradients, [] if split.copy is None else [split.copy], torch.device("cpu"))
        dist.all_reduce(square)
        actual["norm"] = max(actual["norm"], difference(square.sqrt().float(), norm))
        for gradient in gradients:
            local(gradient).mul_(min(1.0, MAX_NORM / float(square.sqrt())))
        for optimizer in optimizers:
            optimizer.step()
    expected = held_tensors(single)
    first = {name: value for bucket in spread.full_parameters(2000) for name, value in bucket.tensors.items()}
    assert list(first) == (list(expected) if dist.get_rank() == 0 else [])
    share = {
        name: value for bucket in spread.full_parameters(2000, is_spread=True) for name, value in bucket.tensors.items()
    }
    shares: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(shares, share)
    all_parts = {name: value for part in shares for name, value in part.items()}
    assert sorted(all_parts) == sorted(name for part in shares for name in part) == sorted(expected)
    assert all(torch.equal(value, all_parts[name]) for name, value in first.items())
    assert len([part for part in shares if part]) > 1 or len(shares) == 1
    largest = max(float(value.detach().abs().max()) for value in expected.values())
    actual["weights"] = max(float((all_parts[name] - expected[name]).abs().max()) / largest for name in expected)
    spread.move_to(torch.device("meta"))
    actual["left"] = float(sum(not local(value).is_meta for value in [*split_one.parameters(), *split_one.buffers()]))
    numbers = torch.tensor(list(actual.values()))
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return {"form": form, "ep": ep, "cp": cp, **dict(zip(actual, numbers.tolist(), strict=True))}


def compare_rounding(
    pp: int, dp: int, tp: int, schedule: str, family: str, form: str, ep: int = 1, cp: int = 1
) -> dict[str, Any]:
    """How far bf16-mixed takes the gradients of a split model from those in float32, against one process."""
    exact, single, split_one = (make_model(family) for _ in range(3))
    mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    experts = expert_mesh("cpu", num_stages=pp, ep=ep) if ep > 1 else None
    split = split_model(split_one, mesh, ends=ends_group(mesh), experts=experts, schedule=schedule, is_mixed=True)
    microbatches = parts(seed=0, is_truncated=False)
    if family in MIXTURES:  # rounding must not choose other experts
        microbatches = [with_routes(part, exact.config, known=1.0) for part in microbatches]
    SingleModel(exact, SETTINGS).forward_backward(microbatches, loss_of, Tensor.backward)
    alone, spread = SingleModel(single, SETTINGS), Parallel3DModel(split, SETTINGS)
    with torch.autocast("cpu", torch.bfloat16):
        for model in (alone, spread):
            model.forward_backward(microbatches, loss_of, Tensor.backward)
    squares = torch.zeros(2)
    for name, value in split.held_tensors().items():
        exact_gradient = None if value.grad is None else exact.get_parameter(name).grad
        if exact_gradient is not None:
            gradients = (whole(value.grad), single.get_parameter(name).grad)
            squares += torch.stack([(gradient - exact_gradient).square().sum() for gradient in gradients])
    dist.all_reduce(squares)
    return {"form": form, "rounding": float((squares[0] / squares[1]).sqrt())}


def compare_case(case: list[Any]) -> dict[str, Any]:
    return {"case": case, **(compare_rounding if "mixed" in case else compare)(*case)}


def main(cases: list[list[Any]]) -> int:
    worlds: dict[int, list[list[Any]]] = {}
    for case in cases:
        worlds.setdefault(math.prod([*case[:3], *case[7:]]), []).append(case)
    return fork_runs(list(worlds), lambda size: print_compared(compare_case, worlds[size]))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
