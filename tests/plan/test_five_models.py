"""Five published models on 8, 64 and 512 GPUs against numbers worked out by hand, and the layouts that are advised."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.plan import MODELS, run_of
from lightrl import GRPO
from lightrl.engines.engine import PlannedEngine
from lightrl.models import ModelSpec, Role
from lightrl.plan import (
    GPUS,
    PlannedRun,
    choices,
    misfits,
    planned_time,
    rank_memories,
    role_cost,
    settings_of,
    settings_text,
    smallest,
)
from lightrl.plan.costs import Work, activation_bytes, key_value_bytes, key_value_ranks, layer_bytes
from lightrl.plan.planned_run import _precision
from lightrl.plan.speed import pass_flops
from lightrl.strategies import FSDP2Strategy, Parallel3DStrategy
from lightrl.strategies.empty_model import empty_model

# By hand, from the published sizes: parameters without routed experts and of all routed experts; layers, layers with
# experts, hidden size; bytes of a token in a server's cache.
#   qwen3-30b-a3b: experts 48 · 128 · 3 · 2048 · 768; others 48 · (2 · 2048 · 4096 + 2 · 2048 · 512) + 2 · 151936 · 2048
#   deepseek-v3: experts 58 · 256 · 3 · 7168 · 2048; its cache has 512 + 64 numbers per layer
BY_HAND = {
    "qwen3-8b": (8.19e9, 0.0, 36, 0, 4096, 36 * 2 * 8 * 128 * 2),
    "qwen3-30b-a3b": (1.54e9, 28.99e9, 48, 48, 2048, 48 * 2 * 4 * 128 * 2),
    "qwen3-235b-a22b": (8.00e9, 227.1e9, 94, 94, 4096, 94 * 2 * 4 * 128 * 2),
    "llama-3.1-70b": (70.55e9, 0.0, 80, 0, 8192, 80 * 2 * 8 * 128 * 2),
    "deepseek-v3": (17.1e9, 653.9e9, 61, 58, 7168, 61 * (512 + 64) * 2),
}
TOKENS = 128 * 8 * 9216  # of an update
MICROBATCHES = {8: 72, 64: 9, 512: 2}  # of 16,384 tokens, on each rank


@cache
def planned(name: str) -> PlannedRun:
    return run_of(MODELS[name], 128, 16384)


def on_ranks(name: str, world: int, *, ep: int = 1, **settings: Any) -> PlannedRun:
    return replace(planned(name).over(world), ep=ep, checkpoint_activations=True, **settings)


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("world", MICROBATCHES)
@pytest.mark.parametrize("name", BY_HAND)
def test_memory_and_bytes_are_those_worked_out_by_hand(name: str, world: int, reduces: bool) -> None:
    others, experts, num_layers, mixed, hidden, per_token = BY_HAND[name]
    ep, num = (8 if experts else 1), MICROBATCHES[world]
    run = on_ranks(name, world, ep=ep, reduce_every_microbatch=reduces)
    role, cost = run.roles[0], role_cost(run, run.roles[0])
    assert cost.num_microbatches == num
    assert cost.weights + cost.gradients + cost.moments == pytest.approx(16 * (others + experts) / world, rel=0.1)
    elsewhere = others * (world - 1) / world + experts / ep * (1 - ep / world)
    assert cost.sent_dp == pytest.approx((4 * num + 4 * (num if reduces else 1)) * elsewhere, rel=0.1)
    # Each token goes to 8 experts and back as float32: in the forward, when it is repeated, and in the backward.
    assert cost.sent_near == pytest.approx(6 * 4 * TOKENS / world * mixed * 8 * hidden * 7 / 8, rel=0.1)
    inputs = activation_bytes(role.size, 16384, 1.0, Work(TOKENS))
    assert inputs == pytest.approx(16384 * 4 * hidden * num_layers, rel=0.1)
    assert key_value_bytes(role.config) == per_token


def test_without_ep_the_bytes_of_a_mixture_are_those_of_all_its_experts() -> None:
    run = on_ranks("qwen3-30b-a3b", 8)
    assert role_cost(run, run.roles[0]).sent == pytest.approx(7.8e12, rel=0.02)  # 72 · 2 · 2 · 30.5e9 · 7/8, one reduce


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        # Of each of 8 experts 2H for its input, 2H for its output, 8I in between; 26H in float32 and bfloat16: norms,
        # the router and the inputs of q, k and v; 10 per number of queries and keys.
        ("qwen3-30b-a3b", 8 * (4 * 2048 + 8 * 768) + 26 * 2048 + 10 * 128 * (32 + 4)),
        ("qwen3-235b-a22b", 8 * (4 * 4096 + 8 * 1536) + 26 * 4096 + 10 * 128 * (64 + 4)),
    ],
)
def test_a_layer_of_a_mixture_keeps_what_its_chosen_experts_do(name: str, per_token: int) -> None:
    size = planned(name).roles[0].size
    assert layer_bytes(size, size.layers[0], Work(1)) == pytest.approx(per_token, rel=0.01)


def test_latent_key_values_are_on_every_gpu_of_a_server() -> None:
    config, dense = planned("deepseek-v3").roles[0].config, planned("qwen3-8b").roles[0].config
    assert (key_value_ranks(config, 8), key_value_ranks(dense, 4), key_value_ranks(dense, 16)) == (1, 4, 8)


def test_a_model_is_planned_without_memory_for_its_experts() -> None:
    """Each layer has 45 GB of experts."""
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.device.type == "cpu":
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    values = {**MODELS["deepseek-v3"], "num_hidden_layers": 4, "max_position_embeddings": 4096}
    with Watch():
        model = empty_model(Role(ModelSpec(config=values, tokenizer="examples.quickstart.task.tokenizer")))
    assert largest < 10e6  # a router, which its constructor fills
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}


H100, MEMORY = GPUS["H100"], 80e9


def test_30b_fits_one_node_of_80_gb_and_two_without_offload() -> None:
    run = planned("qwen3-30b-a3b")
    best = choices(run.over(8), MEMORY, H100)
    assert best
    assert all("optimizer" in choice.run.offloads and choice.run.reduce_every_microbatch for choice in best)
    assert all(choice.memory <= 0.9 * MEMORY for choice in best)
    assert [choice.time.total_s for choice in best] == sorted(choice.time.total_s for choice in best)
    assert smallest(run, MEMORY, H100)[0].run.world <= 8
    (two,) = rank_memories(on_ranks("qwen3-30b-a3b", 16, ep=8, reduce_every_microbatch=True))
    assert two.total <= 0.9 * MEMORY


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3-8b"])
def test_only_layouts_that_a_strategy_accepts_are_advised(name: str) -> None:
    run = planned(name).over(16)
    best = choices(run, MEMORY, H100, most=50)
    assert {choice.run.layout for choice in best} == {"FSDP2", "3D"}
    module = GRPO(ModelSpec(config=MODELS[name], tokenizer="examples.quickstart.task.tokenizer"), reward=len)
    for choice in best:
        strategy = strategy_of(choice.run, run)
        strategy.check_sizes(module)
        role, split = choice.run.roles[0], isinstance(strategy, Parallel3DStrategy)
        assert split == (choice.run.layout == "3D")
        assert (strategy.ep, strategy.cp) == (choice.run.ep, role.cp)
        assert not split or (strategy.pp, strategy.tp) == (role.pp, role.tp)
        assert tuple(strategy.offload_to_cpu) == tuple(choice.run.offloads)
    assert len(
        {(c.run.layout, c.run.ep, c.run.roles[0].cp, c.run.roles[0].pp, c.run.roles[0].tp) for c in best}
    ) == len(best)


def test_the_smallest_world_fits_and_half_of_it_does_not() -> None:
    best = smallest(planned("qwen3-235b-a22b"), MEMORY, H100)
    world = best[0].run.world
    assert best[0].memory <= 0.9 * MEMORY
    assert world % 8 == 0
    for fewer in (world - 8, world // 2):
        assert choices(planned("qwen3-235b-a22b").over(fewer), MEMORY, H100) == []


@pytest.mark.parametrize(("gpus", "nodes", "fewer"), [(8, 2, (8, 1)), (4, 4, (4, 1)), (4, 4, (4, 2)), (3, 4, (2, 1))])
def test_the_written_ranks_are_those_of_the_layout(gpus: int, nodes: int, fewer: tuple[int, int]) -> None:
    base = replace(planned("qwen3-8b"), gpus_per_node=gpus).over(fewer[0] * fewer[1])
    base = replace(base, layout="3D", num_nodes=fewer[1])
    layout = base.over(gpus * nodes)
    written = settings_of(layout, base)["trainer"]
    assert (written["devices"], written["num_nodes"]) == (gpus, nodes)
    assert written["strategy"]["init_args"]["dp"] == gpus * nodes  # of a file that sets another one


def test_neither_tp_nor_a_server_is_larger_than_a_node() -> None:
    run = replace(planned("llama-3.1-70b"), gpus_per_node=4).over(16)
    assert run.num_nodes == 4
    best = choices(run, 1e15, H100, most=50)
    assert max(choice.run.roles[0].tp for choice in best) == 4
    served = replace(run, engine=PlannedEngine("SGLangEngine", "servers"))
    (*_, server) = misfits(served, 25e9)  # tp 8 would fit
    assert server.fix == "use a smaller model, or larger nodes"
    assert "tp to 8" in [*misfits(replace(served, gpus_per_node=8), 25e9)][-1].fix
    (ranks,) = [each for each in misfits(replace(served, world=8).over(8), 45e9) if each.where.startswith("ranks")]
    assert "no number" not in ranks.fix


def test_the_schedule_of_a_pipeline_stays() -> None:
    base = planned("qwen3-8b").over(16, pp=4)
    twice = replace(base, stages_per_rank=2)
    one, two = (role_cost(run, run.roles[0]) for run in (base, twice))
    assert two.activations > one.activations
    assert two.sent_near == 2 * one.sent_near
    with pytest.raises(ValueError, match="80 stages"):
        role_cost(replace(base, stages_per_rank=20), base.roles[0])


def test_latent_attention_counts_its_own_heads() -> None:
    run = planned("deepseek-v3").over(16)
    longer = replace(run, longest=2 * run.longest, prompt_tokens=2 * run.prompt_tokens, new_tokens=2 * run.new_tokens)
    flops = [pass_flops(each, run.roles[0]) for each in (run, longer)]
    attention = 61 * 128 * (128 + 64 + 128) * run.trajectories * run.longest**2
    assert flops[1] - 2 * flops[0] == pytest.approx(2 * attention)


def test_parts_of_a_model_share_the_adapters_of_a_node() -> None:
    assert [H100.gather_bytes_per_s(64, parts, 8) for parts in (1, 2, 8, 64)] == [400e9, 200e9, 50e9, 50e9]
    assert H100.gather_bytes_per_s(8, 8, 8) == 450e9


def strategy_of(run: PlannedRun, base: PlannedRun) -> Any:
    """Builds the strategy of the settings that turn `base` into `run`."""
    given = settings_of(run, base).get("trainer", {}).get("strategy", {"class_path": "FSDP2Strategy"})
    kind: Any = {"FSDP2Strategy": FSDP2Strategy, "Parallel3DStrategy": Parallel3DStrategy}[given["class_path"]]
    strategy = kind(**given.get("init_args", {}))
    strategy.parallel_devices, strategy.num_nodes = [torch.device("cuda", 0)] * run.world, 1
    strategy.precision_plugin = _precision("bf16-mixed")
    return strategy


def test_the_settings_of_a_layout_are_those_that_differ() -> None:
    base = on_ranks("qwen3-30b-a3b", 8)
    changed = replace(base.over(16), ep=8, reduce_every_microbatch=True)
    strategy = {"class_path": "FSDP2Strategy", "init_args": {"reduce_every_microbatch": True, "ep": 8}}
    assert settings_of(changed, base) == {"trainer": {"devices": 8, "num_nodes": 2, "strategy": strategy}}
    assert settings_text(changed, base) == (
        "trainer.strategy's reduce_every_microbatch to true and trainer.strategy's ep to 8 and "
        "trainer.devices · trainer.num_nodes to 16"
    )
    split = replace(base, layout="3D", roles=(replace(base.roles[0], tp=2),))
    assert settings_of(split, base)["trainer"]["strategy"] == {
        "class_path": "Parallel3DStrategy", "init_args": {"dp": 4, "tp": 2, "activation_checkpointing": True},
    }  # fmt: skip
    assert settings_of(base, base) == {}


def test_the_predicted_time_has_the_exchange_of_experts() -> None:
    near, far = (on_ranks("qwen3-30b-a3b", 64, ep=ep) for ep in (8, 64))
    costs = [role_cost(run, run.roles[0]) for run in (near, far)]
    seconds = [planned_time(run, H100, None).phases[-1][1] for run in (near, far)]
    assert costs[1].sent_near > costs[0].sent_near
    assert seconds[1] - seconds[0] == pytest.approx(costs[1].sent_near / 50e9 - costs[0].sent_near / 450e9, rel=0.05)
