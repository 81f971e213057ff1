"""GRPO's relatives: each a few settings of GRPO under the name of its paper."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from lightrl.algorithms.grpo import GRPO
from lightrl.experience import Experience
from lightrl.functional import cispo_loss
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
        for name, value, default in (("ratio_level", self.ratio_level, "token"), ("dual_clip", self.dual_clip, None)):
            if value != default:
                raise ValueError(f"CISPO got {name}={value!r}, which its loss does not read, expected {default!r}.")

    def policy_loss(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        assert experience.advantages is not None
        center = experience.proximal_logprobs if self.decoupled else experience.behavior_logprobs
        assert center is not None
        return cispo_loss(
            outputs.logprobs, center, experience.advantages, clip_low=self.clip_low, clip_high=self.clip_high
        )
