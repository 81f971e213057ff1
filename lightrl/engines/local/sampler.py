"""Samples tokens: one uniform number per (seed, position) through the inverse of the cumulative distribution.

The global random state is not used: a completion depends only on its seed and logits, not on the rest of the batch.
Shapes: n rows, V tokens of the vocabulary. Logprobs are in nats.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64, the increment of splitmix64
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def completion_seed(seed: int, sample: int) -> int:
    """Returns the int64 seed of completion `sample` of a request; completion 0 has the request's seed."""
    if sample == 0:
        return seed
    mixed = _mix(torch.tensor(seed, dtype=torch.int64) ^ _mix(torch.tensor(sample, dtype=torch.int64) * _GOLDEN))
    return int(mixed)


def uniforms(seeds: Tensor, first: int, count: int) -> Tensor:
    """Returns uniform numbers for `count` positions from `first` on, for completions with these seeds [n], int64.

    Source: splitmix64, https://doi.org/10.1145/2660193.2660195, with its state hashed from the seed.

    Returns:
        [n, count] float64 in [0, 1), with 53 random bits.
    """
    counters = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=seeds.device)
    bits = _mix(_mix(seeds)[:, None] + counters[None, :] * _GOLDEN)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def ban_stop_tokens(logits: Tensor, is_banned: Tensor, stop_token_ids: Tensor) -> None:
    """Sets the logits [n, V] of stop tokens to -inf, in place, in rows where `is_banned` [n].

    `stop_token_ids` [n, K] is padded with -1.
    """
    is_out = is_banned[:, None] & (stop_token_ids >= 0)
    bound = torch.where(is_out, -torch.inf, torch.inf).to(logits.dtype)
    logits.scatter_reduce_(1, stop_token_ids.clamp(min=0), bound, "amin")


def sample_tokens(
    logits: Tensor,
    uniform: Tensor,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    is_greedy: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Samples one token per row; returns it, its logprob over its support, and the support.

    The support consists of the tokens that top-k and top-p leave. A setting is None if no row uses it, to save work.

    Args:
        logits: [n, V] float32.
        uniform: [n] float64 in [0, 1).
        temperature: [n], above 0; 1 in greedy rows, whose logprobs are unscaled.
        top_k, top_p: [n]; both or neither; V and 1 keep every token, as in greedy rows.
        is_greedy: [n] bool, rows that get the most likely token.

    Returns:
        Token ids [n] int64, logprobs [n] float32, and bool [n, V]: the tokens that truncated rows could sample (all
        False in other rows); None without `top_k`.
    """
    scaled = logits if temperature is None else logits / temperature[:, None]
    logprobs = torch.log_softmax(scaled, -1)
    probabilities = logprobs.exp()
    if top_k is not None and top_p is not None:
        probabilities = truncated(probabilities, top_k, top_p)
    # float64: with 150,000 tokens a float32 sum would lose every token below 6e-8
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    token_ids = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    token_ids.clamp_(max=logits.shape[-1] - 1)  # NaN logits may give V; `retire` reports their NaN logprob
    if is_greedy is not None:
        token_ids = torch.where(is_greedy[:, None], logits.argmax(-1, keepdim=True), token_ids)
    if top_k is not None and top_p is not None:
        is_truncated = ((top_k < logits.shape[-1]) | (top_p < 1))[:, None]
        is_possible = (probabilities > 0) & is_truncated
        shifted = logits - logits.amax(-1, keepdim=True)  # before the division, where large logits would lose digits
        shifted = shifted if temperature is None else shifted / temperature[:, None]
        within = torch.log_softmax(shifted.masked_fill(~is_possible, -torch.inf), -1)
        logprobs = torch.where(is_truncated, within, logprobs)
    return token_ids[:, 0], logprobs.gather(-1, token_ids)[:, 0], None if top_k is None else is_possible


def truncated(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Sets the probabilities outside top-k to 0, then those of the rest that are outside top-p.

    Top-p keeps the most likely tokens until their sum reaches `top_p`, including the one that reaches it. Ties go to
    the lower token id. The result [n, V] is not renormalized.
    """
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill(ranks >= top_k[:, None], 0.0)
    cumulative = ordered.cumsum(-1, dtype=torch.float64)
    before = cumulative - ordered
    is_outside = (before >= top_p[:, None] * cumulative[:, -1:]) & (top_p[:, None] < 1)
    return torch.zeros_like(probabilities).scatter_(-1, order, ordered.masked_fill(is_outside, 0.0))


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * _MIX_1
    state = (state ^ _shift_right(state, 27)) * _MIX_2
    return state ^ _shift_right(state, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shifts right and fills with zeros; `>>` on int64 would fill with the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
