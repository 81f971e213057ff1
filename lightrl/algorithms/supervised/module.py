"""The base class of SFT, DPO and reward models: a model trained on given data by Lightning's loop.

A subclass computes a batch's losses and metrics in `measure`. All ranks read the same batches and each dp rank
measures its share of the rows, so the update is the same as with one process.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import Tensor

from lightrl.checks.bounds import check_adamw, check_bounds, check_choice
from lightrl.data import ChatBatch, PairBatch
from lightrl.models import ModelSpec, ParallelModel, Role, context_tokens
from lightrl.models.images import ImageReader
from lightrl.models.model_folder import fill_in, keep_trained
from lightrl.models.optimizer import adamw, with_schedule
from lightrl.models.role import load_role
from lightrl.module import TrainedModule
from lightrl.strategies import LogprobSettings, check_strategy, parallel_model, ranks_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DATA_MODULES = {ChatBatch: "SFTDataModule", PairBatch: "PreferenceDataModule"}


class SupervisedSettings(TypedDict, total=False):
    """SupervisedModule's arguments, for type checkers; subclasses pass them on as `kwargs`."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    warmup_steps: int
    lr_decay: Literal["constant", "linear", "cosine"]


class SupervisedModule(TrainedModule):
    """A plain LightningModule with one trained model, AdamW, linear warm-up and decay.

    With `accumulate_grad_batches`, batches are weighted by their tokens (SFT) or pairs, as if all were one batch.

    Args:
        policy: the model to train: a hub name, a local folder, a ModelSpec, or a Role with `lora`.
        lr: learning rate after the warm-up.
        betas: AdamW's decay rates for the two moments.
        weight_decay: AdamW's weight decay, which applies only to matrices, not to norms and biases.
        warmup_steps: number of steps of linear warm-up: step k (from 1) uses k/warmup_steps of `lr`.
        lr_decay: after the warm-up: `constant`, or `linear` or `cosine` to 0 at the end of the run.
    """

    fixed_settings = frozenset({"policy_role", "lr", "betas", "weight_decay", "warmup_steps", "lr_decay"})
    # The attribute that holds the trained model, which HuggingFaceExport writes.
    trained_role: str = "policy"
    # The type of batch that `measure` takes.
    batch_type: type[Any] = object
    # The prefix for metrics logged per step.
    log_prefix: str = "train"
    # The key of the metric to minimize in `measure`'s result.
    loss_name: str = "loss"

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        lr: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        lr_decay: Literal["constant", "linear", "cosine"] = "cosine",
    ) -> None:
        super().__init__()
        check_adamw(lr=lr, weight_decay=weight_decay, betas=betas)
        check_choice(("constant", "linear", "cosine"), lr_decay=lr_decay)
        check_bounds(0, warmup_steps=warmup_steps)
        self.policy_role = Role.of(policy)
        self.check_role("policy", self.policy_role)
        self.lr = lr
        self.betas = betas
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.lr_decay = lr_decay
        self.parallel_models: dict[str, ParallelModel] = {}  # role → model; filled on first use
        self._num_accumulated = 0  # tokens or pairs in the gradients accumulated so far

    def _is_fitted(self) -> bool:
        # In this hook Lightning's LearningRateFinder sets both `lr` and the optimizer's learning rate.
        return super()._is_fitted() and self._current_fx_name != "on_fit_start"

    def check_role(self, name: str, role: Role) -> None:
        """Raises ValueError if the Role sets anything but `model` and `lora`, because it would have no effect here."""
        if dataclasses.replace(role, lora=None) != Role(role.model):
            raise ValueError(
                f"{type(self).__name__}'s {name} may set only model and lora of a Role, got {role}. Set lr and "
                "weight_decay on the module; frozen, offload and mesh need an RLModule."
            )

    def measure(self, batch: Any) -> dict[str, Tensor]:
        """Returns metrics by name, with one number per trajectory, pair or token. `loss_name` is minimized.

        `self.parallel(role).measure` returns a model's outputs under any strategy. To train on several ranks, a batch
        needs `share(rank, size)`, which returns a smaller batch or None, and `num_measured`, the length of each metric.
        """
        raise NotImplementedError(f"{type(self).__name__} must define measure.")

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self.policy_role.spec.load_tokenizer()

    @functools.cached_property
    def image_reader(self) -> ImageReader | None:
        """Prepares images for the model; None for a text-only model."""
        return ImageReader.of(self.policy_role.spec.load_config())

    @property
    def max_prompt_tokens(self) -> int | None:
        """The model's context length, for prompt and completion together; None if its config does not state one."""
        return context_tokens(self.policy_role.spec.load_config())

    def setup(self, stage: str) -> None:
        """Raises ValueError if the strategy cannot train this module."""
        check_strategy(self.trainer.strategy)

    def configure_model(self) -> None:
        for name, role in self.planned_roles().items():
            if not hasattr(self, name):
                is_trained = name == self.trained_role
                model = load_role(name, role, self.policy_role, self.tokenizer, is_trained=is_trained)
                setattr(self, name, model.train(is_trained))

    def on_fit_start(self) -> None:
        if ranks_of(self.trainer.strategy).size > 1:
            self.parallel(self.trained_role)

    def parallel(self, role: str) -> ParallelModel:
        """Returns the role's ParallelModel; the first call creates it."""
        if role not in self.parallel_models:
            settings = LogprobSettings(entropy_needs_gradient=False)
            model = getattr(self, role)
            is_training = model.training
            model.eval()  # dropout would disturb the probes that test what the model supports
            self.parallel_models[role] = parallel_model(self.trainer.strategy, model, settings)
            model.train(is_training)
        return self.parallel_models[role]

    def configure_optimizers(self) -> Any:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
        vectors = [parameter for parameter in parameters if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return self.add_schedule(adamw(self, groups, lr=self.lr, betas=self.betas))

    def add_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        if not self.warmup_steps and self.lr_decay == "constant":
            return optimizer
        num_steps, warmup = self.trainer.estimated_stepping_batches, self.warmup_steps
        return with_schedule(optimizer, num_steps, warmup, self.lr_decay, decay_start=warmup)

    def planned_roles(self) -> dict[str, Role]:
        """Returns the roles, by name, of the models that a step uses."""
        return {self.trained_role: self.policy_role}

    def loaded_models(self) -> dict[str, tuple[PreTrainedModel, Role]]:
        """Returns the models and their roles by name; checkpoints contain only `trained_role`."""
        return {name: (getattr(self, name), role) for name, role in self.planned_roles().items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        keep_trained(checkpoint, self.loaded_models(), [self.trained_role])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.configure_model()  # `load_from_checkpoint` calls this before there is a trainer
        fill_in(checkpoint, self.loaded_models(), [self.trained_role])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        means, number = self.means(batch)
        self._log_means(self.log_prefix, {name: value.detach() for name, value in means.items()}, on_step=True)
        return self.accumulated(means[self.loss_name], number, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log_evaluation("val", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log_evaluation("test", batch)

    def _log_evaluation(self, stage: str, batch: Any) -> None:
        means, number = self.means(batch)
        name = getattr(batch, "set_name", None)
        of_set = {} if name is None else {f"{key}/{name}": value for key, value in means.items()}
        self._log_means(stage, means | of_set, on_step=False, batch_size=number)

    def means(self, batch: Any) -> tuple[dict[str, Tensor], int]:
        """Returns the means to log and minimize, and the count. Averaged over ranks, they are means of the batch."""
        if not isinstance(batch, self.batch_type):
            data_module = _DATA_MODULES.get(self.batch_type, "a data module that makes these")
            raise TypeError(
                f"{type(self).__name__} needs batches of type {self.batch_type.__name__}, got {type(batch).__name__}. "
                f"Use {data_module}."
            )
        ranks = ranks_of(self.trainer.strategy)
        if ranks.dp_size == 1:
            measured = self.measure(batch)
            return {name: values.mean() for name, values in measured.items()}, len(next(iter(measured.values())))
        share, number = batch.share(ranks.dp_rank, ranks.dp_size), batch.num_measured
        factor = 0.0 if share is None else ranks.dp_size / number  # FSDP averages gradients over ranks
        measured = self.measure(batch.share(0, ranks.dp_size) if share is None else share)
        return {name: values.sum() * factor for name, values in measured.items()}, number

    def accumulated(self, loss: Tensor, number: int, batch_idx: int) -> Tensor:
        """Scales the loss so that batches are weighted by size, although Lightning divides by accumulate_grad_batches.

        Args:
            loss: the mean over the batch's tokens or pairs.
            number: the number of tokens or pairs.
            batch_idx: Lightning zeroes the gradients at multiples of accumulate_grad_batches.
        """
        num_batches = self.trainer.accumulate_grad_batches
        if num_batches == 1:
            return loss
        before = self._num_accumulated if batch_idx % num_batches else 0
        self._num_accumulated = before + number
        # The gradients so far are means over `before` tokens or pairs. The optimizer's parameters are never gathered.
        groups = [group for optimizer in self.trainer.optimizers for group in optimizer.param_groups]
        for parameter in (parameter for group in groups for parameter in group["params"]):
            if parameter.grad is not None and before:
                parameter.grad.mul_(before / self._num_accumulated)
        return loss * (num_batches * number / self._num_accumulated)

    def _log_means(self, prefix: str, means: dict[str, Tensor], *, on_step: bool, batch_size: int = 1) -> None:
        # Lightning weights each batch's mean by batch_size, so an epoch's mean is over trajectories or pairs.
        self.log_dict(
            {f"{prefix}/{name}": value for name, value in means.items()},
            on_step=on_step,
            on_epoch=not on_step,
            prog_bar=True,
            batch_size=batch_size,
            sync_dist=not on_step or ranks_of(self.trainer.strategy).dp_size > 1,
        )
