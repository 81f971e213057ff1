"""RewardModel: a network that scores trajectories, trained on pairs.

Shapes: B pairs, T tokens. Rows 2i and 2i + 1 of a batch are pair i, the chosen trajectory first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrl.algorithms.supervised.module import SupervisedModule, SupervisedSettings
from lightrl.checks.annotations import Unpack
from lightrl.data import PairBatch
from lightrl.functional import bradley_terry_loss
from lightrl.models import ModelSpec, Role

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RewardModel(SupervisedModule):
    """A causal language model with a scalar head. The head's value at a trajectory's last token is the reward.

    The difference of two rewards is the log-odds that the first trajectory is preferred (Bradley and Terry). It trains
    on batches from PreferenceDataModule, from a language model (then the head starts at 0) or an earlier reward
    model; `AutoModelForSequenceClassification` loads the export. It logs, as `reward_model/…` per step and `val/…` per
    validation: `loss`; `accuracy_fraction`, how often the chosen trajectory scores higher; `margin`, by how much.

    Source: https://arxiv.org/abs/2203.02155.

    Args:
        policy: the model to start from: a hub name, a local folder, a ModelSpec, or a Role with `lora`.
        kwargs: other arguments to SupervisedModule.
    """

    trained_role = "reward_model"
    batch_type = PairBatch
    log_prefix = "reward_model"

    reward_model: PreTrainedModel

    def __init__(self, policy: str | ModelSpec | Role, **kwargs: Unpack[SupervisedSettings]) -> None:
        super().__init__(policy, **kwargs)
        self.policy_role = self.policy_role.with_scalar_head()

    def configure_model(self) -> None:
        super().configure_model()
        self.reward_model.config.pad_token_id = self.tokenizer.pad_token_id  # the exported model needs it for batches

    def measure(self, batch: PairBatch) -> dict[str, Tensor]:
        # A trajectory's reward is the value at its last token, which the model returns at the next position.
        token_ids = torch.nn.functional.pad(batch.token_ids, (0, 1))
        is_end = torch.arange(token_ids.shape[1], device=token_ids.device) == batch.lengths[:, None]
        padded = PairBatch(token_ids, is_end, batch.lengths + 1)
        values = self.parallel(self.trained_role).measure(padded.experience()).values
        assert values is not None
        rewards = values[is_end]
        chosen, rejected = rewards[0::2], rewards[1::2]
        return {
            "loss": bradley_terry_loss(chosen, rejected),
            "accuracy_fraction": (chosen > rejected).float(),
            "margin": (chosen - rejected).detach(),
        }
