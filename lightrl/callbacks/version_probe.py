"""VersionProbe: whether an engine's scores of the probe follow the trainer's present weights, or older ones.

Shapes: N scored tokens of the probe. p [N] are the trainer's logprobs, e [N] the engine's, of versions u < v:

    d = p_v - p_u                 what the trainer's updates changed
    x = e_v - e_u                 what the engine's did; rounding that did not change cancels
    t = <x, d> / <d, d>           1: it has them; 0: it ignored them; between: a part is missing; 2: applied twice

The standard error of t is White's (HC3): the residual x - t d of each token, over one minus its leverage, weighted by
d²; the trainer's own rounding is added. More than `STANDARD_ERRORS` of them are a fault. Tokens share their context and
their weights, so noise along d may exceed that across it: in healthy syncs the standard deviation of t was at most 1.7
of its standard errors. Even if it were 2.4 of them, a sync would raise a false alarm with a probability below 1e-6 (50
comparisons of 5.8 standard deviations each). In 14 runs of 1,000 healthy syncs (2,000 to 65,000 parameters, float32,
float16 and bfloat16, lr 1e-7 to 1e-3) there was none.

Older versions u are kept ever more sparsely, back to the first: where one step is smaller than rounding, many are not.
Each u is also compared with the first sync's difference, x = (e_v - p_u) - (e_0 - p_0), which shows an engine that is
one version behind each time. In low precision a small step changes few of the weights that the engine gets; nothing is
decided until `MIN_CHANGED` have changed, so that their rounding shows in the residual.

Source: MacKinnon and White, Some heteroskedasticity-consistent covariance matrix estimators, 1985.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.weights import Bucket

STANDARD_ERRORS = 14.0
TOLERANCE = 0.1  # of t
MIN_CHANGED = 256  # parameters; with 17 of them a healthy engine of 2,000 parameters was taken for an older one
SAMPLES = 256  # of each tensor


@dataclass(frozen=True)
class Verdict:
    """What the scores of one sync show; neither is an answer where nothing moved measurably."""

    has_version: bool = False  # they follow this version, and not the one before
    problem: str = ""  # what they follow instead


class SentSample:
    """Some values of each tensor that was sent, to count how many changed in the engine's dtype."""

    def __init__(self) -> None:
        self._values = [torch.zeros(0)]
        self._counts = [torch.zeros(0)]  # how many parameters each value stands for

    def watch(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """The buckets; takes its sample as they pass."""
        for bucket in buckets:
            for tensor in bucket.tensors.values():
                flat = tensor.detach().reshape(-1)
                picked = flat[:: (flat.numel() // SAMPLES) | 1]  # an odd stride does not stay in one column
                self._values.append(picked.to("cpu", torch.float32, copy=True))  # never the trainer's own memory
                self._counts.append(torch.full((picked.numel(),), flat.numel() / max(1, picked.numel())))
            yield bucket
            del bucket  # else it stays alive while the next is gathered

    def num_changed(self, other: SentSample, dtype: torch.dtype) -> float:
        """An estimate of how many parameters differ from another version's, rounded to `dtype`."""
        mine, theirs = self._joined(), other._joined()
        return float(self._counts[0][mine.to(dtype).float() != theirs.to(dtype).float()].sum())

    def _joined(self) -> Tensor:
        """[n], all values; joined once."""
        if len(self._values) > 1:
            self._values, self._counts = [torch.cat(self._values)], [torch.cat(self._counts)]
        return self._values[0]


@dataclass(frozen=True)
class _Sync:
    number: int
    weight_version: int
    trainer: Tensor  # [N]
    engine: Tensor  # [N]
    sent: SentSample


class VersionProbe:
    """The probe's scores of one replica, sync by sync."""

    def __init__(self) -> None:
        self._syncs: list[_Sync] = []  # the first, the last, and ever fewer between
        self._num_syncs = 0

    def judge(
        self,
        weight_version: int,
        trainer: Tensor,
        engine: Tensor,
        sent: SentSample,
        *,
        trainer_eps: float,
        engine_dtype: torch.dtype,
    ) -> Verdict:
        """Compares this sync with the earlier ones, and keeps it.

        Args:
            trainer, engine: [N], float64.
            sent: of this version's parameters.
            trainer_eps: of the dtype in which the trainer computes.
        """
        now = _Sync(self._num_syncs, weight_version, trainer, engine, sent)
        previous = self._syncs
        self._keep(now)
        rounding = trainer_eps * (1 + float(trainer.abs().mean()))
        shares: list[tuple[float, int]] = []  # t and version of the comparisons that show a fault
        is_excluded = False  # the version before this one
        for then in previous:
            is_excluded = False
            moved = trainer - then.trainer
            is_measurable = float(moved.pow(2).mean().sqrt()) >= 4 * rounding
            if not is_measurable or sent.num_changed(then.sent, engine_dtype) < MIN_CHANGED:
                continue
            is_excluded = True
            for known in (then, previous[0]):
                bias = known.engine - known.trainer
                share, error = _share(engine - then.trainer - bias, moved, rounding)
                is_excluded &= share > 0.5 and share >= STANDARD_ERRORS * error
                if abs(1 - share) >= TOLERANCE + STANDARD_ERRORS * error:
                    shares.append((share, then.weight_version))
        if not shares:
            return Verdict(has_version=is_excluded)
        share, version = min(shares, key=lambda item: abs(item[0]))
        if abs(share) < 0.5:
            return Verdict(problem=f"its scores are those of version {version}, not of version {weight_version}")
        return Verdict(problem=f"of the change since version {version} its scores show {share:.0%}")

    def _keep(self, now: _Sync) -> None:
        """Keeps about three syncs per power of two of their age."""
        self._num_syncs += 1
        strides = [2 ** max(0, (now.number - item.number).bit_length() - 2) for item in self._syncs]
        kept = [item for item, stride in zip(self._syncs, strides, strict=True) if item.number % stride == 0]
        self._syncs = [*kept, now]


def _share(engine_moved: Tensor, moved: Tensor, rounding: float) -> tuple[float, float]:
    """t and its standard error; `rounding` is the trainer's, in nats."""
    square = moved @ moved
    share = (engine_moved @ moved) / square
    leverage = moved.pow(2) / square
    residual = (engine_moved - share * moved) / (1 - leverage).clamp(min=1e-3)
    variance = (residual * moved).pow(2).sum() / square**2 + rounding**2 / square
    return float(share), float(variance.sqrt())


def as_row(rows: list[list[float]]) -> Tensor:
    """[N] float64 of all sequences, without their first tokens, which have no logprob."""
    return torch.tensor([value for row in rows for value in row[1:]], dtype=torch.float64)
