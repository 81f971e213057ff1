"""Compares an RL update with supervised fine-tuning of the same tokens on the same path, and with padded Hugging Face.

    python -m benchmarks.update_vs_sft [--quick] [--models 1M,27M] [--processes 1,4] [--workloads short,skewed]

The RL side is GRPO's whole update phase in lightrl.Trainer, with hooks, callbacks and metrics, on given trajectories.
After each of its updates, the same process runs the other sides:

    sft      cross-entropy of the same loss tokens, with the same ParallelModel and microbatches, clipping, fused AdamW
    padded   only with one process: the same in plain Hugging Face, rows padded to the longest, fastest batch size

The learning rates are 0, so the work stays the same. `ratio` is the time of `sft` over that of the update, turn by
turn: above 1, the update is faster; `cpu_ratio` is the same for processor time. Several processes are FSDP2 ranks, of
which rank 0 measures. Each row also contains the machine's load.

Workloads are groups of 8 trajectories: `short` has prompts of 5 tokens and completions of 2 to 4, `skewed` prompts of
32 and completions of lengths.py up to 128, `prompts` prompts of 128 and completions of 8 to 24.

`--topk 0,8,64` also measures `score_centering` with this many most likely tokens per position (random ones here), and
their bytes per token in the trajectories and in the update's tensors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.profilers import Profiler

import lightrl
from benchmarks.lengths import skewed_lengths
from benchmarks.local_engine import make_config, make_model
from benchmarks.report import Report, median_ratio, peak_rss_mib
from benchmarks.trajectories import GROUP_SIZE, PADDED_ROWS, make_trajectories, run_padded
from lightrl.columns import TOPK_NAMES, extended, topk_columns
from lightrl.experience import Experience
from lightrl.models import Outputs
from lightrl.strategies import FSDP2Strategy, Microbatches, ShardedExperience, ranks_of
from lightrl.strategies.sharded_experience.placement import microbatch_rows
from lightrl.trajectory import Trajectory

WARM_UP = 2  # updates
TARGETS = {"sft": 1.0, "padded": 2.0}
CLIP = 1.0


def workload_of(name: str, count: int, cap: int) -> tuple[int, list[int]]:
    """Returns the prompt tokens, and the length of each completion."""
    return {
        "short": (5, [2 + row % 3 for row in range(count)]),
        "skewed": (32, skewed_lengths(count, cap)),
        "prompts": (128, [8 + 4 * (row % 5) for row in range(count)]),
    }[name]


class UpdateTimes(Profiler):
    """Wall and processor time of each update phase, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._started = (0.0, 0.0)

    def start(self, action_name: str) -> None:
        if action_name == "rl/update":
            self._started = now()

    def stop(self, action_name: str) -> None:
        if action_name == "rl/update":
            self.turns["rl"].append(since(self._started))


def now() -> tuple[float, float]:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def since(started: tuple[float, float]) -> tuple[float, float]:
    wall, cpu = now()
    return wall - started[0], cpu - started[1]


class OtherTurns(lightrl.RLCallback):
    """Runs an update of the other sides after each iteration, on the minibatch of the RL update."""

    def __init__(self, times: UpdateTimes, padded_model: str | None) -> None:
        self.times = times
        self.padded_model = padded_model
        self.minibatch: ShardedExperience | None = None
        self.sides: dict[str, Callable[[], None]] = {}

    def on_minibatch_start(self, trainer: Any, module: Any, minibatch: Any, index: int, total: int) -> None:
        self.minibatch = minibatch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.minibatch is not None
        if not self.sides:
            self.sides = {"sft": fine_tuning(pl_module, self.minibatch)}
            if self.padded_model is not None:
                self.sides["padded"] = padded(self.padded_model, self.minibatch.dense(device=pl_module.device))
        sides = list(self.sides.items())
        for name, update in sides if batch_idx % 2 else sides[::-1]:
            started = now()
            update()
            self.times.turns[name].append(since(started))


def fine_tuning(module: Any, minibatch: ShardedExperience) -> Callable[[], None]:
    """Returns an update that maximizes the logprob of each loss token, with the module's model and microbatches."""
    ranks, model = ranks_of(module.trainer.strategy), module.parallel_models["policy"]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=True)
    num_tokens = minibatch.num_loss_tokens

    def loss(part: Experience, outputs: Outputs) -> torch.Tensor:
        return -(outputs.logprobs * part.loss_mask).sum() / num_tokens * ranks.dp_size

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        rows = microbatch_rows(minibatch, ranks, module.microbatch_tokens, unit=module.loss_unit)
        microbatches = Microbatches(minibatch, rows, module.device)
        with torch.enable_grad():
            model.forward_backward(microbatches, loss, lambda value: value.backward())
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return update


def padded(name: str, minibatch: Experience) -> Callable[[], None]:
    """Returns the same update with a plain Hugging Face model."""
    model = make_model(name).to(minibatch.token_ids.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    experience = minibatch.with_tensors({"rewards": torch.full((len(minibatch),), 1 / minibatch.num_loss_tokens)})

    def update(rows: int) -> None:
        with torch.enable_grad():
            run_padded(model, experience, rows)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    tried: dict[int, float] = {}
    for rows in [*PADDED_ROWS[:1], *(rows for rows in PADDED_ROWS if rows <= len(minibatch))]:
        started = now()
        update(rows)
        tried[rows] = since(started)[0]
    fastest = min(tried, key=lambda rows: tried[rows])
    return lambda: update(fastest)


def with_likely_tokens(item: Trajectory, num: int, vocab_size: int) -> Trajectory:
    """Returns the trajectory with `num` random tokens as the sampler's most likely ones, each 1 / vocab_size."""
    generator = random.Random(item.sample)
    chance, ids = -math.log(vocab_size), range(vocab_size)
    tokens = [[(chance, token) for token in generator.sample(ids, num)] for _ in item.completion_ids]
    columns = topk_columns(tokens, num)
    return replace(item, columns=extended({}, len(item.prompt.token_ids or ()), columns, len(tokens)))


def topk_bytes(minibatch: ShardedExperience) -> dict[str, int]:
    """Returns the bytes of the sampler's most likely tokens for each token, on the host and in the update's tensors."""
    tensors = [minibatch.dense()[name] for name in TOPK_NAMES if name in minibatch.tokens]
    return {
        "topk_bytes": sum(minibatch.tokens[name].token_bytes for name in TOPK_NAMES if name in minibatch.tokens),
        "topk_tensor_bytes": sum(tensor.element_size() * tensor.shape[-1] for tensor in tensors),
    }


def work(arguments: argparse.Namespace) -> None:
    """Measures one model and workload, as this process or one of the ranks; rank 0 writes the times into the folder."""
    folder = Path(arguments.folder)
    config = make_config(arguments.models)
    torch.set_num_threads(arguments.threads)
    prompt_tokens, lengths = workload_of(arguments.workloads, arguments.groups * GROUP_SIZE, arguments.cap)
    topk = int(arguments.topk)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        records = make_trajectories(prompt_tokens, lengths, config.vocab_size)
        if topk:
            records = [with_likely_tokens(item, topk, config.vocab_size) for item in records]
        (folder / "trajectories.jsonl").write_text("".join(json.dumps(item.to_json()) + "\n" for item in records))
    times, num_processes = UpdateTimes(), int(arguments.processes)
    others = OtherTurns(times, arguments.models if num_processes == 1 else None)
    centering = {"score_centering": True, "sampling": lightrl.Sampling(topk_logprobs=topk)} if topk else {}
    spec = lightrl.ModelSpec(config=config.to_dict(), tokenizer="examples.quickstart.task.tokenizer", seed=0)
    reward = "examples.quickstart.reward.exact"
    module = lightrl.GRPO(spec, group_size=GROUP_SIZE, lr=0.0, reward=reward, **centering)
    trainer = lightrl.Trainer(
        accelerator=arguments.accelerator,
        devices=num_processes,
        strategy=FSDP2Strategy() if num_processes > 1 else "auto",
        callbacks=[others],
        profiler=times,
        max_steps=WARM_UP + arguments.repeats,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        gradient_clip_val=CLIP,
        limit_val_batches=0,
        default_root_dir=folder,
    )
    trainer.fit(module, datamodule=lightrl.TrajectoryDataModule(str(folder / "trajectories.jsonl")))
    if trainer.is_global_zero:
        turns = {name: values[WARM_UP:] for name, values in times.turns.items()}
        assert others.minibatch is not None
        result = {"turns": turns, "peak_rss_mib": peak_rss_mib(), "tokens": sum(lengths) + prompt_tokens * len(lengths)}
        result["topk"] = {"topk": topk, **topk_bytes(others.minibatch)} if topk else {}
        (folder / "result.json").write_text(json.dumps(result))


def measure(
    report: Report, model: str, workload: str, processes: str, topk: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Adds the rows of one model, workload and number of processes; returns the ratios by side."""
    with tempfile.TemporaryDirectory(prefix="update_vs_sft_") as folder:
        words = [sys.executable, "-m", "benchmarks.update_vs_sft", "--folder", folder, "--models", model]
        words += ["--workloads", workload, "--processes", processes, "--topk", topk]
        words += [
            f"--{name}={getattr(arguments, name)}" for name in ("groups", "cap", "repeats", "threads", "accelerator")
        ]
        load = os.getloadavg()[0]
        subprocess.run(words, check=True, stdout=sys.stderr, timeout=arguments.timeout_s)
        result = json.loads((Path(folder) / "result.json").read_text())
    wall = {name: [turn[0] for turn in turns] for name, turns in result["turns"].items()}
    cpu = {name: [turn[1] for turn in turns] for name, turns in result["turns"].items()}
    ratios = {}
    for side in wall.keys() - {"rl"}:
        ratios[side] = report.add(
            "update",
            model=model,
            workload=workload,
            processes=int(processes),
            against=side,
            **result["topk"],
            **median_ratio(wall[side], wall["rl"]),
            cpu_ratio=median_ratio(cpu[side], cpu["rl"])["ratio"],
            target=TARGETS[side] if side == "sft" or workload != "short" else None,
            update_s=round(statistics.median(wall["rl"]), 4),
            other_s=round(statistics.median(wall[side]), 4),
            tokens=result["tokens"],
            load_1min=round(load, 2),
            peak_rss_mib=result["peak_rss_mib"],
        )["ratio"]
    return ratios


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1M,27M")
    parser.add_argument("--workloads", default="short,skewed,prompts")
    parser.add_argument("--processes", default="1,4")
    parser.add_argument("--topk", default="0", help="likely tokens for score centering; 0 does not center")
    parser.add_argument("--groups", type=int, default=16, help=f"of {GROUP_SIZE} trajectories")
    parser.add_argument("--cap", type=int, default=128, help="longest completion of the skewed workload, in tokens")
    parser.add_argument("--repeats", type=int, default=10, help=f"measured updates; {WARM_UP} more warm up")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument(
        "--timeout-s", type=float, default=3600.0, help="of one model, workload and number of processes"
    )
    parser.add_argument("--accelerator", default="cpu", help="gpu was not run yet")
    parser.add_argument("--quick", action="store_true", help="1M, one workload, 2 groups, 1 and 2 processes, 2 updates")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # this is one measurement's process
    arguments = parser.parse_args(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if arguments.folder is not None:
        work(arguments)
        return
    if arguments.quick:
        arguments.models, arguments.workloads, arguments.processes = "1M", "short", "1,2"
        arguments.groups, arguments.repeats = 2, 2
    report = Report("update_vs_sft", dtype="float32", threads=arguments.threads)
    ratios: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for model in arguments.models.split(","):
        for processes in arguments.processes.split(","):
            for workload, topk in itertools.product(arguments.workloads.split(","), arguments.topk.split(",")):
                measured = measure(report, model, workload, processes, topk, arguments)
                if topk == "0":
                    ratios[model].append(measured)
    print(f"\n{report.table()}\n")
    for model, found in ratios.items():  # the least of all its workloads and numbers of processes
        print(json.dumps({"model": model, "ratio": min(item["sft"] for item in found)}))


if __name__ == "__main__":
    main()
