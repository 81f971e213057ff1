"""LagProbe: how far the policy moves in η versions, by the trainer's numbers alone.

A token that version b sampled and version v trains on has two logprobs: log π_v - log b = (log π_v - log π_b), the
policy's lag, + (log π_b - log b), the engine's mismatch. To compute π_b on trained tokens would need its weights. So
the trainer keeps a few of the trajectories instead: it scores them under version b, and again under b + η.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from lightrl.callbacks.probe import trainer_scores
from lightrl.functional import kl
from lightrl.module import RLModule
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import ranks_of
from lightrl.trajectory import Group

EVERY = 10  # versions: scoring costs two small forwards
MAX_ROWS = 4
ROWS_PER_TRAJECTORY = 1 / 128
MAX_TOKENS = 1024  # of each, from its start


@dataclass
class _Kept:
    """Trajectories of one iteration, with the logprobs of the version after it."""

    weight_version: int
    token_ids: list[list[int]]
    loss_mask: list[list[bool]]
    logprobs: list[list[float]]


class LagProbe:
    """`policy/lag_k3_nats` and `policy/lag_abs_dlogp_nats`: per token, over η = `max_staleness` versions.

    In windowed order nearly every group is η versions old when it is trained on. Measured about every tenth iteration,
    on loss tokens, at the temperature of training; on-policy there is no lag and nothing is scored. A resumed run
    starts without kept trajectories.
    """

    def __init__(self) -> None:
        self._offered: list[tuple[list[int], list[bool]]] = []  # token ids and loss mask
        self._kept: deque[_Kept] = deque()

    def offer(self, trainer: RLTrainer, groups: list[Group]) -> None:
        """The groups of this iteration, of which some trajectories may be kept; rank 0 has their tokens."""
        self._offered = []
        is_its_turn = _keeps(trainer.weight_version + 1) and trainer.rollout.settings.max_staleness > 0
        if not is_its_turn or not trainer.is_global_zero:
            return
        num = max(1, min(MAX_ROWS, round(sum(len(group.trajectories) for group in groups) * ROWS_PER_TRAJECTORY)))
        for group in groups[:: max(1, len(groups) // num)][:num]:
            for item in group.trajectories[:1]:
                loss_mask = list(item.loss_mask[:MAX_TOKENS])
                if any(loss_mask) and not item.prompt.images:
                    self._offered.append((list(item.token_ids[:MAX_TOKENS]), loss_mask))

    def measure(self, trainer: RLTrainer, module: RLModule, weight_version: int) -> dict[str, float]:
        """The metrics, if this version has any; collective, right after the update that made the version."""
        staleness = trainer.rollout.settings.max_staleness
        if staleness == 0:
            return {}
        metrics: dict[str, float] = {}
        if self._kept and self._kept[0].weight_version + staleness <= weight_version:
            then = self._kept.popleft()
            now = trainer_scores(trainer, module, then.token_ids, is_scaled=True)
            metrics = _difference(then, now)
        if _keeps(weight_version):
            offered = ranks_of(trainer.strategy).broadcast_json(self._offered)
            if offered:
                token_ids, loss_mask = [list(part) for part in zip(*offered, strict=True)]
                logprobs = trainer_scores(trainer, module, token_ids, is_scaled=True)
                self._kept.append(_Kept(weight_version, token_ids, loss_mask, logprobs))
        return metrics


def _keeps(weight_version: int) -> bool:
    return weight_version % EVERY == 1


def _difference(then: _Kept, now: list[list[float]]) -> dict[str, float]:
    mask = torch.tensor([value for row in then.loss_mask for value in row])
    before = torch.tensor([value for row in then.logprobs for value in row])[mask]
    after = torch.tensor([value for row in now for value in row])[mask]
    return {
        "policy/lag_k3_nats": float(kl(before, after, estimator="k3").mean()),
        "policy/lag_abs_dlogp_nats": float((after - before).abs().mean()),
    }
