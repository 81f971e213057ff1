"""Estimates what FSDP2 and 3D parallelism cost, up to a number of GPUs, without running anything.

    python -m benchmarks.plan [--gpus 1024] [--model qwen3-32b | --config FOLDER] [--tokens 4194304]

For each number of GPUs it prints FSDP2 and the fastest (pp, dp, tp) that fits the memory: memory of a rank, bytes sent
per update, idle time of the pipeline, microbatches, seconds. If FSDP2's whole gradients do not fit, `reduces` is the
number of microbatches: `reduce_every_microbatch` is set. The formulas for bytes are in lightrl/plan/costs.py. The
machine's constants are assumed, not measured, and printed as `assumed`; set measured ones with --mfu, --memory-gb
and the bandwidths.

With --shards, torch's own FSDP2 also shards the model, on fake tensors and over a process group that only simulates
the other ranks: `rank_0_gib` and `last_gib` are the parameters, gradients and moments of the first and last rank,
including uneven shards, to compare with the formula's `state_gib`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.report import Report
from lightrl.plan.costs import Cost, Work, fsdp2_cost, num_parameters, parallel_3d_cost
from lightrl.strategies.layouts.probes import decoder_layers


@dataclass(frozen=True)
class Machine:
    """Hardware constants; the defaults are for an H100, by its data sheet, and a common network; none is measured."""

    memory_bytes: float = 80e9
    flops: float = 989e12  # bfloat16, dense
    mfu: float = 0.45  # without communication
    local_bytes_per_s: float = 400e9  # per GPU, within a node
    remote_bytes_per_s: float = 50e9  # per GPU, between nodes
    gpus_per_node: int = 8

    def bandwidth(self, ranks: int) -> float:
        return self.local_bytes_per_s if ranks <= self.gpus_per_node else self.remote_bytes_per_s


@dataclass(frozen=True)
class Times:
    """Seconds of one update."""

    compute_s: float  # without attention scores; a checkpointed layer runs its forward twice
    bubble_fraction: float  # idle time of the pipeline
    step_s: float

    @classmethod
    def of(cls, cost: Cost, config: Any, work: Work, machine: Machine) -> Times:
        """Estimates the times; without a pipeline, communication over dp overlaps with the compute."""
        gpus = cost.pp * cost.dp * cost.tp
        per_token = (8 if work.checkpoint_activations else 6) * num_parameters(config)
        compute_s = per_token * work.tokens / (gpus * machine.flops * machine.mfu)
        bubble = (cost.pp - 1) / (cost.num_microbatches + cost.pp - 1)
        dp_s = cost.sent_dp / machine.bandwidth(gpus)
        others_s = cost.sent_tp / machine.bandwidth(cost.tp) + cost.sent_pp / machine.remote_bytes_per_s
        others_s += max(0.0, dp_s - compute_s) if cost.pp == 1 else dp_s
        return cls(compute_s, bubble, compute_s / (1 - bubble) + others_s)


def best_fsdp2_cost(config: Any, gpus: int, work: Work, machine: Machine) -> Cost:
    """Returns the cost with one reduce for all microbatches, the default, if that fits; otherwise with one for each."""
    cost = fsdp2_cost(config, gpus, work)
    if cost.memory_bytes <= machine.memory_bytes or cost.num_microbatches == 1:
        return cost
    return fsdp2_cost(config, gpus, work, reduce_every_microbatch=True)


def best_3d_cost(config: Any, gpus: int, work: Work, machine: Machine) -> Cost:
    """Returns the fastest (pp, dp, tp) for this number of GPUs that fits their memory; the smallest if none fits."""
    costs = list(_all_3d_costs(config, gpus, work, machine))
    fitting = [cost for cost in costs if cost.memory_bytes <= machine.memory_bytes]
    if fitting:
        return min(fitting, key=lambda cost: Times.of(cost, config, work, machine).step_s)
    return min(costs, key=lambda cost: cost.memory_bytes)


def _all_3d_costs(config: Any, gpus: int, work: Work, machine: Machine) -> Iterator[Cost]:
    for tp in (size for size in range(1, machine.gpus_per_node + 1) if gpus % size == 0):
        for pp in (size for size in range(1, gpus // tp + 1) if (gpus // tp) % size == 0):
            try:
                yield parallel_3d_cost(config, pp, gpus // tp // pp, tp, work)
            except ValueError:  # the model's heads or layers do not allow it
                continue


def qwen3(
    hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int, *, is_tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": is_tied,
    }


# Sizes of published models, so nothing needs to be downloaded.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": qwen3(1024, 3072, 28, 16, is_tied=True),
    "qwen3-1.7b": qwen3(2048, 6144, 28, 16, is_tied=True),
    "qwen3-8b": qwen3(4096, 12288, 36, 32, is_tied=False),
    "qwen3-32b": qwen3(5120, 25600, 64, 64, is_tied=False),
}
SIZES = (8, 64, 512, 1024)


def row_of(cost: Cost, times: Times, machine: Machine) -> dict[str, Any]:
    gib = 2**30
    return {
        "gpus": cost.pp * cost.dp * cost.tp,
        "strategy": cost.strategy,
        "pp_dp_tp": f"{cost.pp} {cost.dp} {cost.tp}",
        "microbatches": cost.num_microbatches,
        "reduces": cost.num_microbatches if cost.reduce_every_microbatch else 1,
        "memory_gib": round(cost.memory_bytes / gib, 1),
        "state_gib": round(cost.state_bytes / gib, 2),
        "gathered_gib": round(cost.gathered_bytes / gib, 2),
        "activations_gib": round(cost.activation_bytes / gib, 2),
        "logits_gib": round(cost.logit_bytes / gib, 2),
        "fits": cost.memory_bytes <= machine.memory_bytes,
        "sent_gib": round(cost.sent_bytes / gib, 1),
        "bubble_fraction": round(times.bubble_fraction, 3),
        "compute_s": round(times.compute_s, 3),
        "step_s": round(times.step_s, 3),
    }


def sharded_state_bytes(config: Any, world: int, rank: int) -> int:
    """Returns bytes of a rank's parameters, gradients and Adam moments if FSDP2 shards the model as lightrl does."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (world,))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return 16 * sum(parameter.to_local().numel() for parameter in model.parameters())
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=1024, help="largest number of GPUs")
    parser.add_argument("--model", choices=MODELS, default="qwen3-32b")
    parser.add_argument("--config", help="folder with config.json, instead of --model")
    parser.add_argument("--tokens", type=int, default=2**22, help="of one update, all ranks together")
    parser.add_argument("--microbatch-tokens", type=int, default=16384)
    parser.add_argument("--no-checkpointing", action="store_true")
    parser.add_argument("--shards", action="store_true", help="shard the model on a fake process group too")
    parser.add_argument("--mfu", type=float, default=Machine().mfu)
    parser.add_argument("--memory-gb", type=float, default=Machine().memory_bytes / 1e9)
    parser.add_argument("--local-gb-per-s", type=float, default=Machine().local_bytes_per_s / 1e9)
    parser.add_argument("--remote-gb-per-s", type=float, default=Machine().remote_bytes_per_s / 1e9)
    given = parser.parse_args(arguments)
    if given.config is not None:
        config = AutoConfig.from_pretrained(given.config)
    else:
        values = dict(MODELS[given.model])
        config = AutoConfig.for_model(values.pop("model_type"), **values)
    machine = Machine(
        mfu=given.mfu,
        memory_bytes=given.memory_gb * 1e9,
        local_bytes_per_s=given.local_gb_per_s * 1e9,
        remote_bytes_per_s=given.remote_gb_per_s * 1e9,
    )
    work = Work(given.tokens, given.microbatch_tokens, not given.no_checkpointing)
    report = Report(
        "plan",
        model=given.config or given.model,
        parameters=num_parameters(config),
        tokens=given.tokens,
        assumed=vars(machine),
    )
    for gpus in sorted({*(size for size in SIZES if size < given.gpus), given.gpus}):
        for cost in (best_fsdp2_cost(config, gpus, work, machine), best_3d_cost(config, gpus, work, machine)):
            shards: dict[str, float] = {}
            if given.shards and cost.strategy == "FSDP2":
                sizes = (sharded_state_bytes(config, gpus, rank) for rank in (0, gpus - 1))
                shards = {
                    name: round(size / 2**30, 4) for name, size in zip(("rank_0_gib", "last_gib"), sizes, strict=True)
                }
            report.add(
                "update", **row_of(cost, Times.of(cost, config, work, machine), machine), **shards, peak_rss_mib=0
            )
    report.finish([name for name in report.rows[0] if name not in ("measurement", "peak_rss_mib")])


if __name__ == "__main__":
    main()
