"""LagProbe: measures how far the policy moves in one version and in η versions, from the trainer's logprobs.

If version b sampled a token and version v trains on it, the trainer's logprob minus the engine's is the policy's lag,
log π_v - log π_b, plus the mismatch. To separate them, the trainer computes logprobs under versions b, b + 1, b + η.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.callbacks.probe import trainer_logprobs
from lightrl.functional import kl
from lightrl.module import RLModule
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import ranks_of
from lightrl.trajectory import Group

STEP = "policy/step_k3_nats"
EVERY = 10  # every tenth version starts a measurement of the lag over η versions
MIN_ROWS, NUM_TOKENS = 4, 128  # minimum rows and tokens to measure; short completions need more rows
MAX_FRACTION = 1 / 4  # at most this share of the trajectories
MAX_TOKENS = 1024  # only this many tokens from the start of each trajectory

_Row = tuple[list[int], list[bool], list[float]]  # token ids, loss mask, the engine's logprobs


@dataclass
class _Snapshot:
    """Trajectories from one iteration, with their logprobs under the version that the iteration produced."""

    weight_version: int
    rows: list[_Row]
    logprobs: list[list[float]]

    def trained_logprobs(self, now: list[list[float]]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns three logprobs of each trained token: from the engine, from the snapshot, and from `now`."""
        mask = torch.tensor([value for _, row, _ in self.rows for value in row])
        behavior, before, after = (
            torch.tensor([value for row in rows for value in row])[mask]
            for rows in ([row for _, _, row in self.rows], self.logprobs, now)
        )
        return behavior, before, after


class LagProbe:
    """Measures `policy/step_k3_nats`, over one version, and `policy/lag_*`, over η = `max_staleness`; nats per token.

    Groups are used in prompt order, so nearly all are η versions old when the policy trains on them. Both are measured
    on loss tokens, at the training temperature: the step in each iteration, the lag in about every tenth. On-policy
    there is no lag, so nothing is computed. A resumed run starts without snapshots.
    """

    def __init__(self) -> None:
        self._offered: list[_Row] = []
        self._last: _Snapshot | None = None
        self._waiting: deque[_Snapshot] = deque()  # kept until they are η versions old

    def offer(self, trainer: RLTrainer, groups: list[Group]) -> None:
        """Keeps some of this iteration's trajectories on rank 0, because only rank 0 has their tokens."""
        if trainer.is_global_zero:
            trajectories = [item for group in groups for item in group.trajectories]
            indices = choose_rows(len(trajectories), sum(len(item.completion_ids) for item in trajectories))
            sampled = (trajectories[index] for index in indices)
            text_only = [item for item in sampled if not (item.prompt.images or item.images)]
            rows = [
                (list(item.token_ids[:end]), list(item.loss_mask[:end]), list(item.behavior_logprobs[:end]))
                for item in text_only
                for end in [min(MAX_TOKENS, item.first_branch)]
            ]
            self._offered = [row for row in rows if any(row[1])]

    def measure(self, trainer: RLTrainer, module: RLModule, weight_version: int) -> dict[str, float]:
        """Returns the metrics of this version; collective, called right after the update that made it."""
        staleness = trainer.rollout.settings.max_staleness
        offered: list[_Row] = ranks_of(trainer.strategy).broadcast_json(self._offered)
        is_due = bool(self._waiting) and self._waiting[0].weight_version + staleness <= weight_version
        last, due = self._last, self._waiting.popleft() if is_due else None
        row_lists = [[] if snapshot is None else snapshot.rows for snapshot in (last, due)] + [offered]
        token_ids = [row[0] for rows in row_lists for row in rows]  # one forward for the rows of all three
        logprobs = iter(trainer_logprobs(trainer, module, token_ids, is_scaled=True) if token_ids else [])
        last_now, due_now, offered_now = (list(itertools.islice(logprobs, len(rows))) for rows in row_lists)
        self._last = _Snapshot(weight_version, offered, offered_now) if offered else None
        if self._last is not None and weight_version % EVERY == 1:
            self._waiting.append(self._last)
        metrics = {} if last is None else {STEP: step_k3(*last.trained_logprobs(last_now))}
        return metrics if due is None else metrics | _lag(*due.trained_logprobs(due_now)[1:])


def choose_rows(num_trajectories: int, num_tokens: int, least_tokens: int = NUM_TOKENS) -> range:
    """Chooses trajectories to measure, evenly over an iteration's groups; `num_tokens` counts all completion tokens."""
    num = max(MIN_ROWS, math.ceil(least_tokens * num_trajectories / max(1, num_tokens)))
    num = max(1, min(num, round(MAX_FRACTION * num_trajectories)))
    return range(0, num_trajectories, max(1, num_trajectories // num))[:num]


def step_k3(behavior: Tensor, before: Tensor, after: Tensor) -> float:
    """Returns KL(before ‖ after) in nats per token, by k3, from tokens that an older policy sampled; logprobs [N].

    A token counts less if the policy before the step rarely samples it: its weight is before ÷ behavior, at most 1.
    """
    weights = (before - behavior).exp().clamp(max=1.0)
    return float((weights * kl(before, after, estimator="k3")).sum() / weights.sum().clamp(min=1e-9))


def _lag(before: Tensor, after: Tensor) -> dict[str, float]:
    return {
        "policy/lag_k3_nats": float(kl(before, after, estimator="k3").mean()),
        "policy/lag_abs_dlogp_nats": float((after - before).abs().mean()),
    }
