"""Ratios, policy losses and divergences per token, and pairwise losses. The framework masks and averages them.

Shapes: B trajectories, or B pairs with logprobs of whole completions; T tokens, a teacher's K top tokens. Every [B, T]
tensor is aligned to the token it describes: `logprobs[b, t]` is the log-probability of `token_ids[b, t]` given the
tokens before it, in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lightrl.checks.bounds import check_bounds, check_choice, check_positive, check_same_shape
from lightrl.functional.reduction import neutralize

KLEstimator = Literal["k1", "k2", "k3"]

# Typical log-ratios are below 1; exp of a log-ratio much above 20 overflows.
MAX_LOG_RATIO = 20.0

# Far below any weight that has an effect, and far above the smallest positive float.
_MIN_COEF = 1e-30


def kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Estimates KL(policy ‖ reference) from each sampled token: [B, T], in nats.

    With d = logprobs - reference_logprobs: k1 is d (unbiased, may be negative), k2 is d²/2 (biased, low variance), k3
    is exp(-d) - 1 + d (unbiased, never negative). Expectations are over tokens that the policy itself sampled.

    In a loss, only the gradient matters. In expectation, k1 has gradient 0, k2 has the gradient of KL(policy ‖
    reference), and k3 has the gradient of KL(reference ‖ policy), which is the same to first order.

    Source: J. Schulman, Approximating KL divergence, http://joschu.net/blog/kl-approx.html; gradients,
    https://arxiv.org/abs/2506.09477 and https://arxiv.org/abs/2510.01555.

    Args:
        logprobs: [B, T] of the policy being trained; carries the gradient.
        reference_logprobs: [B, T] of the reference policy.
        estimator: "k1", "k2" or "k3". k3 caps the exponent -d at 20, so that no loss overflows.
    """
    check_same_shape(logprobs=logprobs, reference_logprobs=reference_logprobs)
    check_choice(get_args(KLEstimator), estimator=estimator)
    difference = logprobs - reference_logprobs.detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    # expm1 keeps the digits that exp(-d) - 1 + d loses when the policies are close.
    return (-difference).clamp(max=MAX_LOG_RATIO).expm1() + difference


@dataclass
class KLController:
    """The weight of a KL penalty: fixed, or adapted in proportion to the KL's relative distance from a target.

    One update changes the weight by at most 20%, so a weight above 0 stays above 0.

    Source: https://arxiv.org/abs/1909.08593, section 2.2.

    Args:
        coef: the weight, or the initial weight if there is a target.
        target_nats: target KL per token; None for a fixed weight.
        horizon: the number of trajectories over which a KL 20% off its target changes the weight by about 20%. An
            update with more trajectories counts as one with `horizon`.
    """

    coef: float
    target_nats: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        check_bounds(0, coef=self.coef)
        check_bounds(1, horizon=self.horizon)
        check_positive(target_nats=self.target_nats)

    def update(self, kl_nats: float, num_trajectories: int) -> None:
        """Adapts the weight after an iteration with this mean KL per token."""
        if self.target_nats is None:
            return
        error = min(max(kl_nats / self.target_nats - 1, -0.2), 0.2)
        adapted = self.coef * (1 + error * min(num_trajectories / self.horizon, 1))
        self.coef = max(adapted, _MIN_COEF) if self.coef > 0 else 0.0


Divergence = Literal["reverse_kl", "forward_kl", "jsd"]

# Replaces the logprob -inf of a token that cannot be sampled: 0 · (-inf) would be NaN.
_LOWEST_LOGPROB = -1e4


def topk_divergence(
    logprobs: Tensor, teacher_logprobs: Tensor, divergence: Divergence = "reverse_kl", *, jsd_beta: float = 0.5
) -> Tensor:
    """Computes the policy's divergence from the teacher at each position, over K tokens and one outcome for all others.

    Policy and teacher are distributions over these K + 1 outcomes, so this is a true divergence: never negative, and 0
    only where they agree. It is at most the divergence over the whole vocabulary (the data-processing inequality), and
    equal to it if K is the vocabulary size. With P the teacher and Q the policy:

    reverse_kl, KL(Q ‖ P), falls as the policy avoids tokens that the teacher would not generate. forward_kl, KL(P ‖ Q),
    falls as the policy covers everything that the teacher would generate. jsd is β·KL(P ‖ M) + (1 - β)·KL(Q ‖ M) with
    the mixture M = β·P + (1 - β)·Q; it is bounded, and symmetric at β = 1/2.

    Source: GKD, https://arxiv.org/abs/2306.13649, section 2 and equation 1.

    Args:
        logprobs: [..., K] of the policy being trained, for the teacher's top-k tokens; carries the gradient.
        teacher_logprobs: [..., K] of the teacher, for the same K distinct tokens.
        divergence: "reverse_kl", "forward_kl" or "jsd".
        jsd_beta: the teacher's weight in the mixture, between 0 and 1; only for "jsd".

    Returns:
        The divergence at each position, [...], nats.
    """
    check_same_shape(logprobs=logprobs, teacher_logprobs=teacher_logprobs)
    check_divergence(divergence, jsd_beta)
    policy, teacher = _with_rest(logprobs), _with_rest(teacher_logprobs.detach())
    if divergence == "reverse_kl":
        return _kl(policy, teacher)
    if divergence == "forward_kl":
        return _kl(teacher, policy)
    mixture = torch.logaddexp(teacher + math.log(jsd_beta), policy + math.log1p(-jsd_beta))
    return jsd_beta * _kl(teacher, mixture) + (1 - jsd_beta) * _kl(policy, mixture)


def rest_mass(logprobs: Tensor) -> Tensor:
    """Returns the total probability of all tokens except these K, [..., K] → [...]; at least the machine epsilon."""
    return (1 - logprobs.exp().sum(-1)).clamp(min=torch.finfo(logprobs.dtype).eps)


def check_divergence(divergence: str, jsd_beta: float) -> None:
    """Raises ValueError if the divergence is unknown or `jsd_beta` is not between 0 and 1."""
    check_choice(get_args(Divergence), divergence=divergence)
    if not 0 < jsd_beta < 1:
        raise ValueError(f"jsd_beta must be above 0 and below 1, got {jsd_beta}. For a plain KL, change divergence.")


def _with_rest(logprobs: Tensor) -> Tensor:
    """Appends the logprob of all other tokens: [..., K] → [..., K + 1]."""
    return torch.cat([logprobs.clamp(min=_LOWEST_LOGPROB), rest_mass(logprobs).log()[..., None]], -1)


def _kl(left: Tensor, right: Tensor) -> Tensor:
    return (left.exp() * (left - right)).sum(-1)


_MIN_REST = 1e-9  # minimum probability of all other tokens; rounding can raise a likely token's logprob to 0


def policy_ratio(logprobs: Tensor, proximal_logprobs: Tensor) -> Tensor:
    """Returns policy ÷ proximal policy for each token, [B, T]; the gradient flows only to `logprobs`."""
    check_same_shape(logprobs=logprobs, proximal_logprobs=proximal_logprobs)
    return bounded_exp(logprobs - proximal_logprobs.detach())


def sequence_ratio(logprobs: Tensor, proximal_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Computes GSPO's ratio: the geometric mean of the token ratios over a trajectory's loss tokens.

    This is the GSPO-token variant: all tokens of a trajectory have the same value, and token t's gradient is that value
    times the gradient of its logprob. With advantages that are constant along a trajectory and the reduction
    "sequence", loss and gradient equal GSPO's; per-token advantages also work. Pass it to `clipped_ratio_loss`.

    Source: GSPO, equations 7, 13 and 14, https://arxiv.org/abs/2507.18071.

    Args:
        logprobs: [B, T] of the policy being trained; carries the gradient.
        proximal_logprobs: [B, T] of the policy at the start of the update.
        loss_mask: bool [B, T]; logprobs elsewhere have no effect.

    Returns:
        [B, T]; 1 for a trajectory without loss tokens.
    """
    check_same_shape(logprobs=logprobs, proximal_logprobs=proximal_logprobs, loss_mask=loss_mask)
    logprobs, proximal_logprobs = neutralize(loss_mask, logprobs, proximal_logprobs.detach())
    mean = trajectory_mean(logprobs.detach() - proximal_logprobs, loss_mask)
    return bounded_exp(mean + (logprobs - logprobs.detach()))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Returns exp of the log-ratio, clamped to ±20 (ratios of 2.1e-9 to 4.9e8). Clamped values have no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def trajectory_mean(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Averages values [B, T], which are 0 where masked, over each trajectory's loss tokens: [B, 1]; 0 if none."""
    return values.sum(dim=1, keepdim=True) / loss_mask.sum(dim=1, keepdim=True).clamp(min=1)


def clipped_policy_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """Computes PPO's clipped surrogate loss; `clip_high > clip_low` is DAPO's clip-higher.

    Source: PPO, https://arxiv.org/abs/1707.06347; DAPO, https://arxiv.org/abs/2503.14476; dual clip,
    https://arxiv.org/abs/1912.09729.

    Args:
        logprobs: [B, T] of the policy being trained; carries the gradient.
        proximal_logprobs: [B, T] of the policy at the start of the update, center of the clip.
        advantages: [B, T], constant along a trajectory for outcome rewards.
        clip_low, clip_high: the loss stops falling once the ratio is below `1 - clip_low` or above `1 + clip_high`.
        dual_clip: above 1; caps a token's loss at `dual_clip · |advantage|`, for negative advantages with large ratios.
            None for no cap.

    Returns:
        The loss of each token, [B, T]; lower is better.
    """
    ratio = policy_ratio(logprobs, proximal_logprobs)
    return clipped_ratio_loss(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def clipped_ratio_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> Tensor:
    """Computes `clipped_policy_loss`, [B, T], from the result of `policy_ratio`, or of `sequence_ratio` for GSPO.

    Args:
        ratio: [B, T], carries the gradient.
        advantages, clip_low, clip_high, dual_clip: as in `clipped_policy_loss`. GSPO's clip bounds are far smaller than
            PPO's: 3e-4 and 4e-4 in the paper.
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    check_bounds(0, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1 (3 is usual) or None, got {dual_clip}.")
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return loss if dual_clip is None else torch.minimum(loss, dual_clip * advantages.abs())


def cispo_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, *, clip_low: float = 1.0, clip_high: float
) -> Tensor:
    """CISPO: the policy gradient weighted by a clipped ratio, so that no token loses its gradient.

    -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) · advantages · logprobs.

    Source: MiniMax-M1, equations 4 and 5, https://arxiv.org/abs/2506.13585.

    Args:
        logprobs: [B, T] of the policy being trained; carries the gradient.
        proximal_logprobs: [B, T] of the policy at the start of the update, or of the behavior policy.
        advantages: [B, T].
        clip_low: the default, 1, puts no lower bound on the weight, as in the paper.
        clip_high: has no default, because the paper reports no value.

    Returns:
        The loss of each token, [B, T]. Only its gradient is meaningful.
    """
    check_same_shape(logprobs=logprobs, proximal_logprobs=proximal_logprobs, advantages=advantages)
    check_bounds(0, clip_low=clip_low, clip_high=clip_high)
    weight = policy_ratio(logprobs.detach(), proximal_logprobs).clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs


def sapo_loss(
    ratio: Tensor, advantages: Tensor, *, temperature_positive: float = 1.0, temperature_negative: float = 1.05
) -> Tensor:
    """SAPO: replaces the clip with a smooth gate, so that a token's gradient decays gradually instead of dropping to 0.

    -gate(ratio) · advantages with gate(r) = 4/τ · sigmoid(τ·(r - 1)), whose slope at r = 1 is 1, as without a gate.

    Source: https://arxiv.org/abs/2511.20347, equations 5 and 6.

    Args:
        ratio: [B, T], carries the gradient.
        advantages: [B, T].
        temperature_positive, temperature_negative: τ where the advantage is above 0, and where it is not. The larger
            τ is, the faster the gradient decays off-policy.

    Returns:
        The loss of each token, [B, T].
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    if min(temperature_positive, temperature_negative) <= 0:
        raise ValueError(
            "temperature_positive and temperature_negative must be above 0 (1 and 1.05 in the paper), got "
            f"{temperature_positive} and {temperature_negative}."
        )
    temperature = torch.where(advantages > 0, temperature_positive, temperature_negative)
    return -4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantages


def tapered_weights(logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor) -> Tensor:
    """TOPR's weight on each token's policy gradient: 1 where the advantage is above 0, min(ratio, 1) elsewhere.

    Tokens that did better than expected keep their full weight. Other tokens lose weight as the policy makes them
    less likely. No weight is above 1, so stale data cannot make the gradient large.

    Source: TOPR, https://arxiv.org/abs/2503.14286, but with the token's ratio instead of the trajectory's.

    Args:
        logprobs: [B, T] of the policy being trained.
        behavior_logprobs: [B, T] of the policy that sampled the tokens.
        advantages: [B, T].

    Returns:
        [B, T], detached; the loss is -weight · advantage · logprob.
    """
    check_same_shape(logprobs=logprobs, behavior_logprobs=behavior_logprobs, advantages=advantages)
    ratio = policy_ratio(logprobs.detach(), behavior_logprobs)
    return torch.where(advantages > 0, 1.0, ratio.clamp(max=1))


def regression_loss(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, *, beta: float
) -> Tensor:
    """OAPL: regresses β times each trajectory's log-ratio on its advantage, under any behavior policy.

    -stop_gradient(advantages - β · L) · logprobs, where L is the sum of the log-ratios of the trajectory's loss tokens.
    Summed over a trajectory, its gradient equals the gradient of (β · L - advantage)² / (2β): the policy gradient
    on-policy, and 0 where L equals advantage / β, the optimum (`optimal_advantages`). It needs no importance weight.

    Source: OAPL, https://arxiv.org/abs/2602.19362.

    Args:
        logprobs: [B, T] of the policy being trained; carries the gradient.
        behavior_logprobs: [B, T] of the policy that sampled the tokens.
        advantages: [B, T], constant along a trajectory.
        loss_mask: bool [B, T]; logprobs elsewhere have no effect.
        beta: β, in units of the reward.

    Returns:
        The loss of each token, [B, T]. Only its gradient is meaningful.
    """
    check_same_shape(logprobs=logprobs, behavior_logprobs=behavior_logprobs, advantages=advantages, loss_mask=loss_mask)
    policy, behavior = neutralize(loss_mask, logprobs.detach(), behavior_logprobs)
    log_ratio = (policy - behavior).sum(dim=1, keepdim=True)
    return -(advantages - beta * log_ratio) * logprobs


def leaves_trust_region(logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, *, max_nats: float) -> Tensor:
    """DPPO's mask, bool [B, T]: True where the policies are too far apart and an update would increase the distance.

    The distance is the KL divergence over two outcomes, this token or any other. With q and p the token's probability
    under the behavior and the trained policy, it is q log(q/p) + (1 - q) log((1 - q)/(1 - p)). A bound on the ratio
    would stop rare tokens too early and likely tokens too late.

    Source: DPPO with the binary KL, https://arxiv.org/abs/2602.04879.

    Args:
        logprobs: [B, T] of the policy being trained.
        behavior_logprobs: [B, T] of the policy that sampled the tokens.
        advantages: [B, T]; above 0, a token is masked only if its probability rose; below 0, only if it fell.
        max_nats: upper bound on the divergence.
    """
    check_same_shape(logprobs=logprobs, behavior_logprobs=behavior_logprobs, advantages=advantages)
    if not max_nats > 0:
        raise ValueError(f"max_nats must be above 0 (0.05 is usual), got {max_nats}.")
    policy, behavior = logprobs.detach().double(), behavior_logprobs.double()
    # In float32, 1 - p of a likely token is mostly rounding error.
    rest, behavior_rest = ((-value.clamp(max=-_MIN_REST).expm1()).log() for value in (policy, behavior))
    divergence = behavior.exp() * (behavior - policy) + behavior_rest.exp() * (behavior_rest - rest)
    is_leaving = ((advantages > 0) & (policy > behavior)) | ((advantages < 0) & (policy < behavior))
    return is_leaving & (divergence > max_nats)


def is_clipped(
    ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> Tensor:
    """Returns 1 where the clip removes a token's gradient, 0 elsewhere, float [B, T]; the mean is the clipped fraction.

    Args:
        ratio: [B, T], from `policy_ratio` or `sequence_ratio`.
        advantages: [B, T].
        clip_low, clip_high, dual_clip: the bounds that the loss uses.
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    check_bounds(0, clip_low=clip_low, clip_high=clip_high)
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    too_low = ((ratio < 1 - clip_low) | (ratio > (dual_clip or math.inf))) & (advantages < 0)
    return (too_high | too_low).to(ratio.dtype)


PreferenceLoss = Literal["sigmoid", "ipo"]


def bradley_terry_loss(chosen_rewards: Tensor, rejected_rewards: Tensor) -> Tensor:
    """Returns -log P(chosen is preferred), [B], with P = sigmoid(chosen reward - rejected reward).

    Source: Bradley and Terry, 1952, https://doi.org/10.2307/2334029; for reward models,
    https://arxiv.org/abs/2203.02155, equation 1.

    Args:
        chosen_rewards, rejected_rewards: [B], for the two trajectories of each pair; both carry the gradient.
    """
    check_same_shape(chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards)
    return -logsigmoid(chosen_rewards - rejected_rewards)


def preference_margin(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    reference_chosen_logprobs: Tensor,
    reference_rejected_logprobs: Tensor,
) -> Tensor:
    """Returns how much more the policy prefers the chosen completion than the reference policy does, [B], in nats.

    Args:
        chosen_logprobs, rejected_logprobs: [B], summed over the completion's tokens; both carry the gradient.
        reference_chosen_logprobs, reference_rejected_logprobs: [B], the same sums for the reference policy.
    """
    check_same_shape(
        chosen_logprobs=chosen_logprobs,
        rejected_logprobs=rejected_logprobs,
        reference_chosen_logprobs=reference_chosen_logprobs,
        reference_rejected_logprobs=reference_rejected_logprobs,
    )
    chosen = chosen_logprobs - reference_chosen_logprobs.detach()
    return chosen - (rejected_logprobs - reference_rejected_logprobs.detach())


def preference_loss(margin: Tensor, *, kl_coef: float = 0.1, kind: PreferenceLoss = "sigmoid") -> Tensor:
    """Computes the DPO ("sigmoid") or IPO ("ipo") loss of each pair from its margin, [B].

    sigmoid is -log sigmoid(kl_coef · margin), which pushes every margin up without limit. ipo is
    (margin - 1/(2·kl_coef))², which pulls every margin to a target.

    Source: DPO, equation 7, https://arxiv.org/abs/2305.18290; IPO, equation 17, https://arxiv.org/abs/2310.12036.

    Args:
        margin: [B], from `preference_margin`; carries the gradient.
        kl_coef: β (DPO) or τ (IPO) in the papers; a larger value keeps the policy closer to the reference.
        kind: "sigmoid" or "ipo".
    """
    check_choice(get_args(PreferenceLoss), kind=kind)
    if kl_coef <= 0:
        raise ValueError(f"kl_coef must be above 0 (0.1 is usual), got {kl_coef}.")
    if kind == "sigmoid":
        return -logsigmoid(kl_coef * margin)
    return (margin - 1 / (2 * kl_coef)).square()
