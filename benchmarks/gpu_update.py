"""Measures the update of a language model on one GPU: tokens/s, MFU and memory, against a plain training loop.

    python -m benchmarks.gpu_update [--quick] [--models qwen3-0.6b,qwen3-1.7b] [--contenders pure,mixed]

Contenders train a model of the same shape with random weights, on the same trajectories (completions of lengths.py,
prompts of a quarter of the longest), with fused AdamW, one after another, each with the GPU to itself; one that runs
out of memory reports it. An update is one microbatch: forward, backward, optimizer step.

    plain    a Hugging Face loop in bfloat16: rows padded to the longest, an attention mask, logits at every position,
             logprobs in float32; as many rows at a time as fit into `--plain-tokens` padded tokens
    pure     SingleModel in bfloat16: one packed row, the output head only at loss tokens, and entropies
    shared   the same, with each group's prompt only once in the row
    mixed    as pure under bf16-mixed: float32 weights, gradients and moments, products in bfloat16
    trainer  GRPO's whole update phase in lightrl.Trainer, with hooks, callbacks and metrics, under bf16-mixed
    fsdp2    the same with FSDP2Strategy, on one GPU
    offload  the same with the moments in host memory between updates

MFU is a fraction of `--tflops`, by default an H100's 989 for dense bfloat16 from its data sheet. It counts only work on
real tokens, without recomputation: the head at loss tokens, half of causal attention, and a prompt for each of its
trajectories, although `shared` and the last three compute it once. `warm_up_s` is the first update, with all
compilation; `memory_gib` is the measured peak; `predicted_gib` is the estimate of plan/costs.py.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import lightrl
from benchmarks.lengths import skewed_lengths
from benchmarks.plan import MODELS
from benchmarks.report import Report
from benchmarks.trajectories import GROUP_SIZE, make_trajectories, run_padded, weighted_sum
from benchmarks.update_vs_sft import UpdateTimes, now, since
from lightrl.experience import Experience
from lightrl.functional import can_compile
from lightrl.models import Outputs
from lightrl.plan.costs import Work, peak_bytes
from lightrl.plan.sizes import ModelSize
from lightrl.strategies import FSDP2Strategy, LogprobSettings, SingleModel
from lightrl.strategies.parallel_3d import head_size
from lightrl.trajectory import Trajectory

GOAL_RATIO, GOAL_MFU = 1.3, {"qwen3-0.6b": 0.35, "qwen3-1.7b": 0.45}
CONTENDERS = ("plain", "pure", "shared", "mixed", "trainer", "fsdp2", "offload")
WARM_UP = 2  # updates
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
TINY: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip


def make_config(name: str) -> PretrainedConfig:
    values = dict(TINY if name == "tiny" else MODELS[name])
    config: PretrainedConfig = AutoConfig.for_model(values.pop("model_type"), **values)
    return config


def flops(config: PretrainedConfig, lengths: Sequence[int], num_loss_tokens: int, *, has_backward: bool) -> float:
    """Returns the FLOPs of one pass over sequences of these lengths; a backward costs two forwards."""
    tokens = sum(lengths)
    layers = config.num_hidden_layers
    in_layer = 2 * config.hidden_size * head_size(config) * (config.num_attention_heads + config.num_key_value_heads)
    in_layer += 3 * config.hidden_size * config.intermediate_size
    matrices = layers * in_layer * tokens + config.vocab_size * config.hidden_size * num_loss_tokens
    # Scores and their product with the values: two products of T × T × heads · head size, half of them masked.
    attention = layers * config.num_attention_heads * config.head_dim * sum(length * length for length in lengths)
    return float((2 * matrices + 2 * attention) * (3 if has_backward else 1))


def trajectories_of(tokens: int, longest: int, vocab_size: int) -> list[Trajectory]:
    """Makes groups of completions, about `tokens` tokens in total; prompts are a quarter of `longest`."""
    prompt = longest // 4
    num = max(1, round(tokens / (GROUP_SIZE * (prompt + longest / 4)))) * GROUP_SIZE
    return make_trajectories(prompt, skewed_lengths(num, longest), vocab_size)


def make_parts(tokens: int, longest: int, vocab_size: int) -> Experience:
    return Experience.from_trajectories(trajectories_of(tokens, longest, vocab_size))


def make_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    with DEVICE:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def backward_of(name: str, model: PreTrainedModel, part: Experience, plain_tokens: int) -> Callable[[], None]:
    """Returns a contender's forward and backward of the microbatch."""
    if name == "plain":
        return lambda: run_padded(model, part, max(1, plain_tokens // part.token_ids.shape[1]))
    single = SingleModel(model, LogprobSettings(entropy_needs_gradient=False), form="packed" if CUDA else None)
    single.packs_prefixes &= name == "shared"

    def loss(part: Experience, outputs: Outputs) -> Tensor:
        return weighted_sum(part, outputs.logprobs)

    return lambda: single.forward_backward([part], loss, Tensor.backward)


def loop_seconds(name: str, config: PretrainedConfig, experience: Experience, given: argparse.Namespace) -> list[float]:
    """Returns the seconds of each update of a contender without a Trainer; the first is the warm-up."""
    is_mixed = name == "mixed"
    model = make_model(config, torch.bfloat16 if CUDA and not is_mixed else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=is_mixed):
        backward = backward_of(name, model, experience.to(DEVICE), given.plain_tokens)

        def update() -> float:
            started = now()
            backward()
            optimizer.step()
            optimizer.zero_grad()
            return since(started)[0]

        return [update() for _ in range(WARM_UP + given.repeats)]


def trainer_seconds(
    name: str, config: PretrainedConfig, trajectories: list[Trajectory], given: argparse.Namespace
) -> list[float]:
    """Returns the seconds of each update phase of a run on recorded trajectories."""
    times = UpdateTimes()
    sharded = FSDP2Strategy(offload_to_cpu=["optimizer"] if name == "offload" else [])
    spec = lightrl.ModelSpec(config=config.to_dict(), tokenizer="examples.quickstart.task.tokenizer", seed=0)
    tokens = sum(len(trajectory.token_ids) for trajectory in trajectories)
    reward = "examples.quickstart.reward.exact"
    module = lightrl.GRPO(spec, group_size=GROUP_SIZE, lr=0.0, reward=reward, microbatch_tokens=tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trajectories.jsonl"
        path.write_text("".join(json.dumps(item.to_json()) + "\n" for item in trajectories))
        trainer = lightrl.Trainer(
            accelerator="gpu" if CUDA else "cpu", devices=1, precision="bf16-mixed",
            strategy="auto" if name == "trainer" else sharded, profiler=times, max_steps=WARM_UP + given.repeats,
            logger=False, enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
            gradient_clip_val=1.0, limit_val_batches=0, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, datamodule=lightrl.TrajectoryDataModule(str(path)))
    return [wall for wall, _ in times.turns["rl"]]


def predicted_bytes(name: str, size: ModelSize, tokens: int) -> float:
    """Estimates the bytes of parameters, gradients, both moments and the peak of a microbatch."""
    width = 2 if CUDA and name in ("pure", "shared") else 4
    copies = name in ("mixed", "trainer")
    is_compiled = can_compile("cuda" if CUDA else "cpu")
    work = Work(tokens, tokens, False, width, copies_weights=copies, is_compiled=is_compiled)
    return 4.0 * width * size.parameters + sum(peak_bytes(size, tokens, 1.0, work))


def measure(report: Report, model: str, tokens: int, given: argparse.Namespace) -> dict[str, float]:
    """Adds a row for each contender; returns the ratios to the plain loop."""
    config = make_config(model)
    trajectories = trajectories_of(tokens, given.longest, config.vocab_size)
    experience = Experience.from_trajectories(trajectories)
    lengths = experience.lengths.tolist()
    work = flops(config, lengths, experience.num_loss_tokens, has_backward=True)
    with torch.device("meta"):
        size = ModelSize.of(AutoModelForCausalLM.from_config(config))
    rates: dict[str, float] = {}
    for name in given.contenders.split(","):
        row: dict[str, Any] = {"model": model, "contender": name, "tokens": sum(lengths)}
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        try:
            if name in ("trainer", "fsdp2", "offload"):
                first, *others = trainer_seconds(name, config, trajectories, given)
            else:
                first, *others = loop_seconds(name, config, experience, given)
            middle = statistics.median(others[WARM_UP - 1 :])
            rates[name] = 1 / middle
            row |= {"ms": round(middle * 1e3, 2), "mfu": round(work / middle / (given.tflops * 1e12), 4)}
            row |= {"tokens_per_s": round(sum(lengths) / middle), "warm_up_s": round(first, 2)}
            if name != "plain":
                row["predicted_gib"] = round(predicted_bytes(name, size, sum(lengths)) / 2**30, 2)
        except torch.cuda.OutOfMemoryError as error:
            row["error"] = str(error).splitlines()[0]
        row["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2) if CUDA else None
        report.add("update", **row)
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
    plain = rates.pop("plain", None)
    ratios = {} if plain is None else {name: round(rate / plain, 3) for name, rate in rates.items()}
    return {f"ratio_{model}_{tokens}_{name}": ratio for name, ratio in ratios.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-0.6b,qwen3-1.7b")
    parser.add_argument("--tokens", default="16384", help="of a microbatch; several joined by commas")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--longest", type=int, default=1024, help="completion, in tokens")
    parser.add_argument("--plain-tokens", type=int, default=8192, help="padded tokens at a time of the plain loop")
    parser.add_argument("--tflops", type=float, default=989.0, help="of the GPU in bfloat16, dense")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny model, on the CPU if there is no GPU")
    given = parser.parse_args(arguments)
    if given.quick:
        given.models, given.tokens, given.longest, given.plain_tokens, given.repeats = "tiny", "256", 32, 256, 1
    elif not CUDA:
        raise SystemExit(
            "benchmarks.gpu_update needs an NVIDIA GPU, and torch finds none. Use --quick to try it on the CPU."
        )
    report = Report("gpu_update", longest=given.longest, tflops=given.tflops)
    ratios: dict[str, float] = {}
    for name in given.models.split(","):
        for tokens in map(int, given.tokens.split(",")):
            ratios |= measure(report, name, tokens, given)
    columns = ["model", "contender", "tokens", "ms", "tokens_per_s", "mfu", "memory_gib", "predicted_gib", "warm_up_s"]
    report.finish([*columns, "error"], **ratios, goal_ratio=GOAL_RATIO, goal_mfu=GOAL_MFU)


if __name__ == "__main__":
    main()
