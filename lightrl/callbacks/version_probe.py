"""VersionProbe: whether an engine's scores of the probe follow the trainer's present weights, or older ones.

Shapes: B sequences, N scored tokens of the probe. p [N] are the trainer's logprobs, e [N] the engine's, of
versions u < v:

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
decided until `MIN_CHANGED` have changed, so that their rounding shows in the residual. Of adapters that the engine does
not merge nearly all change in each step and still none may show: there, d must also exceed the engine's rounding.

A step that rounding hides has no measurable d. But an engine that repeats itself to the bit gives an *unchanged answer*
only if it has u, or if v happens to change no bit of the N scores. How likely that is, its earlier syncs tell. Count in
each of their sequences the tokens up to the first whose score changed (later ones may only follow from it): W tokens,
n of which changed. If a change is as likely at each token of this sync as at theirs, the probability that n changes
among W + N tokens all lie in the W is C(W, n) / C(W + N, n). At most `MAX_CHANCE` is a fault. A sync that moved p, or
the weights, k times as far as this one counts its W tokens k times. An engine that answers the same question twice with
other bits is not judged so. In 25,200 healthy syncs (three dtypes, adapters served and whole weights, lr 1e-7 to 1e-4,
constant, falling, or small in every fifth step) 6,215 answers were unchanged, and the smallest chance was 0.04.

Source: MacKinnon and White, Some heteroskedasticity-consistent covariance matrix estimators, 1985.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightrl.models.lora import is_adapter
from lightrl.weights import Bucket

STANDARD_ERRORS = 14.0
TOLERANCE = 0.1  # of t
MIN_CHANGED = 256  # parameters; with 17 of them a healthy engine of 2,000 parameters was taken for an older one
SAMPLES = 256  # of each tensor
MAX_CHANCE = 1e-6  # of a healthy engine's unchanged answer
NUM_STEPS = 64  # earlier syncs, of which that chance is computed


@dataclass(frozen=True)
class Verdict:
    """What the scores of one sync show; neither is an answer where nothing moved measurably."""

    has_version: bool = False  # they follow this version, and not the one before
    problem: str = ""  # what they follow instead


class SentSample:
    """Some values of each tensor that was sent, to count how many changed in the engine's dtype.

    Adapters come before their base, which only the first sync sends; it is left out.
    """

    def __init__(self) -> None:
        self._values = [torch.zeros(0)]
        self._counts = [torch.zeros(0)]  # how many parameters each value stands for
        self.has_adapters = False

    def watch(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """The buckets; takes its sample as they pass."""
        for bucket in buckets:
            for name, tensor in bucket.tensors.items():
                if self.has_adapters and not is_adapter(name):
                    continue
                self.has_adapters = is_adapter(name)
                flat = tensor.detach().reshape(-1)
                picked = flat[:: (flat.numel() // SAMPLES) | 1]  # an odd stride does not stay in one column
                self._values.append(picked.to("cpu", torch.float32, copy=True))  # never the trainer's own memory
                self._counts.append(torch.full((picked.numel(),), flat.numel() / max(1, picked.numel())))
            yield bucket
            del bucket  # else it stays alive while the next is gathered

    def num_changed(self, other: SentSample, dtype: torch.dtype) -> float:
        """An estimate of how many parameters differ from another version's, rounded to `dtype`."""
        return self._counted(self._moved(other, dtype) != 0)

    def moved(self, other: SentSample, dtype: torch.dtype) -> float:
        """An estimate of the norm of the difference."""
        return math.sqrt(self._counted(self._moved(other, dtype).pow(2)))

    def _counted(self, values: Tensor) -> float:
        """The sum over all parameters of what is given for each of the sample."""
        return float(self._counts[0] @ values.float())

    def _moved(self, other: SentSample, dtype: torch.dtype) -> Tensor:
        return self._joined().to(dtype).double() - other._joined().to(dtype).double()

    def _joined(self) -> Tensor:
        """[n], all values; joined once."""
        if len(self._values) > 1:
            self._values, self._counts = [torch.cat(self._values)], [torch.cat(self._counts)]
        return self._values[0]


@dataclass(frozen=True)
class _Sync:
    number: int
    weight_version: int
    trainer: Tensor  # [B, N / B]
    engine: Tensor  # [B, N / B]
    sent: SentSample


class _Step(NamedTuple):
    """Of one sync to the next."""

    trainer_moved: float  # norm, in nats
    weights_moved: float  # norm
    num_tokens: int  # up to the first whose answer changed, in each sequence
    num_changed: int  # sequences with one


class VersionProbe:
    """The probe's scores of one replica, sync by sync."""

    def __init__(self) -> None:
        self._syncs: list[_Sync] = []  # the first, the last, and ever fewer between
        self._num_syncs = 0
        self._steps: deque[_Step] = deque(maxlen=NUM_STEPS)  # the last
        self._repeats = True

    def judge(
        self,
        weight_version: int,
        trainer: Tensor,
        engine: Tensor,
        sent: SentSample,
        *,
        trainer_eps: float,
        engine_dtype: torch.dtype,
        repeats: bool = False,
    ) -> Verdict:
        """Compares this sync with the earlier ones, and keeps it.

        Args:
            trainer, engine: [B, N / B], float64.
            sent: of this version's parameters.
            trainer_eps: of the dtype in which the trainer computes.
            repeats: whether the engine was asked twice, and gave the same bits.
        """
        now = _Sync(self._num_syncs, weight_version, trainer, engine, sent)
        previous = self._syncs
        self._repeats &= repeats
        repeated = self._repeated(now, engine_dtype)
        self._keep(now)
        eps = max(trainer_eps, torch.finfo(engine_dtype).eps) if sent.has_adapters else trainer_eps
        rounding = eps * (1 + float(trainer.abs().mean()))
        shares: list[tuple[float, int]] = []  # t and version of the comparisons that show a fault
        is_excluded = False  # the version before this one
        for then in previous:
            is_excluded = False
            moved = (trainer - then.trainer).flatten()
            is_measurable = float(moved.pow(2).mean().sqrt()) >= 4 * rounding
            if not is_measurable or sent.num_changed(then.sent, engine_dtype) < MIN_CHANGED:
                continue
            is_excluded = True
            for known in (then, previous[0]):
                bias = known.engine - known.trainer
                share, error = _share((engine - then.trainer - bias).flatten(), moved, rounding)
                is_excluded &= share > 0.5 and share >= STANDARD_ERRORS * error
                if abs(1 - share) >= TOLERANCE + STANDARD_ERRORS * error:
                    shares.append((share, then.weight_version))
        if not shares and repeated is not None:
            return Verdict(
                problem=f"its scores are bit for bit those of version {repeated.weight_version}, although about "
                f"{sent.num_changed(repeated.sent, engine_dtype):.0f} parameters have changed since"
            )
        if not shares:
            return Verdict(has_version=is_excluded)
        share, version = min(shares, key=lambda item: abs(item[0]))
        if abs(share) < 0.5:
            return Verdict(problem=f"its scores are those of version {version}, not of version {weight_version}")
        return Verdict(problem=f"of the change since version {version} its scores show {share:.0%}")

    def _repeated(self, now: _Sync, dtype: torch.dtype) -> _Sync | None:
        """The sync whose answer this is, unless a healthy engine might have given it; learns from the last one."""
        fault = None
        for then in self._syncs if self._repeats else []:
            step = _step(then, now, dtype)
            if step.num_changed == 0 and now.sent.num_changed(then.sent, dtype) >= MIN_CHANGED:
                fault = then if self._chance(step, now.engine.numel()) <= MAX_CHANCE else fault
        if self._syncs:
            self._steps.append(_step(self._syncs[-1], now, dtype))
        return fault

    def _chance(self, step: _Step, num_tokens: int) -> float:
        """That a healthy engine's answer would not change in a step, by those before."""
        if step.trainer_moved == 0 or step.weights_moved == 0:
            return 1.0
        before = 0.0
        for one in self._steps:
            further = max(one.trainer_moved / step.trainer_moved, one.weights_moved / step.weights_moved)
            before += one.num_tokens * max(1.0, further)
        num_changed = sum(one.num_changed for one in self._steps)
        return math.prod((before - index) / (before + num_tokens - index) for index in range(num_changed))

    def _keep(self, now: _Sync) -> None:
        """Keeps about three syncs per power of two of their age."""
        self._num_syncs += 1
        strides = [2 ** max(0, (now.number - item.number).bit_length() - 2) for item in self._syncs]
        kept = [item for item, stride in zip(self._syncs, strides, strict=True) if item.number % stride == 0]
        self._syncs = [*kept, now]


def _step(then: _Sync, now: _Sync, dtype: torch.dtype) -> _Step:
    trainer_moved = float((now.trainer - then.trainer).norm())
    has_changed = now.engine != then.engine
    num_equal = int((has_changed.cumsum(1) == 0).sum())  # before the first that changed
    num_changed = int(has_changed.any(1).sum())
    return _Step(trainer_moved, now.sent.moved(then.sent, dtype), num_equal + num_changed, num_changed)


def _share(engine_moved: Tensor, moved: Tensor, rounding: float) -> tuple[float, float]:
    """t and its standard error; `rounding` is the trainer's, in nats."""
    square = moved @ moved
    share = (engine_moved @ moved) / square
    leverage = moved.pow(2) / square
    residual = (engine_moved - share * moved) / (1 - leverage).clamp(min=1e-3)
    variance = (residual * moved).pow(2).sum() / square**2 + rounding**2 / square
    return float(share), float(variance.sqrt())


def as_rows(rows: list[list[float]]) -> Tensor:
    """[B, N / B] float64, without the sequences' first tokens, which have no logprob."""
    return torch.tensor([row[1:] for row in rows], dtype=torch.float64)
