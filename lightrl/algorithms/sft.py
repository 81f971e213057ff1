"""SFT: supervised fine-tuning, a plain LightningModule; the stage before reinforcement learning.

Shapes: B chats, T tokens, N loss tokens, H hidden size. The loss is computed from hidden states at the N positions that
predict a completion's tokens, like an RLModule's logprobs.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from lightrl.algorithms.supervised import SupervisedModule
from lightrl.data import ChatBatch
from lightrl.functional.logprobs import hidden_logprobs, predicted_token_ids, predicting_positions
from lightrl.models.images import image_inputs
from lightrl.strategies import head_is_plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ARGMAX_LOGITS = 2**24  # logits in memory at once when finding the most likely tokens


class SFT(SupervisedModule):
    """Maximizes the logprob of each completion token, with AdamW, linear warm-up and decay.

    Trains on the batches of SFTDataModule. Logs `sft/loss_nats` per step; `val/loss_nats` and
    `val/token_accuracy_fraction` (how often the most likely token is the right one), each averaged over tokens.
    """

    batch_type = ChatBatch

    policy: PreTrainedModel

    def configure_model(self) -> None:
        if hasattr(self, "policy"):
            return
        self.policy = self.policy_role.load_model().train()

    @functools.cached_property
    def _head_is_plain(self) -> bool:
        with torch.no_grad():
            return self.run_inside(head_is_plain, self.policy)

    def training_step(self, batch: ChatBatch, batch_idx: int) -> Tensor:
        means, number = self.means(self._losses, batch)
        self._log_means("sft", means, on_step=True, batch_size=len(batch.token_ids))
        return self.accumulated(means["loss_nats"], number, batch_idx)

    def measure(self, batch: ChatBatch) -> dict[str, Tensor]:
        """The loss of each loss token, [N], and whether the most likely token is the right one."""
        assert self._head_is_plain is not None  # computed first, since it runs the model
        return self.run_inside(self._measure, batch)

    def _losses(self, batch: ChatBatch) -> dict[str, Tensor]:
        assert self._head_is_plain is not None
        return {"loss_nats": self.run_inside(lambda: -self._logprobs(*self._predictions(batch)))}

    def _measure(self, batch: ChatBatch) -> dict[str, Tensor]:
        predictions, token_ids = self._predictions(batch)
        return {
            "loss_nats": -self._logprobs(predictions, token_ids),
            "token_accuracy_fraction": (self._most_likely_ids(predictions) == token_ids).float(),
        }

    def _predictions(self, batch: ChatBatch) -> tuple[Tensor, Tensor]:
        """Predictions of the loss tokens, and those tokens [N]: hidden states [N, H] if the model only applies an
        output head to them, else logits [N, V]."""
        rows, columns = predicting_positions(batch.loss_mask)
        token_ids, images = batch.token_ids[:, :-1], batch.images
        inputs = {"input_ids": token_ids} if images is None else image_inputs(self.policy, token_ids, images)
        if self._head_is_plain:
            values = self.policy.base_model(**inputs, use_cache=False).last_hidden_state
        else:
            values = self.policy(**inputs, use_cache=False).logits
        return values[rows, columns], predicted_token_ids(batch.token_ids, rows, columns)

    def _logprobs(self, predictions: Tensor, token_ids: Tensor) -> Tensor:
        if not self._head_is_plain:
            return predictions.float().log_softmax(-1).gather(1, token_ids[:, None]).squeeze(1)
        head = self.policy.get_output_embeddings()
        return hidden_logprobs(predictions, head.weight, head.bias, token_ids, entropy_gradient=False)[0]

    def _most_likely_ids(self, predictions: Tensor) -> Tensor:
        if not self._head_is_plain:
            return predictions.argmax(-1)
        head = self.policy.get_output_embeddings()
        chunk = max(1, _ARGMAX_LOGITS // head.weight.shape[0])
        return torch.cat([linear(part, head.weight, head.bias).argmax(-1) for part in torch.split(predictions, chunk)])
