"""HuggingFaceExport: writes the trained policy as an ordinary Hugging Face folder, which any tool can load."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightrl.callbacks.loggers import log_model, loggers_of_models
from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.bounds import check_bounds
from lightrl.checks.files import check_local
from lightrl.concurrency.owner import hold, let_go
from lightrl.models.images import save_processor
from lightrl.models.model_folder import (
    HEAD_STAYS_BEHIND,
    ModelDescription,
    check_model_folder,
    replaced_folder,
    save_model,
    save_tokenizer,
)
from lightrl.models.tuning import Part, tuning_of
from lightrl.strategies import FSDP2Strategy, LogprobSettings, Ranks, parallel_model, ranks_of, whole
from lightrl.strategies.empty_model import empty_model

if TYPE_CHECKING:
    import lightning as L
    from torch import Tensor
    from transformers import PreTrainedModel

    from lightrl.models import Role
    from lightrl.rollout.rl_trainer import RLTrainer

log = logging.getLogger(__name__)

_BUCKET_BYTES = 2**28  # parameters gathered at once


class HuggingFaceExport(RLCallback):
    """Writes weights, config, generation config and tokenizer to the `to` folder when `fit` ends normally.

    `AutoModelForCausalLM.from_pretrained(to)` then loads the same tensors, bit for bit. Use a checkpoint to continue
    the run, and an export for everything else: serving, evaluation, or the next stage (`ModelSpec(path=to)`).

    A plain name such as `exported` is a folder in the run's folder, so runs in a sweep do not share it. Other paths,
    such as `runs/sft/export`, are relative to the working folder; two runs cannot use the same folder at once.

    With LoRA, the folder has only the adapters (`PeftModel.from_pretrained`) or, with `merged`, the whole model.

    The policy's folder omits a critic that is a head on the policy's body; `role="critic"` writes body and head as a
    separate model. Weights & Biases and MLflow get the folder as an artifact if they log models: the last export with
    `log_model: true`, each export with `all`. After Ctrl-C, an exception or `fast_dev_run`, an earlier export is kept.

    Args:
        to: the folder, created with its parents. An earlier export is replaced; any other content is an error.
        every_n_iterations: also export after every n-th iteration; None exports only at the end.
        role: the role to export; None means the module's `trained_role` (RewardModel has one) or, without it, the
        policy. merged: with LoRA, merge the adapters into the weights; always done for critics and reward models.

    Raises:
        ValueError: when `fit` starts, if `to` contains files that are not from an export or contains the model that
            the run loads, if another run uses the folder, or if peft would load the adapters as a different model.
    """

    def __init__(
        self,
        to: str = "exported",
        every_n_iterations: int | None = None,
        role: str | None = None,
        *,
        merged: bool = False,
    ) -> None:
        check_bounds(1, every_n_iterations=every_n_iterations)
        check_local(to=to)
        self.to = Path(to)
        self.folder = self.to  # final once `fit` starts
        self.every_n_iterations = every_n_iterations
        self.role = role
        self.merged = merged

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        root = trainer.log_dir or trainer.default_root_dir  # log_dir is a collective, so all ranks read it
        self.folder = Path(root) / self.to if str(self.to) == self.to.name else self.to
        model = getattr(pl_module, self._body_of(pl_module), None)
        if self._is_head(pl_module) and ModelDescription.of_critic(model, pl_module.policy_role) is None:
            raise TypeError(
                f"HuggingFaceExport cannot export a critic's head on a {type(model).__name__}: transformers has no "
                "sequence classification model of that family. Remove the callback: checkpoints keep the head."
            )
        if not hasattr(model, "save_pretrained"):
            raise TypeError(
                f"HuggingFaceExport needs a Hugging Face model at {type(pl_module).__name__}."
                f"{self._role_of(pl_module)}, got {type(model).__name__}. Name another role, or remove the callback."
            )
        if trainer.is_global_zero:
            hold(self.folder, "to")
        check_model_folder(self.folder, asked_by="HuggingFaceExport", source=str(getattr(model, "name_or_path", "")))
        self._check_adapters(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self.every_n_iterations is not None and trainer.global_step % self.every_n_iterations == 0:
            self._export(trainer, pl_module, is_last=False)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.interrupted:
            self._export(trainer, pl_module, is_last=True)
            if self._role_of(pl_module) == "policy" and getattr(pl_module, "value_head", None) is not None:
                log.info(HEAD_STAYS_BEHIND)

    def teardown(self, *_: object, **__: object) -> None:
        let_go(self.folder)

    on_exception = teardown

    def _export(self, trainer: L.Trainer, module: Any, *, is_last: bool) -> None:
        if cast("RLTrainer", trainer).fast_dev_run:
            return
        ranks = ranks_of(trainer.strategy)
        self._write(trainer, module, ranks)
        loggers = loggers_of_models(trainer.loggers, is_last=is_last)
        if loggers:
            ranks.max_each([0])  # a barrier: a rank other than 0 may have written the export
            if trainer.is_global_zero:
                log_model(loggers, self._role_of(module), self.folder, trainer.global_step)

    def _write(self, trainer: L.Trainer, module: Any, ranks: Ranks) -> None:
        role, body = self._role_of(module), self._body_of(module)
        holders = ranks.of_role(body)
        model: PreTrainedModel = getattr(module, body)
        tensors = self._gather_tensors(trainer, module, body)
        head = self._gather_head(module, holders) if self._is_head(module) and holders.is_here else None
        if not holders.is_main:
            return
        with replaced_folder(self.folder) as folder:
            if head is not None:
                description = ModelDescription.of_critic(model, module.policy_role)
                assert description is not None, "on_fit_start refuses it"
                description.save(description.with_head(tensors or model.state_dict(), head), folder)
            elif tensors is None:
                save_model(model, folder)
            else:
                description = ModelDescription.of(model, self._settings_of(module))
                description.save(tensors, folder)
            if module.tokenizer is not None:
                save_tokenizer(module.tokenizer, folder)
            save_processor(model.config, folder)
        log.info("Exported the %s after iteration %d to %s.", role, trainer.global_step, self.folder)
        if tensors is not None and head is None and description is not None:
            description.check_added(tensors, f"the adapters in {self.folder}")

    def _check_adapters(self, trainer: L.Trainer, module: Any) -> None:
        """Raises ValueError on all ranks if peft would load the adapters as a different model from the trained one."""
        model = getattr(module, self._body_of(module))
        if not tuning_of(model).keeps_base or self._is_whole(module) or cast("RLTrainer", trainer).fast_dev_run:
            return
        ranks, role, problem = ranks_of(trainer.strategy), self._settings_of(module), ""
        if ranks.is_main:
            whole_model = empty_model(role) if isinstance(trainer.strategy, FSDP2Strategy) else model
            added = {name: value for name, value in whole_model.named_parameters() if role.tuning.adds(name)}
            try:
                ModelDescription.of(whole_model, role).check_added(added, "the adapters that this run exports")
            except ValueError as error:
                problem = str(error)
        if problem := ranks.broadcast_json(problem):
            raise ValueError(problem)

    def _gather_tensors(self, trainer: L.Trainer, module: Any, body: str) -> dict[str, Tensor] | None:
        """Returns the whole tensors to write, on the CPU: all parameters with adapters merged, or only the adapters.

        Returns None in one process without adapters. Collective over the model's ranks; only the first gets tensors.
        """
        model: PreTrainedModel = getattr(module, body)
        keeps_base = tuning_of(model).keeps_base
        if not keeps_base and not isinstance(trainer.strategy, FSDP2Strategy):
            return None
        is_main = ranks_of(trainer.strategy).of_role(body).is_main
        parallel = module.parallel_models.get(body)
        if parallel is None:
            parallel = parallel_model(trainer.strategy, model, LogprobSettings())
        part: Part = "added" if keeps_base and not self._is_whole(module) else "whole"
        tensors: dict[str, Tensor] = {}
        for bucket in parallel.full_parameters(_BUCKET_BYTES, part=part):
            if is_main:
                tensors.update({name: tensor.cpu().clone() for name, tensor in bucket.tensors.items()})
        return tensors

    def _gather_head(self, module: Any, holders: Ranks) -> Tensor:
        """Returns the critic's head on the policy's body. Collective over the policy's ranks; each gets the head."""
        weight = module.value_head.weight  # None on the earlier stages of a pipeline
        head = {} if weight is None else {"head": whole(weight)}
        return holders.broadcast_tensors(head, source=holders.size - 1)["head"].cpu()

    def _is_whole(self, module: Any) -> bool:
        """Whether to merge adapters; always for a scalar head, which is trained but does not fit peft's format."""
        return self.merged or self._is_head(module) or self._settings_of(module).spec.head == "scalar"

    def _role_of(self, module: L.LightningModule) -> str:
        return self.role or str(getattr(module, "trained_role", "policy"))

    def _settings_of(self, module: Any) -> Role:
        settings: Role = module.models()[self._role_of(module)] if hasattr(module, "models") else module.policy_role
        return settings

    def _is_head(self, module: Any) -> bool:
        """Whether the role is a critic that is a head on the policy's body."""
        has_model = hasattr(module, "critic")
        return self.role == "critic" and not has_model and getattr(module, "value_head", None) is not None

    def _body_of(self, module: Any) -> str:
        """Returns the role whose model holds the weights."""
        return "policy" if self._is_head(module) else self._role_of(module)
