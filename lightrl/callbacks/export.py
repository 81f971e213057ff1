"""HuggingFaceExport: the trained policy as an ordinary Hugging Face folder, which any tool can load."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from lightrl.callbacks.rl_callback import RLCallback

if TYPE_CHECKING:
    import lightning as L
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# What `save_pretrained` of models and tokenizers writes. A folder with anything else in it is no export to replace.
_EXPORT_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".txt", ".model", ".bin", ".py"})


class _Module(Protocol):
    """What is asked of the module: an RLModule and the SFT module have both."""

    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


class HuggingFaceExport(RLCallback):
    """Writes weights, config, generation config and tokenizer to the folder `to` when `fit` has ended as planned.

    `AutoModelForCausalLM.from_pretrained(to)` then gives the same tensors, bit for bit. A checkpoint is for going on
    with the run, an export for everything else: serving, evaluation, or the next stage (`ModelSpec(path=to)`).

    The folder is always whole: it is written beside its place, under a hidden name, and takes it when it is complete.
    Ctrl-C, an exception and `fast_dev_run` leave the earlier export as it is.

    Args:
        to: the folder; its parents are made. An earlier export in it is replaced, anything else is refused.
        every_n_iterations: exports during the run as well, after every n-th iteration; None for the end only.

    Raises:
        ValueError: when `fit` starts, if `to` holds something that is no export, or the model that the run starts from.
    """

    def __init__(self, to: str, every_n_iterations: int | None = None) -> None:
        if every_n_iterations is not None and every_n_iterations < 1:
            raise ValueError(
                f"every_n_iterations={every_n_iterations}, expected at least 1, or None for the end only. Raise it."
            )
        self.to = Path(to)
        self.every_n_iterations = every_n_iterations

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        policy = getattr(pl_module, "policy", None)
        if not hasattr(policy, "save_pretrained"):
            raise TypeError(
                f"HuggingFaceExport found {type(policy).__name__} at {type(pl_module).__name__}.policy, expected a "
                "Hugging Face model. Give the module one, or leave the callback out."
            )
        self._check_folder(str(getattr(policy, "name_or_path", "")))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.every_n_iterations is not None and trainer.global_step % self.every_n_iterations == 0:
            self._export(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.interrupted:
            self._export(trainer, pl_module)

    def _check_folder(self, source: str) -> None:
        if self.to.exists() and not self.to.is_dir():
            raise ValueError(f"HuggingFaceExport got to={str(self.to)!r}, a file, expected a folder. Name another one.")
        if source and Path(source).is_dir() and Path(source).resolve() == self.to.resolve():
            raise ValueError(
                f"HuggingFaceExport got to={str(self.to)!r}, the folder that the policy is loaded from, expected "
                "another: it would be replaced, and the run could not be repeated. Name another folder."
            )
        found = sorted(self.to.iterdir()) if self.to.is_dir() else []
        foreign = [path.name for path in found if not path.is_file() or path.suffix not in _EXPORT_SUFFIXES]
        if foreign or (found and not (self.to / "config.json").exists()):
            raise ValueError(
                f"HuggingFaceExport got to={str(self.to)!r}, which holds {(foreign or [found[0].name])[0]!r}, expected "
                "an empty folder or an earlier export, since all in it is replaced. Name another folder, or empty it."
            )

    def _export(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        source = cast("_Module", module)
        place = self.to.absolute()
        unfinished = place.with_name(f".{place.name}.unfinished-{os.getpid()}")
        replaced = place.with_name(f".{place.name}.replaced-{os.getpid()}")
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir(parents=True)
            with _without_bars():
                source.policy.save_pretrained(unfinished)
            if source.tokenizer is not None:
                source.tokenizer.save_pretrained(unfinished)
            # Two renames, for a folder cannot be renamed onto a full one; killed between, the old one is at `replaced`.
            if place.exists():
                place.rename(replaced)
            unfinished.rename(place)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
        log.info("Exported the policy after iteration %d to %s.", trainer.global_step, self.to)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hugging Face's progress bar for writing files would break into the run's own."""
    from transformers.utils import logging as transformers_logging

    if not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
