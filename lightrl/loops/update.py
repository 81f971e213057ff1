"""The update phase: one optimizer step per minibatch, whatever its microbatches; the loss reduced over all of them.

N loss tokens and B trajectories are those of the whole minibatch, so gradients do not depend on how it is cut.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrl.errors import TrainingError
from lightrl.experience import Experience
from lightrl.functional import kl, neutralize, reduce_loss
from lightrl.loops.metrics import joined, over_ranks, part_of_metric
from lightrl.models import Outputs
from lightrl.strategies import Ranks

if TYPE_CHECKING:
    from lightrl.module import RLModule

log = logging.getLogger(__name__)


@dataclass
class MinibatchLoss:
    """Reduces what `RLModule.loss` or `value_loss` returns for the microbatches of one minibatch, and their metrics.

    Args:
        module: has the losses and `loss_reduction`.
        minibatch: all microbatches of all ranks together.
        role: whose model is trained.
        ranks: all of the run; those of the role have the other microbatches.
    """

    module: RLModule
    minibatch: Experience
    role: str = "policy"
    ranks: Ranks = field(default_factory=Ranks)
    sums: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)  # of a metric's mean, when minibatches are averaged

    def __post_init__(self) -> None:
        self.holders = self.ranks.of_role(self.role)
        self.num_tokens = max(1, self.minibatch.num_loss_tokens)
        self.num_sequences = max(1, int(self.minibatch.loss_mask.any(1).sum()))

    def __call__(self, experience: Experience, outputs: Outputs) -> Tensor:
        """This microbatch's share of the minibatch's loss of a role's model, a number that carries the gradient.

        A policy whose body bears the critic's head has both losses: loss + value_coef · value loss.
        """
        experience, outputs = self._neutral(experience, outputs)
        if self.role != "policy":
            return self._value_share(experience, outputs, self.role) * self.holders.dp_size
        mask = experience.loss_mask
        share = self._share("loss", self.module.loss(experience, outputs), mask, prefix="")
        with torch.no_grad():
            self._add("entropy_nats", outputs.entropy.detach(), mask)
            difference = kl(experience.behavior_logprobs, outputs.logprobs.detach(), estimator="k3")
            self._add("kl_behavior_nats", difference, mask)
            mismatch = (outputs.logprobs.detach() - experience.behavior_logprobs).abs()
            self._add("behavior_abs_dlogp_nats", mismatch, mask)
            self._add("max_behavior_abs_dlogp_nats", mismatch, mask)
        if outputs.values is not None:
            share = share + self.module.value_coef * self._value_share(experience, outputs, "critic")
        return share * self.holders.dp_size  # gradients are averaged over dp ranks, and shares are to be summed

    def _value_share(self, experience: Experience, outputs: Outputs, role: str) -> Tensor:
        assert outputs.values is not None
        result = self.module.value_loss(experience, outputs.values)
        return self._share("value_loss", result, experience.loss_mask, prefix=f"{role}/")

    def _share(self, hook: str, result: dict[str, Tensor], mask: Tensor, *, prefix: str) -> Tensor:
        """What a hook returned: its loss reduced, its metrics kept under their names behind the prefix."""
        if "loss" not in result:
            raise ValueError(f"{hook} returned the keys {sorted(result)}, expected 'loss' among them. Add it.")
        for name, value in result.items():
            if not isinstance(value, Tensor) or value.shape not in (mask.shape, mask.shape[:1]):
                found = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"as {type(value).__name__}"
                raise ValueError(
                    f"{hook} returned {name!r} {found}, expected [B, T] = {tuple(mask.shape)} or [B] = "
                    f"{tuple(mask.shape[:1])}. Return it per token or per trajectory; the framework averages."
                )
            if name != "loss":
                self._add(prefix + name, value.detach(), mask)
        share = reduce_loss(
            result["loss"],
            mask,
            mode=self.module.loss_reduction,
            num_tokens=self.num_tokens,
            num_sequences=self.num_sequences,
            max_new_tokens=self.module.sampling.max_new_tokens,
        )
        self._count(f"{prefix}loss", share.detach(), 1)  # what is minimized, under whatever reduction
        return share

    def reduce(self) -> None:
        """After the last microbatch: sums over all ranks, so that every rank reports the same numbers."""
        if self.holders.is_here:
            self.sums, self.weights = over_ranks(self.sums, self.holders, self.weights)
        if self.holders.size < self.ranks.size:
            with self.ranks.phase(f"update: {self.role}"):
                self._tell_all()

    def _tell_all(self) -> None:
        """Tells all ranks what those of the role found."""
        source = self.holders.first_rank
        weights = {name: torch.tensor(weight) for name, weight in self.weights.items()}
        self.sums = self.ranks.broadcast_tensors(self.sums, source=source)
        weights = self.ranks.broadcast_tensors(weights, source=source)
        self.weights = {name: int(weight) for name, weight in weights.items()}

    def metrics(self) -> dict[str, float]:
        """Of the whole minibatch: means over loss tokens (for [B, T]) or trajectories (for [B]); see metrics.py."""
        names = list(self.sums)
        return dict(zip(names, torch.stack([self.sums[name] for name in names]).tolist(), strict=True)) if names else {}

    def _neutral(self, experience: Experience, outputs: Outputs) -> tuple[Experience, Outputs]:
        mask = experience.loss_mask
        said = {name: value for name, value in vars(outputs).items() if value is not None}
        outputs = replace(outputs, **dict(zip(said, neutralize(mask, *said.values()), strict=True)))
        fields = {
            name: neutralize(mask, value)[0]
            for name, value in experience.tensors().items()
            if value.dim() >= 2 and value.is_floating_point() and name != "pixel_values"
        }
        if self.module.needs_proximal_logprobs and self.module.makes_one_update:
            fields["proximal_logprobs"] = outputs.logprobs.detach()
        return experience.with_tensors(fields), outputs

    def _add(self, name: str, value: Tensor, mask: Tensor) -> None:
        counts = {"num_tokens": self.num_tokens, "num_sequences": self.num_sequences}
        weight = self.num_tokens if value.dim() == 2 else self.num_sequences
        self._count(name, part_of_metric(name, value, mask, **counts), weight)

    def _count(self, name: str, part: Tensor, weight: int) -> None:
        self.sums[name] = joined(name, self.sums[name], part) if name in self.sums else part
        self.weights[name] = weight


class GradientGuard:
    """Skips an update whose gradients are not finite, counts it, and ends the run after too many in a row."""

    def __init__(self) -> None:
        self.num_skipped = 0
        self.num_in_a_row = 0

    def check(
        self,
        parameters: list[Tensor],
        zero_grad: Callable[[], None],
        *,
        max_in_a_row: int,
        ranks: Ranks | None = None,
    ) -> float:
        """The gradient norm over all parameters; where it is not finite the gradients are gone afterwards.

        Raises:
            TrainingError: after `max_in_a_row` skipped updates in a row.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = (ranks or Ranks()).total_norm(gradients)
        if math.isfinite(norm):
            self.num_in_a_row = 0
            return norm
        zero_grad()
        for parameter in parameters:  # a gradient of zeros would still move Adam's moments and decay the weights
            parameter.grad = None
        self.num_skipped += 1
        self.num_in_a_row += 1
        log.warning("The gradient norm is %s: this update is skipped (%d so far).", norm, self.num_skipped)
        if self.num_in_a_row >= max_in_a_row:
            raise TrainingError(
                f"{self.num_in_a_row} updates in a row had gradients that are not finite, expected fewer than "
                f"max_skipped_updates={max_in_a_row}. Lower the learning rate, clip gradients, or look for inf and nan "
                "in your loss."
            )
        return norm
