"""LagProbe: how far the policy moves in one version and in η versions, by the trainer's numbers alone.

For a token that version b sampled and version v trains on, log π_v - log b is the policy's lag, log π_v - log π_b, plus
the engine's mismatch: the trainer computes logprobs of a few trajectories under version b, again under b + 1 and b + η.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.callbacks.probe import trainer_scores
from lightrl.functional import kl
from lightrl.module import RLModule
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import ranks_of
from lightrl.trajectory import Group

STEP = "policy/step_k3_nats"
EVERY = 10  # versions: what is scored after η versions too
MIN_ROWS, NUM_TOKENS = 4, 128  # trained rows and tokens; more rows where completions are short
MAX_FRACTION = 1 / 4  # the most of the trajectories
MAX_TOKENS = 1024  # the first tokens of each

_Row = tuple[list[int], list[bool], list[float]]  # token ids, loss mask, the engine's logprobs


@dataclass
class _Kept:
    """Trajectories of one iteration, with the logprobs of the version after it."""

    weight_version: int
    rows: list[_Row]
    logprobs: list[list[float]]

    def flat(self, now: list[list[float]]) -> tuple[Tensor, Tensor, Tensor]:
        """Logprobs of the engine, then, and now: of the tokens that train."""
        mask = torch.tensor([value for _, row, _ in self.rows for value in row])
        behavior, before, after = (
            torch.tensor([value for row in rows for value in row])[mask]
            for rows in ([row for _, _, row in self.rows], self.logprobs, now)
        )
        return behavior, before, after


class LagProbe:
    """`policy/step_k3_nats`, over one version, and `policy/lag_*`, over η = `max_staleness` versions: nats per token.

    In windowed order nearly every group is η versions old when it is trained on. Measured on loss tokens of the last
    iteration, at the temperature of training: the step in each iteration, the lag about every tenth; on-policy there is
    no lag and nothing is scored. A resumed run starts without kept trajectories.
    """

    def __init__(self) -> None:
        self._offered: list[_Row] = []
        self._last: _Kept | None = None
        self._kept: deque[_Kept] = deque()

    def offer(self, trainer: RLTrainer, groups: list[Group]) -> None:
        """The groups of this iteration, of which some trajectories are kept; rank 0 has their tokens."""
        self._offered = []
        if trainer.rollout.settings.max_staleness > 0 and trainer.is_global_zero:
            trajectories = [item for group in groups for item in group.trajectories]
            indices = kept_places(len(trajectories), sum(len(item.completion_ids) for item in trajectories))
            sampled = (trajectories[index] for index in indices)
            chosen = [item for item in sampled if not (item.prompt.images or item.images)]
            cut = [
                (list(item.token_ids[:end]), list(item.loss_mask[:end]), list(item.behavior_logprobs[:end]))
                for item in chosen
                for end in [min(MAX_TOKENS, item.first_branch)]
            ]
            self._offered = [row for row in cut if any(row[1])]

    def measure(self, trainer: RLTrainer, module: RLModule, weight_version: int) -> dict[str, float]:
        """The metrics of this version; collective, right after the update that made it."""
        staleness = trainer.rollout.settings.max_staleness
        if staleness == 0:
            return {}
        offered: list[_Row] = ranks_of(trainer.strategy).broadcast_json(self._offered)
        is_due = bool(self._kept) and self._kept[0].weight_version + staleness <= weight_version
        last, due = self._last, self._kept.popleft() if is_due else None
        parts = [[] if then is None else then.rows for then in (last, due)] + [offered]
        token_ids = [row[0] for part in parts for row in part]
        scores = iter(trainer_scores(trainer, module, token_ids, is_scaled=True) if token_ids else [])
        of_last, of_due, of_offered = (list(itertools.islice(scores, len(part))) for part in parts)
        self._last = _Kept(weight_version, offered, of_offered) if offered else None
        if self._last is not None and weight_version % EVERY == 1:
            self._kept.append(self._last)
        metrics = {} if last is None else {STEP: step_k3(*last.flat(of_last))}
        return metrics if due is None else metrics | _lag(*due.flat(of_due)[1:])


def kept_places(num_trajectories: int, num_tokens: int, least_tokens: int = NUM_TOKENS) -> range:
    """Chooses the trajectories of an iteration to keep, from all groups alike; `num_tokens` are their completions'."""
    num = max(MIN_ROWS, math.ceil(least_tokens * num_trajectories / max(1, num_tokens)))
    num = max(1, min(num, round(MAX_FRACTION * num_trajectories)))
    return range(0, num_trajectories, max(1, num_trajectories // num))[:num]


def step_k3(behavior: Tensor, before: Tensor, after: Tensor) -> float:
    """KL(before ‖ after) in nats per token, by k3 on tokens that an older policy sampled; logprobs [N].

    A token that the policy before would seldom write counts less: its weight is policy before ÷ behavior, up to 1.
    """
    weights = (before - behavior).exp().clamp(max=1.0)
    return float((weights * kl(before, after, estimator="k3")).sum() / weights.sum().clamp(min=1e-9))


def _lag(before: Tensor, after: Tensor) -> dict[str, float]:
    return {
        "policy/lag_k3_nats": float(kl(before, after, estimator="k3").mean()),
        "policy/lag_abs_dlogp_nats": float((after - before).abs().mean()),
    }
