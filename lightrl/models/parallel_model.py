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
    """A model's outputs for an Experience, aligned to its tokens; with gradient if the forward has one.

    A separate critic has no distribution over tokens: its logprobs and entropy are 0.
    """

    logprobs: Tensor  # [B, T], nats, of `token_ids`; 0 at position 0
    entropy: Tensor  # [B, T], nats, of the distribution that `token_ids[b, t]` was sampled from
    values: Tensor | None = None  # [B, T], with a scalar head: of the state before `token_ids[b, t]` was sampled
    # [B, T, K], nats, logprobs of the teacher's top-k tokens: `experience["teacher_topk_ids"]` for a policy in
    # training, `teacher_topk_ids` for the teacher.
    teacher_topk: Tensor | None = None
    teacher_topk_ids: Tensor | None = None  # int64 [B, T, K], the most likely first; only from the teacher


LossFunction = Callable[[Experience, Outputs], Tensor]

# A metric that a loss hook returns, [B, T] or [B]: values, or a pair of values and their weights (>= 0).
Metric = Tensor | tuple[Tensor, Tensor]
Backward = Callable[[Tensor], None]


# Tokens whose logprobs a model also computes: int64 [B, T, K], K at each position, or the number K for its own top-k.
Candidates = Tensor | int


class ParallelModel(Protocol):
    """One model under one strategy, on any number of processes."""

    def forward(self, microbatches: Sequence[Experience], *, topk: int = 0) -> Iterable[Outputs]:
        """Yields logprobs and entropy of each microbatch, and its top-k tokens with their logprobs; without gradient.

        Read all results, one by one: the device need not hold those of all microbatches.
        """
        ...

    def forward_backward(self, microbatches: Sequence[Experience], loss_fn: LossFunction, backward: Backward) -> None:
        """Computes each microbatch's outputs and calls `backward` with their scalar loss from `loss_fn`.

        If the microbatch has `teacher_topk_ids`, the outputs have `teacher_topk`.
        """
        ...

    def measure(self, microbatch: Experience, *, topk: int = 0) -> Outputs:
        """Computes the outputs of one microbatch with gradient; every rank must run the backward of its loss."""
        ...

    def full_parameters(
        self, bucket_bytes: int, *, part: Part = "whole", names: Names = "module", is_spread: bool = False
    ) -> Iterator[Bucket]:
        """Yields whole parameters by their Hugging Face names, in buckets of about `bucket_bytes`; collective.

        Rank 0 gets all of them and the others one empty bucket; with `is_spread` each rank gets different parameters.
        Every rank must read all its buckets.

        Args:
            part: the `whole` weights after training, those of the `base`, or those that training `added` to it.
            names: those of the model's modules, or of its checkpoint, which servers expect; see conversion.py.
        """
        ...

    def move_to(self, device: torch.device) -> None:
        """Moves this process's part of an untrained model."""
        ...
