"""Compares iterations per second of GRPO in lightrl and in TRL's GRPOTrainer, on the same task, in one run.

    python -m benchmarks.grpo_vs_trl [--quick] [--threads 2] [--tasks short,skewed] [--contenders ...]

Needs TRL: `pip install -c constraints.txt -e ".[bench]"`.

Each contender is a process that builds its trainer once and runs a few iterations whenever this process lets it. They
take turns, so changes in the machine's speed favor neither, and ratios are computed pair by pair.

    this process ──run 3──► TRL ──seconds──► run 3 ──► lightrl ──seconds──► run 3 ──► lightrl …

Equal on both sides: the model folder (weights, tokenizer), prompts, group size, float32, threads, AdamW with gradient
clipping, the token-level clipped loss without KL, one update per iteration, logging at every iteration, no checkpoints.
The learning rate is 0, so the policy and its completions do not change, but the work is the same. In learning_vs_trl.py
both learn.

    short    the quickstart's task: 32 prompts × 16, at most 4 new tokens, sampled; the end token ends a completion
    skewed   16 prompts × 8, at most 128 new tokens, lengths forced by one list (lengths.py); the reward differs, since
             no completion is correct and TRL could not learn from equal rewards

TRL uses the settings that were fastest on a CPU: sdpa attention, dynamic cache, fused AdamW, no gradient checkpointing,
the batch size below. lightrl uses its defaults (rewards in a killable process, a weight sync in every iteration,
RolloutMetrics, progress bar), and writes CSV and TensorBoard files. Both also train on groups whose rewards are equal.

Rows of the table:
    trl                 TRL
    lightrl             lightrl
    lightrl_no_sharing  an ablation: the update computes a group's prompt G times instead of once
"""

from __future__ import annotations

import argparse
import asyncio
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

from benchmarks.learned import Learned
from benchmarks.report import Report, interleaved, median_ratio, peak_rss_mib

if TYPE_CHECKING:
    from lightrl.engines import Completion, LocalEngine
    from lightrl.trajectory import Sampling, Trajectory

PROMPT_TOKENS = 5
MODEL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
TARGETS = {"short": 2.0, "skewed": 4.0}
OUTSIDE_TARGET = 0.04  # of an iteration, in no phase: Lightning's loop, hooks, metrics, loggers, progress


@dataclass(frozen=True)
class Task:
    """One iteration's work."""

    name: str
    num_prompts: int  # P
    group_size: int  # G
    cap: int  # most new tokens
    trl_batch: int  # TRL's per_device_train_batch_size, the fastest tried
    is_forced: bool = False  # lengths from the shared list
    learned: Learned | None = None  # for learning_vs_trl
    is_bf16: bool = False  # mixed precision, instead of float32
    seed: int = 0

    @property
    def lr(self) -> float:
        return self.learned.lr if self.learned else 0.0

    @property
    def num_trajectories(self) -> int:
        return self.num_prompts * self.group_size

    def lengths(self) -> list[int] | None:
        from benchmarks.lengths import skewed_lengths

        return skewed_lengths(self.num_trajectories, self.cap) if self.is_forced else None


@dataclass
class Block:
    """A contender's measurements of one turn."""

    seconds: list[float] = field(default_factory=list)  # of each iteration
    trained_tokens: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # the mean of each iteration's trajectories
    questions: list[list[str]] = field(default_factory=list)  # of each iteration, sorted, if the task is learned
    phase_seconds: dict[str, list[float]] = field(default_factory=dict)
    peak_rss_mib: float = 0.0

    @property
    def mean_seconds(self) -> float:
        return statistics.mean(self.seconds)


class Turnstile:
    """Holds a contender between iterations until the other side lets it run a number of them.

    Args:
        connection: sends a Block at the end of each turn, and an empty one first; receives the number of iterations, 0
            to end.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.block = Block()
        self._left = 0
        self._is_over = False
        self._started = 0.0

    def pass_through(self) -> None:
        """Waits for the next turn; called before the first iteration and between iterations."""
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


def odd_fraction(trajectory: Trajectory) -> float:
    """Returns a reward that differs within a group, for the skewed task."""
    return sum(token % 2 for token in trajectory.completion_ids) / len(trajectory.completion_ids)


def make_engine(task: Task) -> LocalEngine:
    """Makes a LocalEngine, which ends each completion at its length on the task's list, if there is one."""
    import lightrl
    from benchmarks.lengths import session_length

    lengths = task.lengths()
    if lengths is None:
        return lightrl.LocalEngine()

    class ForcedLengthEngine(lightrl.LocalEngine):
        def generate_group(
            self, token_ids: list[int], samplings: Sequence[Sampling], *, session: str, **request: Any
        ) -> list[asyncio.Future[Completion]]:
            sessions = [f"{session}/{sample}" for sample in range(len(samplings))]
            forced = [session_length(name, lengths, task.group_size) for name in sessions]
            samplings = [
                replace(sampling, min_new_tokens=length, max_new_tokens=length)
                for sampling, length in zip(samplings, forced, strict=True)
            ]
            return super().generate_group(token_ids, samplings, session=session, **request)

    return ForcedLengthEngine()


def train_lightrl(task: Task, turnstile: Turnstile, folder: Path, num_iterations: int, shares_prefixes: bool) -> None:
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    import lightrl
    from examples.quickstart.task import LargestDigit
    from lightrl.data import DataSource

    class Measure(lightrl.RLCallback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            if not shares_prefixes:
                policy = pl_module.parallel_models["policy"]
                policy.can_mask = policy.packs_prefixes = False

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            turnstile.pass_through()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            for name, seconds in trainer.phase_seconds.items():
                turnstile.block.phase_seconds.setdefault(name, []).append(seconds)

        def on_rollout_end(self, trainer: Any, module: Any, groups: Any) -> None:
            turnstile.block.questions.append(sorted(group.prompt.fields.get("question", "") for group in groups))

        def on_experience_ready(self, trainer: Any, module: Any, experience: Any) -> None:
            turnstile.block.trained_tokens.append(experience.num_loss_tokens)
            turnstile.block.rewards.append(float(experience.rewards.mean()))

    L.seed_everything(task.seed)
    reward, data = "examples.quickstart.reward.exact", LargestDigit(batch_size=task.num_prompts)
    callbacks: list[L.Callback] = [Measure()]
    if task.is_forced:
        reward = "benchmarks.grpo_vs_trl.odd_fraction"
    if learned := task.learned:
        reward = learned.reward
        rows = DataSource("benchmarks.learned.train_rows", arguments={"name": learned.name, "seed": task.seed})
        data = lightrl.PromptDataModule(
            rows,
            batch_size=task.num_prompts,
            system_prompt=learned.system_prompt,
            prompt_template=learned.prompt_template,
            shuffle=False,
        )
        callbacks.append(lightrl.HuggingFaceExport(str(folder / "learned")))
    trainer = lightrl.Trainer(
        engine=make_engine(task),
        callbacks=callbacks,
        max_steps=num_iterations,
        accelerator="cpu",
        precision="bf16-mixed" if task.is_bf16 else "32-true",
        logger=[CSVLogger(folder / "csv"), TensorBoardLogger(folder / "tensorboard")],
        log_every_n_steps=1,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    module = lightrl.GRPO(
        str(folder / "model"),
        reward=reward,
        group_size=task.group_size,
        # With forced lengths the engine draws no end token, which the trainer's logprobs must take into account.
        sampling=lightrl.Sampling(max_new_tokens=task.cap, min_new_tokens=task.cap if task.is_forced else 0),
        lr=task.lr,
        microbatch_tokens=1024 if task.learned else 16384,  # both sides hold a model in memory
    )
    trainer.fit(module, datamodule=data)


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
    from trl import GRPOTrainer

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

    def learned_reward(
        completion_ids: list[list[int]], question: list[str], answer: list[str], **kwargs: Any
    ) -> list[float]:
        turnstile.block.questions.append(sorted(question[:: task.group_size]))
        return learned.rewards(tokenizer, completion_ids, answer)

    class Measure(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            turnstile.pass_through()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs and "completions/mean_length" in logs:
                turnstile.block.trained_tokens.append(round(logs["completions/mean_length"] * task.num_trajectories))
                turnstile.block.rewards.append(logs["reward"])

    if learned := task.learned:
        rows = [{"prompt": learned.chat(row), **row} for row in learned.train_rows(task.seed)]
    else:
        prompts = LargestDigit(batch_size=task.num_prompts).make_prompts("train")
        rows = [{"prompt": prompt.id, "answer_ids": prompt.fields["answer_ids"]} for prompt in prompts]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=learned_reward if learned else exact if lengths is None else odd,
        args=trl_settings(task, folder, num_iterations),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Measure()],
    )
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    trainer.train()
    if learned:
        trainer.save_model(str(folder / "learned"))


def trl_settings(task: Task, folder: Path, num_iterations: int) -> Any:
    """Makes TRL's GRPOConfig."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=task.is_bf16,
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
        learning_rate=task.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,  # lightrl's
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_transformers_continuous_batching=False,
        seed=task.seed,
        shuffle_dataset=task.learned is None,
    )


CONTENDERS: dict[str, Callable[[Task, Turnstile, Path, int], None]] = {
    "trl": train_trl,
    "lightrl": functools.partial(train_lightrl, shares_prefixes=True),
    "lightrl_no_sharing": functools.partial(train_lightrl, shares_prefixes=False),
}


def contend(name: str, task: Task, connection: Connection, folder: Path, threads: int, num_iterations: int) -> None:
    """Runs in a contender's process."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # standard output belongs to the measurements
    import torch

    torch.set_num_threads(threads)
    CONTENDERS[name](task, Turnstile(connection), folder, num_iterations)


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
        self._receive()  # waits until it is ready

    def run(self, num_iterations: int) -> float:
        """Lets it run this number of iterations; returns their mean wall time in seconds."""
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
        """Kills it; does nothing after `end`."""
        self.connection.close()
        self.process.terminate()
        self.process.join()

    def _receive(self) -> Block:
        try:
            block: Block = self.connection.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(
                f"The process of {self.name} failed with exit code {self.process.exitcode}. See its traceback above."
            ) from None
        return block

    def _tree_cpu_seconds(self) -> float:
        children = self._tree.children(recursive=True)
        self.children_rss_mib = sum(child.memory_info().rss for child in children) / 2**20
        times = [process.cpu_times() for process in (self._tree, *children)]
        return float(sum(time.user + time.system for time in times))


def save_model(folder: Path) -> None:
    """Saves the quickstart's model and tokenizer as a folder that both sides load."""
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


@dataclass(frozen=True)
class Measured:
    """What the contenders did in a task, by name, and the wall and processor time of an iteration in each turn."""

    task: Task
    blocks: dict[str, list[Block]]
    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    children_rss_mib: dict[str, float]

    def row(self, name: str) -> dict[str, Any]:
        """Returns a contender's measurements, without its first turn, which warms up."""
        blocks = self.blocks[name][1:]
        against: dict[str, Any] = {}
        if "trl" in self.blocks and name != "trl":
            against = median_ratio(self.seconds["trl"], self.seconds[name])
            against["cpu_ratio"] = median_ratio(self.cpu_seconds["trl"], self.cpu_seconds[name])["ratio"]
        phases: dict[str, list[float]] = {}
        for block in blocks:
            for phase, values in block.phase_seconds.items():
                phases.setdefault(phase, []).extend(values)
        seconds = statistics.median(self.seconds[name])
        return {
            "contender": name,
            "seconds": round(seconds, 4),
            "iterations_per_s": round(1 / seconds, 3),
            "cpu_seconds": round(statistics.median(self.cpu_seconds[name]), 4),
            "trained_tokens": round(self.trained_tokens(name), 1),
            **against,
            "seed": self.task.seed,
            **{f"{phase}_s": round(statistics.median(values), 4) for phase, values in phases.items()},
            **outside_phases(blocks),
            "peak_rss_mib": blocks[-1].peak_rss_mib,
            "children_rss_mib": round(self.children_rss_mib[name], 1),
        }

    def trained_tokens(self, name: str) -> float:
        return statistics.mean(count for block in self.blocks[name][1:] for count in block.trained_tokens)


def by_turns(task: Task, names: Sequence[str], folder: Path, *, pairs: int, iterations: int, threads: int) -> Measured:
    """Lets the contenders train the model in `folder` by turns, each in a folder with its name beside it."""
    turns = pairs + 1  # the first warms up
    with contextlib.ExitStack() as stack:
        contenders: dict[str, Contender] = {}
        for name in names:
            num_iterations = turns * iterations + 1  # the last runs to the end of training, unmeasured
            contenders[name] = Contender(name, task, folder / "model", folder / name, threads, num_iterations)
            stack.callback(contenders[name].close)
        runs = {name: functools.partial(contender.run, iterations) for name, contender in contenders.items()}
        seconds = interleaved(runs, repeats=turns)
        for contender in contenders.values():
            contender.end()
    return Measured(
        task,
        {name: contender.blocks for name, contender in contenders.items()},
        {name: times[1:] for name, times in seconds.items()},
        {name: contender.cpu_seconds[1:] for name, contender in contenders.items()},
        {name: contender.children_rss_mib for name, contender in contenders.items()},
    )


def measure(report: Report, task: Task, names: Sequence[str], arguments: argparse.Namespace) -> float | None:
    """Adds all rows of one task; returns lightrl's ratio to TRL if both took part."""
    with tempfile.TemporaryDirectory(prefix="grpo_vs_trl_") as folder:
        save_model(Path(folder) / "model")
        times = {"pairs": arguments.pairs, "iterations": arguments.iterations}
        measured = by_turns(task, names, Path(folder), **times, threads=arguments.threads)
    targets = {"lightrl": {"target": TARGETS[task.name]}}
    rows = [report.add(task.name, **measured.row(name), **targets.get(name, {})) for name in names]
    tokens = {name: measured.trained_tokens(name) for name in names}
    # sampled lengths differ only by chance, forced ones not at all
    by_chance = (
        0.01 * max(tokens.values()) + 4 * (task.num_trajectories / arguments.pairs / arguments.iterations) ** 0.5
    )
    difference = max(tokens.values()) - min(tokens.values())
    assert difference <= (0 if task.is_forced else by_chance), f"unequal work: trained tokens {tokens}"
    return next((row["ratio"] for row in rows if row["contender"] == "lightrl" and "ratio" in row), None)


def outside_phases(blocks: Sequence[Block]) -> dict[str, float]:
    """Returns the fraction of iteration time outside all phases, for a contender that reports phases."""
    in_phases = sum(sum(values) for block in blocks for values in block.phase_seconds.values())
    total = sum(sum(block.seconds) for block in blocks)
    return {"outside_phases_fraction": round(1 - in_phases / total, 4)} if in_phases else {}


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
        help="OpenMP threads sleep while they wait; for busy machines",
    )
    parser.add_argument("--quick", action="store_true", help="8 prompts × 4, cap 16, two turns of one iteration")
    arguments = parser.parse_args(argv)
    names = arguments.contenders.split(",")
    prepare(names, passive_waiting=arguments.passive_waiting)
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
    report = Report(
        "grpo_vs_trl",
        threads=arguments.threads,
        dtype="float32",
        iterations_per_turn=arguments.iterations,
        passive_waiting=arguments.passive_waiting,
        **versions(),
    )
    ratios = {}
    for name in arguments.tasks.split(","):
        ratio = measure(report, tasks[name], names, arguments)
        if ratio is not None:
            ratios[f"ratio_{name}"] = ratio
    report.finish(
        [
            "measurement", "contender", "seconds", "cpu_seconds", "trained_tokens", "ratio", "ratio_min", "ratio_max",
            "cpu_ratio", "target", "rollout_s", "update_s", "outside_phases_fraction",
            "peak_rss_mib", "children_rss_mib",
        ],
        **ratios,
    )  # fmt: skip


def prepare(names: Sequence[str], *, passive_waiting: bool) -> None:
    """Sets what the contenders' processes inherit; exits if TRL takes part but is not installed."""
    if "trl" in names and importlib.util.find_spec("trl") is None:
        sys.exit(
            'TRL is not installed. Run `pip install -c constraints.txt -e ".[bench]"`, or skip it with --contenders '
            "lightrl."
        )
    if passive_waiting:
        os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}


def versions() -> dict[str, str | None]:
    """Returns the versions of the libraries that take part; None for one that is not installed."""

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name: version(name) for name in ("trl", "accelerate", "transformers", "lightning")}


if __name__ == "__main__":
    main()
