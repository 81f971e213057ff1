"""Descriptions of the files in a run's folder: in its README.txt, and in a list at the end of a run."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import ModelCheckpoint

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.strategies.atomic_write import write_whole

if TYPE_CHECKING:
    import lightning as L

log = logging.getLogger(__name__)

# In the order in which a person wants them: pattern in the run's folder → what it is.
KINDS = {
    "config.yaml": "all settings; fit --config config.yaml repeats the run",
    "learning_curve.png": "reward and accuracy over the iterations",
    "learning_curve.csv": "the numbers of the picture",
    "metrics.csv": "every metric, a row per iteration",
    "events.out.tfevents*": "the same for tensorboard --logdir .",
    "trajectories": "what the policy wrote, a line each; lightrl inspect",
    "predictions.jsonl": "trajectories of lightrl predict, a line each",
    "checkpoints": "fit --ckpt_path checkpoints/last.ckpt continues",
    "trace": "where the time went: summary.json, trace.json",
    "problems": "warnings, errors and drops, a file per rank",
    "logs": "log lines, a file per rank; set levels by logging:",
    "failed_rewards.jsonl": "whose reward failed; lightrl doctor replay",
    "journal-*.jsonl": "turns of agents, from which a resumed run continues",
    "traceback.txt": "the error that ended the run",
    "status.json": "what the run does now; lightrl status",
    "hparams.yaml": "the settings as Lightning's CSVLogger keeps them",
}
_NAME_CHARS = max(map(len, KINDS))


def contents(folder: Path) -> list[str]:
    """A line for each kind of file that is in a run's folder."""
    return [f"  {name:<{_NAME_CHARS}}  {kind}" for name, kind in KINDS.items() if any(folder.glob(name))]


class RunFiles(RLCallback):
    """Writes the README.txt when a stage is set up, logs the folder's path, and keeps lightrl's log lines of each rank.

    Nothing is written without a logger or with `fast_dev_run`, or where the disk is full.
    """

    def __init__(self) -> None:
        self._log_file: logging.FileHandler | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        folder = trainer.log_dir  # on all ranks: it comes from rank 0
        for saves in trainer.checkpoint_callbacks if folder else []:
            if isinstance(saves, ModelCheckpoint) and saves.dirpath is None:
                # Where Lightning's are too, unless CSVLogger is not the first.
                saves.dirpath = str(Path(str(folder)) / "checkpoints")
        if not (folder and trainer.loggers) or getattr(trainer, "fast_dev_run", False):
            return
        self._close_log()
        with contextlib.suppress(OSError):
            path = Path(folder) / "logs" / f"rank-{trainer.global_rank}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log_file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
            self._log_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
            logging.getLogger("lightrl").addHandler(self._log_file)
        if not trainer.is_global_zero:
            return
        log.info("run folder: %s", folder)
        lines = [
            "A run of lightrl. `lightrl inspect .` shows it in the browser, also while it goes on.",
            "Some files exist only with their callback or logger, if asynchronous, or after an error:",
            "",
            *(f"{name:<{_NAME_CHARS}}  {kind}" for name, kind in KINDS.items()),
        ]
        with contextlib.suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
            write_whole(Path(folder) / "README.txt", "\n".join(lines) + "\n")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close_log()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close_log()

    def _close_log(self) -> None:
        if self._log_file is not None:
            logging.getLogger("lightrl").removeHandler(self._log_file)
            self._log_file.close()
            self._log_file = None
