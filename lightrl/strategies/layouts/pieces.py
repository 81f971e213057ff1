"""Pieces: cuts a microbatch larger than `microbatch_tokens` into parts of its rows, with the same loss and gradient.

Only a loss needs all rows of a trajectory, pair or group together; a model can run them one after the other. A piece
contains some of the rows, and goes through the model twice:

    1. without gradient:  outputs of all pieces ─► the loss ─► its derivative g with respect to each output
    2. with gradient:     a piece's outputs ─► Σ g · output, whose gradient is the piece's part of the loss's gradient

By the chain rule, the parts sum to the whole gradient, for every loss. A parameter that the loss reads directly counts
as an output of the first piece. Pieces cost one more forward; a microbatch that fits goes through the model once. The
sum over P pieces adds rounding errors of at most P · ε · Σ |gradient of a piece|.

Shapes: B trajectories, T tokens; R rows in a microbatch, W tokens in its longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from lightrl.experience import Experience, LossUnit
from lightrl.functional import on_host, to_device
from lightrl.functional.packing import bins
from lightrl.models import Backward, LossFunction, Outputs, ParallelModel
from lightrl.strategies.layouts.branches import branch_rows
from lightrl.strategies.layouts.shared_prefix import Prefixes
from lightrl.strategies.ranks.processes import Ranks
from lightrl.strategies.sharded_experience.placement import Microbatches

_GRADIENT = "_gradient_of_"  # prefix of a piece's extras: the loss's derivatives with respect to an output


@dataclass(frozen=True)
class _Cut:
    """A microbatch and its pieces; a microbatch that fits is its only piece."""

    whole: Experience
    pieces: list[Experience]
    rows: list[Tensor]  # for each piece, the indices of its rows in [R, W], int64 on the device
    shape: torch.Size  # (R, W)
    join_rows: Callable[[Outputs], Outputs]  # maps outputs [R, W] of all rows to [B, T]

    @classmethod
    def of(cls, whole: Experience, max_tokens: int, *, shares_prefixes: bool) -> _Cut:
        """Cuts a microbatch into pieces of at most `max_tokens` tokens, or one longer row.

        With `shares_prefixes`, rows that share a prefix stay together, and the limit applies to a piece's packed row.
        """
        rows, join = branch_rows(whole)
        if shares_prefixes:
            parts = [part.order for part in Prefixes.of(rows).packed_chunks(max_tokens)]
        else:
            parts = bins(on_host(rows.lengths).tolist(), max_tokens)
        if len(parts) == 1:
            return cls(whole, [whole], [], whole.token_ids.shape, lambda outputs: outputs)
        indices = [to_device(torch.tensor(part), rows.token_ids.device) for part in parts]
        return cls(whole, [rows.select(part) for part in parts], indices, rows.token_ids.shape, join)

    def joined(self, outputs: Sequence[Outputs]) -> Outputs:
        """Joins the pieces' outputs into the outputs of all rows, [R, W]; 0 elsewhere."""
        names = [name for name, value in vars(outputs[0]).items() if value is not None]
        values: dict[str, Tensor] = {}
        for name in names:
            parts = [getattr(output, name) for output in outputs]
            values[name] = parts[0].new_zeros(*self.shape, *parts[0].shape[2:])
            for rows, part in zip(self.rows, parts, strict=True):
                values[name][rows, : part.shape[1]] = part
        return replace(outputs[0], **values)

    def with_gradients(
        self, outputs: Outputs, loss_fn: LossFunction, own: Sequence[Tensor], own_losses: list[Tensor]
    ) -> list[Experience]:
        """Computes the loss from the outputs [R, W]; returns the pieces with its derivatives as extras.

        Adds to `own_losses` a term for each parameter of `own` that the loss reads.
        """
        leaves = {
            name: value.detach().requires_grad_()
            for name, value in vars(outputs).items()
            if value is not None and value.is_floating_point()
        }
        with torch.enable_grad():
            loss = loss_fn(self.whole, self.join_rows(replace(outputs, **leaves)))
            derivatives = torch.autograd.grad(loss, [*leaves.values(), *own], allow_unused=True)
            pairs = zip(own, derivatives[len(leaves) :], strict=True)
            own_losses += [(value * gradient).sum() for value, gradient in pairs if gradient is not None]
        gradients = {name: value for name, value in zip(leaves, derivatives, strict=False) if value is not None}
        return [
            piece.with_tensors(
                {_GRADIENT + name: value[rows, : piece.token_ids.shape[1]] for name, value in gradients.items()}
            )
            for piece, rows in zip(self.pieces, self.rows, strict=True)
        ]


def forward(
    model: ParallelModel, microbatches: Microbatches, *, max_tokens: int, ranks: Ranks, topk: int = 0
) -> Iterator[Outputs]:
    """Runs `ParallelModel.forward`, but cuts trajectories with several rows and more than `max_tokens` tokens.

    All `ranks` that share the model must call this.
    """
    cuts = _cuts(model, microbatches, max_tokens, "trajectory")
    if cuts is None:
        yield from model.forward(microbatches, topk=topk)
        return
    pieces = [piece for cut in cuts for piece in cut.pieces]
    results = iter(model.forward(_padded(pieces, ranks, microbatches), topk=topk))
    for cut in cuts:
        parts = list(islice(results, len(cut.pieces)))
        yield parts[0] if len(parts) == 1 else cut.join_rows(cut.joined(parts))
    for _ in results:
        pass


def forward_backward(
    model: ParallelModel,
    microbatches: Microbatches,
    loss_fn: LossFunction,
    backward: Backward,
    *,
    max_tokens: int,
    unit: LossUnit,
    ranks: Ranks,
    own: Sequence[Tensor] = (),
) -> None:
    """Runs `ParallelModel.forward_backward`, but cuts loss units with several rows and more than `max_tokens` tokens.

    All `ranks` that share the model must call this. The loss may read `own`, trained parameters outside the model.
    """
    cuts = _cuts(model, microbatches, max_tokens, unit)
    if cuts is None:
        model.forward_backward(microbatches, loss_fn, backward)
        return
    first = _padded([piece for cut in cuts if len(cut.pieces) > 1 for piece in cut.pieces], ranks, microbatches)
    results = iter(model.forward(first) if first else ())
    parts: list[Experience] = []
    own_losses: list[Tensor] = []  # kept until the first piece's loss adds them
    for cut in cuts:
        if len(cut.pieces) == 1:
            parts.append(cut.whole)
        else:
            outputs = cut.joined(list(islice(results, len(cut.pieces))))
            parts += cut.with_gradients(outputs, loss_fn, own, own_losses)
    for _ in results:
        pass

    def loss_of(part: Experience, outputs: Outputs) -> Tensor:
        gradients = {name: part.extras.get(_GRADIENT + name) for name in vars(outputs)}
        if all(gradient is None for gradient in gradients.values()):
            return loss_fn(part, outputs)
        pairs = ((getattr(outputs, name), gradient) for name, gradient in gradients.items() if gradient is not None)
        products = [(value * gradient).sum() for value, gradient in pairs if value.requires_grad]
        products = [*(products or [0 * outputs.logprobs.sum()]), *own_losses]  # backward needs a graph
        own_losses.clear()  # only one piece adds them
        return torch.stack(products).sum()  # only its gradient equals the loss's

    model.forward_backward(_padded(parts, ranks, microbatches), loss_of, backward)


def _cuts(model: ParallelModel, microbatches: Microbatches, max_tokens: int, unit: LossUnit) -> list[_Cut] | None:
    """Cuts microbatches that are too large; returns None if there are none on any rank."""
    experience = microbatches.experience
    num_tokens = experience.forward_tokens.tolist()
    largest = max((sum(num_tokens[row] for row in rows) for rows in experience.units(unit)), default=0)
    if largest <= max_tokens or (unit == "trajectory" and "gaps" not in experience.tokens):
        return None
    return [_Cut.of(part, max_tokens, shares_prefixes=model.shares_prefixes(part)) for part in microbatches]


def _padded(parts: Sequence[Experience], ranks: Ranks, microbatches: Microbatches) -> list[Experience]:
    """Adds blank microbatches, so that all ranks of the model, which run together, have the same number."""
    num_lacking = ranks.max_each([len(parts)])[0] - len(parts)
    return [*parts, *[microbatches.experience.blank_row(microbatches.device) for _ in range(num_lacking)]]
