"""Estimates what FSDP2 and 3D parallelism cost, up to a number of GPUs, without running anything.

    python -m benchmarks.plan [--gpus 512] [--model qwen3-30b-a3b ...] [--config FOLDER] [--prompts 128]

For each model and number of GPUs, it prints the fastest layouts that fit the memory, as `lightrl plan` finds them:
memory per rank, bytes sent and seconds per update. GPU rates are from data sheets, at `lightrl plan`'s MFU.

With --shards, torch's FSDP2 also shards the model, on fake tensors over a fake process group: `rank_0_gib` and
`last_gib` are the parameters, gradients and moments of the first and last rank, to compare with `state_gib`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.report import Report
from lightrl import GRPO
from lightrl.models import ModelSpec
from lightrl.plan import GPUS, MFU, Choice, PlannedRun, TrainerSettings, choices, planned, role_cost
from lightrl.strategies.layouts.probes import decoder_layers
from lightrl.trajectory import Sampling


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


def qwen3_moe(hidden_size: int, num_layers: int, num_heads: int, expert_size: int) -> dict[str, Any]:
    dense = qwen3(hidden_size, 3 * hidden_size, num_layers, num_heads, is_tied=False)
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert_size}
    return {**dense, "model_type": "qwen3_moe", "num_key_value_heads": 4, **experts}


# Sizes of published models, so nothing needs to be downloaded.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": qwen3(1024, 3072, 28, 16, is_tied=True),
    "qwen3-1.7b": qwen3(2048, 6144, 28, 16, is_tied=True),
    "qwen3-8b": qwen3(4096, 12288, 36, 32, is_tied=False),
    "qwen3-32b": qwen3(5120, 25600, 64, 64, is_tied=False),
    "qwen3-30b-a3b": qwen3_moe(2048, 48, 32, 768),
    "qwen3-235b-a22b": qwen3_moe(4096, 94, 64, 1536),
    "llama-3.1-70b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "first_k_dense_replace": 3, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "n_group": 8, "topk_group": 4, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False,
    },
}  # fmt: skip
FIVE = ("qwen3-8b", "qwen3-30b-a3b", "qwen3-235b-a22b", "llama-3.1-70b", "deepseek-v3")
SIZES = (8, 64, 512)
GROUP, PROMPT_TOKENS, NEW_TOKENS = 8, 1024, 8192


def run_of(values: dict[str, Any], prompts: int, microbatch_tokens: int) -> PlannedRun:
    """Plans GRPO of a model with this config on one GPU, with an update per iteration, without the engine's memory."""
    spec = ModelSpec(
        config={"max_position_embeddings": 40960, **values}, tokenizer="examples.quickstart.task.tokenizer"
    )
    sampling = Sampling(max_new_tokens=NEW_TOKENS)
    module = GRPO(spec, reward=len, group_size=GROUP, microbatch_tokens=microbatch_tokens, sampling=sampling)
    trainer = TrainerSettings.of({"accelerator": "gpu", "devices": 1, "strategy": "FSDP2Strategy"})
    data = SimpleNamespace(batch_size=prompts, max_prompt_tokens=PROMPT_TOKENS)
    return replace(planned(module, trainer, data), engine=None)


def row_of(choice: Choice) -> dict[str, Any]:
    gib, run = 2**30, choice.run
    role, cost = run.roles[0], role_cost(run, run.roles[0])
    split = f"pp {role.pp} tp {role.tp}" if run.layout == "3D" else f"ep {run.ep} cp {role.cp}"
    settings = {
        "checkpointing": run.checkpoint_activations, "reduce": run.reduce_every_microbatch, "offload": run.offloads,
    }  # fmt: skip
    return {
        "gpus": run.world,
        "layout": f"{run.layout} {split}",
        "settings": " ".join(name for name, value in settings.items() if value),
        "memory_gib": round(choice.memory / gib, 1),
        "state_gib": round((cost.weights + cost.gradients + cost.moments) / gib, 2),
        "gathered_gib": round(cost.gathered / gib, 2),
        "activations_gib": round(cost.activations / gib, 2),
        "sent_gib": round(choice.sent / gib, 1),
        "update_s": round(choice.time.total_s, 1),
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
    parser.add_argument("--gpus", type=int, default=512, help="largest number of GPUs")
    parser.add_argument("--model", choices=MODELS, nargs="+", default=FIVE)
    parser.add_argument("--config", help="folder with config.json, instead of --model")
    parser.add_argument("--prompts", type=int, default=128, help=f"per update, each with {GROUP} trajectories")
    parser.add_argument("--microbatch-tokens", type=int, default=16384)
    parser.add_argument("--gpu", choices=GPUS, default="H100")
    parser.add_argument("--memory-gb", type=float, default=80.0)
    parser.add_argument("--shards", action="store_true", help="shard the model on a fake process group too")
    given = parser.parse_args(arguments)
    models = {name: MODELS[name] for name in given.model}
    if given.config is not None:
        models = {given.config: AutoConfig.from_pretrained(given.config).to_dict()}
    report = Report("plan", trajectory_tokens=PROMPT_TOKENS + NEW_TOKENS, mfu=MFU, assumed=vars(GPUS[given.gpu]))
    for name, values in models.items():
        run = run_of(values, given.prompts, given.microbatch_tokens)
        for gpus in sorted({*(size for size in SIZES if size < given.gpus), given.gpus}):
            shards: dict[str, float] = {}
            if given.shards:
                ends = zip(("rank_0_gib", "last_gib"), (0, gpus - 1), strict=True)
                shards = {
                    key: round(sharded_state_bytes(run.roles[0].config, gpus, rank) / 2**30, 4) for key, rank in ends
                }
            for choice in choices(run.over(gpus), given.memory_gb * 1e9, GPUS[given.gpu]):
                report.add("update", model=name, **row_of(choice), **shards, peak_rss_mib=0)
    report.finish([name for name in report.rows[0] if name not in ("measurement", "peak_rss_mib")])


if __name__ == "__main__":
    main()
