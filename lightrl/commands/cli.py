"""lightrl fit | validate | test | predict: LightningCLI with lightrl's Trainer, short class names and short errors.

`model` and `data` take any LightningModule and LightningDataModule, by `class_path`: lightrl's own and Lightning's
classes by their short name, a user's by a dotted path that starts in the working folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, cast

import jsonargparse
import lightning as L
import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import (
    LightningArgumentParser,
    LightningCLI,
    LRSchedulerTypeTuple,
    SaveConfigCallback,
    instantiate_class,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

import lightrl
from lightrl.checks.disk_errors import is_disk_full
from lightrl.commands.config_errors import UsageError, explain, nearest_files
from lightrl.errors import EngineUnreachable, LightRLError, OtherRankFailed
from lightrl.module import RLModule
from lightrl.strategies import is_on_all_ranks
from lightrl.trainer import Trainer
from lightrl.trajectory import Group

log = logging.getLogger(__name__)

# What a user can mend; during the run only if lightrl itself says so.
_MENDABLE = (ValueError, TypeError, OSError, ImportError, MisconfigurationException)


class LightRLCLI(LightningCLI):
    """LightningCLI for lightrl; parses, builds and runs when it is made, as LightningCLI does.

    Args:
        args: of the command line, the command first; `sys.argv[1:]` if None.
        callbacks: further callbacks, not configurable.
        descriptions: a line about each command, for its help.
    """

    trainer: Trainer

    def __init__(
        self,
        args: Sequence[str] | None = None,
        *,
        callbacks: Sequence[L.Callback] = (),
        descriptions: Mapping[str, str] | None = None,
    ) -> None:
        import_public_classes()
        strict: dict[str, Any] = {"exit_on_error": False, "allow_abbrev": False}
        commands = {
            name: {
                **strict,
                "usage": f"lightrl {name} --config run.yaml [--setting value ...]",
                **({"description": f"lightrl {name}: {descriptions[name]}."} if descriptions else {}),
            }
            for name in self.subcommands()
        }
        super().__init__(
            trainer_class=Trainer,
            trainer_defaults={"callbacks": list(callbacks)},
            save_config_callback=SaveRunConfig,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_kwargs={**strict, "prog": "lightrl", **commands},
            args=list(sys.argv[1:] if args is None else args),
        )

    # ------------------------------------------------------------------ parsing

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(dump_header=[f"lightrl=={lightrl.__version__}"], **kwargs)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        commands = LightningCLI.subcommands()
        commands["predict"].add("return_predictions")  # they go to a file
        return commands

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_optimizer_args((torch.optim.Optimizer,))
        parser.add_lr_scheduler_args(LRSchedulerTypeTuple)

    def parse_arguments(self, parser: ArgumentParser, args: Any) -> None:
        """Parses the command line into `self.config`.

        Raises:
            UsageError: if a setting is unknown, missing or of the wrong type.
        """
        try:
            self.config: Namespace = parser.parse_args(args)
        except ArgumentError as error:
            command, *rest = args
            raise UsageError(explain(error, self._subcommand_parsers[command], rest)) from error

    # ------------------------------------------------------------------ building

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        trainer = cast(Trainer, super().instantiate_trainer(**kwargs))
        asked = self.config[self.config.subcommand].trainer.logger
        # fast_dev_run and barebones leave another logger than Lightning's default
        if asked in (None, True) and [type(logger) for logger in trainer.loggers] == [TensorBoardLogger]:
            trainer.loggers = default_loggers(trainer.default_root_dir)
        return trainer

    def after_instantiate_classes(self) -> None:
        """Optimizer and scheduler sections, made when the model has its parameters: an RLModule loads them late."""
        settings = self.config_init[self.config.subcommand]
        optimizer, scheduler = settings.get("optimizer"), settings.get("lr_scheduler")
        if optimizer is None:
            if scheduler is not None:
                raise UsageError("lr_scheduler is set without optimizer, expected both. Add an `optimizer:` section.")
            return
        log.info(
            "optimizer: %s instead of %s.configure_optimizers.", optimizer["class_path"], type(self.model).__name__
        )

        def configure_optimizers(module: L.LightningModule) -> Any:
            return _configured_optimizers(module, optimizer, scheduler)

        self.model.configure_optimizers = MethodType(configure_optimizers, self.model)

    # ------------------------------------------------------------------ running

    def before_fit(self) -> None:
        self._find_checkpoint()

    def before_validate(self) -> None:
        self._find_checkpoint()

    def before_test(self) -> None:
        self._find_checkpoint()

    def before_predict(self) -> None:
        self._find_checkpoint()

    def after_fit(self) -> None:
        folder = run_folder(self.trainer)
        if folder is not None and not any(isinstance(item, lightrl.LearningCurve) for item in self.trainer.callbacks):
            self.trainer.print(f"Run folder: {folder}")

    def predict(self, **kwargs: Any) -> None:
        """Predicts; the trajectories of an RLModule are written to the run's folder, one per line."""
        folder = run_folder(self.trainer)
        writer = _PredictionFile((folder or Path.cwd()) / "predictions.jsonl")
        self.trainer.callbacks.append(writer)
        self.trainer.predict(**kwargs, return_predictions=False)
        if writer.has_written:
            self.trainer.print(f"Predictions: {writer.path}")

    def _find_checkpoint(self) -> None:
        """`ckpt_path: last` across runs, each of which has a new folder: the newest that has one."""
        settings = self.config_init[self.config.subcommand]
        ckpt_path = settings.get("ckpt_path")
        if ckpt_path is None:
            return
        if ckpt_path == "last":
            if any(isinstance(item, ModelCheckpoint) and item.dirpath for item in self.trainer.callbacks):
                return  # one place for all runs, where Lightning looks itself
            found = last_checkpoint(run_folder(self.trainer))
            if found is not None:
                log.info("ckpt_path=last is %s. This run has a folder of its own.", found)
                settings["ckpt_path"] = str(found)
            elif self.config.subcommand != "fit":
                raise UsageError("ckpt_path=last found no last.ckpt, expected one of an earlier run. Give its path.")
        elif ckpt_path not in ("best", "hpc") and ":" not in ckpt_path and not Path(ckpt_path).exists():
            raise UsageError(
                f"ckpt_path={ckpt_path} does not exist, expected a checkpoint, last or best. "
                f"{nearest_files(Path(ckpt_path), '.ckpt')}"
            )


class SaveRunConfig(SaveConfigCallback):
    """Saves the configuration as config.yaml in the run's folder; there only, never over a file it was read from."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not trainer.loggers or trainer.log_dir is None:
            return
        target = (Path(trainer.log_dir) / self.config_filename).absolute()
        if target not in [Path(str(source)).absolute() for source in self.config.get("config") or []]:
            super().setup(trainer, pl_module, stage)


class _PredictionFile(L.Callback):
    """Writes the judged trajectories of each batch to a file when they are there, one per line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.has_written = False

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        groups = [item for item in outputs if isinstance(item, Group)] if isinstance(outputs, list) else []
        if not groups or not trainer.is_global_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        mode = "a" if self.has_written else "w"
        with self.path.open(mode, encoding="utf-8", errors="backslashreplace") as file:
            for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
                file.write(json.dumps(trajectory.to_json(), ensure_ascii=False) + "\n")
        self.has_written = True


class _RunWatch(L.Callback):
    """Knows whether the run has begun, and its folder, for the error message."""

    def __init__(self) -> None:
        self.has_begun = False
        self.folder: Path | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.folder = run_folder(trainer)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.has_begun = True

    on_train_start = on_validation_start = on_test_start = on_predict_start = on_sanity_check_start


def import_public_classes() -> None:
    """Imports lightrl's public classes: a short name in a config means an imported class."""
    for name in lightrl.__all__:
        getattr(lightrl, name)


def default_loggers(root: str) -> list[L.pytorch.loggers.Logger]:
    """CSV metrics and TensorBoard events in one run folder, `<root>/lightning_logs/version_<n>`."""
    metrics = CSVLogger(root)
    return [metrics, TensorBoardLogger(root, version=metrics.version)]


def run_folder(trainer: L.Trainer) -> Path | None:
    """Where the loggers write; None without a logger or with `fast_dev_run`."""
    if not trainer.loggers or getattr(trainer, "fast_dev_run", False) or trainer.log_dir is None:
        return None
    return Path(trainer.log_dir)


def last_checkpoint(folder: Path | None) -> Path | None:
    """The newest last checkpoint among this run folder and its neighbors."""
    if folder is None:
        return None
    found = list(folder.parent.glob(f"*/checkpoints/{ModelCheckpoint.CHECKPOINT_NAME_LAST}*.ckpt"))
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _configured_optimizers(module: L.LightningModule, optimizer: Any, scheduler: Any) -> Any:
    """What `configure_optimizers` gives for the sections `optimizer:` and `lr_scheduler:`."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    made = instantiate_class((trained,), optimizer)
    if scheduler is None:
        return made
    made_scheduler = instantiate_class(made, scheduler)
    if isinstance(module, RLModule) and not hasattr(made_scheduler, "monitor"):
        # an iteration is the unit of an RL run; Lightning's default is the epoch
        return {"optimizer": made, "lr_scheduler": {"scheduler": made_scheduler, "interval": "step"}}
    return LightningCLI.configure_optimizers(module, made, made_scheduler)


# ---------------------------------------------------------------------- the command


def run(args: Sequence[str], descriptions: Mapping[str, str] | None = None) -> int:
    """Runs one command, whose name is the first argument; errors become one message on stderr.

    Args:
        args: of the command line.
        descriptions: a line about each command, for its help.

    Returns:
        0 done, 1 failed during the run, 2 something to mend in the call.
    """

    def fulfil(callbacks: Sequence[L.Callback]) -> int:
        LightRLCLI(args, callbacks=callbacks, descriptions=descriptions)
        return 0

    return reported(fulfil)


def reported(command: Callable[[Sequence[L.Callback]], int]) -> int:
    """Runs a command that gives its exit code; errors become one message on stderr and a code.

    Args:
        command: gets the callbacks that its trainer must have.
    """
    _put_working_folder_first()
    configure_logging()
    silence_irrelevant()
    watch = _RunWatch()
    debug = os.environ.get("LIGHTRL_DEBUG", "0") not in ("", "0")
    try:
        return command([watch])
    except (UsageError, ArgumentError) as error:
        if debug:
            raise
        return _say(str(error), code=2)
    except OtherRankFailed as error:
        if debug:
            raise
        # Not into the run's folder, where that of the rank that failed may lie; and the cause comes last.
        met = error.__cause__
        return _say(f"{type(met).__name__}: {met}\n{_keep_traceback(None)}\n{error}", code=1)
    except (LightRLError, *_MENDABLE) as error:
        cause = _unwrapped(error)
        is_ours = isinstance(error, LightRLError) or _raised_in(cause, lightrl)
        if debug or (watch.has_begun and not is_ours and not is_disk_full(error)):
            raise
        if is_on_all_ranks(error) and vars(rank_zero_only).get("rank"):
            return 1  # rank 0 says it
        if watch.has_begun or isinstance(error, LightRLError):
            return _say(f"{_chain(cause)}\n{_keep_traceback(watch.folder)}", code=1)
        return _say(f"{_chain(cause)}\nNothing was trained. LIGHTRL_DEBUG=1 shows the traceback.", code=2)


def _say(message: str, *, code: int) -> int:
    sys.stderr.write(f"lightrl: {message}\n")
    return code


def _chain(error: BaseException) -> str:
    """The message and those of its causes that it does not quote; of others' errors also type and place."""
    lines: list[str] = []
    link: BaseException | None = error
    while link is not None:
        text = str(link) or type(link).__name__
        if not any(text in line for line in lines):
            file, number = _place(link)
            ours = not file or _raised_in(link, lightrl)
            said = text if ours else f"{type(link).__name__}: {text} ({file}:{number})"
            if not (ours or lines) and is_disk_full(link):
                said += ". Expected a disk with room. Free some, or write elsewhere: trainer.default_root_dir."
            lines.append(f"  caused by {said}" if lines else said)
        link = None if isinstance(link, EngineUnreachable) else link.__cause__  # it says in words what the client did
    return "\n".join(lines)


def _unwrapped(error: BaseException) -> BaseException:
    """The error of a constructor, without the types that jsonargparse tried it for."""
    if not _raised_in(error, jsonargparse):
        return error
    tried = [_unwrapped(one) for one in _tried(error)]
    return next((one for one in tried if not _raised_in(one, jsonargparse)), tried[0] if tried else error)


def _tried(error: BaseException) -> list[BaseException]:
    """What each type said of a value that may have several: jsonargparse names the first one's alone as the cause."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    cause = error.__cause__ or error.__context__
    return frame.f_locals.get("exceptions") or ([] if cause is None else [cause])


def _raised_in(error: BaseException, package: ModuleType) -> bool:
    return Path(_place(error)[0]).is_relative_to(Path(str(package.__file__)).parent)


def _place(error: BaseException) -> tuple[str, int]:
    """File and line that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)


def _keep_traceback(folder: Path | None) -> str:
    """Writes the traceback of the error being handled to the run's folder, or else to a temporary one; says where."""
    text = traceback.format_exc()
    for place in (folder, None):
        with contextlib.suppress(OSError):
            place = place or Path(tempfile.mkdtemp(prefix="lightrl-"))
            place.mkdir(parents=True, exist_ok=True)
            path = place / "traceback.txt"
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return f"Full traceback: {path}"
    return text  # nowhere to write: better long than lost


def _put_working_folder_first() -> None:
    """A user's `my_rewards.py` lies in the working folder; the console script alone would not look there."""
    folder = str(Path.cwd())
    if folder not in sys.path[:1]:
        sys.path.insert(0, folder)


class _AboveProgressBar(logging.Handler):
    """Writes to stderr above whatever progress bar is drawn there."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        mark = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        try:
            tqdm.write(f"{mark}{self.format(record)}", file=sys.stderr)
        except Exception:  # noqa: BLE001 - logging never ends a run
            self.handleError(record)


def configure_logging() -> None:
    """lightrl's own lines from INFO up on stderr, plain; a second call changes nothing."""
    logger = logging.getLogger("lightrl")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _AboveProgressBar) for handler in logger.handlers):
        logger.addHandler(_AboveProgressBar())
        logger.propagate = False


def _is_no_advertisement(record: logging.LogRecord) -> bool:
    return "Tip: For seamless cloud" not in record.getMessage()


def silence_irrelevant() -> None:
    """Silences what no user can act on, each for its reason."""
    # Lightning 2.6.6 recommends its cloud at every start
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_no_advertisement)
    # Lightning 2.6.6 on torch 2.13, in every loop
    warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)", FutureWarning)
    # each run has a new folder, also one that resumes: its best checkpoints are its own
    warnings.filterwarnings("ignore", r"The dirpath has changed from", UserWarning)
    # Lightning 2.6.6 calls jsonargparse by names that its version 4.49 renamed
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    # a bar for each load of a model's weights, some of milliseconds
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
