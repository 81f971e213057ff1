"""HuggingFaceExport: the trained policy as an ordinary Hugging Face folder, which any tool can load."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.model_folder import check_model_folder, replaced_folder

if TYPE_CHECKING:
    import lightning as L
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class _Module(Protocol):
    """What is asked of the module: an RLModule and the SFT module have both."""

    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


class HuggingFaceExport(RLCallback):
    """Writes weights, config, generation config and tokenizer to the folder `to` when `fit` has ended as planned.

    `AutoModelForCausalLM.from_pretrained(to)` then gives the same tensors, bit for bit. A checkpoint is for going on
    with the run, an export for everything else: serving, evaluation, or the next stage (`ModelSpec(path=to)`).

    The folder is always whole: an export takes its place when it is complete (model_folder.py).
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
        check_model_folder(self.to, asked_by="HuggingFaceExport", source=str(getattr(policy, "name_or_path", "")))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.every_n_iterations is not None and trainer.global_step % self.every_n_iterations == 0:
            self._export(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.interrupted:
            self._export(trainer, pl_module)

    def _export(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.is_global_zero or getattr(trainer, "fast_dev_run", False):
            return
        source = cast("_Module", module)
        with replaced_folder(self.to) as folder:
            source.policy.save_pretrained(folder)
            if source.tokenizer is not None:
                source.tokenizer.save_pretrained(folder)
        log.info("Exported the policy after iteration %d to %s.", trainer.global_step, self.to)
