"""SFT: supervised fine-tuning, a plain LightningModule; what comes before reinforcement learning.

Shapes: B chats, T tokens, N loss tokens, H hidden size. The loss is computed from hidden states at the N positions that
predict a completion's token, as an RLModule's logprobs are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import torch
from torch import Tensor
from torch.nn.functional import linear

from lightrl.data.supervised import ChatBatch
from lightrl.functional.logprobs import hidden_logprobs, predicted_token_ids, predicting_positions
from lightrl.models import ModelSpec
from lightrl.strategies import check_strategy, head_is_plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ARGMAX_LOGITS = 2**24  # logits held at once when the likeliest tokens are looked for


class SFT(L.LightningModule):
    """Maximizes the logprob of each completion token, with AdamW, linear warm-up and decay.

    Trains on the batches of SFTDataModule. Logs `sft/loss_nats` per step; `val/loss_nats` and
    `val/token_accuracy_fraction` (how often the likeliest token is the right one), each averaged over tokens.

    Args:
        policy: the model to train: a hub name, a local folder, or a ModelSpec.
        lr: learning rate after the warm-up.
        betas: of AdamW.
        weight_decay: of AdamW, on matrices only: not on norms and biases.
        warmup_steps: linear warm-up: step k (from 1) has k/warmup_steps of `lr`.
        lr_decay: after the warm-up: `constant`, or `linear` or `cosine` to 0 at the end of the run.
    """

    policy: PreTrainedModel

    def __init__(
        self,
        policy: str | ModelSpec,
        *,
        lr: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        lr_decay: Literal["constant", "linear", "cosine"] = "cosine",
    ) -> None:
        super().__init__()
        if lr_decay not in ("constant", "linear", "cosine"):
            raise ValueError(f"lr_decay={lr_decay!r}, expected constant, linear or cosine. Choose one of them.")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps}, expected 0 or more. Raise it.")
        self.policy_spec = ModelSpec.of(policy)
        self.lr = lr
        self.betas = betas
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.lr_decay = lr_decay
        self._tokenizer: PreTrainedTokenizerBase | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's; loaded once."""
        if self._tokenizer is None:
            self._tokenizer = self.policy_spec.load_tokenizer()
        return self._tokenizer

    @property
    def max_prompt_tokens(self) -> int | None:
        """The model's context, which prompt and completion share; None if the model states none."""
        return getattr(self.policy_spec.load_config(), "max_position_embeddings", None)

    def setup(self, stage: str) -> None:
        check_strategy(self.trainer.strategy)

    def configure_model(self) -> None:
        if hasattr(self, "policy"):
            return
        self.policy = self.policy_spec.load_model().train()
        self._head_is_plain = head_is_plain(self.policy)

    def configure_optimizers(self) -> Any:
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
        vectors = [parameter for parameter in parameters if parameter.dim() < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.lr,
            betas=self.betas,
            fused=True,
        )
        if not self.warmup_steps and self.lr_decay == "constant":
            return optimizer
        num_steps = self.trainer.estimated_stepping_batches
        if self.lr_decay != "constant" and num_steps == math.inf:
            raise ValueError(
                f"lr_decay={self.lr_decay!r} needs the end of the run, expected max_steps or max_epochs. Set one."
            )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self._lr_factor(step, num_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: ChatBatch, batch_idx: int) -> Tensor:
        loss = -self._logprobs(*self._predictions(batch)).mean()
        self.log("sft/loss_nats", loss, on_step=True, prog_bar=True, batch_size=len(batch.token_ids))
        return loss

    def validation_step(self, batch: ChatBatch, batch_idx: int) -> None:
        self._log_evaluation("val", batch)

    def test_step(self, batch: ChatBatch, batch_idx: int) -> None:
        self._log_evaluation("test", batch)

    def _log_evaluation(self, stage: str, batch: ChatBatch) -> None:
        predictions, token_ids = self._predictions(batch)
        values = {
            f"{stage}/loss_nats": -self._logprobs(predictions, token_ids).mean(),
            f"{stage}/token_accuracy_fraction": (self._likeliest(predictions) == token_ids).float().mean(),
        }
        # Lightning weighs each batch's mean by batch_size: with its tokens there, the epoch's mean is over tokens.
        self.log_dict(values, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(token_ids), sync_dist=True)

    def _predictions(self, batch: ChatBatch) -> tuple[Tensor, Tensor]:
        """What predicts the loss tokens, and those tokens [N]: hidden states [N, H] if an output head is all that makes
        logits of them, else logits [N, V]."""
        rows, columns = predicting_positions(batch.loss_mask)
        inputs = batch.token_ids[:, :-1]
        if self._head_is_plain:
            values = self.policy.base_model(input_ids=inputs, use_cache=False).last_hidden_state
        else:
            values = self.policy(input_ids=inputs, use_cache=False).logits
        return values[rows, columns], predicted_token_ids(batch.token_ids, rows, columns)

    def _logprobs(self, predictions: Tensor, token_ids: Tensor) -> Tensor:
        if not self._head_is_plain:
            return predictions.float().log_softmax(-1).gather(1, token_ids[:, None]).squeeze(1)
        head = self.policy.get_output_embeddings()
        return hidden_logprobs(predictions, head.weight, head.bias, token_ids, entropy_gradient=False)[0]

    def _likeliest(self, predictions: Tensor) -> Tensor:
        if not self._head_is_plain:
            return predictions.argmax(-1)
        head = self.policy.get_output_embeddings()
        chunk = max(1, _ARGMAX_LOGITS // head.weight.shape[0])
        return torch.cat([linear(part, head.weight, head.bias).argmax(-1) for part in torch.split(predictions, chunk)])

    def _lr_factor(self, step: int, num_steps: float) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps))
        if self.lr_decay == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        return 1 - done if self.lr_decay == "linear" else 1.0
