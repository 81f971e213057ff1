"""SFT: supervised fine-tuning, a plain LightningModule; the stage before reinforcement learning.

Shapes: N loss tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lightrl.algorithms.supervised.module import SupervisedModule
from lightrl.data import ChatBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SFT(SupervisedModule):
    """Maximizes the logprob of each completion token, with AdamW, linear warm-up and decay.

    It trains on batches from SFTDataModule. It logs `sft/loss_nats` per step. In validation, it logs `val/loss_nats`
    and `val/token_accuracy_fraction` (how often the most likely token is the right one), averaged over tokens.
    """

    batch_type = ChatBatch
    log_prefix = "sft"
    loss_name = "loss_nats"

    policy: PreTrainedModel

    def measure(self, batch: ChatBatch) -> dict[str, Tensor]:
        """Returns the loss of each loss token, [N]; in validation also whether the most likely token is right."""
        outputs = self.parallel("policy").measure(batch.experience(), topk=0 if self.training else 1)
        losses = {"loss_nats": -outputs.logprobs[batch.loss_mask]}
        if outputs.teacher_topk_ids is None:
            return losses
        is_hit = outputs.teacher_topk_ids[..., 0] == batch.token_ids
        return {**losses, "token_accuracy_fraction": is_hit[batch.loss_mask].float()}
