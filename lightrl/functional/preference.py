"""Losses of pairs, one trajectory chosen over the other: for policies (DPO, IPO) and for reward models.

Shapes: B pairs. Logprobs are those of whole completions, in nats.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import logsigmoid

from lightrl.functional.shapes import check_same_shape

PreferenceLoss = Literal["sigmoid", "ipo"]


def bradley_terry_loss(chosen_rewards: Tensor, rejected_rewards: Tensor) -> Tensor:
    """-log P(chosen is preferred) where P = sigmoid(difference of the rewards), [B].

    Source: Bradley and Terry, 1952, https://doi.org/10.2307/2334029; for reward models,
    https://arxiv.org/abs/2203.02155, equation 1.

    Args:
        chosen_rewards, rejected_rewards: [B], of the two trajectories of each pair; both carry the gradient.

    Raises:
        ValueError: if the tensors differ in shape.
    """
    check_same_shape(chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards)
    return -logsigmoid(chosen_rewards - rejected_rewards)


def preference_margin(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    reference_chosen_logprobs: Tensor,
    reference_rejected_logprobs: Tensor,
) -> Tensor:
    """How much more than the reference policy the policy prefers the chosen completion, [B] nats.

    Args:
        chosen_logprobs, rejected_logprobs: [B], Σ over the completion's tokens; carry the gradient.
        reference_chosen_logprobs, reference_rejected_logprobs: [B], the same for the reference policy.

    Raises:
        ValueError: if the tensors differ in shape.
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
    """DPO ("sigmoid") or IPO ("ipo") of each pair's margin, [B].

    sigmoid: -log sigmoid(kl_coef · margin), which increases every margin without end; ipo: (margin - 1/(2·kl_coef))²,
    which has a target.

    Source: DPO, equation 7, https://arxiv.org/abs/2305.18290; IPO, equation 17, https://arxiv.org/abs/2310.12036.

    Args:
        margin: [B] of `preference_margin`; carries the gradient.
        kl_coef: β (DPO) or τ (IPO) of the papers: the larger, the closer the policy stays to the reference.
        kind: which loss.

    Raises:
        ValueError: if `kl_coef` is not above 0, or the kind is unknown.
    """
    if kl_coef <= 0:
        raise ValueError(f"kl_coef must be above 0 (0.1 is usual), got {kl_coef}.")
    if kind == "sigmoid":
        return -logsigmoid(kl_coef * margin)
    if kind == "ipo":
        return (margin - 1 / (2 * kl_coef)).square()
    raise ValueError(f"kind must be sigmoid or ipo, got {kind!r}.")
