"""ParallelModel: what a strategy can do with a role's model, and Outputs, what the model returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightrl.experience import Experience
from lightrl.models.conversion import Names
from lightrl.models.tuning import Part
from lightrl.weights import Bucket


@dataclass(frozen=True)
class Outputs:
    """A model's outputs for an Experience, aligned to its tokens; all carry the gradient where there is one.

    A critic of its own has no distribution over tokens: its logprobs and entropy are 0.
    """

    logprobs: Tensor  # [B, T], nats, of `token_ids`; 0 at position 0
    entropy: Tensor  # [B, T], nats, of the distribution that `token_ids[b, t]` was sampled from
    values: Tensor | None = None  # [B, T], with a scalar head: of the state before `token_ids[b, t]` was sampled
    # [B, T, K], nats, of the teacher's top-k tokens: for a policy being trained those of
    # `experience["teacher_topk_ids"]`, for the teacher its own.
    teacher_topk: Tensor | None = None
    teacher_topk_ids: Tensor | None = None  # int64 [B, T, K], the most likely first; from the teacher only


LossFunction = Callable[[Experience, Outputs], Tensor]

# A metric that a loss hook returns, [B, T] or [B]: values, or a pair of values and their weights (0 or more).
Metric = Tensor | tuple[Tensor, Tensor]
Backward = Callable[[Tensor], None]


# Further tokens whose logprobs a model computes: K tokens at each position (int64 [B, T, K]), or K for its own top-k.
Candidates = Tensor | int


def teacher_candidates(experience: Experience) -> Candidates:
    """Return the teacher's top-k tokens if the experience has them, else none."""
    return experience.extras.get("teacher_topk_ids", 0)


class ParallelModel(Protocol):
    """One model under one strategy, on any number of processes: forward, measure, forward_backward, full parameters."""

    def forward(self, microbatches: Sequence[Experience], *, topk: int = 0) -> Iterable[Outputs]:
        """Yield logprobs and entropy of each microbatch, and its top-k tokens with their logprobs; without gradient.

        Read the results one by one, to the end: the device need not hold those of all microbatches.
        """
        ...

    def forward_backward(self, microbatches: Sequence[Experience], loss_fn: LossFunction, backward: Backward) -> None:
        """Computes for each microbatch its outputs, `loss_fn` of them, a scalar, and `backward` of that.

        If the microbatch has `teacher_topk_ids`, the outputs have `teacher_topk`.
        """
        ...

    def measure(self, microbatch: Experience, *, topk: int = 0) -> Outputs:
        """Computes `forward` of one microbatch with gradient; every rank runs the backward of its loss."""
        ...

    def full_parameters(
        self, bucket_bytes: int, *, part: Part = "whole", names: Names = "module", is_spread: bool = False
    ) -> Iterator[Bucket]:
        """All parameters with their Hugging Face names, whole, in buckets of about `bucket_bytes`; collective.

        Rank 0 gets all of them; with `is_spread` each rank gets a share, and no two ranks the same parameter. The
        others get one empty bucket. Every rank must read its buckets to the end.

        Args:
            part: the weights as training has left them, those of the `base`, or what training has `added` to it.
            names: those of the model's modules, or those of its checkpoint, which servers expect: see conversion.py.
        """
        ...

    def move_to(self, device: torch.device) -> None:
        """Moves this process's part of a model that is not trained."""
        ...
