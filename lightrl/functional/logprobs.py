"""Logprobs and entropies of tokens, from logits or hidden states; the only file that shifts by one.

Shapes: B trajectories, T tokens, V vocabulary, H hidden size, N positions that predict a token, J candidate tokens at
each position. Logprobs and entropies are in nats, computed in float32 (float64 for float64 input), and belong to the
distribution softmax(logits / temperature).

A causal model's output at position t - 1 predicts token t. Every [B, T] tensor outside this file is aligned to the
token it describes; nothing predicts position 0, so it is 0. Training never materializes logits [B, T, V]:

    loss_mask [B, T] ── predicting_positions ──► rows, columns [N]
    hidden [B, T, H] ── hidden[rows, columns] ─► [N, H] ─┐
    token_ids [B, T] ── predicted_token_ids ───► [N] ────┴─ hidden_logprobs ──► [N] ── aligned_to_tokens ──► [B, T]
"""

from __future__ import annotations

import functools
import logging
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from lightrl.checks.bounds import check_bounds, check_same_shape
from lightrl.functional.chunk_buffers import ChunkBuffers
from lightrl.functional.device_copy import on_host, to_device
from lightrl.functional.supports import Supports, support_scores

log = logging.getLogger(__name__)


@functools.cache
def can_compile(device_type: str) -> bool:
    """Whether torch.compile works on this device: it needs an NVIDIA GPU, Triton and a C compiler.

    torch's environment variable TORCH_COMPILE_DISABLE=1 turns compilation off.
    """
    if device_type != "cuda":
        return False
    # Models share the layers' code, which is recompiled per variant (frozen, shared prompts, autocast, sliding window).
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # default: 8
    try:
        torch.compile(lambda values: values.exp() + 1, dynamic=True)(torch.ones(2, device=device_type))
    except (RuntimeError, ImportError, OSError, subprocess.SubprocessError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        log.warning("torch.compile fails on this GPU; decoder layers and the head run slower, uncompiled (%s)", reason)
        return False
    return True


# Up to this number of logits (64 MiB in float32) are kept for the backward pass instead of being recomputed.
_KEPT_LOGITS = 2**24
# Logits per chunk beyond that number. Smaller chunks read the head more often: on a CPU, 512 tokens with a vocabulary
# of 50,000 took 0.9 s with 2^24 and 2^22, 1.4 s with 2^20, 3.9 s with 2^18. A GPU needs a few hundred rows at a time;
# fused chunks make no float32 copies.
_CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**26, "fused": 2**28}


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float = 1.0,
    *,
    masked_ids: Tensor | None = None,
    masked_rows: Tensor | None = None,
    supports: Supports | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns each token's logprob, and the entropy of the distribution that it was sampled from.

    Args:
        logits: [B, T, V], as the model returns them: `logits[b, t]` predicts token t + 1. Carries the gradient.
        token_ids: int64 [B, T], or [B, T, J] for several candidates at each position.
        temperature: divides the logits; above 0.
        masked_ids: int64 [K], ids that could not be sampled at some positions (stop tokens before `min_new_tokens`).
        masked_rows: bool [B, T], the positions where `masked_ids` could not be sampled.
        supports: the supports of all tokens from position 1 on (N = B · (T - 1)); None if sampling was not truncated.

    Returns:
        Logprobs, in the shape of `token_ids`, and entropies, [B, T], aligned to the token they describe; 0 at position
        0. Both carry the gradient.
    """
    if logits.dim() != 3 or logits.shape[:2] != token_ids.shape[:2]:
        raise ValueError(
            "logits must be [B, T, V] and token_ids [B, T], got shapes "
            f"{tuple(logits.shape)} and {tuple(token_ids.shape)}. Pass the model's logits unshifted."
        )
    if masked_rows is not None:
        check_same_shape(entropy=logits[..., 0], masked_rows=masked_rows)
        masked_rows = masked_rows[:, 1:].reshape(-1)
    num, width, vocabulary = logits.shape
    if width == 0:
        return logits.new_zeros(token_ids.shape), logits.new_zeros(num, 0)
    logprobs, entropy = logits_logprobs(
        logits[:, :-1].reshape(-1, vocabulary),
        token_ids[:, 1:].flatten(0, 1),
        temperature,
        masked_ids=masked_ids,
        masked_rows=masked_rows,
        supports=supports,
    )
    first = (0, 0) * (token_ids.dim() - 2) + (1, 0)
    logprobs = torch.nn.functional.pad(logprobs.view(token_ids[:, 1:].shape), first)
    return logprobs, torch.nn.functional.pad(entropy.view(num, width - 1), (1, 0))


def logits_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = True,
    masked_ids: Tensor | None = None,
    masked_rows: Tensor | None = None,
    supports: Supports | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `hidden_logprobs` from logits [N, V], for a model whose head is more than a matrix product."""
    mask = _as_mask(temperature, masked_ids, masked_rows, logits)
    # A model may assign -inf to ids it never generates; 0 · inf would make the entropy NaN.
    logits = logits.clamp(min=torch.finfo(logits.dtype).min)

    def compute(rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        return _logits_logprobs(logits[rows], token_ids[rows], temperature, mask_of(mask, rows), entropy_gradient)

    if supports is None or not len(supports.limited):
        return compute(slice(None))
    scores = logits[supports.limited[supports.rows], supports.ids]
    scores = scores.float() if scores.dtype.itemsize < 4 else scores
    limited = supports.logprobs(scores, temperature, token_ids)
    logprobs, entropy = supports.filled(limited, compute)
    return logprobs, entropy if entropy_gradient else entropy.detach()


def predicting_positions(loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the positions of the hidden states that predict the loss tokens: (rows [N], columns [N]), in row order.

    The mask is bool [B, T]; position 0 is ignored, since nothing predicts that token.
    """
    rows, columns = on_host(loss_mask)[:, 1:].nonzero(as_tuple=True)
    return to_device(rows, loss_mask.device), to_device(columns, loss_mask.device)


def predicted_token_ids(token_ids: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Selects the tokens [N] predicted at `predicting_positions`; also works for other [B, T, ...] tensors."""
    return token_ids[rows, columns + 1]


def aligned_to_tokens(values: Tensor, rows: Tensor, columns: Tensor, shape: Sequence[int]) -> Tensor:
    """Places values [N, ...] at the tokens that their positions predict, [B, T, ...]; 0 elsewhere. Keeps the gradient.

    Args:
        rows, columns: [N], from `predicting_positions`.
        shape: (B, T).
    """
    return values.new_zeros((*shape, *values.shape[1:])).index_put((rows, columns + 1), values)


def hidden_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    temperature: float = 1.0,
    *,
    chunk_tokens: int | None = None,
    entropy_gradient: bool = True,
    masked_ids: Tensor | None = None,
    masked_rows: Tensor | None = None,
    supports: Supports | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `token_logprobs` from hidden states and the output head, without holding all logits [N, V] in memory.

    With several chunks, the backward pass recomputes the logits chunk by chunk. Under autocast the head runs in
    autocast's dtype, as `torch.nn.Linear` would.

    Args:
        hidden: [N, H] at `predicting_positions`. Carries the gradient, as do weight and bias.
        weight: [V, H] of the output head.
        bias: [V], or None.
        token_ids: int64 [N], from `predicted_token_ids`; or [N, J], several candidates at each position.
        temperature, masked_ids, masked_rows, supports: as in `token_logprobs`, for these N positions. A candidate
            outside its position's support has the logprob -inf.
        chunk_tokens: positions per chunk. None chooses by vocabulary and device, and uses one chunk for few logits.
        entropy_gradient: False returns the entropy detached, which saves memory.

    Returns:
        Logprobs, in the shape of `token_ids`, and entropies, [N]. Even with N = 0 both have a gradient, which is 0.
    """
    if token_ids.dim() not in (1, 2) or token_ids.shape[:1] != hidden.shape[:1]:
        raise ValueError(
            f"token_ids must be [N] and hidden [N, H], got shapes {tuple(token_ids.shape)} and {tuple(hidden.shape)}. "
            "Gather both at predicting_positions."
        )
    hidden, weight, bias, chunk_tokens = prepared(hidden, weight, bias, chunk_tokens)
    mask = _as_mask(temperature, masked_ids, masked_rows, hidden)

    def compute(rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        states, ids, row_mask = hidden[rows], token_ids[rows], mask_of(mask, rows)
        num = states.shape[0]
        if num <= chunk_tokens and (are_few_logits(num, weight.shape[0]) or not can_compile(states.device.type)):
            return _logits_logprobs(linear(states, weight, bias), ids, temperature, row_mask, entropy_gradient)
        return _head_logprobs(states, weight, bias, ids, temperature, row_mask, entropy_gradient, chunk_tokens)

    with torch.autocast(hidden.device.type, enabled=False):
        if supports is None or not len(supports.limited):
            return compute(slice(None))
        limited = hidden[supports.limited] if len(supports.unlimited) else hidden
        scores = support_scores(limited, weight, bias, supports, chunk_tokens=chunk_tokens)
        logprobs, entropy = supports.filled(supports.logprobs(scores, temperature, token_ids), compute)
        return logprobs, entropy if entropy_gradient else entropy.detach()


@torch.no_grad()
def hidden_topk(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    num: int,
    *,
    num_ids: int | None = None,
    chunk_tokens: int | None = None,
    masked_ids: Tensor | None = None,
    masked_rows: Tensor | None = None,
) -> Tensor:
    """Returns the `num` most likely tokens at each position, the most likely first, int64 [N, num].

    Args:
        hidden, weight, bias, chunk_tokens, masked_ids, masked_rows: as in `hidden_logprobs`.
        num: at most V.
        num_ids: only the first `num_ids` ids are candidates; None for all.
    """
    hidden, weight, bias, chunk_tokens = prepared(hidden, weight, bias, chunk_tokens)
    mask = _as_mask(1.0, masked_ids, masked_rows, hidden)
    parts = [torch.empty(0, num, dtype=torch.int64, device=hidden.device)]
    with torch.autocast(hidden.device.type, enabled=False):
        buffers = ChunkBuffers(min(hidden.shape[0], chunk_tokens), weight)
        for chunk in chunks(hidden.shape[0], chunk_tokens):
            logits = buffers.logits(hidden[chunk], weight, bias)
            parts.append(_largest(logits, num, num_ids, mask_of(mask, chunk), buffers.first(logits)))
    return torch.cat(parts)


@torch.no_grad()
def logits_topk(
    logits: Tensor,
    num: int,
    *,
    num_ids: int | None = None,
    masked_ids: Tensor | None = None,
    masked_rows: Tensor | None = None,
) -> Tensor:
    """Computes `hidden_topk` from logits [N, V]."""
    return _largest(logits, num, num_ids, _as_mask(1.0, masked_ids, masked_rows, logits))


def _largest(logits: Tensor, num: int, num_ids: int | None, mask: Mask | None, out: Tensor | None = None) -> Tensor:
    scores = masked_scores(logits, 1.0, mask, out)[:, :num_ids]
    if num > scores.shape[1]:
        raise ValueError(f"num must be at most {scores.shape[1]}, the number of token ids, got {num}.")
    return scores.topk(num, dim=1).indices


def prepared(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_tokens: int | None
) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """Returns the tensors in the dtype that the head runs in, and the number of positions per chunk."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [N, H] and weight [V, H], got shapes {tuple(hidden.shape)} and {tuple(weight.shape)}. "
            "Gather the hidden states at predicting_positions first."
        )
    check_bounds(1, chunk_tokens=chunk_tokens)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    form = "fused" if can_compile(device) else device
    return hidden, weight, bias, chunk_tokens or tokens_per_chunk(hidden.shape[0], weight.shape[0], form)


def tokens_per_chunk(num: int, vocabulary: int, form: str) -> int:
    """Returns how many of `num` positions to compute logits for at a time: all if their logits are kept anyway.

    Args:
        form: the device type, or "fused" if the head's functions are compiled.
    """
    if are_few_logits(num, vocabulary):
        return max(num, 1)
    return max(_CHUNK_LOGITS.get(form, _KEPT_LOGITS) // vocabulary, 1)


def are_few_logits(num: int, vocabulary: int) -> bool:
    """Whether the logits of `num` positions are few enough to keep for the backward pass."""
    return num * vocabulary <= _KEPT_LOGITS


# (masked_ids [K], masked_rows bool [N]), or None if every id could be sampled.
Mask = tuple[Tensor, Tensor]


def _as_mask(temperature: float, masked_ids: Tensor | None, masked_rows: Tensor | None, states: Tensor) -> Mask | None:
    """Checks the public functions' arguments, and returns the mask if there is one; `states` is [N, ...]."""
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}. For greedy logprobs use 1.")
    if masked_ids is None and masked_rows is None:
        return None
    if masked_ids is None or masked_rows is None:
        raise ValueError("masked_ids and masked_rows must be passed together, got only one of them.")
    check_same_shape(positions=states[:, 0], masked_rows=masked_rows)
    return masked_ids, masked_rows


def _masked(values: Tensor, mask: Mask, number: float, out: Tensor | None = None) -> Tensor:
    """Writes `number` where the mask excludes an id of values [N, V], without synchronizing with the device."""
    ids, rows = mask
    return torch.index_copy(values, 1, ids, values.index_select(1, ids).masked_fill(rows[:, None], number), out=out)


def masked_scores(logits: Tensor, temperature: float, mask: Mask | None, out: Tensor | None = None) -> Tensor:
    """Turns logits [N, V] of any dtype into the input of the softmax; writes it to `out` if given."""
    if out is not None and out is not logits:
        logits = out.copy_(logits)
    elif logits.dtype.itemsize < 4:
        logits = logits.float()
    if temperature != 1:
        logits = torch.div(logits, temperature, out=out)
    if mask is not None:
        # The lowest finite number instead of -inf: its probability is also 0, but 0 times the logprob is not NaN.
        logits = _masked(logits, mask, torch.finfo(logits.dtype).min, out)
    return logits


def _distribution(
    logits: Tensor, temperature: float, mask: Mask | None, buffers: ChunkBuffers | None = None
) -> tuple[Tensor, Tensor]:
    """Turns logits [N, V] of any dtype into (log-probabilities, probabilities), in the buffers if given."""
    probabilities, log_probabilities = (buffers.first(logits), buffers.second(logits)) if buffers else (None, None)
    scores = masked_scores(logits, temperature, mask, probabilities)
    log_probabilities = torch.log_softmax(scores, dim=-1, out=log_probabilities)
    return log_probabilities, torch.exp(log_probabilities, out=probabilities)


def _columns(values: Tensor) -> Tensor:
    """Reshapes [N] to [N, 1]; returns [N, J] unchanged."""
    return values[:, None] if values.dim() == 1 else values


def _gather(log_probabilities: Tensor, probabilities: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the tokens' logprobs, [N] or [N, J], and the entropies, [N]."""
    logprobs = log_probabilities.gather(1, _columns(token_ids)).view(token_ids.shape)
    return logprobs, -torch.linalg.vecdot(probabilities, log_probabilities)


def logits_gradient(
    log_probabilities: Tensor | None,
    probabilities: Tensor,
    token_ids: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
    mask: Mask | None,
    is_here: Tensor | None = None,
    in_place: bool = False,
) -> Tensor:
    """Computes d loss / d logits, [N, V]. A logprob's gradient is onehot - p, the entropy's is -p · (log p + entropy).

    `is_here` is False where a token's logit is on a different rank; None if this rank holds all logits. With
    `in_place` the result overwrites the probabilities or log-probabilities.
    """
    if grad_logprobs is None:
        grad_logprobs = torch.zeros_like(token_ids, dtype=entropy.dtype)
    grad_logprobs = _columns(grad_logprobs)
    total = grad_logprobs.sum(1)
    if grad_entropy is None:
        gradient = torch.mul(probabilities, -total[:, None], out=probabilities if in_place else None)
    else:
        assert log_probabilities is not None
        constant = total + grad_entropy * entropy
        out = log_probabilities if in_place else None
        slope = torch.addcmul(constant[:, None], log_probabilities, grad_entropy[:, None], out=out)
        gradient = slope.mul_(probabilities).neg_()
    local = grad_logprobs if is_here is None else torch.where(is_here, grad_logprobs, 0)
    gradient.scatter_add_(1, _columns(token_ids), local)
    if temperature != 1:
        gradient /= temperature
    if mask is not None:
        gradient = _masked(gradient, mask, 0.0, gradient)
    return gradient


class _LogitsLogprobs(torch.autograd.Function):
    """Keeps the probabilities and computes the gradient in one pass; autograd would need five."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float, mask: Mask | None, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        log_probabilities, probabilities = _distribution(logits, temperature, mask)
        logprobs, entropy = _gather(log_probabilities, probabilities, token_ids)
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(log_probabilities if entropy_gradient else None, probabilities, token_ids, entropy)
        ctx.temperature, ctx.mask, ctx.dtype = temperature, mask, logits.dtype
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        log_probabilities, probabilities, token_ids, entropy = ctx.saved_tensors
        scores, settings = (log_probabilities, probabilities), (ctx.temperature, ctx.mask)
        gradient = logits_gradient(*scores, token_ids, entropy, grad_logprobs, grad_entropy, *settings)
        return gradient.to(ctx.dtype), None, None, None, None


_logits_logprobs: Callable[..., tuple[Tensor, Tensor]] = _LogitsLogprobs.apply


class _HeadLogprobs(torch.autograd.Function):
    """Stores no tensor of size V except the head; the backward pass recomputes each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        temperature: float,
        mask: Mask | None,
        entropy_gradient: bool,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        logits_of, compute, _ = _passes(hidden, weight, chunk_tokens)
        parts = []
        for chunk in chunks(hidden.shape[0], chunk_tokens):
            logits = logits_of(hidden[chunk], weight, bias)
            parts.append(compute(logits, token_ids[chunk], temperature, mask_of(mask, chunk)))
        logprobs, *saved = (torch.cat(values) for values in zip(*parts, strict=True))
        entropy = saved[0]
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(hidden, weight, bias, token_ids, *saved)
        ctx.temperature, ctx.mask, ctx.chunk_tokens = temperature, mask, chunk_tokens
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, token_ids, *saved = ctx.saved_tensors
        logits_of, _, gradient_of = _passes(hidden, weight, ctx.chunk_tokens)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Sum in at least float32, because a bfloat16 sum over hundreds of chunks loses most small terms.
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=sum_dtype) if ctx.needs_input_grad[2] else None
        for chunk in chunks(hidden.shape[0], ctx.chunk_tokens):
            rows = (None if value is None else value[chunk] for value in (grad_logprobs, grad_entropy, *saved))
            logits = logits_of(hidden[chunk], weight, bias)
            gradient = gradient_of(logits, token_ids[chunk], ctx.temperature, mask_of(ctx.mask, chunk), *rows)
            if grad_bias is not None:
                grad_bias += gradient.sum(dim=0, dtype=sum_dtype)
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                _add_product(grad_weight, gradient.T, hidden[chunk])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *[None] * 5,
        )


_head_logprobs: Callable[..., tuple[Tensor, Tensor]] = _HeadLogprobs.apply


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to total, in the total's dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _chunk_logprobs(
    buffers: ChunkBuffers, logits: Tensor, token_ids: Tensor, temperature: float, mask: Mask | None
) -> tuple[Tensor, ...]:
    """Computes logprobs and entropies from a chunk's logits [n, V]."""
    log_probabilities, probabilities = _distribution(logits, temperature, mask, buffers)
    logprobs = log_probabilities.gather(1, _columns(token_ids)).view(token_ids.shape)
    return logprobs, -probabilities.mul_(log_probabilities).sum(1)


def _chunk_gradient(
    buffers: ChunkBuffers,
    logits: Tensor,
    token_ids: Tensor,
    temperature: float,
    mask: Mask | None,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor,
) -> Tensor:
    """Computes the gradient of a chunk's logits, [n, V] in their dtype."""
    scores = _distribution(logits, temperature, mask, buffers)
    gradients, settings = (grad_logprobs, grad_entropy), (temperature, mask)
    gradient = logits_gradient(*scores, token_ids, entropy, *gradients, *settings, in_place=True)
    return gradient if gradient.dtype == logits.dtype else logits.copy_(gradient)


# The same two functions for torch.compile: only the logits [n, V] and their gradient are in memory; other tensors of
# that size stay inside a kernel. The forward also returns the largest score and the log of the sum, so that the
# backward reads the logits only once.


def _fused_logprobs(logits: Tensor, token_ids: Tensor, temperature: float, mask: Mask | None) -> tuple[Tensor, ...]:
    scores = masked_scores(logits, temperature, mask)
    largest = scores.amax(1, keepdim=True)
    shifted = scores - largest
    powers = shifted.exp()
    total = powers.sum(1)
    normalizer = total.log()
    logprobs = shifted.gather(1, _columns(token_ids)) - normalizer[:, None]
    return logprobs.view(token_ids.shape), normalizer - (powers * shifted).sum(1) / total, largest[:, 0], normalizer


def _fused_gradient(
    logits: Tensor,
    token_ids: Tensor,
    temperature: float,
    mask: Mask | None,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor,
    largest: Tensor,
    normalizer: Tensor,
) -> Tensor:
    log_probabilities = masked_scores(logits, temperature, mask) - largest[:, None] - normalizer[:, None]
    slope = torch.zeros_like(entropy)[:, None]
    if grad_logprobs is not None:
        slope = slope + _columns(grad_logprobs).sum(1, keepdim=True)
    if grad_entropy is not None:
        slope = slope + grad_entropy[:, None] * (entropy[:, None] + log_probabilities)
    gradient = -log_probabilities.exp() * slope
    if grad_logprobs is not None and token_ids.dim() == 1:
        is_token = torch.arange(logits.shape[1], device=logits.device) == token_ids[:, None]
        gradient = gradient + torch.where(is_token, grad_logprobs[:, None], 0.0)
    elif grad_logprobs is not None:
        gradient = gradient.scatter_add(1, token_ids, grad_logprobs)
    gradient = gradient / temperature
    return (gradient if mask is None else _masked(gradient, mask, 0.0)).to(logits.dtype)


_Pass = Callable[..., Any]


def _passes(hidden: Tensor, weight: Tensor, chunk_tokens: int) -> tuple[_Pass, _Pass, _Pass]:
    """Returns the functions that compute a chunk's logits, its logprobs and entropies, and its logits' gradient."""
    if can_compile(hidden.device.type):
        return linear, _compiled(_fused_logprobs), _compiled(_fused_gradient)
    buffers = ChunkBuffers(min(hidden.shape[0], chunk_tokens), weight)
    return buffers.logits, functools.partial(_chunk_logprobs, buffers), functools.partial(_chunk_gradient, buffers)


@functools.cache
def _compiled(function: _Pass) -> _Pass:
    """Compiles a function for any number of rows and a fixed vocabulary."""
    fused = torch.compile(function)

    def call(logits: Tensor, token_ids: Tensor, temperature: float, mask: Mask | None, *rows: Tensor | None) -> Any:
        rows = tuple(None if value is None else value.detach().contiguous() for value in rows)
        for value in (logits, token_ids, *rows, *(() if mask is None else mask[1:])):
            if value is not None:
                torch._dynamo.maybe_mark_dynamic(value, 0)
        return fused(logits, token_ids, temperature, mask, *rows)

    return call


def chunks(num: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, num)) for start in range(0, num, chunk_tokens)]


def mask_of(mask: Mask | None, chunk: slice | Tensor) -> Mask | None:
    return None if mask is None else (mask[0], mask[1][chunk])
