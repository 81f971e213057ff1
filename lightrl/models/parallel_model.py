"""ParallelModel, a strategy's operations on a role's model, and Outputs, the results."""

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
    """A model's outputs for an Experience, aligned to its tokens, with gradient if the forward computes one.

    A separate critic has no distribution over tokens, so its logprobs and entropy are 0.
    """

    logprobs: Tensor  # [B, T], nats: logprobs of `token_ids`; 0 at position 0
    entropy: Tensor  # [B, T], nats: entropy of the distribution that `token_ids[b, t]` was sampled from
    values: Tensor | None = None  # [B, T], a scalar head's value of the state before `token_ids[b, t]` was sampled
    # [B, T, K], nats, logprobs of top-k tokens. The teacher returns their ids below; the trained policy reads them from
    # `experience["teacher_topk_ids"]`, or from the sampler's `experience["behavior_topk_ids"]`.
    teacher_topk: Tensor | None = None
    teacher_topk_ids: Tensor | None = None  # int64 [B, T, K], the most likely first; only from the teacher


LossFunction = Callable[[Experience, Outputs], Tensor]

# A metric that a loss hook returns: values [B, T] or [B], or a pair of values and their weights (>= 0).
Metric = Tensor | tuple[Tensor, Tensor]
Backward = Callable[[Tensor], None]


# Additional tokens whose logprobs are computed: their ids, int64 [B, T, K], or K for the model's top-k tokens.
Candidates = Tensor | int


class ParallelModel(Protocol):
    """One model under one strategy, on any number of processes."""

    def shares_prefixes(self, experience: Experience) -> bool:
        """Whether the model computes a prefix that several rows of this microbatch share once, not once per row."""
        ...

    def forward(self, microbatches: Sequence[Experience], *, topk: int = 0) -> Iterable[Outputs]:
        """Yields each microbatch's logprobs and entropy, and its top-k tokens with their logprobs; without gradient.

        Without `topk`, a microbatch with `teacher_topk_ids` gets their logprobs, as in `forward_backward`. The caller
        must read all results, and should drop each before reading the next to save device memory.
        """
        ...

    def forward_backward(self, microbatches: Sequence[Experience], loss_fn: LossFunction, backward: Backward) -> None:
        """Computes each microbatch's outputs and calls `backward` with their scalar loss from `loss_fn`.

        If the microbatch has `teacher_topk_ids` or `behavior_topk_ids`, the outputs have `teacher_topk`.
        """
        ...

    def measure(self, microbatch: Experience, *, topk: int = 0) -> Outputs:
        """Computes one microbatch's outputs with gradient; every rank must run the backward of its loss."""
        ...

    def full_parameters(
        self, bucket_bytes: int, *, part: Part = "whole", names: Names = "module", is_spread: bool = False
    ) -> Iterator[Bucket]:
        """Yields whole parameters with their Hugging Face names, in buckets of about `bucket_bytes`; collective.

        Rank 0 gets all parameters, and other ranks get one empty bucket; with `is_spread` each rank gets different
        parameters. Every rank must read all its buckets.

        Args:
            part: the `whole` trained weights, the `base` weights, or the weights that training `added` to the base.
            names: as in the model's modules, or as in its checkpoint, which is what servers expect; see conversion.py.
        """
        ...

    def move_to(self, device: torch.device) -> None:
        """Moves this process's shard of a model that is not trained."""
        ...
