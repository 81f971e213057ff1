"""Equations: tensors in, tensors out. Nothing here depends on a trainer or a process group.

Sums over microbatches and ranks happen outside. Functions check shapes and settings on entry and raise ValueError.

Reading order:
    logprobs.py     logits or hidden states → logprobs and entropies; the only file that shifts by one
                    (chunk_buffers.py: memory shared by all chunks)
    advantages.py   rewards → advantages
    values.py       a critic's values → advantages and returns (GAE); value loss and normalization; reward shaping
    losses.py       ratios; the clipped and other policy losses; pairwise losses: DPO, IPO, Bradley-Terry;
                    KL estimators and the adaptive KL weight; divergences over a teacher's top-k tokens
    centering.py    score centering, for samplers whose probabilities differ from the trainer's
    importance.py   importance weights for stale logprobs, M2PO's mask, an interpolated proximal policy
    reduction.py    masking before and after the loss, and three ways to average it
    device_copy.py  asynchronous copies to a device
    branches.py     turns a trajectory's tree of conversations into a model's rows, and outputs back into tree order
    packing.py      batches rows with little padding
    supports.py     the tokens that truncated sampling could choose: how they are encoded, and the softmax over them

May import: errors, checks, columns, trajectory.

To add an equation, write a pure function in the matching file. It checks shapes on entry, and its docstring has
`Source:`. Test it in tests/functional/ against a value worked out by hand and an independent slow implementation.
"""

from lightrl.functional.advantages import batch_normalized, group_advantages, optimal_advantages
from lightrl.functional.branches import BranchRows, row_lengths, row_spans
from lightrl.functional.centering import check_centering, clipped_weights, defines_together, rest_of, score_correction
from lightrl.functional.device_copy import on_host, to_device
from lightrl.functional.importance import ImportanceWeights, interpolated_proximal_logprobs, second_moment_mask
from lightrl.functional.logprobs import (
    aligned_to_tokens,
    can_compile,
    hidden_logprobs,
    hidden_topk,
    logits_logprobs,
    logits_topk,
    predicted_token_ids,
    predicting_positions,
    token_logprobs,
)
from lightrl.functional.losses import (
    Divergence,
    KLController,
    bradley_terry_loss,
    check_divergence,
    cispo_loss,
    clipped_policy_loss,
    clipped_ratio_loss,
    is_clipped,
    kl,
    leaves_trust_region,
    policy_ratio,
    preference_loss,
    preference_margin,
    regression_loss,
    rest_mass,
    sapo_loss,
    sequence_ratio,
    tapered_weights,
    topk_divergence,
)
from lightrl.functional.packing import bins, rectangles
from lightrl.functional.reduction import masked_mean, neutralize, reduce_loss
from lightrl.functional.supports import Supports, encode_supports
from lightrl.functional.values import (
    RewardShaping,
    ValueNormalizer,
    explained_variance,
    gae,
    on_last_loss_token,
    on_loss_tokens,
    value_loss,
)

__all__ = ["group_advantages", "optimal_advantages", "batch_normalized", "on_host", "to_device", "ValueNormalizer"]
__all__ += ["policy_ratio", "sequence_ratio", "second_moment_mask", "interpolated_proximal_logprobs", "value_loss"]
__all__ += ["ImportanceWeights", "KLController", "kl", "Divergence", "topk_divergence", "rest_mass", "check_divergence"]
__all__ += ["can_compile", "token_logprobs", "hidden_logprobs", "hidden_topk", "logits_logprobs", "logits_topk"]
__all__ += ["predicting_positions", "predicted_token_ids", "aligned_to_tokens", "is_clipped", "rectangles", "bins"]
__all__ += ["clipped_policy_loss", "clipped_ratio_loss", "cispo_loss", "sapo_loss", "tapered_weights"]
__all__ += ["regression_loss", "leaves_trust_region", "bradley_terry_loss", "preference_margin", "preference_loss"]
__all__ += ["neutralize", "masked_mean", "reduce_loss", "Supports", "encode_supports", "BranchRows", "row_lengths"]
__all__ += ["RewardShaping", "on_last_loss_token", "on_loss_tokens", "row_spans", "gae", "explained_variance"]
__all__ += ["rest_of", "score_correction", "clipped_weights", "check_centering", "defines_together"]
