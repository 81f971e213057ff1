"""The update phase: one optimizer step per minibatch, with the loss reduced over all its microbatches.

The loss is divided by token or trajectory counts for the whole minibatch, so gradients do not depend on the division
into microbatches. Metrics do not depend on the division into microbatches, minibatches and ranks either.

A metric is a mean, over loss tokens if it is [B, T] and over trajectories with loss tokens if it is [B]. A pair of
values and weights of the same shape gives their weighted mean, Σ w·v / Σ w. If the name starts with `max_` or `min_`,
the metric is the largest or smallest value whose weight is not 0; with `num_`, it is the weighted sum. A metric whose
weights are all 0 is left out. A part of a metric is a tensor [2]: Σ w·v (or the maximum or minimum so far), and Σ w.
The parts of all microbatches, ranks and minibatches are joined in the same way.

The effective sample size needs two sums. Let w be the weight of a token's policy gradient. The means of w and of w²
over the tokens that learn (w ≠ 0) are joined as two metrics, from which `values_of` computes `ess_fraction` = mean(w)²
/ mean(w²) = (Σw)² / (N Σw²). It is 1 on-policy, and about 1/N if one of N tokens carries all the weight. It counts
tokens, not trajectories, because losses weight tokens, and because rounding dominates the product of a long
trajectory's ratios: 30,000 differences of 0.01 nats have a standard deviation of 1.7 nats, so even on-policy the
effective sample size would be 5%.

Unlike validation metrics, these are not torchmetrics Metrics. A Metric reduces each of its states with a separate
collective (about 60 per update instead of two), in every process instead of only a role's ranks, and requires the same
metrics on all ranks. Shapes: B trajectories, T tokens.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightrl.checks.printable import count_text
from lightrl.errors import TrainingError
from lightrl.experience import FIELDS, Experience
from lightrl.functional import BranchRows, kl, neutralize, policy_ratio, reduce_loss
from lightrl.models import Metric, Outputs
from lightrl.module import ESS_WEIGHTS, RLModule
from lightrl.strategies import Ranks, ShardedExperience

log = logging.getLogger(__name__)

WEIGHT, SQUARED_WEIGHT, ESS = "ess_weight", "ess_weight_squared", "ess_fraction"

Reduction = Literal["mean", "sum", "max", "min"]


def reduction_of(name: str) -> Reduction:
    """Returns how to join a metric's values, which the first word after the last slash of its name determines."""
    word = name.rsplit("/", 1)[-1].split("_", 1)[0]
    reductions: dict[str, Reduction] = {"max": "max", "min": "min", "num": "sum"}
    return reductions.get(word, "mean")


@torch.no_grad()
def parts_of(metrics: Mapping[str, Metric], loss_mask: Tensor) -> dict[str, Tensor]:
    """Returns each metric's part from a microbatch, [2]: its weighted sum, maximum or minimum, and the sum of weights.

    Args:
        metrics: name (see `reduction_of`) → values [B, T] or [B], or a pair of values and weights; masked positions
            and values with weight 0 have no effect.
        loss_mask: bool [B, T].
    """
    masks = {2: loss_mask, 1: loss_mask.any(1)}
    # id of the weights (None: number of dims) → weights, mask of values that count, sum of weights; shared by metrics
    weights_by_key: dict[int, tuple[Tensor | None, Tensor, Tensor]] = {}
    numbers, sums = [], []
    for name, metric in metrics.items():
        values, given = metric if isinstance(metric, tuple) else (metric, None)
        key, mask = values.dim() if given is None else id(given), masks[values.dim()]
        if key not in weights_by_key:
            if given is None:
                weights_by_key[key] = None, mask, mask.sum(dtype=torch.float32)
            else:
                given = torch.where(mask, given.float(), 0.0)
                weights_by_key[key] = given, given != 0, given.sum()
        weights, counts, total = weights_by_key[key]
        reduction, values = reduction_of(name), values.float()
        if reduction == "max":
            numbers.append(torch.where(counts, values, -torch.inf).amax())
        elif reduction == "min":
            numbers.append(torch.where(counts, values, torch.inf).amin())
        else:
            numbers.append(torch.where(counts, values if weights is None else values * weights, 0.0).sum())
        sums.append(total)
    return dict(zip(metrics, torch.stack([torch.stack(numbers), torch.stack(sums)], 1).unbind(), strict=True))


def values_of(parts: Mapping[str, Tensor]) -> dict[str, float]:
    """Computes each metric's value from its joined part (see above); omits metrics whose weights are all 0."""
    values: dict[str, float] = {}
    for name, part in parts.items():
        number, weight = part.tolist()
        if weight != 0:
            values[name] = number / weight if reduction_of(name) == "mean" else number
    if SQUARED_WEIGHT in values:
        values[ESS] = values.pop(WEIGHT) ** 2 / values.pop(SQUARED_WEIGHT)
    return values


def over_ranks(parts: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Joins the parts of all ranks, which may have different metrics; every rank gets the same result.

    One sum is enough: each rank fills one column of a table of zeros, so the sum contains all ranks' columns.
    """
    names = _all_names(sorted(parts), ranks)
    columns = torch.zeros(len(names), ranks.dp_size, 2, dtype=torch.float64)
    for row, name in enumerate(names):
        if name in parts:
            columns[row, ranks.dp_rank] = parts[name].double()
    columns = ranks.sum_(columns)
    whole: dict[str, Tensor] = {}
    for row, name in enumerate(names):
        for part in columns[row].unbind():
            if part[1]:
                add_parts(whole, {name: part})
    return whole


def add_parts(whole: dict[str, Tensor], parts: Mapping[str, Tensor]) -> None:
    """Joins parts into `whole`, in place: adds sums, or keeps the larger maximum or smaller minimum; adds weights."""
    for name, part in parts.items():
        before, reduction = whole.get(name), reduction_of(name)
        if before is None:
            whole[name] = part
        elif reduction in ("mean", "sum"):
            whole[name] = before + part
        else:
            choose = torch.maximum if reduction == "max" else torch.minimum
            whole[name] = torch.stack([choose(before[0], part[0]), before[1] + part[1]])


def _all_names(own: list[str], ranks: Ranks) -> list[str]:
    """Returns all names that any rank has; sends names only if checksums show that ranks have different names."""
    encoded = json.dumps(own).encode()
    checksums = torch.zeros(ranks.dp_size, 2, dtype=torch.float64)  # each rank's checksum, and the length of its names
    checksums[ranks.dp_rank] = torch.tensor([zlib.crc32(encoded), len(encoded)])
    checksums = ranks.sum_(checksums)
    if bool((checksums == checksums[0]).all()):
        return own
    text = torch.zeros(ranks.dp_size, max(sizes := checksums[:, 1].int().tolist()))
    text[ranks.dp_rank, : len(encoded)] = torch.tensor(list(encoded))
    rows = ranks.sum_(text).to(torch.uint8).tolist()
    lists = [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]
    return sorted({name for names in lists for name in names})


@dataclass
class MinibatchLoss:
    """Reduces the losses and metrics that `RLModule.loss` or `value_loss` returns for a minibatch's microbatches.

    Args:
        module: defines the losses and `loss_reduction`.
        minibatch: the whole minibatch, with the rows of all ranks.
        ranks: all ranks of the run; the role's ranks divide the minibatch among them.
        weight_version: the version of the current weights in an iteration's first update; None in later ones.
    """

    module: RLModule
    minibatch: Experience | ShardedExperience
    role: str = "policy"
    ranks: Ranks = field(default_factory=Ranks)
    weight_version: int | None = None
    parts: dict[str, Tensor] = field(default_factory=dict)  # parts of metrics

    def __post_init__(self) -> None:
        self.holders = self.ranks.of_role(self.role)
        self.num_tokens = max(1, self.minibatch.num_loss_tokens)
        self.num_sequences = max(1, int((self.minibatch.loss_token_counts > 0).sum()))

    def __call__(self, experience: Experience, outputs: Outputs) -> Tensor:
        """Computes this microbatch's share of the minibatch's loss, a scalar with gradient.

        If the critic is a head on the policy's body, the loss is policy loss + value_coef · value loss.
        """
        experience, outputs = self._neutralized(experience, outputs)
        if self.role != "policy":
            return self._value_share(experience, outputs, self.role) * self.holders.dp_size
        mask = experience.loss_mask
        result = self._call_hook("loss", experience, outputs)
        weights = result.pop(ESS_WEIGHTS, None)
        metrics: dict[str, Metric] = {}
        share = self._share("loss", result, experience, metrics, "")
        if outputs.logprobs.requires_grad and not share.requires_grad:
            raise ValueError(
                f"{self._name('loss')} returns a loss that has no gradient. Compute it from outputs.logprobs, without "
                "detach, item or no_grad."
            )
        with torch.no_grad():
            metrics["entropy_nats"] = outputs.entropy
            metrics |= self._behavior_metrics(experience, outputs.logprobs, weights)
            add_parts(self.parts, parts_of(metrics, mask))
        if outputs.values is not None:
            share = share + self.module.value_coef * self._value_share(experience, outputs, "critic")
        return share * self.holders.dp_size  # gradients are averaged over dp ranks, but shares must be summed

    def _behavior_metrics(self, experience: Experience, logprobs: Tensor, weights: Metric | None) -> dict[str, Metric]:
        k3 = kl(experience.behavior_logprobs, logprobs, estimator="k3")
        mismatch = (logprobs - experience.behavior_logprobs).abs()
        weights = weights if isinstance(weights, Tensor) else policy_ratio(logprobs, experience.behavior_logprobs)
        learns = weights != 0
        metrics: dict[str, Metric] = {"kl_behavior_nats": k3}
        metrics |= {WEIGHT: (weights, learns), SQUARED_WEIGHT: (weights.square(), learns)}
        metrics |= {"behavior_abs_dlogp_nats": mismatch, "max_behavior_abs_dlogp_nats": mismatch}
        if self.weight_version is not None:
            # For tokens that the current weights sampled, these metrics measure only numerics, not policy changes.
            is_current = experience.weight_versions == self.weight_version
            metrics["sync/mismatch_k3_nats"] = k3, is_current
            metrics["sync/mismatch_abs_dlogp_nats"] = metrics["sync/max_mismatch_abs_dlogp_nats"] = mismatch, is_current
            # Only rows without older tokens, because the engine may have reused older tokens' KV cache.
            in_current_row = (is_current | (experience.weight_versions < 0)).all(1)[:, None].expand_as(mismatch)
            metrics["sync/mismatch_present_abs_dlogp_nats"] = mismatch, in_current_row
            metrics["sync/max_mismatch_present_abs_dlogp_nats"] = mismatch, in_current_row
            metrics["sync/num_present_tokens"] = torch.ones_like(mismatch), in_current_row
        return metrics

    def _name(self, hook: str) -> str:
        return f"{type(self.module).__name__}.{hook}"

    def _call_hook(self, hook: str, experience: Experience, values: object) -> dict[str, Metric]:
        """Calls a user's loss; if it makes a common mistake, raises an error that says how to fix it."""
        name = self._name(hook)
        try:
            result = getattr(self.module, hook)(experience, values)
        except MisconfigurationException as error:
            raise ValueError(f"{name} must not call self.log. Return the metric by name, next to 'loss'.") from error
        except (AttributeError, TypeError) as error:
            _explain(error, name, experience)
            raise
        if not isinstance(result, Mapping):
            raise TypeError(
                f"{name} must return a dict, got {type(result).__name__}. Return {{'loss': ...}}, per "
                "token or per trajectory."
            )
        return dict(result)

    def _value_share(self, experience: Experience, outputs: Outputs, role: str) -> Tensor:
        assert outputs.values is not None
        result = self._call_hook("value_loss", experience, outputs.values)
        metrics: dict[str, Metric] = {}
        share = self._share("value_loss", result, experience, metrics, f"{role}/")
        if metrics:
            add_parts(self.parts, parts_of(metrics, experience.loss_mask))
        return share

    def _share(
        self, hook: str, result: Mapping[str, Metric], experience: Experience, metrics: dict[str, Metric], prefix: str
    ) -> Tensor:
        """Returns a hook's reduced loss; adds its other metrics to `metrics` under their prefixed names."""
        mask, hook = experience.loss_mask, self._name(hook)
        if "loss" not in result:
            raise ValueError(f"{hook} must return a dict with the key 'loss', got the keys {sorted(result)}.")
        for name, metric in result.items():
            _check_metric(hook, name, metric, mask)
            if name != "loss":
                metrics[prefix + name] = metric
        loss = result["loss"]
        assert isinstance(loss, Tensor)
        weights = None if experience.gaps is None else self._token_weights(experience, experience.gaps)
        if weights is not None and loss.dim() == 2:
            loss = loss * weights.to(loss.dtype)
        share = reduce_loss(
            loss,
            mask,
            mode=self.module.loss_reduction,
            num_tokens=self.num_tokens,
            num_sequences=self.num_sequences,
            max_new_tokens=self.module.sampling.max_new_tokens,
        )
        # Whatever the reduction, the loss is the sum of the shares, so the weights of the parts sum to 1.
        add_parts(self.parts, {f"{prefix}loss": torch.stack([share.detach(), mask.sum() / self.num_tokens])})
        return share

    def _token_weights(self, experience: Experience, gaps: Tensor) -> Tensor | None:
        """Returns each token's weight from `row_weights`, [B, T]; None if all are 1."""
        rows = BranchRows.of(gaps, experience.lengths)
        weights = self.module.row_weights((rows.spread(experience.loss_mask) & rows.is_first).sum(1), rows.trees)
        if weights is None:
            return None
        if not isinstance(weights, Tensor) or weights.shape != rows.trees.shape:
            got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise ValueError(f"{self._name('row_weights')} must return [R] = {tuple(rows.trees.shape)}, got {got}.")
        return weights[rows.tree_rows]

    def reduce(self) -> None:
        """Joins the parts of all ranks after the last microbatch, so that every rank reports the same numbers."""
        if self.holders.is_here and self.holders.dp_size > 1:
            self.parts = over_ranks(self.parts, self.holders)
        if self.holders.size < self.ranks.size:
            with self.ranks.phase(f"update: {self.role}"):  # also for ranks without the role
                self.parts = self.ranks.broadcast_tensors(self.parts, source=self.holders.first_rank)
        if self.parts:  # copy all to the host at once
            numbers = torch.stack(list(self.parts.values())).cpu().double()
            self.parts = dict(zip(self.parts, numbers.unbind(), strict=True))

    def _neutralized(self, experience: Experience, outputs: Outputs) -> tuple[Experience, Outputs]:
        """Sets values outside the loss mask to 0; with a single update, sets proximal_logprobs to the logprobs."""
        mask = experience.loss_mask
        tensors = {name: value for name, value in vars(outputs).items() if value is not None}
        outputs = replace(outputs, **dict(zip(tensors, neutralize(mask, *tensors.values()), strict=True)))
        fields = {
            name: neutralize(mask, value)[0]
            for name, value in experience.tensors().items()
            if value.dim() >= 2 and value.is_floating_point() and name != "pixel_values"
        }
        if self.module.needs_proximal_logprobs and self.module.makes_one_update:
            fields["proximal_logprobs"] = outputs.logprobs.detach()
        return experience.with_tensors(fields), outputs


def _check_metric(hook: str, name: str, metric: Metric, mask: Tensor) -> None:
    is_pair = isinstance(metric, tuple) and len(metric) == 2 and name != "loss"
    tensors: Any = metric if is_pair else (metric,)
    for value in tensors:
        if not isinstance(value, Tensor) or value.shape not in (mask.shape, mask.shape[:1]):
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{hook} must return {name!r} per token, [B, T] = {tuple(mask.shape)}, or per trajectory, [B] = "
                f"{tuple(mask.shape[:1])}, got {shape}. The framework averages it."
            )
    if tensors[0].shape != tensors[-1].shape:
        raise ValueError(
            f"Values and weights of {name!r} from {hook} must have the same shape, got {tuple(tensors[0].shape)} and "
            f"{tuple(tensors[-1].shape)}."
        )


def _explain(error: AttributeError | TypeError, name: str, experience: Experience) -> None:
    """Raises an error with a fix if a loss reads a field that does not exist or is not set."""
    missing = FIELDS - experience.tensors().keys()
    if isinstance(error, AttributeError) and isinstance(error.obj, Experience):
        wrong = str(error.name)
        fix = " or ".join(difflib.get_close_matches(wrong, FIELDS, 1) or sorted(experience.tensors()))
        raise AttributeError(f"{name} reads experience.{wrong}, which does not exist. Use {fix}.") from error
    if "NoneType" in str(error) and "proximal_logprobs" in missing:
        raise ValueError(
            f"{name} computes with None ({error}): experience has no {', '.join(sorted(missing))}. Set "
            "needs_proximal_logprobs = True for proximal logprobs; add a model call for other fields."
        ) from error


class GradientGuard:
    """Skips an update whose gradients are not finite, counts it, and ends the run after too many in a row."""

    def __init__(self) -> None:
        self.num_skipped = 0
        self.num_in_a_row = 0

    def check(
        self, parameters: list[Tensor], zero_grad: Callable[[], None], *, max_in_a_row: int, ranks: Ranks | None = None
    ) -> float:
        """Returns the gradient norm over all parameters; if it is not finite, deletes the gradients.

        Raises TrainingError after `max_in_a_row` skipped updates in a row.
        """
        norm = (ranks or Ranks()).total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        if math.isfinite(norm):
            self.num_in_a_row = 0
        else:
            zero_grad()
            for parameter in parameters:  # zeros would still move Adam's moments and decay the weights
                parameter.grad = None
            self._count_skipped(norm, max_in_a_row)
        return norm

    def _count_skipped(self, norm: float, max_in_a_row: int) -> None:
        self.num_skipped += 1
        self.num_in_a_row += 1
        log.warning("Skipping an update (%d so far): its gradient norm is %s.", self.num_skipped, norm)
        if self.num_in_a_row >= max_in_a_row:
            raise TrainingError(
                f"Aborting: {count_text(self.num_in_a_row, 'update')} in a row had non-finite gradients "
                f"(max_skipped_updates={max_in_a_row}). Lower the learning rate, clip gradients, or check your loss "
                "for inf and nan."
            )
