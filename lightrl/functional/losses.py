"""Ratios, policy losses per token, and pairwise losses; the framework masks and averages.

Shapes: B trajectories, or B pairs with logprobs of whole completions; T tokens. Every [B, T] tensor is aligned to the
token it describes: `logprobs[b, t]` is the log-probability of `token_ids[b, t]` given the tokens before it, in nats.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lightrl.checks.bounds import check_bounds, check_choice, check_same_shape
from lightrl.functional.kl import MAX_LOG_RATIO
from lightrl.functional.reduction import neutralize

_MIN_REST = 1e-9  # least probability of all other tokens together; rounding can lift a likely token's logprob to 0


def policy_ratio(logprobs: Tensor, proximal_logprobs: Tensor) -> Tensor:
    """Returns policy ÷ proximal policy for each token, [B, T]; the gradient goes to `logprobs` only."""
    check_same_shape(logprobs=logprobs, proximal_logprobs=proximal_logprobs)
    return bounded_exp(logprobs - proximal_logprobs.detach())


def sequence_ratio(logprobs: Tensor, proximal_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Computes GSPO's ratio: the geometric mean of the token ratios over a trajectory's loss tokens.

    It is the GSPO-token variant: every token of a trajectory has the same value, and token t's gradient is that value
    times the gradient of its own logprob. With advantages that are constant along a trajectory and the reduction
    "sequence", loss and gradient are those of GSPO; per-token advantages work too. Pass it to `clipped_ratio_loss`.

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
    """Returns exp of the log-ratio, clamped to ±20 (ratios of 2.1e-9 to 4.9e8); the gradient is 0 beyond these."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def trajectory_mean(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Averages values [B, T], 0 where masked, over each trajectory's loss tokens, [B, 1]; 0 for one that has none."""
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
        dual_clip: caps a token's loss at `dual_clip · |advantage|`, for negative advantages with large ratios; above 1.
            None for no cap.

    Returns:
        The loss of each token, [B, T]; lower is better.
    """
    ratio = policy_ratio(logprobs, proximal_logprobs)
    return clipped_ratio_loss(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def clipped_ratio_loss(
    ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> Tensor:
    """Computes `clipped_policy_loss` from the result of `policy_ratio`, or of `sequence_ratio` for GSPO.

    Args:
        ratio: [B, T], carries the gradient.
        advantages, clip_low, clip_high, dual_clip: as in `clipped_policy_loss`. GSPO's clip bounds are far smaller than
            PPO's: 3e-4 and 4e-4 in the paper.

    Returns:
        The loss of each token, [B, T].
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
        clip_high: has no default, because the paper tunes it and gives no value.

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
    """SAPO: replaces the clip by a smooth gate, so that a token's gradient decays gradually instead of dropping to 0.

    -gate(ratio) · advantages with gate(r) = 4/τ · sigmoid(τ·(r - 1)), whose slope at r = 1 is 1, like the ratio's own.

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

    Tokens that did better than expected keep their full weight; the others lose weight as the policy makes them less
    likely. No weight is above 1, so stale data cannot make the gradient large.

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
    Its gradient, summed over a trajectory, is that of (β · L - advantage)² / (2β): the policy gradient on-policy, and 0
    where L equals advantage / β, the optimum (`optimal_advantages`). The loss therefore needs no importance weight.

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
    """DPPO's mask: True where the policies are already too far apart and an update would increase the distance.

    The distance is the KL divergence over two outcomes, this token or any other. With q and p the token's probability
    under the behavior policy and the policy, it is q log(q/p) + (1 - q) log((1 - q)/(1 - p)). A bound on the ratio
    would stop rare tokens too early and likely ones too late.

    Source: DPPO with the binary KL, https://arxiv.org/abs/2602.04879.

    Args:
        logprobs: [B, T] of the policy being trained.
        behavior_logprobs: [B, T] of the policy that sampled the tokens.
        advantages: [B, T]; above 0, a token is masked only if its probability rose; below 0, only if it fell.
        max_nats: upper bound on the divergence.

    Returns:
        bool [B, T].
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


def is_clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """Returns 1 where the clip removes a token's gradient, 0 elsewhere; its mean is the clipped fraction.

    Args:
        ratio: [B, T], from `policy_ratio` or `sequence_ratio`.
        advantages: [B, T].
        clip_low, clip_high: the same as for the loss.

    Returns:
        float [B, T], detached.
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    check_bounds(0, clip_low=clip_low, clip_high=clip_high)
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
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
    (margin - 1/(2·kl_coef))², which has a target margin.

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
