"""Iterations per second of GRPO: lightrl against TRL's GRPOTrainer, on the same task, in one run.

    python -m benchmarks.grpo_vs_trl [--quick] [--threads 2] [--tasks short,skewed] [--contenders ...]

Needs TRL: `pip install -c constraints.txt -e ".[bench]"`.

Each contender is a process that builds its trainer once and then waits between two iterations until this one lets it
run a few. They run in turns, so a machine whose speed drifts favors nobody, and ratios are made pair by pair.

    this process ──run 3──► TRL ──seconds──► run 3 ──► lightrl ──seconds──► run 3 ──► lightrl …

Equal on both sides: the model folder (weights, tokenizer), prompts, group size, float32, threads, AdamW with gradient
clipping, the token-level clipped loss without KL, one update per iteration, logging at every iteration, no checkpoints.
The learning rate is 0, so the policy and with it the completions stay the same while the same work is done.

    short    the quickstart's task: 32 prompts × 16, at most 4 new tokens, sampled; the end token ends a completion
    skewed   16 prompts × 8, at most 128 new tokens, lengths forced by one list (lengths.py); the reward is another one,
             for no completion is right and TRL would have nothing to learn from equal rewards

TRL has the settings that were fastest on a CPU: sdpa attention, dynamic cache, fused AdamW, no gradient checkpointing,
the batch size below. lightrl has its defaults: rewards in their killable process, weight sync to the engine at every
iteration, RolloutMetrics, progress bar; CSV and TensorBoard files besides. Every group is trained on, also where all
its rewards are equal.

Rows of the table:
    trl                 TRL
    lightrl             lightrl
    lightrl_no_sharing  an ablation: the update sends a group's prompt through the model G times instead of once
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import Report, interleaved, median_ratio, peak_rss_mib

if TYPE_CHECKING:
    from lightrl.trajectory import Trajectory

PROMPT_TOKENS = 5
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
TARGETS = {"short": 1.3, "skewed": 2.5}


@dataclass(frozen=True)
class Task:
    """What an iteration consists of."""

    name: str
    num_prompts: int  # P
    group_size: int  # G
    cap: int  # most new tokens
    trl_batch: int  # TRL's per_device_train_batch_size: the fastest of those tried
    is_forced: bool  # lengths by the shared list

    @property
    def num_trajectories(self) -> int:
        return self.num_prompts * self.group_size

    def lengths(self) -> list[int] | None:
        from benchmarks.lengths import skewed_lengths

        return skewed_lengths(self.num_trajectories, self.cap) if self.is_forced else None


@dataclass
class Block:
    """What a contender did in one turn."""

    seconds: list[float] = field(default_factory=list)  # of each iteration
    trained_tokens: list[int] = field(default_factory=list)
    phase_seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_rss_mib: float = 0.0

    @property
    def mean_seconds(self) -> float:
        return statistics.mean(self.seconds)


class Turnstile:
    """Holds a contender between two iterations until the other side lets it run so many.

    Args:
        connection: gets a Block when the turn is over (an empty one at first), gives the number of iterations; 0 ends.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.block = Block()
        self._left = 0
        self._is_over = False
        self._started = 0.0

    def pass_through(self) -> None:
        """Called between any two iterations, and before the first."""
        if self._left > 0:
            self.block.seconds.append(time.perf_counter() - self._started)
            self._left -= 1
        if self._left == 0 and not self._is_over:
            self.block.peak_rss_mib = peak_rss_mib()
            self.connection.send(self.block)
            self.block = Block()
            self._left = self.connection.recv()
            self._is_over = self._left == 0
        self._started = time.perf_counter()


# ---------------------------------------------------------------------- the two sides


def odd_fraction(trajectory: Trajectory) -> float:
    """A reward that differs within a group, for the skewed task."""
    return sum(token % 2 for token in trajectory.completion_ids) / len(trajectory.completion_ids)


def train_lightrl(task: Task, turnstile: Turnstile, folder: Path, num_iterations: int, shares_prefixes: bool) -> None:
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    import lightrl
    from benchmarks.lengths import session_length
    from examples.quickstart.task import LargestDigit
    from lightrl.engines import Completion
    from lightrl.trajectory import Sampling

    lengths = task.lengths()

    class ForcedLengthEngine(lightrl.LocalEngine):
        """Ends each completion at its length on the list, by position of the prompt and number of the sample."""

        async def generate(
            self, token_ids: list[int], sampling: Sampling, *, session: str, n: int = 1
        ) -> list[Completion]:
            assert lengths is not None
            length = session_length(session, lengths, task.group_size)
            sampling = replace(sampling, min_new_tokens=length, max_new_tokens=length)
            return await super().generate(token_ids, sampling, session=session, n=n)

    class Measure(lightrl.RLCallback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            policy = pl_module.parallel_models["policy"]
            policy.can_share_prefixes = policy.can_share_prefixes and shares_prefixes

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            turnstile.pass_through()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            for name, seconds in trainer.phase_seconds.items():
                turnstile.block.phase_seconds.setdefault(name, []).append(seconds)

        def on_experience_ready(self, trainer: Any, module: Any, experience: Any) -> None:
            turnstile.block.trained_tokens.append(experience.num_loss_tokens)

    L.seed_everything(0)
    engine_class = lightrl.LocalEngine if lengths is None else ForcedLengthEngine
    trainer = lightrl.Trainer(
        engine=engine_class(),
        callbacks=[Measure()],
        max_steps=num_iterations,
        accelerator="cpu",
        logger=[CSVLogger(folder / "csv"), TensorBoardLogger(folder / "tensorboard")],
        log_every_n_steps=1,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    module = lightrl.GRPO(
        str(folder / "model"),
        reward="examples.quickstart.reward.exact" if lengths is None else "benchmarks.grpo_vs_trl.odd_fraction",
        group_size=task.group_size,
        # With forced lengths the engine draws no end token at all, and the trainer's logprobs are told so.
        sampling=Sampling(max_new_tokens=task.cap, min_new_tokens=0 if lengths is None else task.cap),
        lr=0.0,
    )
    trainer.fit(module, datamodule=LargestDigit(batch_size=task.num_prompts))


def train_trl(task: Task, turnstile: Turnstile, folder: Path, num_iterations: int) -> None:
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LogitsProcessorList,
        PrinterCallback,
        ProgressCallback,
        TrainerCallback,
    )
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.lengths import ForcedLengths
    from examples.quickstart.task import LargestDigit

    lengths = task.lengths()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    if lengths is not None:
        forced = ForcedLengths(lengths, end_token=tokenizer.eos_token_id, prompt_tokens=PROMPT_TOKENS, cap=task.cap)
        model.generate = functools.partial(model.generate, logits_processor=LogitsProcessorList([forced]))

    def exact(completion_ids: list[list[int]], answer_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(ids == answer) for ids, answer in zip(completion_ids, answer_ids, strict=True)]

    def odd(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]

    class Measure(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            turnstile.pass_through()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "completions/mean_length" in logs:
                turnstile.block.trained_tokens.append(round(logs["completions/mean_length"] * task.num_trajectories))

    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=task.trl_batch,
        gradient_accumulation_steps=task.num_trajectories // task.trl_batch,
        num_generations=task.group_size,
        num_iterations=1,
        max_completion_length=task.cap,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        loss_type="dapo",  # the mean over tokens, as lightrl's default
        max_steps=num_iterations,
        learning_rate=0.0,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_transformers_continuous_batching=False,
        seed=0,
    )
    prompts = LargestDigit(batch_size=task.num_prompts).make_prompts("train")
    rows = [{"prompt": prompt.id, "answer_ids": prompt.fields["answer_ids"]} for prompt in prompts]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=exact if lengths is None else odd,
        args=settings,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Measure()],
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.train()


CONTENDERS: dict[str, Callable[[Task, Turnstile, Path, int], None]] = {
    "trl": train_trl,
    "lightrl": functools.partial(train_lightrl, shares_prefixes=True),
    "lightrl_no_sharing": functools.partial(train_lightrl, shares_prefixes=False),
}


def contend(name: str, task: Task, connection: Connection, folder: Path, threads: int, num_iterations: int) -> None:
    """A contender's process, from start to end."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output belongs to the measurements
    import torch

    torch.set_num_threads(threads)
    CONTENDERS[name](task, Turnstile(connection), folder, num_iterations)


# ---------------------------------------------------------------------- in turns


class Contender:
    """The other side of a Turnstile, with the processor time and memory of the process and its children."""

    def __init__(self, name: str, task: Task, model: Path, folder: Path, threads: int, num_iterations: int) -> None:
        import psutil

        self.name = name
        self.blocks: list[Block] = []
        self.cpu_seconds: list[float] = []  # of an iteration, by turn
        self.children_rss_mib = 0.0
        folder.mkdir(parents=True)
        (folder / "model").symlink_to(model)
        self.connection, other = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=contend, args=(name, task, other, folder, threads, num_iterations), name=name
        )
        self.process.start()
        other.close()
        self._tree = psutil.Process(self.process.pid)
        self._receive()  # it is ready

    def run(self, num_iterations: int) -> float:
        """Lets it run so many iterations; their mean wall time in seconds."""
        before = self._tree_cpu_seconds()
        self.connection.send(num_iterations)
        block = self._receive()
        self.cpu_seconds.append((self._tree_cpu_seconds() - before) / num_iterations)
        self.blocks.append(block)
        return block.mean_seconds

    def end(self) -> None:
        self.connection.send(0)
        self.process.join()

    def close(self) -> None:
        """Ends it wherever it is; without effect after `end`."""
        self.connection.close()
        self.process.terminate()
        self.process.join()

    def _receive(self) -> Block:
        try:
            block: Block = self.connection.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(
                f"The process of {self.name} ended with exit code {self.process.exitcode}, expected an iteration. Its "
                "traceback is above."
            ) from None
        return block

    def _tree_cpu_seconds(self) -> float:
        children = self._tree.children(recursive=True)
        self.children_rss_mib = sum(child.memory_info().rss for child in children) / 2**20
        times = [process.cpu_times() for process in (self._tree, *children)]
        return float(sum(time.user + time.system for time in times))


def save_model(folder: Path) -> None:
    """The quickstart's model and tokenizer, as an ordinary folder that both sides load."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from examples.quickstart.task import tokenizer

    torch.manual_seed(0)
    token = tokenizer()
    config = Qwen3Config(
        vocab_size=len(token),
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=token.pad_token_id,
        eos_token_id=token.eos_token_id,
        bos_token_id=None,
        **MODEL,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    token.save_pretrained(folder)


def measure(report: Report, task: Task, names: Sequence[str], arguments: argparse.Namespace) -> float | None:
    """All rows of one task; gives lightrl's ratio to TRL if both took part."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo_vs_trl_")))
        save_model(folder / "model")
        turns = arguments.pairs + 1  # the first warms up
        num_iterations = turns * arguments.iterations + 1  # the last is not measured: it goes on to the end of the run
        contenders: dict[str, Contender] = {}
        for name in names:
            contenders[name] = Contender(name, task, folder / "model", folder / name, arguments.threads, num_iterations)
            stack.callback(contenders[name].close)
        runs = {name: functools.partial(contender.run, arguments.iterations) for name, contender in contenders.items()}
        seconds = {name: times[1:] for name, times in interleaved(runs, repeats=turns).items()}
        for contender in contenders.values():
            contender.end()
    cpu = {name: contender.cpu_seconds[1:] for name, contender in contenders.items()}
    tokens = {
        name: statistics.mean(count for block in contender.blocks[1:] for count in block.trained_tokens)
        for name, contender in contenders.items()
    }
    for name, contender in contenders.items():
        against: dict[str, Any] = {}
        if "trl" in names and name != "trl":
            against = median_ratio(seconds["trl"], seconds[name])
            against["cpu_ratio"] = median_ratio(cpu["trl"], cpu[name])["ratio"]
        phases: dict[str, list[float]] = {}
        for block in contender.blocks[1:]:
            for phase, values in block.phase_seconds.items():
                phases.setdefault(phase, []).extend(values)
        report.add(
            task.name,
            contender=name,
            seconds=round(statistics.median(seconds[name]), 4),
            iterations_per_s=round(1 / statistics.median(seconds[name]), 3),
            cpu_seconds=round(statistics.median(cpu[name]), 4),
            trained_tokens=round(tokens[name], 1),
            **against,
            target=TARGETS[task.name] if name == "lightrl" else None,
            **{f"{phase}_s": round(statistics.median(values), 4) for phase, values in phases.items()},
            peak_rss_mib=contender.blocks[-1].peak_rss_mib,
            children_rss_mib=round(contender.children_rss_mib, 1),
        )
    # Sampled lengths differ by chance only, forced ones not at all.
    num_measured = arguments.pairs * arguments.iterations
    tolerance = 0 if task.is_forced else 0.01 * max(tokens.values()) + 4 * (task.num_trajectories / num_measured) ** 0.5
    assert max(tokens.values()) - min(tokens.values()) <= tolerance, f"unequal work: trained tokens {tokens}"
    if not {"trl", "lightrl"} <= set(names):
        return None
    return median_ratio(seconds["trl"], seconds["lightrl"])["ratio"]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="short,skewed")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--threads", type=int, default=2, help="of each contender; only one runs at a time")
    parser.add_argument("--pairs", type=int, default=12, help="measured turns of each contender; one more warms up")
    parser.add_argument("--iterations", type=int, default=3, help="in a turn")
    parser.add_argument(
        "--passive-waiting",
        action="store_true",
        help="OpenMP threads sleep while they wait; for machines where something else runs",
    )
    parser.add_argument("--quick", action="store_true", help="8 prompts × 4, cap 16, two turns of one iteration")
    arguments = parser.parse_args(argv)
    names = arguments.contenders.split(",")
    if "trl" in names and importlib.util.find_spec("trl") is None:
        sys.exit(
            "TRL is not installed, expected it beside lightrl to compare with. "
            'Run `pip install -c constraints.txt -e ".[bench]"`, or leave it out with --contenders lightrl.'
        )
    if arguments.passive_waiting:
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    tasks = {
        "short": Task("short", 32, 16, cap=4, trl_batch=256, is_forced=False),
        "skewed": Task("skewed", 16, 8, cap=128, trl_batch=32, is_forced=True),
    }
    if arguments.quick:
        arguments.pairs, arguments.iterations = 1, 1
        tasks = {
            name: replace(task, num_prompts=8, group_size=4, cap=min(task.cap, 16), trl_batch=32)
            for name, task in tasks.items()
        }
    versions = {name: _version(name) for name in ("trl", "accelerate", "transformers", "lightning")}
    report = Report(
        "grpo_vs_trl",
        threads=arguments.threads,
        dtype="float32",
        iterations_per_turn=arguments.iterations,
        passive_waiting=arguments.passive_waiting,
        **versions,
    )
    ratios = {}
    for name in arguments.tasks.split(","):
        ratio = measure(report, tasks[name], names, arguments)
        if ratio is not None:
            ratios[f"ratio_{name}"] = ratio
    report.finish(
        [
            "measurement", "contender", "seconds", "cpu_seconds", "trained_tokens", "ratio", "ratio_min", "ratio_max",
            "cpu_ratio", "target", "rollout_s", "update_s", "peak_rss_mib", "children_rss_mib",
        ],
        **ratios,
    )  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
