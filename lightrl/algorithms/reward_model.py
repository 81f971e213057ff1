"""RewardModel: a network that scores trajectories, learned from pairs.

Shapes: B pairs, T tokens. Rows 2i and 2i + 1 of a batch are pair i, the chosen trajectory first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl.algorithms.supervised import SupervisedModule
from lightrl.data import PairBatch
from lightrl.functional import bradley_terry_loss
from lightrl.models import ModelSpec, Role

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RewardModel(SupervisedModule):
    """A causal language model whose head is one number, the reward, read at a trajectory's last token.

    The difference of two rewards is the log-odds that the first trajectory is preferred (Bradley and Terry). Trains on
    the batches of PreferenceDataModule; starts from a language model (the head then returns 0) or an earlier reward
    model; `AutoModelForSequenceClassification` loads its export. Logs, as `reward_model/…` per step and `val/…` per
    validation: `loss`; `accuracy_fraction`, how often the chosen one scores higher; `margin`, by how much.

    Source: https://arxiv.org/abs/2203.02155.

    Args:
        policy: the model to start from: a hub name, a local folder, a ModelSpec, or a Role with `lora`.
        kwargs: those of SupervisedModule.
    """

    trained_role = "reward_model"
    batch_type = PairBatch
    log_prefix = "reward_model"

    reward_model: PreTrainedModel

    def __init__(self, policy: str | ModelSpec | Role, **kwargs: Any) -> None:
        super().__init__(policy, **kwargs)
        self.policy_role = self.policy_role.with_scalar_head()

    def configure_model(self) -> None:
        if hasattr(self, "reward_model"):
            return
        self.reward_model = self.policy_role.load_model().train()
        self.reward_model.config.pad_token_id = self.tokenizer.pad_token_id  # readers of the export need it for batches

    def measure(self, batch: PairBatch) -> dict[str, Tensor]:
        rewards = self.run_inside(trajectory_rewards, self.reward_model, batch.token_ids, batch.lengths)
        chosen, rejected = rewards[0::2], rewards[1::2]
        return {
            "loss": bradley_terry_loss(chosen, rejected),
            "accuracy_fraction": (chosen > rejected).float(),
            "margin": (chosen - rejected).detach(),
        }


def trajectory_rewards(model: PreTrainedModel, token_ids: Tensor, lengths: Tensor) -> Tensor:
    """The reward of each trajectory, [B], read at its last token.

    Args:
        model: of a ModelSpec with `head: scalar`.
        token_ids: int64 [B, T], padded on the right, so a causal model needs no mask.
        lengths: int64 [B], tokens of each trajectory.
    """
    hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    last = hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
    rewards: Tensor = model.score(last).squeeze(-1)
    return rewards.float()
