"""Two iterations of the run, watched: logprobs of engine and trainer, rewards, completions; hours and bytes."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch

from lightrl.callbacks import RLCallback
from lightrl.callbacks.probe import Rounding, mismatch_bound_nats, rounding
from lightrl.checks.printable import duration_text
from lightrl.commands.doctor.findings import Finding, judged
from lightrl.commands.doctor.machine import host_memory
from lightrl.commands.doctor.rewards import judge_again, ms_text
from lightrl.launch.memory import bytes_text
from lightrl.module import RLModule
from lightrl.trace import MemoryPeaks
from lightrl.trace.memory import child_bytes
from lightrl.trajectory import Trajectory

NUM_ITERATIONS = 2
_NUM_REPLAYED = 8
_ALMOST_ALL = 0.9
_EPOCHS_OF_LIGHTNING = 1000  # where neither epochs nor steps are set
_PROBE = "sync/probe_abs_dlogp_nats"
_MISMATCH = "sync/mismatch_present_abs_dlogp_nats"


@dataclass(eq=False)
class Trial(RLCallback):
    """Two iterations, measured while they run; last of all callbacks, so it reads what the others log."""

    trajectories: list[Trajectory] = field(default_factory=list)  # of all iterations
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    messages: dict[str, str] = field(default_factory=dict)  # the first one of each reason
    iterations_s: list[float] = field(default_factory=list)
    phases_s: dict[str, float] = field(default_factory=dict)  # of the last iteration
    validation_batch_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # the last value of each
    stop_tokens: dict[str, list[int]] = field(default_factory=dict)
    checkpoint_bytes: int = 0
    peaks: dict[str, int] = field(default_factory=dict)  # host, cuda
    children_bytes: dict[str, int] = field(default_factory=dict)
    epoch_iterations: float = 0.0
    rounding: Rounding | None = None  # of trainer and engine

    def __post_init__(self) -> None:
        self._memory = MemoryPeaks()
        self._since_s = self._since_validation_s = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.stop_tokens = pl_module.stop_token_ids()
        self._memory.begin()

    def on_train_batch_start(self, *_: Any) -> None:
        self._since_s = time.monotonic()

    def on_rewards_ready(self, trainer: Any, module: Any, groups: Any) -> None:
        self.trajectories += [item for group in groups for item in group.trajectories]

    def on_trajectory_dropped(self, trainer: Any, module: Any, reason: str, message: str) -> None:
        self.dropped[reason] += 1
        self.messages.setdefault(reason, message)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.iterations_s.append(time.monotonic() - self._since_s)
        self.phases_s = dict(getattr(trainer, "phase_seconds", {}))
        self.metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._since_validation_s = time.monotonic()

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.validation_batch_s = time.monotonic() - self._since_validation_s

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.epoch_iterations = float(trainer.num_training_batches)
        self.peaks, self.children_bytes = self._memory.end("trial"), child_bytes()
        self.rounding = rounding(trainer, pl_module)  # type: ignore[arg-type]
        self.checkpoint_bytes = _state_bytes(pl_module, trainer.optimizers)


def _state_bytes(module: RLModule, optimizers: list[Any]) -> int:
    """What a checkpoint holds: weights of the roles that it saves, and the optimizer's state, over all ranks."""
    kept = [
        getattr(module, name)
        for name in module.saved_roles()
        if isinstance(getattr(module, name, None), torch.nn.Module)
    ]
    tensors = [tensor for model in kept for tensor in model.parameters()]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)  # a DTensor counts as the whole


def findings(measured: Trial, module: RLModule) -> Iterator[Finding]:
    """What the trial shows, except of the whole run."""
    yield _logprobs(measured)
    yield from _completions(measured, module)
    yield from _rewards(measured, module)
    if measured.peaks:
        yield from _memory(measured)


def _logprobs(measured: Trial) -> Finding:
    values = measured.metrics
    names = {_PROBE: "nats per token on the probe", _MISMATCH: "on what the engine sampled"}
    texts = [f"{values[name]:.2g} {what}" for name, what in names.items() if name in values]
    if not texts:
        fix = "Set WeightSync.probe above 0 and an engine that scores tokens, or watch sync/mismatch_* in the run."
        return Finding("logprobs", "Engine and trainer could not be compared.", "warning", fix)
    text = f"Engine and trainer differ by {' and '.join(texts)}"
    if measured.rounding is None:
        return Finding("logprobs", f"{text}.")
    bound = mismatch_bound_nats(measured.rounding, values.get("policy/entropy_nats", 0.0))
    text += f"; {' and '.join(measured.rounding.dtypes)} explain up to {bound:.2g}."
    fix = (
        "The engine has other weights, another precision or other sampling settings than the trainer: look at its log, "
        "its dtype and its arguments."
    )
    return judged("logprobs", text, "fails", fix, is_wrong=not values.get(_MISMATCH, 0.0) <= bound)


def _completions(measured: Trial, module: RLModule) -> Iterator[Finding]:
    stops = "; ".join(f"{module.tokenizer.decode(ids)} {ids} ({name})" for name, ids in measured.stop_tokens.items())
    trajectories = measured.trajectories
    if not trajectories:
        yield Finding("completions", "No trajectory was finished.", "fails", "See the dropped ones and the log above.")
        return
    cut = sum(trajectory.finish_reason == "length" for trajectory in trajectories) / len(trajectories)
    lengths = [sum(trajectory.loss_mask) for trajectory in trajectories]
    text = (
        f"{len(trajectories)} completions of {min(lengths)} to {max(lengths)} tokens (median "
        f"{statistics.median(lengths):g}); {cut:.0%} were cut at max_new_tokens={module.sampling.max_new_tokens}. They "
        f"end at {stops or 'no token'}."
    )
    fix = (
        "Check the stop tokens and the chat template, or increase sampling.max_new_tokens: a policy that never ends by "
        "itself is rarely judged right."
    )
    yield judged("completions", text, "warning", fix, is_wrong=cut > _ALMOST_ALL)


def _rewards(measured: Trial, module: RLModule) -> Iterator[Finding]:
    for reason, num in measured.dropped.items():
        text = f"{num} trajectories were dropped ({reason}): {measured.messages[reason]}"
        verdict: Any = "fails" if reason.startswith("reward") else "warning"
        yield Finding("reward", text, verdict, "lightrl doctor reward shows more.")
    rewards = [item.reward for item in measured.trajectories if item.reward is not None]
    if not rewards:
        return
    flat = measured.metrics.get("rollout/zero_variance_fraction")
    text = f"{len(rewards)} rewards from {min(rewards):.3g} to {max(rewards):.3g}, mean {statistics.fmean(rewards):.3g}"
    text += f"; in {flat:.0%} of the last iteration's groups all are equal, which teaches nothing" if flat else ""
    fix = "Begin with a stronger model (SFT first), easier prompts, a larger group_size, or a reward with more levels."
    yield judged("reward", text, "warning", fix, is_wrong=flat == 1)
    rows = judge_again(measured.trajectories[:_NUM_REPLAYED], module, 2)
    num_differing = sum(not row.is_deterministic for row in rows)
    text = (
        f"{len(rows)} of {len(measured.trajectories)} completions judged twice: {num_differing} got another result; a "
        f"call takes {ms_text(statistics.median(row.latency_s for row in rows))}."
    )
    fix = "Make the reward deterministic, or a resumed run will differ."
    yield judged("reward", text, "warning", fix, is_wrong=num_differing > 0)


def _memory(measured: Trial) -> Iterator[Finding]:
    (_, total), own = host_memory(), measured.peaks.get("host", 0)
    others = sum(measured.children_bytes.values())
    text = (
        f"This process took up to {bytes_text(own)} of the host, and those it started {bytes_text(others)}, of "
        f"{bytes_text(total)}."
    )
    fix = "Lower microbatch_tokens or batch_size, or use a host with more memory."
    yield judged("memory", text, "warning", fix, is_wrong=own + others > _ALMOST_ALL * total)
    if "cuda" in measured.peaks:
        used, (_, total) = measured.peaks["cuda"], torch.cuda.mem_get_info()
        text = f"Rank 0 took up to {bytes_text(used)} of its GPU's {bytes_text(total)}."
        fix = "Lower model.microbatch_tokens or set activation_checkpointing: longer completions will need more."
        yield judged("memory", text, "warning", fix, is_wrong=used > _ALMOST_ALL * total)


def run_length(
    trainer: Mapping[str, Any], checkpoints: Sequence[Mapping[str, Any]], epoch: float
) -> tuple[float, float, float]:
    """Iterations of the whole run, infinite if nothing ends it; its validations; checkpoints on the disk at its end.

    Args:
        trainer: the run's own section.
        checkpoints: the settings of each ModelCheckpoint.
        epoch: its iterations.
    """
    steps, epochs, interval = trainer["max_steps"], trainer.get("max_epochs"), trainer.get("val_check_interval")
    if epochs is None and steps < 0:
        epochs = _EPOCHS_OF_LIGHTNING
    iterations = min(math.inf if epochs in (None, -1) else epochs * epoch, math.inf if steps < 0 else steps)
    every = epoch * (trainer.get("check_val_every_n_epoch") or 1)
    if interval is not None:
        every = interval if isinstance(interval, int) else interval * epoch
    files = 0.0
    for settings in checkpoints:
        saves = iterations // max(settings.get("every_n_train_steps") or epoch, 1)
        top_k = settings.get("save_top_k", 1)
        files += (saves if top_k == -1 else min(top_k, saves)) + bool(settings.get("save_last"))
    return iterations, iterations // max(every, 1), files


def forecast(
    length: tuple[float, float, float], measured: Trial, *, logged_bytes: float, validation_batches: int
) -> tuple[Finding, float]:
    """Hours and bytes of the run, as if each iteration were like the last one of the trial; and the bytes alone.

    Args:
        length: as `run_length` gives it.
        logged_bytes: of an iteration in the trajectory log, on average over those that are not logged.
        validation_batches: of a validation in the run; that of the trial had one.
    """
    iterations, validations, files = length
    if not math.isfinite(iterations):
        text = "Nothing ends this run: it has no max_steps and no max_epochs."
        return Finding("run", text, "warning", "Set trainer.max_steps."), 0.0
    validation_s = validations * validation_batches * measured.validation_batch_s
    checkpoints, logs = files * measured.checkpoint_bytes, iterations * logged_bytes
    seconds = iterations * measured.iterations_s[-1] + validation_s
    text = (
        f"{iterations:.0f} iterations take about {duration_text(seconds)} "
        f"(validation {duration_text(validation_s)} of it) and write {bytes_text(checkpoints)} of checkpoints (each "
        f"{bytes_text(measured.checkpoint_bytes)}) and {bytes_text(logs)} of trajectories, if all are like the last of "
        "these. Completions that become longer take longer."
    )
    return Finding("run", text), checkpoints + logs


def times(measured: Trial) -> Finding:
    """The time per phase of the last iteration."""
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in measured.phases_s.items())
    first, *_, last = measured.iterations_s
    return Finding("time", f"The first iteration took {first:.2f} s, the last {last:.2f} s: {phases}.")
