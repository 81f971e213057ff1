"""Tensor parallelism: splits parameters over the tp axis, and runs the computations that need all tp ranks.

Shapes: N positions that predict a token, J tokens whose logprobs are computed at each, H hidden size, V vocabulary;
each tp rank holds V / tp, rounded up, and the last one the rest. Between projections, hidden states are split along the
sequence (sequence parallelism), so norms and residuals cost each rank 1 / tp of the time and memory, and a pipeline
sends 1 / tp of the bytes. Logits are never gathered: logprobs and entropies need only one MAX of [N] and one SUM of
[2 + J, N] numbers over the tp axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from lightrl.functional.logprobs import Mask, chunks, logits_gradient, mask_of, masked_scores, prepared
from lightrl.functional.supports import Supports, support_scores
from lightrl.models.tuning import Tuning
from lightrl.strategies.parallel_3d.tensor_plans import layer_plan
from lightrl.strategies.ranks.processes import local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Number of logits computed at a time (128 MiB in float32).
_CHUNK_LOGITS = 2**25


def split_parameters(
    body: nn.Module, head: nn.Linear | None, plan: Mapping[str, str], mesh: DeviceMesh, tuning: Tuning
) -> None:
    """Turns a causal language model's parameters into DTensors on the tp mesh, in place.

    Args:
        body: has `layers`, as well as `embed_tokens` and `norm` if this rank holds them.
        head: the output head, if this rank holds it; a tied head stays tied to the embedding.
        plan: result of `tensor_plan`.
    """
    embedding: Any = getattr(body, "embed_tokens", None)
    is_tied = head is not None and embedding is not None and head.weight is embedding.weight
    for layer in body.layers.children():  # type: ignore[union-attr]
        _split_layer(layer, plan, mesh, tuning)
    if isinstance(getattr(body, "norm", None), nn.Module):
        share_parameters(body.norm, mesh)  # type: ignore[arg-type]
    if embedding is not None:
        _distribute_parameters(embedding, mesh, Shard(0))
        embedding.forward = functools.partial(_embed, embedding, mesh)
    if head is not None and is_tied:
        head.weight = embedding.weight
    elif head is not None:
        _distribute_parameters(head, mesh, Shard(0))


def _split_layer(layer: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh, tuning: Tuning) -> None:
    """Splits a decoder layer's projections according to the plan, and replicates its other parameters."""
    styles: dict[str, ParallelStyle] = {}
    plan = layer_plan(plan, layer)
    for name, style in plan.items():
        if style not in ("colwise", "rowwise"):
            continue
        for part, part_style in tuning.split_styles(name, layer.get_submodule(name), style).items():
            if part_style == "colwise":
                styles[part] = ColwiseParallel()
            elif part_style == "rowwise":
                styles[part] = RowwiseParallel(output_layouts=Shard(1))
            else:
                _distribute_parameters(layer.get_submodule(part), mesh, Replicate())
    for name in {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise"}:
        gather = functools.partial(_gather_input, mesh)
        layer.get_submodule(name).register_forward_pre_hook(gather, with_kwargs=True)
    for name, module in layer.named_modules():
        if name not in styles and not any(isinstance(value, DTensor) for value in module.parameters(recurse=False)):
            share_parameters(module, mesh)
    parallelize_module(layer, mesh, styles)


def _gather_input(
    mesh: DeviceMesh, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gathers the whole sequence's hidden states, the first argument (positional or not) of attention or MLP."""
    hidden = args[0] if args else kwargs["hidden_states"]
    whole = DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False).redistribute(mesh, [Replicate()])
    return ((whole, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": whole})


def share_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replicates a module's direct parameters, as DTensors, on all tp ranks.

    Each rank runs the module on its part of the tokens or heads, so a parameter's gradient is the sum over ranks.
    """
    _distribute_parameters(module, mesh, Replicate())
    if any(True for _ in module.parameters(recurse=False)):
        module.forward = functools.partial(_call_with_local_parameters, module, module.forward)


def _call_with_local_parameters(module: nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    """Runs a module's forward with plain tensors as parameters, because its operations do not accept DTensors.

    `functional_call` replaces the parameters and calls the module, which calls this function a second time.
    """
    parameters = dict(module.named_parameters(recurse=False))
    if not any(isinstance(parameter, DTensor) for parameter in parameters.values()):
        return forward(*args)  # the second call
    local_parameters = {
        name: parameter.to_local(grad_placements=[Partial()])  # type: ignore[attr-defined]
        for name, parameter in parameters.items()
    }
    return torch.func.functional_call(module, local_parameters, args)


def _distribute_parameters(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Turns the module's direct parameters into DTensors with this placement, in place."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        distributed = distribute_tensor(parameter, mesh, [placement])
        module.register_parameter(key, nn.Parameter(distributed, requires_grad=parameter.requires_grad))


def _embed(embedding: nn.Embedding, mesh: DeviceMesh, token_ids: Tensor) -> Tensor:
    """Embeds tokens, [B, T, H], with an embedding whose rows are split over tp."""
    weight, first = local(embedding.weight), first_row(embedding.weight, mesh)
    is_here = (token_ids >= first) & (token_ids < first + weight.shape[0])
    padding = embedding.padding_idx  # the padding row gets no gradient, as in one process
    if padding is not None:
        padding = padding - first if first <= padding < first + weight.shape[0] else None
    rows = nn.functional.embedding(torch.where(is_here, token_ids - first, 0), weight, padding)
    rows = torch.where(is_here[..., None], rows, rows.new_zeros(()))
    scale = getattr(embedding, "embed_scale", None)  # Gemma has one
    if scale is not None:
        rows = rows * scale.to(weight.dtype)
    parts = DTensor.from_local(rows, mesh, [Partial()], run_check=False)
    embedded: Tensor = parts.redistribute(mesh, [Replicate()]).to_local()
    return embedded


def first_row(weight: Tensor, mesh: DeviceMesh) -> int:
    """Returns the index of this rank's first row of an embedding or head [V, H]."""
    return mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())


def part_of_sequence(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns this rank's part [B, T / tp, ...] of hidden states [B, T, ...] that all ranks have."""
    whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
    part: Tensor = whole.redistribute(mesh, [Shard(1)]).to_local()
    return part


def whole_sequence(hidden: Tensor, mesh: DeviceMesh, *, gradients_add_up: bool) -> Tensor:
    """Gathers hidden states [B, T, ...] from all ranks' parts [B, T / tp, ...].

    With `gradients_add_up`, each rank computes only a summand of the gradient, from its part of the vocabulary.
    """
    split = DTensor.from_local(hidden, mesh, [Shard(1)], run_check=False)
    gradient = Partial() if gradients_add_up else Replicate()
    whole: Tensor = split.redistribute(mesh, [Replicate()]).to_local(grad_placements=[gradient])
    return whole


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    temperature: float = 1.0,
    *,
    group: dist.ProcessGroup | None,
    first_id: int = 0,
    cap: float | None = None,
    entropy_gradient: bool = True,
    masked_ids: Tensor | None = None,
    masked_rows: Tensor | None = None,
    supports: Supports | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes `functional.hidden_logprobs` with a head whose rows are divided over `group`.

    Args:
        hidden: [N, H], the same on all ranks; each rank computes only a summand of its gradient.
        weight: [V / tp, H], this rank's rows of the head.
        token_ids, temperature, entropy_gradient, masked_ids, masked_rows, supports: as in `hidden_logprobs`.
        group: process group of the tp axis; None for one rank.
        first_id: the token id of this rank's first row.
        cap: logits are cap · tanh(logits / cap) before the temperature; None for no cap.
    """
    hidden, weight, _, chunk_tokens = prepared(hidden, weight, None, _chunk_tokens(weight))
    mask = _own_mask(weight, first_id, masked_ids, masked_rows)
    ids = (token_ids if token_ids.dim() == 2 else token_ids[:, None]) - first_id

    def compute(rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        logprobs, entropy = _VocabParallelLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden[rows], weight, ids[rows], temperature, group, cap, entropy_gradient, mask_of(mask, rows)
        )
        return logprobs.view(token_ids[rows].shape), entropy

    with torch.autocast(hidden.device.type, enabled=False):
        if supports is None or not len(supports.limited):
            return compute(slice(None))
        scores = support_scores(
            hidden[supports.limited],
            weight,
            None,
            supports,
            chunk_tokens=chunk_tokens,
            first_id=first_id,
            total=None if group is None else functools.partial(dist.all_reduce, group=group),
        )
        scores = scores if cap is None else torch.tanh(scores / cap) * cap
        logprobs, entropy = supports.filled(supports.logprobs(scores, temperature, token_ids), compute)
        return logprobs, entropy if entropy_gradient else entropy.detach()


@torch.no_grad()
def vocab_parallel_topk(
    hidden: Tensor,
    weight: Tensor,
    num: int,
    *,
    group: dist.ProcessGroup | None,
    first_id: int = 0,
    cap: float | None = None,
    num_ids: int | None = None,
    masked_ids: Tensor | None = None,
    masked_rows: Tensor | None = None,
) -> Tensor:
    """Computes `functional.hidden_topk`, int64 [N, num], from the top-k of each rank of `group`.

    Args:
        hidden, weight, group, first_id, cap, masked_ids, masked_rows: as for `vocab_parallel_logprobs`.
        num: number of tokens per position, at most V.
        num_ids: only the first `num_ids` ids are candidates; None for all.
    """
    hidden, weight, _, chunk_tokens = prepared(hidden, weight, None, _chunk_tokens(weight))
    mask = _own_mask(weight, first_id, masked_ids, masked_rows)
    num_local = min(num, weight.shape[0])
    scores = hidden.new_empty(0, num_local, dtype=torch.float32)
    ids = torch.empty(0, num_local, dtype=torch.int64, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for chunk in chunks(hidden.shape[0], chunk_tokens):
            chunk_scores, _ = _scores(hidden, weight, 1.0, cap, mask, chunk)
            if num_ids is not None:
                chunk_scores[:, max(0, num_ids - first_id) :] = -torch.inf
            largest = chunk_scores.topk(num_local, dim=1)
            scores, ids = torch.cat([scores, largest.values]), torch.cat([ids, largest.indices + first_id])
    if group is not None:
        padding = (0, num - num_local)  # the ranks' numbers of ids may differ; -inf is never among the `num` largest
        scores = _gathered(nn.functional.pad(scores, padding, value=-torch.inf), group)
        ids = _gathered(nn.functional.pad(ids, padding), group)
    return ids.gather(1, scores.topk(num, dim=1).indices)


def _gathered(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers [N, tp · K] from each rank's [N, K]."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group)
    return torch.cat(parts, 1)


def _own_mask(weight: Tensor, first_id: int, masked_ids: Tensor | None, masked_rows: Tensor | None) -> Mask | None:
    """Returns the part of the mask that concerns this rank's ids."""
    if masked_ids is None or masked_rows is None:
        return None
    own_ids = masked_ids - first_id
    return own_ids[(own_ids >= 0) & (own_ids < weight.shape[0])], masked_rows


def _chunk_tokens(weight: Tensor) -> int:
    return max(1, _CHUNK_LOGITS // max(1, weight.shape[0]))


def _scores(
    hidden: Tensor, weight: Tensor, temperature: float, cap: float | None, mask: Mask | None, chunk: slice
) -> tuple[Tensor, Tensor | None]:
    """Returns the softmax's input, float32 [n, V / tp], and with a cap also the slope d capped logit / d logit."""
    logits, slope = nn.functional.linear(hidden[chunk], weight), None
    if cap is not None:
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        tanh = torch.tanh(logits / cap)
        logits, slope = tanh * cap, 1 - tanh.square()
    return masked_scores(logits, temperature, mask_of(mask, chunk)), slope


class _VocabParallelLogprobs(torch.autograd.Function):
    """Stores no logits for the backward pass, which recomputes them chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        cap: float | None,
        entropy_gradient: bool,
        mask: Mask | None,
    ) -> tuple[Tensor, Tensor]:
        is_here = (ids >= 0) & (ids < weight.shape[0])
        ids = torch.where(is_here, ids, 0)
        ctx.chunks = chunks(max(1, hidden.shape[0]), _chunk_tokens(weight))
        parts = []
        for chunk in ctx.chunks:
            scores, _ = _scores(hidden, weight, temperature, cap, mask, chunk)
            largest = scores.amax(1)
            shifted = scores - largest[:, None]
            powers = shifted.exp()
            own_scores = torch.where(is_here[chunk], scores.gather(1, ids[chunk]), 0)
            numbers = torch.stack([largest, powers.sum(1), torch.linalg.vecdot(powers, shifted)])
            parts.append(torch.cat([numbers, own_scores.T]))
        own_largest, total, weighted, *token_scores = torch.cat(parts, 1)
        largest = own_largest
        if group is not None:
            largest = own_largest.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        # The sums are relative to this rank's largest score; make them relative to the largest of all ranks.
        shift = (own_largest - largest).clamp(min=-1e4)  # finite also if all of this rank's ids are masked
        sums = torch.stack([total * shift.exp(), (weighted + total * shift) * shift.exp(), *token_scores])
        if group is not None:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        total, weighted = sums[:2]
        normalizer = largest + total.log()
        entropy = total.log() - weighted / total
        ctx.set_materialize_grads(False)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.save_for_backward(hidden, weight, ids, is_here, normalizer, entropy)
        ctx.temperature, ctx.cap, ctx.mask = temperature, cap, mask
        return sums[2:].T - normalizer[:, None], entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, is_here, normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Sum in at least float32, because a bfloat16 sum over hundreds of chunks loses most small terms.
        grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for chunk in ctx.chunks:
            scores, slope = _scores(hidden, weight, ctx.temperature, ctx.cap, ctx.mask, chunk)
            log_probabilities = scores - normalizer[chunk, None]
            grads = [None if value is None else value[chunk] for value in (grad_logprobs, grad_entropy)]
            scores_of_chunk = log_probabilities, log_probabilities.exp(), ids[chunk], entropy[chunk], grads[0], grads[1]
            gradient = logits_gradient(*scores_of_chunk, ctx.temperature, mask_of(ctx.mask, chunk), is_here[chunk])
            if slope is not None:
                gradient *= slope
            gradient = gradient.to(hidden.dtype)
            grad_hidden[chunk] = gradient @ weight
            grad_weight += gradient.T @ hidden[chunk]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None, None
