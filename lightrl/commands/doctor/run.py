"""lightrl doctor run: checks everything that a run needs, in a minute, with two iterations in a temporary folder."""

from __future__ import annotations

import logging
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, cast

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only

import lightrl
from lightrl.callbacks import (
    DynamicSampling,
    PromptCurriculum,
    RLCallback,
    RolloutMetrics,
    StalenessControl,
    TrajectoryLog,
    WeightSync,
)
from lightrl.callbacks.probe import Rounding, mismatch_bound_nats, rounding
from lightrl.checks.entry_points import entry_point
from lightrl.checks.files import nearest_folder
from lightrl.checks.printable import count_text, duration_text, escape_unprintable, one_period
from lightrl.commands.cli import LightRLCLI
from lightrl.commands.config_layers import UsageError
from lightrl.commands.console import FIXABLE, chain, keep_traceback, unwrapped
from lightrl.commands.doctor.data import first_prompts, read_split, repeats
from lightrl.commands.doctor.rewards import ms_text, recompute_rewards
from lightrl.concurrency.owner import own_prefix
from lightrl.data import PromptDataModule
from lightrl.errors import LightRLError, OtherRankFailed
from lightrl.models import context_tokens
from lightrl.module import RLModule
from lightrl.plan import UnknownMemory, bytes_text, memory_line, misfits, planned
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.trace.spans import child_bytes, host_bytes, host_memory
from lightrl.trainer import Trainer
from lightrl.trajectory import Group, Trajectory

_MAX_ROWS = 20_000  # per split; reading them takes about a minute
_LEAST_FREE = 0.1  # fraction of the host's memory; if less is free, even starting the run may fail
_LEAST_DISK_BYTES = 2**30
_SHOWN_CHARS = 60  # number of characters shown from a prompt's end
_SHOWN_PROBLEMS = 3
Status = Literal["ok", "warning", "fails"]
_NUM_ITERATIONS = 2
_NUM_REPLAYED = 8
MAX_VALIDATION_PROMPTS = 64
_ALMOST_ALL = 0.9
_ANSWER_S = 10.0  # a running server must answer within this time
_PROBE = "sync/probe_abs_dlogp_nats"
_MISMATCH = "sync/mismatch_present_abs_dlogp_nats"

# Callbacks that affect how a run samples and write only to the run's folder, which is temporary here.
_TRIAL_CALLBACKS = (StalenessControl, WeightSync, RolloutMetrics, DynamicSampling, PromptCurriculum, TrajectoryLog)

# Trainer overrides for the trial: one validation batch, no output. The Trial callback ends the run.
_SHORTENED: dict[str, object] = {
    **dict.fromkeys(("max_time", "min_steps", "min_epochs", "profiler")),
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "fast_dev_run": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 1,
}


def check_run(args: Sequence[str], callbacks: Sequence[L.Callback]) -> int:
    """Prints a line for each check as soon as it is done; returns 1 if a check fails."""
    logging.getLogger("lightrl").setLevel(logging.WARNING)
    filters = [(handler, partial(_is_new, set())) for handler in logging.getLogger("lightrl").handlers]
    try:
        for handler, is_new in filters:
            handler.addFilter(is_new)
        with tempfile.TemporaryDirectory(prefix=own_prefix("lightrl-doctor-"), ignore_cleanup_errors=True) as folder:
            return int(_RunCheck(Path(folder), args, callbacks).num_by_status["fails"] > 0)
    finally:
        for handler, is_new in filters:
            handler.removeFilter(is_new)


def _is_new(shown: set[str], record: logging.LogRecord) -> bool:
    """Returns False for messages already shown (the trial loads data and models again) or printed by the data check."""
    text = record.getMessage()
    is_new = text not in shown and "train prompts" not in text
    shown.add(text)
    return is_new


class _RunCheck(LightRLCLI):
    """Runs two iterations of `lightrl fit` with its output suppressed, and checks before and after them."""

    def __init__(self, folder: Path, args: Sequence[str], callbacks: Sequence[L.Callback]) -> None:
        self.folder = folder
        self.num_by_status: Counter[str] = Counter()
        self.start_s = time.monotonic()
        super().__init__(["fit", *args], callbacks=callbacks)

    def before_instantiate_classes(self) -> None:
        """Shortens the run and redirects its output to the temporary folder."""
        settings = self.config[self.config.subcommand]
        trainer = settings.trainer
        self.user_trainer = trainer.clone()
        self.root = str(self.user_trainer.get("default_root_dir") or ".")
        self.left_out = [f"ckpt_path={settings.ckpt_path}"] if settings.get("ckpt_path") else []
        settings.ckpt_path = None
        for name, value in (_SHORTENED | {"default_root_dir": str(self.folder)}).items():
            trainer[name] = value
        engine = trainer.get("engine")
        engine_args = (engine.get("init_args") if isinstance(engine, Namespace) else None) or Namespace()
        if engine_args.get("urls"):  # the servers are already running
            engine_args.timeouts.startup_s = min(engine_args.timeouts.startup_s, _ANSWER_S)
        folder = engine_args.get("weight_folder")
        if folder is not None:  # a shared folder: servers on other hosts read it, and other runs may use it
            Path(folder).mkdir(parents=True, exist_ok=True)
            prefix = own_prefix("lightrl-doctor-", Path(folder))
            self._weights = tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True)
            engine_args.weight_folder = self._weights.name

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Leaves out user-defined callbacks, and those that write outside the run's folder."""
        settings = self.config_init[self.config.subcommand].trainer
        callbacks = settings.callbacks or []
        self.user_callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        settings.callbacks = [callback for callback in self.user_callbacks if _is_kept(callback)]
        self.left_out += [type(callback).__name__ for callback in self.user_callbacks if not _is_kept(callback)]
        for callback in settings.callbacks:
            if isinstance(callback, TrajectoryLog):
                callback.table_every_n_iterations = None
        return super().instantiate_trainer(**kwargs)

    def before_fit(self) -> None:
        """Does nothing: the trial needs no checkpoint and has no run folder to report."""

    after_fit = before_fit

    def fit(self, **kwargs: Any) -> None:
        module, datamodule = self.model, self.datamodule
        if not isinstance(module, RLModule):
            needed = f"an RLModule such as GRPO, got {type(module).__name__}"
            raise UsageError(f"lightrl doctor run needs {needed}. To check only data: lightrl doctor data.")
        self._check_before(module, datamodule)
        checkpoints = [callback for callback in self.user_callbacks if isinstance(callback, ModelCheckpoint)]
        if not checkpoints and self.user_trainer.get("enable_checkpointing") is not False:
            checkpoints = [ModelCheckpoint(save_last=True)]
        if hasattr(datamodule, "validation_batch_size"):  # a large validation batch could take hours
            datamodule.validation_batch_size = min(datamodule.validation_batch_size, MAX_VALIDATION_PROMPTS)
        trial = Trial(checkpoints)
        self.trainer.callbacks.append(trial)
        try:
            self.trainer.fit(**kwargs)
        except OtherRankFailed:
            raise
        except (LightRLError, *FIXABLE) as error:
            self._report([Finding("trial", chain(unwrapped(error)), "fails", f"See above. {keep_traceback(None)}")])
        self._check_after(trial, module, datamodule)

    @rank_zero_only
    def _check_before(self, module: RLModule, datamodule: L.LightningDataModule) -> None:
        self._report(device_findings(self.trainer))
        self._report([disk_finding(self.root)])
        self._report(memory_on_paper(module, self.trainer, datamodule))
        self._report(model_findings(module))
        self._report(data_findings(module, datamodule))
        if self.left_out:
            self._report([Finding("trial", f"Left out of the two iterations: {', '.join(self.left_out)}.")])

    @rank_zero_only
    def _check_after(self, trial: Trial, module: RLModule, datamodule: L.LightningDataModule) -> None:
        if trial.trajectories or trial.dropped:
            self._report(_trial_findings(trial, module))
        if trial.iterations_s:
            logged = sum(file.stat().st_size for file in self.folder.rglob("iteration-000001.jsonl"))
            interval = next((c.every_n_iterations for c in self.user_callbacks if isinstance(c, TrajectoryLog)), 1)
            batches = _num_batches(datamodule, self.user_trainer.get("limit_val_batches"))
            bottleneck = entry_point("bottleneck")
            (measured,) = [item for item in self.trainer.callbacks if isinstance(item, bottleneck)]
            self._report(bottleneck_findings(*measured.finding(module)))
            self._report(forecast(trial, self.root, logged_bytes=logged / interval, validation_batches=batches))
        warnings, took_s = count_text(self.num_by_status["warning"], "warning"), time.monotonic() - self.start_s
        totals = f"{self.num_by_status['ok']} ok, {warnings}, {self.num_by_status['fails']} failed"
        sys.stdout.write(f"\n{totals}, in {took_s:.0f} s. All output from the trial was deleted.\n")

    @rank_zero_only
    def _report(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.num_by_status[finding.status] += 1
            sys.stdout.write(f"{one_period(str(finding))}\n")
            sys.stdout.flush()


def _is_kept(callback: object) -> bool:
    """Whether the trial keeps a callback: one of `_TRIAL_CALLBACKS`, or one that overrides `configure_rollout`."""
    hook = getattr(type(callback), "configure_rollout", None)
    return isinstance(callback, _TRIAL_CALLBACKS) or hook not in (None, RLCallback.configure_rollout)


def _num_batches(datamodule: Any, limit: Any) -> int:
    """Returns the number of batches in a full validation."""
    prompts = getattr(datamodule, "prompts", {}).get("validation") or []
    total = math.ceil(len(prompts) / getattr(datamodule, "validation_batch_size", 1))
    return math.ceil(limit * total) if isinstance(limit, float) else min(total, total if limit is None else limit)


@dataclass(eq=False)
class Trial(RLCallback):
    """Ends the run after two iterations and measures them; it is the last callback, so it sees what the others log."""

    checkpoints: Sequence[ModelCheckpoint] = ()  # the run's callbacks; the trial itself saves no checkpoint
    length: tuple[float, float, float] = (0, 0, 0)  # see `run_length`
    trajectories: list[Trajectory] = field(default_factory=list)  # from both iterations
    dropped: dict[str, list[str]] = field(default_factory=dict)  # reason → messages
    iterations_s: list[float] = field(default_factory=list)
    phases_s: dict[str, float] = field(default_factory=dict)  # phase → seconds in the last iteration
    validation_batch_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # last values
    checkpoint_bytes: int = 0
    host_bytes: int = 0  # peak, including the processes that the trainer started
    rounding: Rounding | None = None
    since_s: float = 0.0  # start of the current iteration or validation

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.length = run_length(trainer, self.checkpoints)
        trainer.check_val_every_n_epoch, trainer.val_check_batch = None, _NUM_ITERATIONS

    def on_train_batch_start(self, *_: object) -> None:
        self.since_s = time.monotonic()

    def on_rewards_ready(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        self.trajectories += [item for group in groups for item in group.trajectories]

    def on_trajectory_dropped(self, trainer: RLTrainer, module: RLModule, reason: str, message: str) -> None:
        self.dropped.setdefault(reason, []).append(message)

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        self.iterations_s.append(time.monotonic() - self.since_s)
        self.phases_s = dict(getattr(trainer, "phase_seconds", {}))
        self.metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
        trainer.should_stop = len(self.iterations_s) == _NUM_ITERATIONS

    def on_validation_start(self, *_: object) -> None:
        self.since_s = time.monotonic()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.validation_batch_s = time.monotonic() - self.since_s

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.host_bytes = host_bytes("VmHWM") + sum(child_bytes().values())
        module = cast(RLModule, pl_module)
        self.rounding = rounding(cast(RLTrainer, trainer), module)
        self.checkpoint_bytes = _state_bytes(module, trainer.optimizers)


def _state_bytes(module: RLModule, optimizers: list[torch.optim.Optimizer]) -> int:
    """Returns the size of a checkpoint in bytes, over all ranks: saved roles' weights and optimizer states."""
    models = (getattr(module, name, None) for name in module.saved_roles())
    trained = [model for model in models if isinstance(model, torch.nn.Module)]
    tensors: list[torch.Tensor] = [parameter for model in trained for parameter in model.parameters()]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    tensors += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)  # a DTensor's size includes all shards


def _trial_findings(trial: Trial, module: RLModule) -> Iterator[Finding]:
    yield _logprobs(trial)
    yield from _completions(trial, module)
    yield from _rewards(trial, module)
    if not trial.host_bytes:  # the trial failed
        return
    used = [("the host", trial.host_bytes, host_memory()[1])]
    if torch.cuda.is_available():
        used.append(("rank 0's GPU", torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1]))
    fix = "Lower model.microbatch_tokens or data.batch_size, or set activation_checkpointing."
    for name, num, total in used:
        text = f"The trial used up to {bytes_text(num)} of {bytes_text(total)} on {name}."
        yield check("memory", text, "warning", fix, is_wrong=num > _ALMOST_ALL * total)


def _logprobs(trial: Trial) -> Finding:
    values = trial.metrics
    names = {_PROBE: "nats per token on the probe", _MISMATCH: "nats per token on the sampled tokens"}
    texts = [f"{values[name]:.2g} {unit}" for name, unit in names.items() if name in values]
    if not texts or trial.rounding is None:
        fix = "Set WeightSync.verify, use an engine that computes logprobs, or watch sync/mismatch_* in the run."
        return Finding("logprobs", "Engine and trainer could not be compared.", "warning", fix)
    bound = mismatch_bound_nats(trial.rounding, values.get("policy/entropy_nats", 0.0))
    explained = f"rounding in {trial.rounding} explains up to {bound:.2g}"
    text = f"Engine and trainer differ by {' and '.join(texts)}; {explained}."
    fix = "The engine's weights, precision or sampling settings differ: check its log and arguments."
    return check("logprobs", text, "fails", fix, is_wrong=not values.get(_MISMATCH, 0.0) <= bound)


def _completions(trial: Trial, module: RLModule) -> Iterator[Finding]:
    sources: dict[str, list[str]] = {}  # stop tokens → names of their sources
    for name, ids in module.stop_token_ids().items():
        sources.setdefault(f"{module.tokenizer.decode(ids)} {ids}", []).append(name)
    stops = "; ".join(f"{tokens} ({', '.join(names)})" for tokens, names in sources.items())
    trajectories = trial.trajectories
    if not trajectories:
        yield Finding("completions", "No trajectory finished.", "fails", "See the reasons below and the log above.")
        return
    cut = _cut_fraction(trajectories)
    lengths = [sum(trajectory.loss_mask) for trajectory in trajectories]
    text = (
        f"{len(trajectories)} completions of {min(lengths)} to {max(lengths)} tokens (median "
        f"{statistics.median(lengths):g}); {cut:.0%} were cut at max_new_tokens={module.sampling.max_new_tokens}. They "
        f"end at {stops or 'no token'}."
    )
    fix = "Check the stop tokens and the chat template, or increase sampling.max_new_tokens."
    yield check("completions", text, "warning", fix, is_wrong=cut > _ALMOST_ALL)


def _cut_fraction(trajectories: Sequence[Trajectory]) -> float:
    return statistics.fmean(trajectory.finish_reason == "length" for trajectory in trajectories)


def _rewards(trial: Trial, module: RLModule) -> Iterator[Finding]:
    for reason, messages in trial.dropped.items():
        text = f"Dropped trajectories ({reason}): {len(messages)}. {messages[0]}"
        status: Status = "fails" if reason.startswith("reward") else "warning"
        yield Finding("reward", text, status, "lightrl doctor reward shows more.")
    rewards = [item.reward for item in trial.trajectories if item.reward is not None]
    if not rewards:
        return
    flat = trial.metrics.get("rollout/zero_variance_fraction")
    text = f"{len(rewards)} rewards from {min(rewards):.3g} to {max(rewards):.3g}, mean {statistics.fmean(rewards):.3g}"
    text += f"; {flat:.0%} of the last iteration's groups have equal rewards and teach nothing" if flat else ""
    fix = "Use a stronger model (SFT first), easier prompts, a larger group_size, or a reward with more levels."
    if _cut_fraction(trial.trajectories) > _ALMOST_ALL:
        fix = "The completions are cut before a reward or environment sees their end: fix that first, see above."
    yield check("reward", text, "warning", fix, is_wrong=flat == 1)
    rows = recompute_rewards(trial.trajectories[:_NUM_REPLAYED], module, 2)
    num_differing = sum(not row.is_deterministic for row in rows)
    text = (
        f"{len(rows)} of {len(trial.trajectories)} rewards computed twice: {num_differing} differ; a call "
        f"takes {ms_text(statistics.median(row.latency_s for row in rows))}."
    )
    fix = "Make the reward deterministic, or a resumed run will differ."
    yield check("reward", text, "warning", fix, is_wrong=num_differing > 0)


def run_length(trainer: L.Trainer, checkpoints: Sequence[ModelCheckpoint]) -> tuple[float, float, float]:
    """Returns a run's number of iterations (infinite if nothing ends it), validations, and checkpoints it keeps."""
    iterations, epoch = float(trainer.estimated_stepping_batches), trainer.num_training_batches
    interval = (trainer.val_check_batch or math.inf) * (trainer.check_val_every_n_epoch or 1)
    files = 0.0
    for item in checkpoints:
        saves = iterations // (item._every_n_train_steps or epoch)
        files += (saves if item.save_top_k == -1 else min(item.save_top_k, saves)) + bool(item.save_last)
    return iterations, iterations // interval, files


def forecast(trial: Trial, root: str, *, logged_bytes: float, validation_batches: int) -> Iterator[Finding]:
    """Reports the duration of each phase; extrapolates the run's duration and bytes from the trial's last iteration."""
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in trial.phases_s.items())
    first, last = trial.iterations_s[0], trial.iterations_s[-1]
    yield Finding("time", f"The first iteration took {first:.2f} s, the last {last:.2f} s: {phases}.")
    iterations, validations, files = trial.length
    if not math.isfinite(iterations):
        text = "Nothing ends this run: it has no max_steps and no max_epochs."
        yield Finding("run", text, "warning", "Set trainer.max_steps.")
        return
    validation_s = validations * validation_batches * trial.validation_batch_s
    checkpoints, logs = files * trial.checkpoint_bytes, iterations * logged_bytes
    text = (
        f"{iterations:.0f} iterations take about {duration_text(iterations * last + validation_s)} "
        f"(including {duration_text(validation_s)} of validation) and write {bytes_text(checkpoints)} of checkpoints "
        f"({bytes_text(trial.checkpoint_bytes)} each) and {bytes_text(logs)} of trajectories, if all are like the last "
        "one. Longer completions take longer."
    )
    yield Finding("run", text)
    yield disk_finding(root, checkpoints + logs)


def bottleneck_findings(area: str, text: str) -> Iterator[Finding]:
    """Reports which part takes most of an iteration, if one does; warns about slow rewards or data."""
    problem, _, fix = text.partition(". ")
    if area in ("reward", "data"):
        yield Finding("time", f"{problem}.", "warning", fix)
    elif area:
        yield Finding("time", text)


@dataclass(frozen=True)
class Finding:
    """One paragraph in the report."""

    area: str  # such as `disk`
    text: str  # the observation
    status: Status = "ok"
    fix: str = ""  # what to do about it; empty if ok

    def __str__(self) -> str:
        """Formats status, area and text, and the fix below them."""
        width = max(shutil.get_terminal_size((120, 0)).columns, 60)
        start = f"{self.status:<8} {self.area:<12} "
        indent = " " * len(start)
        lines = textwrap.wrap(escape_unprintable(self.text), width, initial_indent=start, subsequent_indent=indent)
        fix, under = escape_unprintable(self.fix), f"{indent}     "
        return "\n".join([*lines, *textwrap.wrap(fix, width, initial_indent=f"{indent}fix: ", subsequent_indent=under)])


def check(area: str, text: str, status: Status, fix: str, *, is_wrong: bool) -> Finding:
    """Returns a finding with this status and fix if `is_wrong`, otherwise with status ok."""
    return Finding(area, text, status, fix) if is_wrong else Finding(area, text)


def device_findings(trainer: L.Trainer) -> Iterator[Finding]:
    """Reports versions, the trainer's devices, and the free memory of devices and host."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "lightning", "transformers"))
    yield Finding("environment", f"lightrl {lightrl.__version__}, Python {platform.python_version()}, {versions}")
    kind = trainer.strategy.root_device.type
    used = f"{trainer.world_size} x {kind}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads per process"
    num_gpus = torch.cuda.device_count()
    text = f"The trainer uses {used}; this machine has {count_text(num_gpus, 'GPU')}."
    fix = "Set trainer.accelerator to auto or gpu."
    yield check("devices", text, "warning", fix, is_wrong=num_gpus > 0 and kind == "cpu")
    memories = [("The host", *host_memory(), _LEAST_FREE, "Stop other processes.")]
    for index in range(num_gpus if kind == "cuda" else 0):
        fix = "Another process uses this GPU: nvidia-smi shows which. Stop it, or choose other trainer.devices."
        name = f"GPU {index}, {torch.cuda.get_device_name(index)}"
        memories.append((name, *torch.cuda.mem_get_info(index), 0.9, fix))
    for name, free, total, least, fix in memories:
        text = f"{name} has {bytes_text(free)} of {bytes_text(total)} free."
        yield check("memory", text, "warning", fix, is_wrong=free < least * total)


def memory_on_paper(module: RLModule, trainer: L.Trainer, data: object) -> Iterator[Finding]:
    """Compares the ranks' memory, as estimated by `lightrl plan`, with the GPU's."""
    try:
        run = planned(module, trainer, data)
    except UnknownMemory as error:
        yield Finding("memory", str(error), "warning", "Run lightrl plan where the model's config can be read.")
        return
    yield Finding("memory", memory_line(run))
    if trainer.strategy.root_device.type == "cuda":
        total = torch.cuda.get_device_properties(trainer.strategy.root_device).total_memory
        for misfit in misfits(run, float(total)):
            yield Finding("memory", f"{misfit.text}.", "warning", "lightrl plan shows the details.")


def disk_finding(root: str, needed_bytes: float = 0) -> Finding:
    """Checks that the run's folder is writable and has space for `needed_bytes`."""
    folder = nearest_folder(Path(root))
    if not os.access(folder, os.W_OK):
        fix = "Set trainer.default_root_dir to another folder."
        return Finding("disk", f"{folder} is not writable.", "fails", fix)
    free = shutil.disk_usage(folder).free
    needs = f"; the run writes about {bytes_text(needed_bytes)}" if needed_bytes else ""
    fix = "Free disk space, set trainer.default_root_dir to another disk, or keep fewer checkpoints (save_top_k)."
    status: Status = "fails" if free < needed_bytes else "warning"
    is_wrong = free < max(needed_bytes, _LEAST_DISK_BYTES)
    return check("disk", f"{folder} has {bytes_text(free)} free{needs}.", status, fix, is_wrong=is_wrong)


def model_findings(module: RLModule) -> Iterator[Finding]:
    """Reports the configuration and context length of each model, and checks the tokenizer's size."""
    for name, role in module.models().items():
        if role.spec.url is not None:
            yield Finding("model", f"{name}: served at {role.spec.url}")
            continue
        config = role.spec.load_config()
        context = context_tokens(config) or "not stated"
        yield Finding("model", f"{name}: {config.model_type}, {role.spec.path or 'random weights'}, context {context}")
    tokenizer, text = module.tokenizer, module.policy_spec.load_config().get_text_config()
    sizes = f"{len(tokenizer)} tokens for {text.vocab_size} embeddings, end token {tokenizer.eos_token!r}"
    fix = "Use the tokenizer that belongs to the model, or a larger vocab_size."
    yield check("tokenizer", sizes, "fails", fix, is_wrong=len(tokenizer) > text.vocab_size)


def data_findings(module: RLModule, datamodule: L.LightningDataModule) -> Iterator[Finding]:
    """Reports the first prompt's end, the data's rows and lengths, and prompts that occur more than once."""
    for prompt in first_prompts(module, datamodule, 1):
        end = str(module.tokenizer.decode(prompt.token_ids or []))[-_SHOWN_CHARS:]
        is_plain = module.tokenizer.chat_template is None
        how = "is plain text" if is_plain else "uses the chat template"
        fix = "Set data.chat_template, unless the model was trained on plain text."
        is_wrong = is_plain and prompt.messages is not None
        yield check("template", f"The first prompt {how} and ends in {end!r}.", "warning", fix, is_wrong=is_wrong)
    if not isinstance(datamodule, PromptDataModule):
        yield Finding("data", f"{type(datamodule).__name__} makes its own prompts; only the trial's are checked.")
        return
    reports = [read_split(datamodule, "train", _MAX_ROWS), read_split(datamodule, "validation", _MAX_ROWS)]
    for report in reports:
        read = f"the first {_MAX_ROWS} rows: " if report.is_cut else ""
        problems = "; ".join(["", *report.problems[:_SHOWN_PROBLEMS]])
        text = f"{report.name}: {read}{report.counts_text()}{problems}"
        fix = "Fix these rows; lightrl doctor data lists more."
        yield check("data", text, "fails", fix, is_wrong=report.is_refused(datamodule.max_bad_fraction))
    for text in repeats(*reports):
        yield Finding("data", f"{text[0].upper()}{text[1:]}.", "warning", "Remove unintended copies.")
