"""lightrl doctor run: everything that a run needs, checked in a minute, with two iterations in a temporary folder."""

from __future__ import annotations

import copy
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only

from lightrl.callbacks import (
    DynamicSampling,
    PromptCurriculum,
    RLCallback,
    RolloutMetrics,
    StalenessControl,
    TrajectoryLog,
    WeightSync,
)
from lightrl.checks.dotted_path import function_of
from lightrl.checks.printable import duration_text
from lightrl.commands.cli import LightRLCLI
from lightrl.commands.config_layers import UsageError
from lightrl.commands.console import FIXABLE, chain, keep_traceback, unwrapped
from lightrl.commands.doctor import inputs, machine, trial
from lightrl.commands.doctor.findings import Finding, findings_text, ok, totals_text
from lightrl.commands.doctor.forecast import Forecast, RunLength, forecast
from lightrl.commands.doctor.machine import bytes_text
from lightrl.concurrency.owner import own_prefix
from lightrl.errors import LightRLError, OtherRankFailed
from lightrl.module import RLModule

# What decides how a run samples, and writes nothing but into the run's folder, which is a temporary one here.
_KEPT = (StalenessControl, WeightSync, RolloutMetrics, DynamicSampling, PromptCurriculum, TrajectoryLog)

# Settings of the trainer that make two iterations of a run, with one validation batch, and keep nothing.
_SHORTENED = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "fast_dev_run": False,
    "profiler": None,
    "max_steps": trial.NUM_ITERATIONS,
    "max_epochs": -1,
    "max_time": None,
    "min_steps": None,
    "min_epochs": None,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 1,
    "val_check_interval": trial.NUM_ITERATIONS,
    "check_val_every_n_epoch": None,
}


def check_run(args: Sequence[str], callbacks: Sequence[Any]) -> int:
    """Prints a line for each check as soon as it is done; returns 1 if one fails."""
    for name in ("lightning.pytorch", "lightning.fabric"):  # their lines about devices and stages mean nothing here
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("lightrl").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix=own_prefix("lightrl-doctor-"), ignore_cleanup_errors=True) as folder:
        return _RunCheck(Path(folder), args, callbacks).code


class _RunCheck(LightRLCLI):
    """`lightrl fit` for two iterations, without what it would write, between checks."""

    def __init__(self, folder: Path, args: Sequence[str], callbacks: Sequence[Any]) -> None:
        self.folder = folder
        self.findings: list[Finding] = []
        self.begun_s = time.monotonic()
        super().__init__(["fit", *args], callbacks=callbacks)

    @property
    def code(self) -> int:
        return int(any(finding.verdict == "fails" for finding in self.findings))

    def before_instantiate_classes(self) -> None:
        """Shortens the run and sends what it writes to the temporary folder."""
        settings = self.config[self.config.subcommand]
        trainer = settings.trainer
        self.root = str(trainer.get("default_root_dir") or ".")
        self.length = _run_length(trainer)
        self.limit_val_batches = trainer.get("limit_val_batches")
        self.port = (settings.get("launch") or {}).get("port") or os.environ.get("MASTER_PORT")
        kept, left_out = _sorted_callbacks(_items(trainer.get("callbacks")))
        self.left_out = [*left_out, *([f"ckpt_path={settings.ckpt_path}"] if settings.get("ckpt_path") else [])]
        settings.ckpt_path = None
        for name, value in (_SHORTENED | {"callbacks": kept, "default_root_dir": str(self.folder)}).items():
            trainer[name] = value
        folder = _field(trainer.get("engine"), "weight_folder")
        if folder is not None:  # servers elsewhere see it too; what other runs have there stays
            Path(folder).mkdir(parents=True, exist_ok=True)
            prefix = own_prefix("lightrl-doctor-", Path(folder))
            own = tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True)
            self._weights = own
            trainer.engine.init_args.weight_folder = own.name

    def before_fit(self) -> None:
        """Needs no checkpoint."""

    def after_fit(self) -> None:
        """Has no run folder."""

    def fit(self, **kwargs: Any) -> None:
        """Checks instead of training."""
        module, datamodule = self.model, self.datamodule
        if not isinstance(module, RLModule):
            raise UsageError(
                f"lightrl doctor run needs an RLModule such as GRPO, got {type(module).__name__}. For data alone: "
                "lightrl doctor data."
            )
        is_main = vars(rank_zero_only).get("rank", 0) == 0
        if is_main:
            self._before(module, datamodule)
        watch = trial.Watch()
        self.trainer.callbacks.append(watch)
        problem = self._tried(kwargs)
        if not is_main:
            return
        if problem is not None:
            self._note([problem])
        self._after(watch.measured, module, datamodule)
        took = f"{time.monotonic() - self.begun_s:.0f} s"
        sys.stdout.write(f"\n{totals_text(self.findings)}, in {took}. Nothing was kept.\n")

    def _before(self, module: RLModule, datamodule: Any) -> None:
        self._note(machine.environment())
        self._note(machine.devices(self.trainer))
        self._note(machine.ports(self.trainer.engine, int(self.port) if self.port else None))
        self._note([machine.disk(self.root)])
        self._note(inputs.model(module))
        self._note(inputs.data(module, datamodule))
        if self.left_out:
            self._note([ok("trial", f"Left out of the two iterations: {', '.join(self.left_out)}.")])

    def _tried(self, kwargs: Any) -> Finding | None:
        """Runs the iterations; what ended them, if they failed."""
        try:
            self.trainer.fit(**kwargs)
        except OtherRankFailed:
            raise
        except (LightRLError, *FIXABLE) as error:
            return Finding("trial", "fails", chain(unwrapped(error)), f"See above. {keep_traceback(None)}")
        return None

    def _after(self, measured: trial.Measured, module: RLModule, datamodule: Any) -> None:
        if measured.trajectories or measured.dropped:
            self._note(trial.findings(measured, module))
        if not measured.iterations_s:
            return
        self._note([trial.times(measured)])
        logged = sum(file.stat().st_size for file in self.folder.rglob("iteration-000000.jsonl"))
        result = forecast(
            self.length,
            measured,
            logged_bytes=logged,
            validation_batches=_num_batches(datamodule, self.limit_val_batches),
        )
        self._note([_forecast_finding(result, measured)])
        if math.isfinite(result.bytes):
            self._note([machine.disk(self.root, result.bytes)])

    def _note(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.findings.append(finding)
            sys.stdout.write(findings_text([finding]) + "\n")
            sys.stdout.flush()


def _forecast_finding(result: Forecast, measured: trial.Measured) -> Finding:
    if not math.isfinite(result.iterations):
        fix = "Set trainer.max_steps."
        return Finding("run", "warning", "Nothing ends this run: it has no max_steps and no max_epochs.", fix)
    one = f"a checkpoint has {bytes_text(measured.checkpoint_bytes)}"
    return ok(
        "run",
        f"{result.iterations:.0f} iterations take about {duration_text(result.seconds)} (validation "
        f"{duration_text(result.validation_s)} of it) and write {bytes_text(result.checkpoint_bytes)} of checkpoints "
        f"({one}) and {bytes_text(result.trajectory_bytes)} of trajectories, if all iterations are like the last of "
        "these. Completions that become longer take longer.",
    )


def _run_length(trainer: Namespace) -> RunLength:
    callbacks = [(_class_of(item), _settings_of(item)) for item in _items(trainer.get("callbacks"))]
    checkpoints = [settings for kind, settings in callbacks if issubclass(kind, ModelCheckpoint)]
    if not checkpoints and trainer.get("enable_checkpointing") is not False:
        checkpoints = [{"save_last": True}]
    logs = [settings for kind, settings in callbacks if issubclass(kind, TrajectoryLog)]
    return RunLength(
        max_steps=trainer.max_steps,
        max_epochs=trainer.get("max_epochs"),
        val_check_interval=trainer.get("val_check_interval"),
        every_n_epochs=trainer.get("check_val_every_n_epoch"),
        checkpoints=checkpoints,
        log_every=int(logs[0].get("every_n_iterations", 10)) if logs else None,
    )


def _sorted_callbacks(items: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """The callbacks that the trial keeps, without their tables, and the class paths of the others."""
    kept: list[Any] = []
    left_out: list[str] = []
    for item in items:
        kind = _class_of(item)
        if not issubclass(kind, _KEPT) and not _changes_sampling(kind):
            left_out.append(kind.__name__)
            continue
        item = copy.deepcopy(item)
        if issubclass(kind, TrajectoryLog) and isinstance(item, Namespace):
            item.init_args.table_every_n_iterations = None
        kept.append(item)
    return kept, left_out


def _changes_sampling(kind: type) -> bool:
    hook = "configure_rollout"
    return getattr(kind, hook, None) not in (None, getattr(RLCallback, hook))


def _items(callbacks: Any) -> list[Any]:
    return [] if callbacks is None else list(callbacks) if isinstance(callbacks, list) else [callbacks]


def _class_of(item: Any) -> type:
    kind: Any = function_of(item.class_path, "trainer.callbacks") if isinstance(item, Namespace) else type(item)
    return kind  # type: ignore[no-any-return]


def _settings_of(item: Any) -> dict[str, Any]:
    return vars(item.get("init_args") or Namespace()) if isinstance(item, Namespace) else {}


def _field(engine: Any, name: str) -> Any:
    return (engine.get("init_args") or {}).get(name) if isinstance(engine, Namespace) else None


def _num_batches(datamodule: Any, limit: Any) -> int:
    """Batches of a whole validation."""
    prompts = getattr(datamodule, "prompts", {}).get("validation") or []
    total = math.ceil(len(prompts) / getattr(datamodule, "validation_batch_size", 1))
    if isinstance(limit, float):
        return math.ceil(limit * total)
    return total if limit is None else min(total, limit)
