"""Writes a command's output to stderr: log lines above the progress bar, and an error as one short message."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import traceback
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import jsonargparse
import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_only

import lightrl
from lightrl.callbacks.run_files import run_folder
from lightrl.checks.files import is_disk_full
from lightrl.checks.printable import one_period
from lightrl.commands.config_layers import UsageError
from lightrl.concurrency.owner import LOGS_KEPT_S, own_prefix
from lightrl.errors import EngineUnreachable, LightRLError, OtherRankFailed
from lightrl.strategies import is_on_all_ranks

# Errors that a user can fix. Once the run has started, only errors that lightrl itself raises count as fixable.
FIXABLE = (ValueError, TypeError, OSError, ImportError, MisconfigurationException)


class _RunWatch(L.Callback):
    """Records the run's folder and whether the run has started, for the error message."""

    def __init__(self) -> None:
        self.has_started = False
        self.folder: Path | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.folder = run_folder(trainer)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.has_started = True

    on_train_start = on_validation_start = on_test_start = on_predict_start = on_sanity_check_start


def reported(command: Callable[[Sequence[L.Callback]], int]) -> int:
    """Runs a command with callbacks for its trainer; prints an error as a short message; returns the exit code."""
    folder = str(Path.cwd())
    if folder not in sys.path[:1]:  # it has the user's modules, but a console script does not search it
        sys.path.insert(0, folder)
    configure_logging()
    silence_irrelevant()
    watch = _RunWatch()
    debug = os.environ.get("LIGHTRL_DEBUG", "0") not in ("", "0")
    try:
        return command([watch])
    except (UsageError, ArgumentError) as error:
        if debug:
            raise
        return _fail(str(error), code=2)
    except OtherRankFailed as error:
        if debug:
            raise
        # The failed rank may write its traceback to the run's folder, so write this one elsewhere. Put the cause last.
        consequence = error.__cause__
        return _fail(f"{type(consequence).__name__}: {consequence}\n{keep_traceback(None)}\n{error}", code=1)
    except (LightRLError, *FIXABLE) as error:
        cause = unwrapped(error)
        is_ours = isinstance(error, LightRLError) or _raised_in(cause, lightrl)
        if debug or (watch.has_started and not is_ours and not is_disk_full(error)):
            raise
        if is_on_all_ranks(error) and vars(rank_zero_only).get("rank"):
            return 1  # rank 0 reports it
        if watch.has_started or isinstance(error, LightRLError):
            return _fail(f"{chain(cause)}\n{keep_traceback(watch.folder)}", code=1)
        return _fail(f"{chain(cause)}\nLIGHTRL_DEBUG=1 shows the traceback.", code=2)


def _fail(message: str, *, code: int) -> int:
    sys.stderr.write(f"lightrl: {one_period(message)}\n")
    return code


def chain(error: BaseException) -> str:
    """Joins the messages of an error and its causes, without repeats; adds type and line to other packages' errors."""
    lines: list[str] = []
    link: BaseException | None = error
    while link is not None:
        text = str(link) or type(link).__name__
        if not any(text in line for line in lines):
            file, number = _place(link)
            is_ours = not file or _raised_in(link, lightrl)
            line = text if is_ours else f"{type(link).__name__}: {text} ({file}:{number})"
            if not (is_ours or lines) and is_disk_full(link):
                line += ". Free disk space, or set trainer.default_root_dir to another disk."
            lines.append(f"  caused by {line}" if lines else line)
        link = None if isinstance(link, EngineUnreachable) else link.__cause__  # its message quotes the client's error
    return "\n".join(lines)


def unwrapped(error: BaseException) -> BaseException:
    """Returns the error that a constructor raised, without the errors that jsonargparse wraps around it."""
    if not _raised_in(error, jsonargparse):
        return error
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    cause = error.__cause__ or error.__context__  # jsonargparse chains only the first error of a union
    causes: list[BaseException] = frame.f_locals.get("exceptions") or ([] if cause is None else [cause])
    errors = [unwrapped(item) for item in causes]
    return next((item for item in errors if not _raised_in(item, jsonargparse)), errors[0] if errors else error)


def _raised_in(error: BaseException, package: ModuleType) -> bool:
    return Path(_place(error)[0]).is_relative_to(Path(str(package.__file__)).parent)


def _place(error: BaseException) -> tuple[str, int]:
    """Returns the file and line that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    return (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)


def keep_traceback(folder: Path | None) -> str:
    """Writes the current traceback to a folder, or to a temporary one if that fails; returns a line with the path."""
    text = traceback.format_exc()
    for place in (folder, None):
        with contextlib.suppress(OSError):
            place = place or Path(tempfile.mkdtemp(prefix=own_prefix("lightrl-traceback-", kept_s=LOGS_KEPT_S)))
            place.mkdir(parents=True, exist_ok=True)
            path = place / "traceback.txt"
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return f"Full traceback: {path}"
    return text  # no disk is writable


class _AboveProgressBar:
    """A stream that writes to stderr above any progress bar."""

    def write(self, text: str) -> None:
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr, end="")

    def flush(self) -> None:
        sys.stderr.flush()


class _MarkedFormatter(logging.Formatter):
    """Formats log lines; warnings and errors start with their level, in color on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        text = one_period(super().format(record))
        if record.levelno < logging.WARNING:
            return text
        mark = f"{record.levelname.lower()}:"
        if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
            mark = f"\033[{31 if record.levelno >= logging.ERROR else 33}m{mark}\033[0m"
        return f"{mark} {text}"


def configure_logging() -> None:
    """Sends log lines from lightrl (INFO and above) and Lightning to stderr above the progress bar; idempotent."""
    logger = logging.getLogger("lightrl")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler.formatter, _MarkedFormatter) for handler in logger.handlers):
        handler = logging.StreamHandler(_AboveProgressBar())
        handler.setFormatter(_MarkedFormatter())
        logger.addHandler(handler)
        logger.propagate = False
    for name in ("lightning.pytorch", "lightning.fabric"):
        for lightning_handler in logging.getLogger(name).handlers:
            if type(lightning_handler) is logging.StreamHandler:  # Lightning's handler, not one that writes elsewhere
                lightning_handler.setStream(_AboveProgressBar())


# Lightning 2.6.6 lists devices, which lightrl lists together with the engine.
_NOTICES = ("GPU available: ", "TPU available: ", "HPU available: ")


def _is_of_interest(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    is_exception = " was raised with message: " in text  # "An KeyboardInterrupt …"; TimedCheckpoint logs what it saved
    return not (is_exception or text.startswith(_NOTICES))


def silence_irrelevant() -> None:
    """Silences warnings that a user cannot act on."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_of_interest)
    # lightrl must adapt to changes that libraries announce; users cannot
    libraries = r"(lightning|torch|transformers|datasets|huggingface_hub|jsonargparse|peft)(\.|$)"
    for kind in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=kind, module=libraries)
    # Lightning 2.6.6 uses names that jsonargparse 4.49 renamed
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    # MLflow shows a progress bar for each table that it appends to
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # huggingface_hub logs each retry if the hub is unreachable; the final error says so in one line
    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    # transformers shows a progress bar whenever it loads weights, even if that takes only milliseconds
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
