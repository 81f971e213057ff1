"""Two iterations of the run, watched: logprobs of engine and trainer, rewards, completions, times and bytes."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lightrl.callbacks import RLCallback
from lightrl.callbacks.probe import Rounding, mismatch_bound_nats, rounding
from lightrl.commands.doctor.findings import Finding, judged, ok
from lightrl.commands.doctor.machine import GIB, host_memory
from lightrl.commands.doctor.reward_table import ms_text
from lightrl.module import RLModule
from lightrl.rewards import ReplayRow, replay
from lightrl.trace import MemoryPeaks
from lightrl.trace.memory import child_bytes
from lightrl.trajectory import Trajectory

NUM_ITERATIONS = 2
_NUM_REPLAYED = 8
_ALMOST_ALL = 0.9
_PROBE = "sync/probe_abs_dlogp_nats"
_MISMATCH = "sync/mismatch_present_abs_dlogp_nats"


@dataclass
class Measured:
    """What the trial gave."""

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


class Watch(RLCallback):
    """Fills in `measured` while the trial runs; last of all callbacks, so it reads what the others log."""

    def __init__(self) -> None:
        self.measured = Measured()
        self._memory = MemoryPeaks()
        self._since = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.measured.stop_tokens = pl_module.stop_token_ids()
        self._memory.begin()

    def on_train_batch_start(self, *_: Any) -> None:
        self._since = time.monotonic()

    def on_rewards_ready(self, trainer: Any, module: Any, groups: Any) -> None:
        self.measured.trajectories += [item for group in groups for item in group.trajectories]

    def on_trajectory_dropped(self, trainer: Any, module: Any, reason: str, message: str) -> None:
        self.measured.dropped[reason] += 1
        self.measured.messages.setdefault(reason, message)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.measured.iterations_s.append(time.monotonic() - self._since)
        self.measured.phases_s = dict(getattr(trainer, "phase_seconds", {}))
        self.measured.metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._since_validation = time.monotonic()

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.measured.validation_batch_s = time.monotonic() - self._since_validation

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        measured = self.measured
        measured.epoch_iterations = float(trainer.num_training_batches)
        measured.peaks = self._memory.end("trial")
        measured.children_bytes = child_bytes()
        measured.rounding = rounding(trainer, pl_module)  # type: ignore[arg-type]
        measured.checkpoint_bytes = state_bytes(pl_module, trainer.optimizers)


def state_bytes(module: RLModule, optimizers: list[Any]) -> int:
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


def findings(measured: Measured, module: RLModule) -> Iterator[Finding]:
    """What the trial shows, except its times."""
    yield _logprobs(measured)
    yield from _completions(measured, module)
    yield from _rewards(measured, module)
    if measured.peaks:
        yield from _memory(measured)


def _logprobs(measured: Measured) -> Finding:
    values = measured.metrics
    texts = []
    if _PROBE in values:
        texts.append(f"{values[_PROBE]:.2g} nats per token on the probe")
    if _MISMATCH in values:
        texts.append(f"{values[_MISMATCH]:.2g} on what the engine sampled")
    if not texts:
        fix = "Set WeightSync.probe above 0 and an engine that scores tokens, or watch sync/mismatch_* in the run."
        return Finding("logprobs", "warning", "Engine and trainer could not be compared.", fix)
    text = f"Engine and trainer differ by {' and '.join(texts)}"
    if measured.rounding is None:
        return ok("logprobs", f"{text}.")
    bound = mismatch_bound_nats(measured.rounding, values.get("policy/entropy_nats", 0.0))
    return judged(
        "logprobs",
        f"{text}; {' and '.join(measured.rounding.dtypes)} explain up to {bound:.2g}.",
        "fails",
        "The engine has other weights, another precision or other sampling settings than the trainer: look at its log, "
        "its dtype and its arguments.",
        is_wrong=not values.get(_MISMATCH, 0.0) <= bound,
    )


def _completions(measured: Measured, module: RLModule) -> Iterator[Finding]:
    stops = "; ".join(f"{module.tokenizer.decode(ids)} {ids} ({name})" for name, ids in measured.stop_tokens.items())
    trajectories = measured.trajectories
    if not trajectories:
        yield Finding("completions", "fails", "No trajectory was finished.", "See the dropped ones and the log above.")
        return
    num_cut = sum(trajectory.finish_reason == "length" for trajectory in trajectories)
    cut = num_cut / len(trajectories)
    lengths = [sum(trajectory.loss_mask) for trajectory in trajectories]
    yield judged(
        "completions",
        f"{len(trajectories)} completions of {min(lengths)} to {max(lengths)} tokens (median "
        f"{statistics.median(lengths):g}); {cut:.0%} were cut at max_new_tokens={module.sampling.max_new_tokens}. They "
        f"end at {stops or 'no token'}.",
        "warning",
        "Check the stop tokens and the chat template, or increase sampling.max_new_tokens: a policy that never ends "
        "by itself is rarely judged right.",
        is_wrong=cut > _ALMOST_ALL,
    )


def _rewards(measured: Measured, module: RLModule) -> Iterator[Finding]:
    for reason, num in measured.dropped.items():
        text = f"{num} trajectories were dropped ({reason}): {measured.messages[reason]}"
        yield Finding(
            "reward", "fails" if reason.startswith("reward") else "warning", text, "lightrl doctor reward shows more."
        )
    rewards = [item.reward for item in measured.trajectories if item.reward is not None]
    if not rewards:
        return
    flat = measured.metrics.get("rollout/zero_variance_fraction")
    text = f"{len(rewards)} rewards from {min(rewards):.3g} to {max(rewards):.3g}, mean {statistics.fmean(rewards):.3g}"
    yield judged(
        "reward",
        text + (f"; in {flat:.0%} of the last iteration's groups all are equal, which teaches nothing" if flat else ""),
        "warning",
        "Begin with a stronger model (SFT first), easier prompts, a larger group_size, or a reward with more levels.",
        is_wrong=flat == 1,
    )
    rows = judged_again(measured.trajectories[:_NUM_REPLAYED], module)
    latency = ms_text(statistics.median(row.latency_s for row in rows))
    num_differing = sum(not row.is_deterministic for row in rows)
    yield judged(
        "reward",
        f"{len(rows)} of {len(measured.trajectories)} completions judged twice: {num_differing} got another result; a "
        f"call takes {latency}.",
        "warning",
        "Make the reward deterministic, or a resumed run will differ.",
        is_wrong=num_differing > 0,
    )


def judged_again(trajectories: list[Trajectory], module: RLModule) -> list[ReplayRow]:
    """Each judged twice by the module's reward."""
    return replay(
        trajectories,
        module.reward_source if module.reward_source is not None else module.reward,
        repeats=2,
        search_paths=[str(Path.cwd())],
        timeout_s=module.reward_timeout_s,
        memory_limit_mib=module.reward_memory_mib,
    )


def _memory(measured: Measured) -> Iterator[Finding]:
    _, total = host_memory()
    others = sum(measured.children_bytes.values())
    used = measured.peaks.get("host", 0) + others
    yield judged(
        "memory",
        f"This process took up to {measured.peaks.get('host', 0) / GIB:.1f} GiB of the host, and those it started "
        f"{others / GIB:.1f}, of {total / GIB:.1f} GiB.",
        "warning",
        "Lower microbatch_tokens or batch_size, or use a host with more memory.",
        is_wrong=used > _ALMOST_ALL * total,
    )
    if "cuda" in measured.peaks:
        _, total = torch.cuda.mem_get_info()
        yield judged(
            "memory",
            f"Rank 0 took up to {measured.peaks['cuda'] / GIB:.1f} of its GPU's {total / GIB:.1f} GiB.",
            "warning",
            "Lower model.microbatch_tokens or set activation_checkpointing: longer completions will need more.",
            is_wrong=measured.peaks["cuda"] > _ALMOST_ALL * total,
        )


def times(measured: Measured) -> Finding:
    """The time per phase of the last iteration."""
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in measured.phases_s.items())
    first, *_, last = measured.iterations_s
    return ok("time", f"The first iteration took {first:.2f} s, the last {last:.2f} s: {phases}.")
