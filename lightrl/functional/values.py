"""The critic's loss, and the running statistics that keep its targets near mean 0 and deviation 1.

Shapes: B trajectories, T tokens. `values[b, t]` is the value of the state before `token_ids[b, t]` was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightrl.checks.bounds import check_choice
from lightrl.functional.advantages import moments
from lightrl.functional.reduction import Total, of_one_rank
from lightrl.functional.shapes import check_same_shape

ValueNormalization = Literal["exponential", "running"]


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor | None = None,
    *,
    value_clip: float | None = None,
    huber_delta: float | None = None,
) -> Tensor:
    """Half the squared distance of a value from its return, per token; linear far out with `huber_delta`.

    With `value_clip`, a value that has moved further than that from the old one has the worse loss of itself and the
    bound, so it gains nothing by moving further.

    Source: PPO's implementations, https://arxiv.org/abs/2005.12729; Huber, https://doi.org/10.1214/aoms/1177703732.

    Args:
        values: [B, T], carry the gradient.
        returns: [B, T].
        old_values: [B, T], from before the update; required with `value_clip`.
        value_clip: bound on the move; None for no bound.
        huber_delta: distance beyond which the loss grows linearly; None for never.

    Returns:
        [B, T].

    Raises:
        ValueError: if the tensors differ in shape, a bound is not positive, or `value_clip` has no old values.
    """
    check_same_shape(values=values, returns=returns)
    for name, bound in (("value_clip", value_clip), ("huber_delta", huber_delta)):
        if bound is not None and bound <= 0:
            raise ValueError(f"{name} must be above 0 or None, got {bound}.")
    loss = _distance_loss(values - returns.detach(), huber_delta)
    if value_clip is None:
        return loss
    if old_values is None:
        raise ValueError(f"value_clip={value_clip} needs old_values, the values from before the update.")
    check_same_shape(values=values, old_values=old_values)
    old = old_values.detach()
    bounded = old + (values - old).clamp(-value_clip, value_clip)
    return torch.maximum(loss, _distance_loss(bounded - returns.detach(), huber_delta))


def explained_variance(values: Tensor, returns: Tensor, loss_mask: Tensor, total: Total = of_one_rank) -> float:
    """1 - Var(returns - values) / Var(returns) over the loss tokens: 1 is a perfect critic, 0 a constant one.

    0 if the returns do not vary. `total` is over ranks that have other trajectories.
    """
    check_same_shape(values=values, returns=returns, loss_mask=loss_mask)
    predicted, actual = values[loss_mask].double(), returns[loss_mask].double()
    _, variance, are_equal = moments(actual, total)
    _, unexplained, _ = moments(actual - predicted, total)
    return 0.0 if are_equal or float(variance) == 0 else float(1 - unexplained / variance)


@dataclass
class ValueNormalizer:
    """Mean and deviation of the returns seen so far; the critic predicts normalized returns.

    `running` counts each return once, so that statistics settle; `exponential` forgets, so that they follow a policy
    that gets better. Before the first update values stay as they are.

    Source: https://arxiv.org/abs/2006.05990, https://arxiv.org/abs/2103.01955.

    Args:
        kind: `running` or `exponential`.
        decay: of `exponential`, per iteration.
    """

    kind: ValueNormalization = "exponential"
    decay: float = 0.99
    mean: float = 0.0
    mean_square: float = 0.0
    weight: float = 0.0  # running: the number of returns; exponential: 1 - decay^iterations, its debiasing term

    def __post_init__(self) -> None:
        check_choice(get_args(ValueNormalization), value_normalization=self.kind)
        if not 0 <= self.decay < 1:
            raise ValueError(f"value_decay must be at least 0 and below 1, got {self.decay}.")

    def update(self, returns: Tensor, over_ranks: Total = of_one_rank) -> None:
        """Adds the returns of an iteration, of any shape, those of all ranks; without any, nothing changes."""
        values = returns.double()
        num, sum_, square_sum = over_ranks(
            torch.stack([torch.tensor(values.numel()).double(), values.sum(), values.square().sum()])
        ).tolist()
        if num == 0:
            return
        count = num if self.kind == "running" else 1 - self.decay
        keep = self.weight if self.kind == "running" else self.decay * self.weight
        total = keep + count
        self.mean = (keep * self.mean + count * sum_ / num) / total
        self.mean_square = (keep * self.mean_square + count * square_sum / num) / total
        self.weight = total

    @property
    def std(self) -> float:
        """The scale, at least 1e-2, since it divides."""
        return 1.0 if self.weight == 0 else max(self.mean_square - self.mean**2, 1e-4) ** 0.5

    def normalize(self, returns: Tensor) -> Tensor:
        return (returns - self.mean) / self.std

    def denormalize(self, values: Tensor) -> Tensor:
        return values * self.std + self.mean

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "mean_square": self.mean_square, "weight": self.weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.mean, self.mean_square, self.weight = state["mean"], state["mean_square"], state["weight"]


def _distance_loss(distance: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return distance.square() / 2
    far = distance.abs()
    return torch.where(far <= huber_delta, distance.square() / 2, huber_delta * (far - huber_delta / 2))
