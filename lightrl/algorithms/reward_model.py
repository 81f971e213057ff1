"""RewardModel: a network that says how good a trajectory is, learned from pairs.

Shapes: B pairs, T tokens. Rows 2i and 2i + 1 of a batch are pair i, the chosen trajectory first.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl.algorithms.supervised import SupervisedModule
from lightrl.data.pairs import PairBatch
from lightrl.functional import bradley_terry_loss
from lightrl.models import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RewardModel(SupervisedModule):
    """A causal language model whose head is one number, the reward, read at a trajectory's last token.

    The difference of two rewards is the log-odds that the first trajectory is preferred (Bradley and Terry). Trains on
    the batches of PreferenceDataModule; loads from a language model (the head then starts at random) or from an earlier
    reward model, and exports what `AutoModelForSequenceClassification` loads. Logs, as `reward_model/…` per step and
    `val/…` per validation: `loss`; `accuracy_fraction`, how often the chosen one gets more; `margin`, how much more.

    Source: https://arxiv.org/abs/2203.02155.

    Args:
        policy: the model to start from: a hub name, a local folder, or a ModelSpec.
        kwargs: those of SupervisedModule.
    """

    trained_role = "reward_model"
    log_room = "reward_model"

    reward_model: PreTrainedModel

    def configure_model(self) -> None:
        if hasattr(self, "reward_model"):
            return
        self.reward_model = load_reward_model(self.policy_spec).train()
        self.reward_model.config.pad_token_id = self.tokenizer.pad_token_id  # what reads the export in batches needs it

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
        model: of `load_reward_model`.
        token_ids: int64 [B, T], padded on the right, which a causal model needs no mask for.
        lengths: int64 [B], tokens of each trajectory.
    """
    hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    last = hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
    rewards: Tensor = model.score(last).squeeze(-1)
    return rewards.float()


def load_reward_model(spec: ModelSpec) -> PreTrainedModel:
    """The model with a head of one number, on the CPU, in evaluation mode; a head that is new follows from the seed.

    Raises:
        ValueError: if the model's family has no such head.
    """
    from transformers import AutoModelForSequenceClassification

    dtype = getattr(torch, spec.dtype or "float32")
    options: dict[str, Any] = {"dtype": dtype, **spec.options}
    if spec.attn_implementation is not None:
        options["attn_implementation"] = spec.attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(os.environ.get("PL_GLOBAL_SEED", "0")) if spec.seed is None else spec.seed)
        if spec.path is None:
            config = spec.load_config()
            config.num_labels = 1
            model = AutoModelForSequenceClassification.from_config(config, **options)
        else:
            model = AutoModelForSequenceClassification.from_pretrained(
                spec.path, num_labels=1, use_safetensors=True, trust_remote_code=spec.trust_remote_code, **options
            )
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise ValueError(
            f"{type(model).__name__} has no linear layer named score, expected one on a causal language model. Use a "
            "decoder such as Qwen3 or Llama."
        )
    return model.eval()
