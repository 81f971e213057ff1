"""GRPO with a baseline that remembers: for each prompt, the running mean of the rewards of all its completions so far.

    lightrl fit --config examples/quickstart/grpo.yaml --model examples.quickstart.running_baseline.RunningBaseline

A researcher's first algorithm often has state like this. It must be the same on every rank, and a resumed run must
continue with it.
"""

from __future__ import annotations

from typing import Any

import torch

import lightrl


class RunningBaseline(lightrl.GRPO):
    """Subtracts the prompt's running mean from each reward; on a prompt's first visit, the group's mean.

    Args:
        decay: how much of the old mean each visit keeps, 0 to 1.
        kwargs: passed to GRPO.
    """

    reads_prompts = True  # sets self.prompts before `advantages`, on every rank

    def __init__(self, policy: str | lightrl.ModelSpec | lightrl.Role, *, decay: float = 0.9, **kwargs: Any) -> None:
        super().__init__(policy, **kwargs)
        self.decay = decay
        self.means: dict[str, float] = {}  # prompt id → running mean

    def advantages(self, experience: lightrl.Experience) -> torch.Tensor:
        rewards = self.shaped_rewards(experience)  # [B], on all ranks
        rewards_by_prompt: dict[str, list[float]] = {}
        for prompt, reward in zip(self.prompts, rewards.tolist(), strict=True):
            rewards_by_prompt.setdefault(prompt.id, []).append(reward)
        means = {name: sum(group) / len(group) for name, group in rewards_by_prompt.items()}
        baselines = means | {name: self.means[name] for name in means if name in self.means}
        self.means |= {name: self.decay * baselines[name] + (1 - self.decay) * means[name] for name in means}
        self.log("policy/baseline_reward", sum(baselines.values()) / len(baselines))
        return rewards - torch.tensor([baselines[prompt.id] for prompt in self.prompts])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["running_means"] = self.means  # plain data: checkpoints are loaded with weights_only=True

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.means = dict(checkpoint["running_means"])
