"""HuggingFaceExport: the trained policy as an ordinary Hugging Face folder, which any tool can load."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.models import ParallelModel, Role
from lightrl.models.lora import has_adapters
from lightrl.models.model_folder import (
    HEAD_STAYS_BEHIND,
    ModelDescription,
    check_model_folder,
    replaced_folder,
    save_model,
)
from lightrl.models.pictures import save_processor
from lightrl.strategies import LogprobSettings, Ranks, SplitsModels, parallel_model, ranks_of, whole

if TYPE_CHECKING:
    import lightning as L
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_BUCKET_BYTES = 2**28  # of parameters gathered at once


class _Module(Protocol):
    """What is asked of the module beside the model: an RLModule and the supervised ones have it."""

    tokenizer: PreTrainedTokenizerBase | None
    policy_role: Role
    parallel_models: dict[str, ParallelModel]

    def models(self) -> dict[str, Role]: ...


class HuggingFaceExport(RLCallback):
    """Writes weights, config, generation config and tokenizer to the folder `to` when `fit` has ended as planned.

    `AutoModelForCausalLM.from_pretrained(to)` then gives the same tensors, bit for bit. A checkpoint is for going on
    with the run, an export for everything else: serving, evaluation, or the next stage (`ModelSpec(path=to)`).

    With LoRA the folder has peft's form, adapters only (`PeftModel.from_pretrained`), or with `merged` the whole model.

    A critic that is a head on the policy's body is left out of the policy's folder; with `role="critic"` body and head
    are written as a model of its own, for a later run's `critic` or `reward_model`.

    The folder is always whole: an export takes its place when it is complete (model_folder.py).
    Ctrl-C, an exception and `fast_dev_run` leave the earlier export as it is.

    Args:
        to: the folder; its parents are made. An earlier export in it is replaced, anything else is refused.
        every_n_iterations: exports during the run as well, after every n-th iteration; None for the end only.
        role: whose model; None is the module's `trained_role`, which a RewardModel has, or else the policy.
        merged: with LoRA, merge the adapters into the weights; always so for critics and reward models.

    Raises:
        ValueError: when `fit` starts, if `to` holds something that is no export, or the model that the run starts from.
    """

    def __init__(
        self, to: str, every_n_iterations: int | None = None, role: str | None = None, *, merged: bool = False
    ) -> None:
        if every_n_iterations is not None and every_n_iterations < 1:
            raise ValueError(
                f"every_n_iterations={every_n_iterations}, expected at least 1, or None for the end only. Raise it."
            )
        self.to = Path(to)
        self.every_n_iterations = every_n_iterations
        self.role = role
        self.merged = merged

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        model = getattr(pl_module, self._body_of(pl_module), None)
        if self._is_head(pl_module) and ModelDescription.of_critic(model, pl_module.policy_role) is None:
            raise TypeError(
                f"HuggingFaceExport found a critic's head on a {type(model).__name__}, expected a family with a model "
                "for sequence classification. Leave the callback out: the head travels with the run's checkpoints."
            )
        if not hasattr(model, "save_pretrained"):
            raise TypeError(
                f"HuggingFaceExport found {type(model).__name__} at {type(pl_module).__name__}."
                f"{self._role_of(pl_module)}, expected a Hugging Face model. Give the module one, name another role, "
                "or leave the callback out."
            )
        check_model_folder(self.to, asked_by="HuggingFaceExport", source=str(getattr(model, "name_or_path", "")))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.every_n_iterations is not None and trainer.global_step % self.every_n_iterations == 0:
            self._export(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.interrupted:
            self._export(trainer, pl_module)
            if self._role_of(pl_module) == "policy" and getattr(pl_module, "value_head", None) is not None:
                log.info(HEAD_STAYS_BEHIND)

    def _export(self, trainer: L.Trainer, module: Any) -> None:
        if getattr(trainer, "fast_dev_run", False):
            return
        role, body = self._role_of(module), self._body_of(module)
        holders = ranks_of(trainer.strategy).of_role(body)
        model: PreTrainedModel = getattr(module, body)
        tensors = self._gathered(trainer, module, body)
        head = self._whole_head(module, holders) if self._is_head(module) and holders.is_here else None
        if not holders.is_main:
            return
        tokenizer = cast("_Module", module).tokenizer
        with replaced_folder(self.to) as folder:
            if head is not None:
                description = ModelDescription.of_critic(model, module.policy_role)
                assert description is not None, "on_fit_start refuses it"
                description.save(description.with_head(tensors or model.state_dict(), head), folder)
            elif tensors is None:
                save_model(model, folder)
            else:
                described = _described_by(cast("_Module", module), role)
                ModelDescription.of(model, described).save(tensors, folder, merged=self.merged)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            save_processor(model.config, folder)
        log.info("Exported the %s after iteration %d to %s.", role, trainer.global_step, self.to)

    def _gathered(self, trainer: L.Trainer, module: Any, role: str) -> dict[str, Tensor] | None:
        """What is to be written, whole, on the CPU: all parameters, or the trained ones of a model with adapters.

        None if the model has it as it is. Collective over the ranks that a model is spread over; the first keeps it.
        """
        model: PreTrainedModel = getattr(module, role)
        keeps = ranks_of(trainer.strategy).of_role(role).is_main
        if has_adapters(model):
            trained = ((name, value) for name, value in model.named_parameters() if value.requires_grad)
            gathered = ((name, whole(value)) for name, value in trained)
            return {name: value.cpu() for name, value in gathered if keeps}
        if not isinstance(trainer.strategy, SplitsModels):
            return None
        parallel = module.parallel_models.get(role)
        if parallel is None:
            parallel = parallel_model(trainer.strategy, model, LogprobSettings())
        found: dict[str, Tensor] = {}
        for bucket in parallel.full_parameters(_BUCKET_BYTES):
            if keeps:
                found.update({name: tensor.cpu().clone() for name, tensor in bucket.tensors.items()})
        return found

    def _whole_head(self, module: Any, holders: Ranks) -> Tensor:
        """A critic's on the policy's body, on each rank of that; collective over them."""
        weight = module.value_head.weight  # of a pipeline the last rank has it, the first may have none
        found = {} if weight is None else {"head": whole(weight)}
        return holders.broadcast_tensors(found, source=holders.size - 1)["head"].cpu()

    def _role_of(self, module: L.LightningModule) -> str:
        return self.role or str(getattr(module, "trained_role", "policy"))

    def _is_head(self, module: Any) -> bool:
        """Whether it is a critic that is a head on the policy's body."""
        is_own = hasattr(module, "critic")
        return self.role == "critic" and not is_own and getattr(module, "value_head", None) is not None

    def _body_of(self, module: Any) -> str:
        """The role whose model holds the weights."""
        return "policy" if self._is_head(module) else self._role_of(module)


def _described_by(module: _Module, role: str) -> Role:
    """The role of that name; supervised modules have one."""
    return module.models()[role] if hasattr(module, "models") else module.policy_role
