"""LearningCurve: plots the run's progress as one image, and lists the files in the run's folder at the end."""

from __future__ import annotations

import csv
import io
import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightrl.callbacks.loggers import warn_of_errors
from lightrl.callbacks.rl_callback import RLCallback
from lightrl.callbacks.run_files import contents, write_whole
from lightrl.checks.bounds import check_bounds
from lightrl.checks.files import write_problem

if TYPE_CHECKING:
    import lightning as L
    from matplotlib.axes import Axes

    from lightrl.rollout.rl_trainer import RLTrainer
    from lightrl.trajectory import JsonMapping, JsonObject

log = logging.getLogger(__name__)

REWARD = "rollout/reward"
SAMPLED_ACCURACY = "rollout/accuracy_fraction"
HELD_OUT_ACCURACY = "val/accuracy_fraction"
HELD_OUT_REWARD = "val/reward"  # plotted if there is no held-out accuracy

_BLUE, _ORANGE, _GRAY = "#2f6db3", "#d9541e", "#6b6b6b"  # distinct for any color vision, and in grayscale

MAX_POINTS = 1000  # per curve, in the image and in a checkpoint

Curve = Mapping[float, float]  # iteration → value


class Points:
    """A curve of at most `MAX_POINTS` points: when it is full, each pair of neighbors is replaced by its mean.

    After n iterations, each point is therefore the mean over the same number of iterations, from n / 1000 to n / 500,
    and is plotted at the middle of these iterations.
    """

    def __init__(self) -> None:
        self.stride = 1  # iterations per point
        self._sums: dict[int, tuple[float, int]] = {}  # index of a point → sum and number of its values

    def add(self, iteration: int, value: float) -> None:
        self._put(iteration // self.stride, value, 1)
        if len(self._sums) > MAX_POINTS:
            self.stride *= 2  # each pair of neighboring points becomes one
            before, self._sums = self._sums, {}
            for point, (total, num) in before.items():
                self._put(point // 2, total, num)

    def values(self) -> dict[float, float]:
        """Returns iteration → value, in order."""
        middle = (self.stride - 1) / 2
        points = ((point * self.stride + middle, *self._sums[point]) for point in sorted(self._sums))
        return {center if middle else int(center): total / num for center, total, num in points}

    def state_dict(self) -> JsonObject:
        rows = [[point, total, num] for point, (total, num) in self._sums.items()]
        return {"stride": self.stride, "sums": torch.tensor(rows, dtype=torch.float64)}

    def load_state_dict(self, state: JsonMapping) -> None:
        self.stride = state["stride"]
        self._sums = {int(point): (total, int(num)) for point, total, num in state["sums"].tolist()}

    def _put(self, point: int, total: float, num: int) -> None:
        before, num_before = self._sums.get(point, (0.0, 0))
        self._sums[point] = (before + total, num_before + num)


class LearningCurve(RLCallback):
    """Plots the reward and the sampled and held-out accuracy over the iterations; prints where the run's files are.

    If the reward reports no `accuracy`, it plots the held-out reward instead.

    When `fit` ends, normally or by Ctrl-C or SIGTERM, it writes `learning_curve.png` to the run's folder and, if no
    CSVLogger writes the metrics, the plotted numbers to `learning_curve.csv`. It sends the image to Weights & Biases,
    MLflow and TensorBoard, then prints the folder and its contents. Checkpoints contain the numbers, so a resumed run
    plots the whole curve. To bound their size, after 1,000 iterations it plots means over 2, 4, 8, … iterations.

    A held-out value at iteration i is measured with the weights after i iterations; `num_sanity_val_steps=-1` adds the
    value before training, at 0. A run that logs none of the plotted metrics writes no image.

    Args:
        constant_baseline: accuracy of the best constant answer, plotted as a dashed line; None for no line.
        held_out: the validation metric to plot; for SFT, `val/token_accuracy_fraction`.
    """

    run_folder_output = "learning_curve.png"  # two runs must not write it at the same time

    def __init__(self, constant_baseline: float | None = None, *, held_out: str = HELD_OUT_ACCURACY) -> None:
        check_bounds(0, 1, constant_baseline=constant_baseline)
        self.constant_baseline = constant_baseline
        self.held_out = held_out
        self._curves = {name: Points() for name in (REWARD, SAMPLED_ACCURACY, HELD_OUT_ACCURACY, HELD_OUT_REWARD)}
        self._run_folder: Path | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._run_folder = Path(trainer.log_dir or trainer.default_root_dir)  # log_dir is a collective

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        metrics = trainer.callback_metrics
        for name in (REWARD, SAMPLED_ACCURACY):
            if name in metrics:
                self._curves[name].add(trainer.global_step, float(metrics[name]))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        is_complete = not trainer.sanity_checking or trainer.num_sanity_val_steps == float("inf")
        for metric, curve in {self.held_out: HELD_OUT_ACCURACY, HELD_OUT_REWARD: HELD_OUT_REWARD}.items():
            if is_complete and metric in trainer.callback_metrics:
                self._curves[curve].add(trainer.global_step, float(trainer.callback_metrics[metric]))
                break

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._finish(trainer, pl_module)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt | SIGTERMException):
            self._finish(trainer, pl_module)

    def state_dict(self) -> JsonObject:
        return {"curves": {name: curve.state_dict() for name, curve in self._curves.items()}}

    def load_state_dict(self, state_dict: JsonObject) -> None:
        for name, curve in state_dict["curves"].items():
            self._curves[name].load_state_dict(curve)

    def _held_out_label(self, trainer: L.Trainer) -> str:
        """Returns the held-out metric's name in the legend, such as `held-out prompts` for accuracy."""
        data = getattr(trainer, "datamodule", None)
        rows = f"held-out {getattr(data, 'row_name', 'prompt')}s"
        if self.held_out == HELD_OUT_ACCURACY:
            return rows
        metric = self.held_out.removeprefix("val/").removesuffix("_fraction").replace("_", " ")
        return f"{metric} of {rows}"

    def _finish(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        run_folder, self._run_folder = self._run_folder, None
        if run_folder is None or not trainer.is_global_zero or cast("RLTrainer", trainer).fast_dev_run:
            return
        curves = {name: points for name, curve in self._curves.items() if (points := curve.values())}
        if curves:
            try:
                run_folder.mkdir(parents=True, exist_ok=True)
                if not any(isinstance(logger, CSVLogger) for logger in trainer.loggers):
                    write_curves(curves, run_folder / "learning_curve.csv")
                draw_learning_curve(
                    curves,
                    run_folder / "learning_curve.png",
                    title=type(module).__name__,
                    constant_baseline=self.constant_baseline,
                    held_out_label=self._held_out_label(trainer),
                )
                log_plot(trainer.loggers, run_folder / "learning_curve.png", trainer.global_step)
            except ImportError as error:
                log.warning("The learning curve is missing: matplotlib cannot be imported (%s). Install it.", error)
            except OSError as error:
                problem = write_problem(error, run_folder / "learning_curve.png")
                log.warning(
                    "Could not write the learning curve to %s: %s. Free space before the next run.", run_folder, problem
                )
        module.print("\n".join([f"Run folder: {run_folder}", *contents(run_folder)]))  # above the progress bar


def write_curves(curves: Mapping[str, Curve], path: Path) -> None:
    """Writes one row per iteration and one column per metric; a missing value leaves its cell empty."""
    iterations = sorted({iteration for curve in curves.values() for iteration in curve})
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["iteration", *curves])
    rows.writerows([iteration, *(curve.get(iteration, "") for curve in curves.values())] for iteration in iterations)
    write_whole(path, text.getvalue())


def draw_learning_curve(
    curves: Mapping[str, Curve],
    path: Path,
    *,
    title: str,
    constant_baseline: float | None = None,
    held_out_label: str = "held-out prompts",
) -> None:
    """Plots the accuracy as a PNG, with the reward in a panel above if it differs; without accuracy, only the reward.

    Sampled values are noisy, so they are plotted in a pale color under their running mean.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    reward, sampled, held_out = (curves.get(name, {}) for name in (REWARD, SAMPLED_ACCURACY, HELD_OUT_ACCURACY))
    held_out_reward = {} if held_out else curves.get(HELD_OUT_REWARD, {})
    has_accuracy = bool(sampled or held_out)
    has_reward = bool(held_out_reward) or (bool(reward) and dict(reward) != dict(sampled))
    figure = Figure(figsize=(7.2, 5.4 if has_accuracy and has_reward else 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    ratios = [2, 3] if has_accuracy and has_reward else [1]
    panels: list[Axes] = list(figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0])
    figure.suptitle(title, x=0.015, ha="left", fontsize=13, fontweight="bold")

    if has_reward:
        if reward:
            _plot_running_mean(panels[0], reward, color=_GRAY, label="reward of sampled completions")
        if held_out_reward:
            _plot_held_out(panels[0], held_out_reward, f"{held_out_label} ({{:.3g}} at the end)")
        panels[0].set_ylabel("mean reward")
    if has_accuracy:
        panel = panels[-1]
        if sampled:
            is_reward = " (the reward)" if reward and not has_reward else ""
            _plot_running_mean(panel, sampled, color=_BLUE, label=f"sampled, training prompts{is_reward}")
        if held_out:
            _plot_held_out(panel, held_out, f"{held_out_label} ({{:.1%}} at the end)")
        if constant_baseline is not None:
            label = f"best constant answer ({constant_baseline:.0%})"
            panel.axhline(constant_baseline, color="black", lw=1.0, ls=(0, (5, 4)), label=label, zorder=1)
        panel.set_ylim(-0.02, 1.02)
        panel.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
        panel.set_ylabel("accuracy (completions)" if sampled else "accuracy")
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="0.9", lw=0.8)
        panel.set_axisbelow(True)
        panel.legend(frameon=False, fontsize=9, loc="best")
        panel.margins(x=0.02)
    panels[-1].set_xlabel("iteration")
    unfinished = path.with_suffix(".png.tmp")
    figure.savefig(unfinished, format="png")
    unfinished.replace(path)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Returns the centered running mean over about `window` values, fewer at both ends."""
    half = window // 2
    return [statistics.fmean(values[max(0, index - half) : index + half + 1]) for index in range(len(values))]


def _plot_held_out(panel: Axes, curve: Curve, label: str) -> None:
    points = sorted(curve.items())
    label = label.format(points[-1][1])
    panel.plot(*zip(*points, strict=True), color=_ORANGE, marker="o", ms=5, lw=1.2, zorder=4, label=label)


def _plot_running_mean(panel: Axes, curve: Curve, *, color: str, label: str) -> None:
    iterations, values = zip(*sorted(curve.items()), strict=True)
    window = max(1, len(values) // 25)
    if window > 1:
        panel.plot(iterations, values, color=color, lw=0.8, alpha=0.3)
    panel.plot(iterations, running_mean(values, window), color=color, lw=2.0, label=label, zorder=3)


def log_plot(loggers: Iterable[Logger], path: Path, step: int) -> None:
    """Logs a PNG file under its file name, to Weights & Biases, MLflow and TensorBoard."""
    for logger in loggers:
        with warn_of_errors(logger, path.name):
            if isinstance(logger, WandbLogger):
                logger.log_image(path.stem, [str(path)], step=step)
            elif isinstance(logger, MLFlowLogger):
                logger.experiment.log_artifact(logger.run_id, str(path))
            elif isinstance(logger, TensorBoardLogger):
                from matplotlib.image import imread

                logger.experiment.add_image(path.stem, imread(path), step, dataformats="HWC")
