"""Distillation: the policy generates, and learns from a teacher's distribution at every token.

Shapes: B trajectories, T tokens, the teacher's K most likely tokens at each position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lightrl.algorithms.grpo import GRPO, AllButBaseline
from lightrl.checks.annotations import Unpack
from lightrl.checks.bounds import check_effect
from lightrl.dataflow import ModelCall
from lightrl.experience import Experience
from lightrl.functional import Divergence, check_divergence, kl, rest_mass, topk_divergence
from lightrl.models import ModelSpec, Outputs, Role
from lightrl.trajectory import Trajectory


class Distillation(GRPO):
    """On-policy distillation: moves the policy towards a teacher on the policy's own completions.

    Without `teacher_topk` it minimizes the reverse KL, KL(policy ‖ teacher), by policy gradient. A token's advantage is
    the teacher's logprob minus the behavior policy's. Every token gets a signal, and no reward is needed.

    With `teacher_topk=K` a token's loss is a divergence between both models' distributions at its position, over the
    teacher's top-k tokens and one outcome for all others (`functional.topk_divergence`). This is far less noisy, but
    costs 12 · K bytes and K more logprobs per token. Its gradient does not depend on how the trajectory was sampled, so
    stale trajectories need no importance weights.

    Both models compute logprobs at the same sampling temperature; the teacher must have the policy's tokenizer.

    It logs `policy/kl_teacher_nats`, the reverse KL per token estimated from the sampled tokens. With `teacher_topk` it
    also logs `policy/teacher_divergence_nats`, the loss, and `policy/teacher_rest_fraction`, the teacher's probability
    of all tokens outside its top-k; if that is large, increase K.

    Source: https://thinkingmachines.ai/blog/on-policy-distillation; MiniLLM, https://arxiv.org/abs/2306.08543; with
    `teacher_topk`: GKD, https://arxiv.org/abs/2306.13649.

    Args:
        policy: the student.
        teacher: the model to imitate; frozen.
        teacher_topk: K; None uses only the teacher's logprobs of the sampled tokens.
        divergence: `reverse_kl`, `forward_kl` or `jsd`, with `teacher_topk`.
        jsd_beta: the teacher's share, between 0 and 1, of the mixture with which `jsd` compares both models.
        reward: is computed and logged, but trained on only with `reward_coef`.
        reward_coef: weight of GRPO's group advantages, which are added to the teacher's advantages.
        group_size: completions per prompt; 1 is enough without `reward_coef`.
        kwargs: further arguments of GRPO.
    """

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        teacher: str | ModelSpec | Role,
        teacher_topk: int | None = None,
        divergence: Divergence = "reverse_kl",
        jsd_beta: float = 0.5,
        reward_coef: float = 0.0,
        group_size: int = 1,
        advantage_mean: Literal["group", "batch"] | None = None,
        advantage_std: Literal["group", "batch"] | None = None,
        leave_one_out: bool = False,
        **kwargs: Unpack[AllButBaseline],
    ) -> None:
        if not reward_coef >= 0:
            raise ValueError(f"reward_coef must be >= 0 (0 trains on the teacher alone), got {reward_coef}.")
        if teacher_topk is not None and teacher_topk < 1:
            raise ValueError(f"teacher_topk must be at least 1, or null for sampled tokens only, got {teacher_topk}.")
        check_divergence(divergence, jsd_beta)
        if teacher_topk is None and divergence != "reverse_kl":
            raise ValueError(
                f"divergence={divergence!r} needs teacher_topk, because sampled tokens alone give reverse_kl. Set "
                "teacher_topk, for example to 32."
            )
        if divergence != "jsd":
            check_effect("unless divergence is 'jsd'", jsd_beta=(jsd_beta, 0.5))
        if not reward_coef:
            settings = {"advantage_mean": advantage_mean, "advantage_std": advantage_std, **kwargs}
            names = settings.keys() & {"advantage_mean", "advantage_std", "reward_shaping", "overlong_penalty"}
            check_effect("with reward_coef=0", **{name: (settings[name], None) for name in sorted(names)})
        if reward_coef and advantage_mean is None:
            advantage_mean = advantage_std = "group"
        super().__init__(
            policy,
            group_size=group_size,
            advantage_mean=advantage_mean,
            advantage_std=advantage_std,
            leave_one_out=leave_one_out,
            **kwargs,
        )
        if teacher_topk is not None and self.sampling.is_truncated:
            raise ValueError(
                f"teacher_topk={teacher_topk} compares the teacher's top-k tokens, which truncated sampling may "
                "leave out. Set sampling.top_p to 1 and top_k to -1, or leave teacher_topk out."
            )
        if teacher_topk is not None and self.score_centering:
            raise ValueError("score_centering and teacher_topk read different tokens' logprobs. Leave out one of them.")
        self.teacher_role = Role.of(teacher)
        self.teacher_topk = teacher_topk
        self.divergence = divergence
        self.jsd_beta = jsd_beta
        self.reward_coef = reward_coef

    def configure_model(self) -> None:
        super().configure_model()
        for role in ("policy", "teacher") if self.teacher_topk else ():
            if not hasattr(self, role):  # its model is on a server
                continue
            num_ids = getattr(self, role).config.get_text_config().vocab_size
            if self.teacher_topk > num_ids:
                raise ValueError(
                    f"teacher_topk must be at most {num_ids}, the size of the {role}'s vocabulary, got "
                    f"{self.teacher_topk}."
                )

    def reward(self, trajectory: Trajectory) -> object:
        """Returns 0. A function given as `reward=` replaces this hook."""
        return 0.0

    def models(self) -> dict[str, Role]:
        return {**super().models(), "teacher": self.teacher_role}

    def model_calls(self) -> list[ModelCall]:
        teacher = ModelCall("teacher_logprobs", "teacher", "infer", ("token_ids",), ("teacher_logprobs",))
        if self.teacher_topk is not None:
            outputs = (*teacher.outputs, "teacher_topk_ids", "teacher_topk_logprobs")
            teacher = replace(teacher, outputs=outputs, topk=self.teacher_topk)
        return [*super().model_calls(), teacher]

    def advantages(self, experience: Experience) -> Tensor:
        local = experience.local
        if self.teacher_topk is not None:
            self._check_ids(local["teacher_topk_ids"])
            advantages = torch.zeros_like(local.behavior_logprobs)
        else:
            advantages = local["teacher_logprobs"] - local.behavior_logprobs
        if self.reward_coef:
            advantages = advantages + self.reward_coef * super().advantages(experience)[experience.local_rows, None]
        return advantages

    def loss(self, experience: Experience, outputs: Outputs) -> dict[str, Tensor]:
        divergence = kl(outputs.logprobs.detach(), experience["teacher_logprobs"], estimator="k1")
        result = {**super().loss(experience, outputs), "kl_teacher_nats": divergence}
        if self.teacher_topk is None:
            return result
        assert outputs.teacher_topk is not None
        teacher = experience["teacher_topk_logprobs"]
        loss = topk_divergence(outputs.teacher_topk, teacher, self.divergence, jsd_beta=self.jsd_beta)
        return {
            **result,
            "loss": result["loss"] + loss,
            "teacher_divergence_nats": loss.detach(),
            "teacher_rest_fraction": rest_mass(teacher),
        }

    def _check_ids(self, ids: Tensor) -> None:
        """Raises ValueError if a top-k id is outside the policy's vocabulary; a teacher's server may return one."""
        num_ids, largest = self.policy_config.get_text_config().vocab_size, int(ids.max()) if ids.numel() else 0
        if largest >= num_ids:
            raise ValueError(
                f"The teacher's top {self.teacher_topk} tokens include id {largest}, but the policy's vocabulary "
                f"has {num_ids}. Use a teacher with the policy's tokenizer, or lower teacher_topk; a teacher loaded by "
                "path is limited to the policy's tokens."
            )
