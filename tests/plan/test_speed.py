"""Predicted times against an H200's measurements, and against numbers worked out by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.plan import MODELS
from lightrl.engines.engine import PlannedEngine
from lightrl.plan import GPUS, Gpu, PlannedRun, engine_memory, planned_time, role_cost
from lightrl.plan.memory import PlannedRole
from lightrl.plan.sizes import LayerSize, ModelSize
from lightrl.plan.speed import LOCAL_LAYER_S

ROOT = Path(__file__).parents[2]
ROUND = Gpu("", flops_per_s=1e15, bytes_per_s=1e12, link_bytes_per_s=1e11)


def run_of(model: str, **settings) -> PlannedRun:
    """16 trajectories of 1,024 tokens, half of them generated: the microbatch of the measurements."""
    values = dict(MODELS[model])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        size = ModelSize.of(AutoModelForCausalLM.from_config(config))
    fields = {
        "roles": (PlannedRole("policy", size, size.parameters, range(1), is_compiled=True),), "world": 1,
        "layout": "whole", "prompts": 4, "group_size": 4, "num_minibatches": 1, "update_epochs": 1,
        "microbatch_tokens": 16384, "prompt_tokens": 512, "new_tokens": 512, "longest": 1024, "is_mixed": True,
    }  # fmt: skip
    return PlannedRun(**{**fields, **settings})


def measured() -> list[dict]:
    lines = (ROOT / "benchmarks/gpu/h200.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["call"] == 2]


def test_an_update_takes_the_time_that_an_h200_took_up_to_the_ratio_on_the_page():
    records = measured()
    assert len(records) == 6
    ratios = []
    for record in records:
        time = planned_time(run_of(record["model"]), GPUS["H200"], None)
        ((name, seconds, _),) = time.phases
        assert (name, time.tokens, time.trained_tokens) == ("update", record["tokens"], 8192)
        ratios.append(seconds / record["ms"] * 1e3)
    page = re.search(r"predictions are ([\d.]+) to ([\d.]+)\s+times", (ROOT / "docs/gpu.md").read_text())
    assert page is not None
    assert [f"{min(ratios):.2f}", f"{max(ratios):.2f}"] == [*page.groups()]
    assert min(ratios) >= 0.8
    assert max(ratios) <= 1.25


def test_decoding_reads_weights_and_key_values_once_per_step():
    engine = PlannedEngine("SGLangEngine", "servers", servers=2, tp=2)
    run = run_of("qwen3-1.7b", engine=engine)
    (name, seconds, text), _, (_, sync_s, _) = planned_time(run, ROUND, None).phases
    weights = 2 * run.roles[0].parameters / 2  # bytes on each of two GPUs
    key_values = 8 * 768 * (2 * 28 * 8 * 128 * 2) / 2  # eight rows, 768 tokens on average, over two GPUs
    step_s = (weights + key_values) / (0.6 * 1e12)
    assert name == "rollout"
    assert "1 x 512 steps of 8 rows" in text
    assert seconds == pytest.approx(512 * step_s, rel=0.02)  # and a little prefill
    assert sync_s == pytest.approx(weights / 1e11)


def test_trajectories_that_wait_for_memory_make_further_waves():
    run = run_of("qwen3-1.7b", engine=PlannedEngine("SGLangEngine", "servers"))
    weights, each = engine_memory(run, run.engine, rows=1)
    time = planned_time(run, ROUND, (weights + 5.5 * each) / 0.9)
    assert time.phases[0][2].startswith("4 x 512 steps of 5 rows")


def test_local_decoding_waits_for_kernel_launches():
    time = planned_time(run_of("qwen3-0.6b", engine=PlannedEngine("LocalEngine", "rank 0")), GPUS["H200"], None)
    assert time.phases[0][1] == pytest.approx(512 * 28 * LOCAL_LAYER_S, rel=0.1)
    assert time.num_gpus == 1


def test_more_work_takes_longer_by_its_passes():
    def update_s(**settings) -> float:
        return planned_time(run_of("qwen3-0.6b", **settings), ROUND, None).phases[-1][1]

    once = update_s()
    assert update_s(update_epochs=3) == pytest.approx(3 * once)
    assert update_s(checkpoint_activations=True) == pytest.approx(4 / 3 * once)
    role = run_of("qwen3-0.6b").roles[0]
    assert update_s(roles=(replace(role, trained=1),)) == pytest.approx(2 / 3 * once)
    assert update_s(roles=(replace(role, ranks=range(4)),)) == pytest.approx(once / 4)
    time = planned_time(run_of("qwen3-0.6b", inferring=["policy", "policy"]), ROUND, None)
    assert time.phases[0][1] == pytest.approx(2 / 3 * once)


def test_slow_links_limit_an_update_beyond_a_node():
    fast = replace(ROUND, link_bytes_per_s=1e15)
    node, nodes = (run_of("qwen3-1.7b").over(world) for world in (8, 16))
    assert "limited by communication" not in planned_time(node, fast, None).phases[-1][2]
    ((_, seconds, text),) = planned_time(nodes, replace(fast, network_bytes_per_s=1e9), None).phases
    assert "limited by communication" in text
    assert seconds == pytest.approx(role_cost(nodes, nodes.roles[0]).sent / 8e9)  # eight adapters of a node


def test_the_cost_is_that_of_all_gpus_and_a_rollout_during_the_update_is_free():
    run = run_of("qwen3-1.7b", engine=PlannedEngine("SGLangEngine", "servers", servers=3))
    time = planned_time(run, ROUND, None)
    rollout, update, sync = (seconds for _, seconds, _ in time.phases)
    assert time.total_s == pytest.approx(rollout + update + sync)
    assert planned_time(replace(run, max_staleness=1), ROUND, None).total_s == pytest.approx(
        max(rollout, update) + sync
    )
    each, per_million = time.cost(3.6)
    assert each == pytest.approx(4 * time.total_s / 1000)
    assert per_million == pytest.approx(each / 8192 * 1e6)


def test_a_mixture_counts_the_experts_that_a_token_uses():
    run = run_of("qwen3-1.7b")
    role, (layer,) = run.roles[0], run.roles[0].size.layers
    half = layer.parameters // 2
    mixture = LayerSize(layer.num, layer.parameters - half, 0, half, experts=8, expert_width=1)
    mixed = replace(run, roles=(replace(role, size=replace(role.size, layers=(mixture,), experts_per_token=2)),))
    assert mixed.roles[0].parameters == role.parameters
    in_use = role.size.in_layers - layer.num * half * 6 / 8
    assert mixed.roles[0].size.used_in_layers == pytest.approx(in_use)
    assert planned_time(mixed, ROUND, None).total_s < planned_time(run, ROUND, None).total_s


@pytest.mark.parametrize(("copy_s", "waits_s"), [(1, 0), (2, 1), (3, 3), (4, 5), (9, 15)])  # per forward pass, here 1
def test_moments_are_copied_behind_one_forward_pass_and_one_backward_pass_that_takes_twice_as_long(copy_s, waits_s):
    run = replace(run_of("qwen3-1.7b").over(4), num_minibatches=2)
    cost, gpu = role_cost(run, run.roles[0]), replace(ROUND, link_bytes_per_s=1e18)
    forward_s = planned_time(run, gpu, None).phases[-1][1] / 2 / cost.num_microbatches / 3  # in two updates
    gpu = replace(gpu, host_bytes_per_s=2 * 4 * run.roles[0].parameters / 4 / (copy_s * forward_s))
    times = [planned_time(replace(run, offloads=what), gpu, None).phases[-1][1] for what in ([], ["optimizer"])]
    assert times[1] - times[0] == pytest.approx(2 * waits_s * forward_s, abs=1e-9 * times[0])


def test_what_neighbors_exchange_comes_on_top_of_the_compute():
    run = run_of("qwen3-1.7b").over(4)

    def update_s(changed: PlannedRun) -> float:
        return planned_time(changed, ROUND, None).phases[-1][1]

    shared = replace(run, roles=(replace(run.roles[0], cp=2),))
    assert update_s(shared) - update_s(run) == pytest.approx(role_cost(shared, shared.roles[0]).sent_near / 1e11)
    staged = replace(run, layout="3D", microbatch_tokens=2048, roles=(replace(run.roles[0], pp=4),))
    times = [planned_time(each, replace(ROUND, link_bytes_per_s=1e18), None).phases[-1][1] for each in (staged, run)]
    assert times[0] == pytest.approx(times[1] * (8 + 4 - 1) / 8)  # eight microbatches
