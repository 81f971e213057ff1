"""RolloutProgressBar: a bar for the run, a bar for its phase, and permanent lines. ModelLines: lists the models."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelSummary, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_summary.model_summary import get_human_readable_count

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.bounds import check_bounds
from lightrl.checks.printable import duration_text
from lightrl.experience import Experience
from lightrl.module import RLModule
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.trajectory import Group

# Metric name → short name in the bar. The first line is about learning, the second about speed.
_LEARNING = {"rollout/reward": "reward", "rollout/accuracy_fraction": "accuracy", "val/accuracy_fraction": "held-out"}
_SPEED = {
    "rollout/tokens_per_s": "tokens/s",
    "staleness/max_versions": "staleness",
    "time/straggler_wait_s": "straggler_wait_s",
    "time/sync_s": "sync_s",
}
SHORT_NAMES = {**_LEARNING, **_SPEED}
_OFTEN_ZERO = ("staleness", "straggler_wait_s", "failed_fraction", "truncated_fraction")
_RUN_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_PHASE_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}"
_UNCOUNTED_FORMAT = "{desc}{postfix}"
_LINE_CHARS = 100
_SILENT_S = 10.0  # an iteration gets a line if it ends at least this long after the last printed line
_SILENT_PHASE_S = 60.0  # without bars, a phase gets a line this long after the last printed line
_REPAINT_S = 0.1  # minimum time between two repaints within a phase
_DIM, _BOLD, _PLAIN = "\033[2m", "\033[1m", "\033[0m"


class RolloutProgressBar(TQDMProgressBar, RLCallback):
    """Shows the run on one line (iterations, time left, reward, held-out accuracy) and its current phase on a second.

        iteration 80/200  reward=0.531  accuracy=0.410  held-out=0.430  tokens/s=12.3k  sync_s=0.004
        Training:  40%|████      | 80/200 [00:09<00:14, reward=0.531, accuracy=0.410, held-out=0.430]
          rollout:  58%|█████▊    | 300/512, tokens/s=12.3k, sync_s=0.004

    The second line says what the run is waiting for. Permanent lines of at most 100 characters are printed above them:
    one every `print_every_n_iterations`, one for each iteration that ends at least ten seconds after the last line, and
    one for each validation. The accuracy is omitted if it equals the reward. If the reward reports no accuracy,
    `held-out` shows the held-out reward. If standard output is not a terminal (a log file, a pipe), only these lines
    are printed, with the time left and, in a long iteration, the phase once a minute. NO_COLOR turns off colors.

    The first line counts the run's batches over all epochs; an RL run has one batch per iteration. A plain
    LightningModule has only the first line, with the values logged with `prog_bar=True`.

    Args:
        refresh_rate: batches between two updates of the first line; 0 shows nothing.
        process_position: number of lines to leave free above the bar.
        leave: as in TQDMProgressBar.
        print_every_n_iterations: iterations between two permanent lines.
    """

    def __init__(
        self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False, print_every_n_iterations: int = 10
    ) -> None:
        super().__init__(refresh_rate=refresh_rate, process_position=process_position, leave=leave)
        check_bounds(1, print_every_n_iterations=print_every_n_iterations)
        self.print_every_n_iterations = print_every_n_iterations
        self._is_training = False  # whether there is a first line
        self._phase_bar: Tqdm | None = None
        self._phase = ""
        self._num_trajectories: int | None = None  # per iteration; unknown during the first
        self._speed = ""  # the last iteration's speed, for the second line
        self._painted_s = -math.inf  # monotonic clock
        self._printed_s = 0.0  # monotonic clock at the last permanent line
        self._begun: tuple[float, int] = 0.0, 0  # monotonic clock and finished iterations at the start

    @property
    def has_bars(self) -> bool:
        """Whether bars are drawn in addition to permanent lines."""
        # A notebook draws bars although it is not a terminal.
        return self.is_enabled and (sys.stdout.isatty() or "ipykernel" in sys.modules)

    @property
    def is_disabled(self) -> bool:
        """True if no bar is drawn; Lightning passes it to tqdm."""
        return not self.has_bars

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.train_progress_bar = self.init_train_tqdm()
        self.train_progress_bar.bar_format = _RUN_FORMAT
        self.train_progress_bar.colour = "green" if _has_color() else None
        self._is_training = True
        self._printed_s = time.monotonic()
        self._begun = self._printed_s, _num_batches_done(trainer)
        self.train_progress_bar.total = num_batches_of_run(trainer)
        # `initial` excludes the batches before a resume from the rate.
        self.train_progress_bar.initial = self.train_progress_bar.n = _num_batches_done(trainer)
        self._repaint()

    def on_train_epoch_start(self, trainer: L.Trainer, *_: object) -> None:
        self.train_progress_bar.total = num_batches_of_run(trainer)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if not self.is_enabled:
            return
        done, total = _num_batches_done(trainer), num_batches_of_run(trainer)
        self.train_progress_bar.n = done
        if self.has_bars:
            self._show_metrics(trainer, pl_module)
        is_late = time.monotonic() - self._printed_s >= _SILENT_S
        if done % self.print_every_n_iterations == 0 or done == total or is_late:
            self._print_iteration(done, total, _drop_redundant(self.get_metrics(trainer, pl_module)))
        if self.has_bars and (done == total or (done % self.refresh_rate == 0 and self._is_due())):
            self._repaint()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.has_bars:
            self._show_metrics(trainer, pl_module)
            self._repaint()

    def on_train_end(self, *_: object, **__: object) -> None:
        self._close_phase_bar()
        if self._is_training:
            self.train_progress_bar.close()

    on_exception = on_train_end

    def on_rollout_start(self, trainer: RLTrainer, module: RLModule) -> None:
        self._show_phase("rollout", 0, self._num_trajectories)

    def on_rollout_progress(self, trainer: RLTrainer, module: RLModule, done: int, total: int) -> None:
        self._num_trajectories = total
        num = trainer.rollout.progress()["stragglers"]
        self._show_phase(f"rollout, waiting for {num} stragglers" if num else "rollout", done, total)

    def on_rollout_end(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        num = self._num_trajectories = sum(len(group.trajectories) for group in groups)
        self._show_phase("rollout", num, num)

    def on_rewards_progress(self, trainer: RLTrainer, module: RLModule, done: int, total: int) -> None:
        self._show_phase("rewards", done, total)

    def on_rewards_ready(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        self._show_phase("scores")

    def on_minibatch_start(
        self, trainer: RLTrainer, module: RLModule, minibatch: Experience, index: int, total: int
    ) -> None:
        self._show_phase("update", index, total)

    def on_minibatch_end(
        self, trainer: RLTrainer, module: RLModule, metrics: dict[str, float], index: int, total: int
    ) -> None:
        self._show_phase("update", index + 1, total)

    def on_policy_updated(self, trainer: RLTrainer, module: RLModule, weight_version: int) -> None:
        self._show_phase("weight sync")

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close_phase_bar()  # Lightning's validation bar uses its line
        super().on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.val_progress_bar.close()
        self.reset_dataloader_idx_tracker()
        if trainer.state.fn != "fit" or (trainer.sanity_checking and trainer.num_sanity_val_steps != float("inf")):
            return
        if self.has_bars and self._is_training:
            self._show_metrics(trainer, pl_module)
            self._repaint()
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        if self.is_enabled and values:
            first = ("val/accuracy_fraction", "val/reward")
            names = sorted(values, key=lambda name: (name not in first, name))
            metrics = {name.removeprefix("val/"): values[name] for name in names}
            when = f"after iteration {done}" if (done := _num_batches_done(trainer)) else "before iteration 1"
            self._print_line(f"validation {when}", _drop_redundant(metrics))

    def get_metrics(
        self, trainer: L.Trainer, pl_module: L.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Returns Lightning's metrics by short name, without `v_num`, and the last held-out accuracy or reward."""
        values = dict(super().get_metrics(trainer, pl_module))
        values.pop("v_num", None)
        metrics = trainer.callback_metrics
        held_out = metrics.get("val/accuracy_fraction", metrics.get("val/reward"))
        if held_out is not None:
            values["val/accuracy_fraction"] = float(held_out)
        main = {short: values.pop(name) for name, short in SHORT_NAMES.items() if name in values}
        if "staleness" in main:
            main["staleness"] = f"{main['staleness']:g}"  # a whole number of versions
        return {**main, **values}

    def print(self, *args: object, sep: str = " ", **kwargs: Any) -> None:
        """Prints above the bars; without bars, it works like `print`."""
        Tqdm.write(sep.join(map(str, args)), **{"file": sys.stdout, **kwargs})

    def _print_iteration(self, done: int, total: int | None, values: Mapping[str, object]) -> None:
        self._printed_s = time.monotonic()
        of_total = "" if total is None else f"/{total}"
        start_s, num_before = self._begun
        if total is not None and num_before < done < total and not self.has_bars:  # a bar shows the time left
            left_s = (self._printed_s - start_s) / (done - num_before) * (total - done)
            of_total += f", {duration_text(left_s)} left"
        self._print_line(f"iteration {done}{of_total}", values)

    def _print_line(self, start: str, values: Mapping[str, object]) -> None:
        """Prints `start  name=value  name=value`, with as many values as fit."""
        max_chars = min(_LINE_CHARS, shutil.get_terminal_size().columns) if self.has_bars else _LINE_CHARS
        num_chars, parts = len(start), [_style(start, _BOLD)]
        for name, value in values.items():
            text = _short_number(value)
            num_chars += len(f"  {name}={text}")
            if num_chars > max_chars:
                break
            parts.append(f"{_style(f'{name}=', _DIM)}{text}")
        self.print("  ".join(parts))

    def _show_metrics(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        values = _drop_redundant(self.get_metrics(trainer, module))
        speed = {name: values.pop(name) for name in _SPEED.values() if name in values}
        self._speed = ", ".join(f"{name}={_short_number(value)}" for name, value in speed.items())
        postfix = {name: _short_number(value) for name, value in values.items()}
        self.train_progress_bar.set_postfix(postfix, refresh=False)

    def _show_phase(self, name: str, done: int | None = None, total: int | None = None) -> None:
        """Shows a phase, without numbers if `done` is None. Shows a new phase at once, as it may take a while."""
        if self._is_training and self.has_bars:
            self._draw_phase(name, done, total)
        elif self._is_training and self.is_enabled and time.monotonic() - self._printed_s >= _SILENT_PHASE_S:
            self._printed_s = time.monotonic()
            counts = f": {done}/{total}" if total else ""
            self._print_line(f"in iteration {self.train_progress_bar.n + 1}, {name}{counts}", {})

    def _draw_phase(self, name: str, done: int | None, total: int | None) -> None:
        if self._phase_bar is None:
            self._phase = ""
            settings = {"leave": False, "dynamic_ncols": True, "file": sys.stdout, "bar_format": _PHASE_FORMAT}
            position, colour = 2 * self.process_position + 1, "cyan" if _has_color() else None
            self._phase_bar = Tqdm(total=total, position=position, colour=colour, **settings)
        phase = name.partition(",")[0]
        is_new_phase, self._phase = phase != self._phase, phase
        self._phase_bar.desc = f"  {name}" if done is None else f"  {name}: "
        self._phase_bar.postfix = self._speed
        self._phase_bar.bar_format = _UNCOUNTED_FORMAT if done is None else _PHASE_FORMAT
        self._phase_bar.n = done or 0
        if total is not None or is_new_phase:
            self._phase_bar.total = total
        if is_new_phase or self._is_due():
            self._repaint()

    def _is_due(self) -> bool:
        return time.monotonic() - self._painted_s >= _REPAINT_S

    def _repaint(self) -> None:
        self._painted_s = time.monotonic()
        self.train_progress_bar.refresh()
        if self._phase_bar is not None:
            self._phase_bar.refresh()

    def _close_phase_bar(self) -> None:
        if self._phase_bar is not None:
            self._phase_bar.close()
            self._phase_bar = None


def num_batches_of_run(trainer: L.Trainer) -> int | None:
    """Returns the number of training batches over all epochs; None if only time or a callback ends the run."""
    bounds: list[float] = []
    if trainer.max_steps is not None and trainer.max_steps >= 0:
        bounds.append(trainer.max_steps * trainer.accumulate_grad_batches)
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        bounds.append(trainer.max_epochs * trainer.num_training_batches)
    total = min(bounds, default=math.inf)
    return None if math.isinf(total) or math.isnan(total) else int(total)


def _drop_redundant(values: Mapping[str, object]) -> dict[str, object]:
    """Drops expected zeros, and either reward or accuracy if they are equal."""
    remaining = {name: value for name, value in values.items() if name not in _OFTEN_ZERO or float(str(value))}
    for name, other in (("accuracy", "reward"), ("reward", "accuracy_fraction")):
        if other in remaining and remaining.get(name) == remaining[other]:
            del remaining[name]
    return remaining


def _num_batches_done(trainer: L.Trainer) -> int:
    return trainer.fit_loop.total_batch_idx + 1


def _short_number(value: object) -> str:
    """Formats a number with a nearly constant width, so that the line does not jump."""
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e6:
        return f"{value / 1e6:.1f}M"
    if abs(value) >= 1e3:
        return f"{value / 1e3:.1f}k"
    return f"{value:.{1 if abs(value) >= 100 else 3}f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


def _has_color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _style(text: str, style: str) -> str:
    return f"{style}{text}{_PLAIN}" if _has_color() else text


class ModelLines(ModelSummary):
    """Replaces Lightning's default summary, which would show 0 FLOPs and meaningless train modes.

    policy: Qwen3ForCausalLM, 789 K parameters
    789 K of 789 K parameters are trained, 3.2 MB
    """

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pp = getattr(trainer.strategy, "pp", 1)
        self._summarize_kwargs["of"] = f" in rank 0's pipeline stage (one of {pp})" if pp > 1 else ""
        super().on_fit_start(trainer, pl_module)

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        *_: object,
        of: str = "",
        **__: object,
    ) -> None:
        columns = dict(summary_data)
        rows = zip(columns["Name"], columns["Type"], columns["Params"], strict=True)
        # FSDP2 replaces a model's class with one that has this prefix.
        lines = [f"{name}: {kind.removeprefix('FSDP')}, {num.strip()} parameters{of}" for name, kind, num in rows]
        trained, total = (
            " ".join(get_human_readable_count(num).split()) for num in (trainable_parameters, total_parameters)
        )
        rank_zero_info("\n".join([*lines, f"{trained} of {total} parameters{of} are trained, {model_size:.1f} MB"]))
