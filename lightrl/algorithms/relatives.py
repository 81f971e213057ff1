"""GRPO's relatives: each a few settings of GRPO under the name of its paper."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from lightrl.algorithms.grpo import GRPO
from lightrl.dataflow import ModelCall
from lightrl.experience import Experience
from lightrl.functional import batch_normalized, cispo_loss, group_advantages, kl, sapo_loss, second_moment_mask
from lightrl.models import ModelSpec, Outputs


class DrGRPO(GRPO):
    """GRPO without its two biases: no division by the group's deviation, none by the trajectory's length.

    Source: https://arxiv.org/abs/2503.20783.
    """

    def __init__(
        self,
        policy: str | ModelSpec,
        *,
        advantage_std: Literal["group", "batch"] | None = None,
        loss_reduction: Literal["token", "sequence", "fixed"] = "fixed",
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, advantage_std=advantage_std, loss_reduction=loss_reduction, **kwargs)


class DAPO(GRPO):
    """Clip-higher and a loss over tokens; with `overlong_buffer_tokens`, a soft penalty on overlong completions.

    Its dynamic sampling, which leaves out groups whose rewards are all equal, is the callback `DynamicSampling()`.

    Source: https://arxiv.org/abs/2503.14476.
    """

    def __init__(
        self,
        policy: str | ModelSpec,
        *,
        clip_high: float = 0.28,
        loss_reduction: Literal["token", "sequence", "fixed"] = "token",
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, clip_high=clip_high, loss_reduction=loss_reduction, **kwargs)


class RLOO(GRPO):
    """REINFORCE whose baseline is the mean reward of the group's other trajectories.

    The loss of a trajectory is the sum over its tokens, since the whole completion is one action; `fixed` divides that
    by a constant. The ratio is clipped token by token, which on-policy is the same.

    Source: https://arxiv.org/abs/2402.14740.
    """

    def __init__(
        self,
        policy: str | ModelSpec,
        *,
        leave_one_out: bool = True,
        advantage_std: Literal["group", "batch"] | None = None,
        loss_reduction: Literal["token", "sequence", "fixed"] = "fixed",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            policy, leave_one_out=leave_one_out, advantage_std=advantage_std, loss_reduction=loss_reduction, **kwargs
        )


class ReinforceBaseline(GRPO):
    """REINFORCE with the batch's mean reward as its baseline; one trajectory per prompt is enough.

    Source: Williams, 1992, https://doi.org/10.1007/BF00992696.
    """

    def __init__(
        self,
        policy: str | ModelSpec,
        *,
        advantage_mean: Literal["group", "batch"] | None = "batch",
        advantage_std: Literal["group", "batch"] | None = None,
        group_size: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            policy, advantage_mean=advantage_mean, advantage_std=advantage_std, group_size=group_size, **kwargs
        )


class GSPO(GRPO):
    """The ratio and its clip belong to the trajectory, not to the token.

    Source: https://arxiv.org/abs/2507.18071, which also gives the clip bounds.
    """

    def __init__(
        self,
        policy: str | ModelSpec,
        *,
        ratio_level: Literal["token", "sequence"] = "sequence",
        clip_low: float = 3e-4,
        clip_high: float = 4e-4,
        loss_reduction: Literal["token", "sequence", "fixed"] = "sequence",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            policy,
            ratio_level=ratio_level,
            clip_low=clip_low,
            clip_high=clip_high,
            loss_reduction=loss_reduction,
            **kwargs,
        )


class CISPO(GRPO):
    """The clipped ratio weighs the policy gradient, so a clipped token still learns.

    It has no use for `ratio_level="sequence"` and `dual_clip`, and refuses them.

    Source: https://arxiv.org/abs/2506.13585. The paper tunes `clip_high` and names no number.
    """

    def __init__(
        self, policy: str | ModelSpec, *, clip_low: float = 1.0, clip_high: float = 4.0, **kwargs: Any
    ) -> None:
        super().__init__(policy, clip_low=clip_low, clip_high=clip_high, **kwargs)
        _refuse(self, ratio_level="token", dual_clip=None)

    def is_clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Where the weight is bounded, whatever the advantage's sign; the token learns all the same."""
        return ((ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high)).to(ratio.dtype)

    def policy_loss(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        assert experience.advantages is not None
        return cispo_loss(
            outputs.logprobs,
            self.center(experience, outputs),
            experience.advantages,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )


class SAPO(GRPO):
    """A smooth gate in the place of the clip: off-policy a token's gradient fades, faster where the advantage is bad.

    Source: https://arxiv.org/abs/2511.20347, which also gives the temperatures.

    Args:
        temperature_positive, temperature_negative: of the gate, where the advantage is above 0 and elsewhere.
        clip_low, clip_high: there is no clip; other values and `dual_clip` are refused.
        kwargs: those of GRPO.
    """

    def __init__(
        self,
        policy: str | ModelSpec,
        *,
        temperature_positive: float = 1.0,
        temperature_negative: float = 1.05,
        clip_low: float = 1.0,
        clip_high: float = math.inf,
        loss_reduction: Literal["token", "sequence", "fixed"] = "sequence",
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, clip_low=clip_low, clip_high=clip_high, loss_reduction=loss_reduction, **kwargs)
        _refuse(self, clip_low=1.0, clip_high=math.inf, dual_clip=None)
        if min(temperature_positive, temperature_negative) <= 0:
            raise ValueError(
                f"SAPO got temperatures {temperature_positive} and {temperature_negative}, expected more than 0. "
                "Raise the lower one."
            )
        self.temperature_positive = temperature_positive
        self.temperature_negative = temperature_negative

    def policy_loss(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        assert experience.advantages is not None
        return sapo_loss(
            ratio,
            experience.advantages,
            temperature_positive=self.temperature_positive,
            temperature_negative=self.temperature_negative,
        )


class LitePPO(GRPO):
    """Mean of the group, standard deviation of the batch, and a loss over tokens: two tricks and nothing else.

    The deviation is the plain one of all the batch's rewards; AReaL's is around the group means.

    Source: https://arxiv.org/abs/2508.08221.
    """

    def __init__(
        self,
        policy: str | ModelSpec,
        *,
        advantage_std: Literal["group", "batch"] | None = "batch",
        loss_reduction: Literal["token", "sequence", "fixed"] = "token",
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, advantage_std=advantage_std, loss_reduction=loss_reduction, **kwargs)


class ReinforcePlusPlus(GRPO):
    """No group and no critic: a token's return is the reward less the KL divergence to come, normalized over the batch.

    With `kl_coef` the k1 estimate of each token is taken off its reward (the behavior policy against the reference), as
    PPO does. `advantage_mean="group"` is the paper's variant with a baseline: the group's mean reward comes off first.

    Source: https://arxiv.org/abs/2501.03262.
    """

    kl_in_reward = True

    def __init__(
        self,
        policy: str | ModelSpec,
        *,
        advantage_mean: Literal["group", "batch"] | None = "batch",
        advantage_std: Literal["group", "batch"] | None = "batch",
        kl_estimator: Literal["k1", "k2", "k3"] = "k1",
        group_size: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            policy,
            advantage_mean=advantage_mean,
            advantage_std=advantage_std,
            kl_estimator=kl_estimator,
            group_size=group_size,
            **kwargs,
        )
        _refuse(self, advantage_std="batch", leave_one_out=False)

    def advantages(self, experience: Experience) -> Tensor:
        mask = experience.loss_mask
        mean: Literal["group"] | None = "group" if self.advantage_mean == "group" else None
        rewards = group_advantages(self.shaped_rewards(experience), experience.group_ids, mean=mean, std=None)
        returns = rewards[:, None].expand(mask.shape)
        if self.kl_coef > 0:
            assert experience.reference_logprobs is not None
            penalty = kl(experience.behavior_logprobs, experience.reference_logprobs, estimator=self.kl_estimator)
            penalty = torch.where(mask, penalty, 0.0)
            to_come = penalty.flip(1).cumsum(1).flip(1)
            returns = returns - self.kl_coef * to_come
        return batch_normalized(returns, mask)


class M2PO(GRPO):
    """No clip: the tokens with the largest squared log-ratio are left out until the mean of the rest is small enough.

    For very stale trajectories, where a clip takes away the gradient of many informative tokens. The mask compares the
    proximal with the behavior policy, once for the whole iteration, so it costs a forward; a token that is left out
    keeps its place in the loss's denominator.

    Source: https://arxiv.org/abs/2510.01161, which also gives the threshold.

    Args:
        second_moment_threshold: bound on the mean of log_ratio², nats².
        clip_low, clip_high: there is no clip; other values and `dual_clip` are refused.
        kwargs: those of GRPO.
    """

    def __init__(
        self,
        policy: str | ModelSpec,
        *,
        second_moment_threshold: float = 0.04,
        clip_low: float = 1.0,
        clip_high: float = math.inf,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, clip_low=clip_low, clip_high=clip_high, **kwargs)
        _refuse(self, clip_low=1.0, clip_high=math.inf, dual_clip=None, approximate_proximal=False)
        if second_moment_threshold <= 0:
            raise ValueError(
                f"second_moment_threshold={second_moment_threshold}, expected more than 0 (0.04 in the paper). "
                "Raise it."
            )
        self.second_moment_threshold = second_moment_threshold
        self.needs_proximal_logprobs = True

    def score_calls(self) -> list[ModelCall]:
        calls = super().score_calls()
        if not any("proximal_logprobs" in call.outputs for call in calls):  # with one update too: the mask reads them
            calls.insert(0, ModelCall("proximal_logprobs", "policy", "infer", ("token_ids",), ("proximal_logprobs",)))
        return calls

    def advantages(self, experience: Experience) -> Tensor:
        assert experience.proximal_logprobs is not None
        kept = second_moment_mask(
            experience.proximal_logprobs,
            experience.behavior_logprobs,
            experience.loss_mask,
            threshold=self.second_moment_threshold,
        )
        return torch.where(kept, super().advantages(experience)[:, None], 0.0)


def _refuse(module: GRPO, **expected: Any) -> None:
    """Refuses settings that this algorithm does not read."""
    for name, default in expected.items():
        if getattr(module, name) != default:
            raise ValueError(
                f"{type(module).__name__} got {name}={getattr(module, name)!r}, which its loss does not read, expected "
                f"{default!r}. Leave it out."
            )
