"""Distillation: the policy writes, a teacher says token by token how it would have gone on."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from lightrl.algorithms.grpo import GRPO
from lightrl.dataflow import ModelCall
from lightrl.experience import Experience
from lightrl.functional import group_advantages, kl
from lightrl.models import ModelSpec, Outputs
from lightrl.trajectory import Trajectory


class Distillation(GRPO):
    """On-policy distillation: minimizes the reverse KL, KL(policy ‖ teacher), on what the policy itself writes.

    A token's advantage is the teacher's logprob of it less the behavior policy's: the k1 estimate of the divergence,
    negated, of that token alone. It is dense where a reward is one number per trajectory, and needs no reward at all.
    Both models see the tokens at the same sampling temperature; the teacher must have the policy's tokenizer.

    Logs `policy/kl_teacher_nats`, the divergence per token.

    Source: https://thinkingmachines.ai/blog/on-policy-distillation; MiniLLM, https://arxiv.org/abs/2306.08543.

    Args:
        policy: the student.
        teacher: the model to imitate; frozen.
        reward: measured and logged; trained on only with `reward_coef`.
        reward_coef: weight of GRPO's group advantages beside the teacher's.
        group_size: completions of each prompt; 1 is enough without `reward_coef`.
        kwargs: those of GRPO.
    """

    def __init__(
        self,
        policy: str | ModelSpec,
        *,
        teacher: str | ModelSpec,
        reward_coef: float = 0.0,
        group_size: int = 1,
        advantage_mean: Literal["group", "batch"] | None = None,
        advantage_std: Literal["group", "batch"] | None = None,
        **kwargs: Any,
    ) -> None:
        if reward_coef < 0:
            raise ValueError(f"reward_coef={reward_coef}, expected 0 (the teacher alone) or more. Raise it.")
        if reward_coef and advantage_mean is None:
            advantage_mean = advantage_std = "group"
        super().__init__(
            policy, group_size=group_size, advantage_mean=advantage_mean, advantage_std=advantage_std, **kwargs
        )
        self.teacher_spec = ModelSpec.of(teacher)
        self.reward_coef = reward_coef

    def reward(self, trajectory: Trajectory) -> Any:
        """Nothing is judged unless `reward=` is given."""
        return 0.0

    def models(self) -> dict[str, ModelSpec]:
        return {**super().models(), "teacher": self.teacher_spec}

    def score_calls(self) -> list[ModelCall]:
        teacher = ModelCall("teacher_logprobs", "teacher", "infer", ("token_ids",), ("teacher_logprobs",))
        return [*super().score_calls(), teacher]

    def advantages(self, experience: Experience) -> Tensor:
        assert experience.teacher_logprobs is not None
        advantages = experience.teacher_logprobs - experience.behavior_logprobs
        if self.reward_coef:
            judged = group_advantages(
                self.shaped_rewards(experience),
                experience.group_ids,
                mean=self.advantage_mean,
                std=self.advantage_std,
                leave_one_out=self.leave_one_out,
            )
            advantages = advantages + self.reward_coef * judged[:, None]
        return advantages

    def loss(self, experience: Experience, outputs: Outputs) -> dict[str, Tensor]:
        assert experience.teacher_logprobs is not None
        divergence = kl(outputs.logprobs.detach(), experience.teacher_logprobs, estimator="k1")
        return {**super().loss(experience, outputs), "kl_teacher_nats": divergence}
