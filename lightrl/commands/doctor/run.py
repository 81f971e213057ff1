"""lightrl doctor run: everything that a run needs, checked in a minute, with two iterations in a temporary folder."""

from __future__ import annotations

import copy
import logging
import math
import os
import sys
import tempfile
import time
from collections import Counter
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
from lightrl.commands.cli import LightRLCLI
from lightrl.commands.config_layers import UsageError
from lightrl.commands.console import FIXABLE, chain, keep_traceback, unwrapped
from lightrl.commands.doctor import machine, trial
from lightrl.commands.doctor.findings import Finding
from lightrl.concurrency.owner import own_prefix
from lightrl.errors import LightRLError, OtherRankFailed
from lightrl.module import RLModule

# What decides how a run samples, and writes nothing but into the run's folder, which is a temporary one here.
_KEPT = (StalenessControl, WeightSync, RolloutMetrics, DynamicSampling, PromptCurriculum, TrajectoryLog)

# Trainer overrides for the trial: two iterations, one validation batch, no output.
_SHORTENED: dict[str, Any] = {
    **dict.fromkeys(("max_time", "min_steps", "min_epochs", "profiler", "check_val_every_n_epoch")),
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    "fast_dev_run": False,
    "max_epochs": -1,
    "max_steps": trial.NUM_ITERATIONS,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 1,
    "val_check_interval": trial.NUM_ITERATIONS,
}


def check_run(args: Sequence[str], callbacks: Sequence[Any]) -> int:
    """Prints a line for each check as soon as it is done; returns 1 if one fails."""
    logging.getLogger("lightrl").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix=own_prefix("lightrl-doctor-"), ignore_cleanup_errors=True) as folder:
        return int(_RunCheck(Path(folder), args, callbacks).verdicts["fails"] > 0)


class _RunCheck(LightRLCLI):
    """`lightrl fit` for two iterations, without what it would write, between checks."""

    def __init__(self, folder: Path, args: Sequence[str], callbacks: Sequence[Any]) -> None:
        self.folder = folder
        self.verdicts: Counter[str] = Counter()
        self.begun_s = time.monotonic()
        super().__init__(["fit", *args], callbacks=callbacks)

    def before_instantiate_classes(self) -> None:
        """Shortens the run and sends what it writes to the temporary folder."""
        settings = self.config[self.config.subcommand]
        trainer = settings.trainer
        self.root = str(trainer.get("default_root_dir") or ".")
        port = (settings.get("launch") or {}).get("port") or os.environ.get("MASTER_PORT")
        self.port = int(port) if port else None
        items = trainer.get("callbacks") or []
        items = items if isinstance(items, list) else [items]
        self.given = trainer.clone()
        self.items = [(_class_of(item), _settings_of(item)) for item in items]
        kept = [_without_table(item) for item in items if _is_kept(_class_of(item))]
        self.left_out = [kind.__name__ for kind, _ in self.items if not _is_kept(kind)]
        self.left_out += [f"ckpt_path={settings.ckpt_path}"] if settings.get("ckpt_path") else []
        settings.ckpt_path = None
        for name, value in (_SHORTENED | {"callbacks": kept, "default_root_dir": str(self.folder)}).items():
            trainer[name] = value
        engine = trainer.get("engine")
        folder = (engine.get("init_args") or {}).get("weight_folder") if isinstance(engine, Namespace) else None
        if folder is not None:  # servers elsewhere see it too; what other runs have there stays
            Path(folder).mkdir(parents=True, exist_ok=True)
            prefix = own_prefix("lightrl-doctor-", Path(folder))
            self._weights = tempfile.TemporaryDirectory(prefix=prefix, dir=folder, ignore_cleanup_errors=True)
            trainer.engine.init_args.weight_folder = self._weights.name

    def before_fit(self) -> None:
        """Needs no checkpoint."""

    def after_fit(self) -> None:
        """Has no run folder."""

    def fit(self, **kwargs: Any) -> None:
        """Checks instead of training."""
        module, datamodule, is_main = self.model, self.datamodule, vars(rank_zero_only).get("rank", 0) == 0
        if not isinstance(module, RLModule):
            raise UsageError(
                f"lightrl doctor run needs an RLModule such as GRPO, got {type(module).__name__}. For data alone: "
                "lightrl doctor data."
            )
        if is_main:
            self._before(module, datamodule)
        measured = trial.Trial()
        self.trainer.callbacks.append(measured)
        problem = None
        try:
            self.trainer.fit(**kwargs)
        except OtherRankFailed:
            raise
        except (LightRLError, *FIXABLE) as error:
            problem = Finding("trial", chain(unwrapped(error)), "fails", f"See above. {keep_traceback(None)}")
        if not is_main:
            return
        self._note([] if problem is None else [problem])
        self._after(measured, module, datamodule)
        num, took = self.verdicts, time.monotonic() - self.begun_s
        warnings = f"{num['warning']} warning{'s' * (num['warning'] != 1)}"
        sys.stdout.write(f"\n{num['ok']} ok, {warnings}, {num['fails']} failed, in {took:.0f} s. Nothing was kept.\n")

    def _before(self, module: RLModule, datamodule: Any) -> None:
        self._note(machine.devices(self.trainer))
        self._note(machine.ports(self.trainer.engine, self.port))
        self._note([machine.disk(self.root)])
        self._note(machine.memory_on_paper(module, self.trainer, datamodule))
        self._note(machine.models(module))
        self._note(machine.data(module, datamodule))
        if self.left_out:
            self._note([Finding("trial", f"Left out of the two iterations: {', '.join(self.left_out)}.")])

    def _after(self, measured: trial.Trial, module: RLModule, datamodule: Any) -> None:
        if measured.trajectories or measured.dropped:
            self._note(trial.findings(measured, module))
        if not measured.iterations_s:
            return
        logged = sum(file.stat().st_size for file in self.folder.rglob("iteration-000000.jsonl"))
        logs = [
            settings.get("every_n_iterations", 10) for kind, settings in self.items if issubclass(kind, TrajectoryLog)
        ]
        saved = [settings for kind, settings in self.items if issubclass(kind, ModelCheckpoint)]
        if not saved and self.given.get("enable_checkpointing") is not False:
            saved = [{"save_last": True}]
        whole, needed = trial.forecast(
            trial.run_length(self.given, saved, measured.epoch_iterations),
            measured,
            logged_bytes=logged / logs[0] if logs else 0.0,
            validation_batches=_num_batches(datamodule, self.given.get("limit_val_batches")),
        )
        self._note([trial.times(measured), whole, *([machine.disk(self.root, needed)] if needed else [])])

    def _note(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.verdicts[finding.verdict] += 1
            sys.stdout.write(f"{finding}\n")
            sys.stdout.flush()


def _is_kept(kind: type) -> bool:
    """Also a callback that changes how the run samples."""
    hook = "configure_rollout"
    return issubclass(kind, _KEPT) or getattr(kind, hook, None) not in (None, getattr(RLCallback, hook))


def _without_table(item: Any) -> Any:
    item = copy.deepcopy(item)
    if issubclass(_class_of(item), TrajectoryLog) and isinstance(item, Namespace):
        item.init_args.table_every_n_iterations = None
    return item


def _settings_of(item: Any) -> dict[str, Any]:
    return vars(item.get("init_args") or Namespace()) if isinstance(item, Namespace) else {}


def _class_of(item: Any) -> type:
    kind: Any = function_of(item.class_path, "trainer.callbacks") if isinstance(item, Namespace) else type(item)
    return kind  # type: ignore[no-any-return]


def _num_batches(datamodule: Any, limit: Any) -> int:
    """Batches of a whole validation."""
    prompts = getattr(datamodule, "prompts", {}).get("validation") or []
    total = math.ceil(len(prompts) / getattr(datamodule, "validation_batch_size", 1))
    return math.ceil(limit * total) if isinstance(limit, float) else min(total, total if limit is None else limit)
