"""Probe: a few fixed sequences that trainer and engine both score, to show that the engine has the trainer's weights.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from lightrl.engines.abilities import NamesDtypes
from lightrl.errors import WeightSyncError
from lightrl.experience import Experience
from lightrl.module import RLModule
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import ranks_of
from lightrl.trajectory import Prompt, Trajectory

FLOAT32_BOUND_NATS = 1e-3
LOW_PRECISION_BOUND_NATS = 0.2  # bfloat16 was measured to differ by up to 0.12


def probe_sequences(vocab_size: int, *, num: int, num_tokens: int) -> list[list[int]]:
    """The same random token ids in every run: they need no data and reach every part of the model."""
    draw = random.Random(vocab_size)
    return [[draw.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(num)]


def trainer_scores(trainer: RLTrainer, module: RLModule, sequences: list[list[int]]) -> list[list[float]]:
    """Logprobs at temperature 1 of each token given those before, 0 for the first; collective."""
    ranks = ranks_of(trainer.strategy)
    holders = ranks.of_role("policy")
    rows: list[list[float]] = []
    if holders.is_here:
        experience = Experience.from_trajectories([_as_trajectory(row, ids) for row, ids in enumerate(sequences)])
        model = module.parallel_models["policy"]
        with torch.no_grad(), trainer.precision_plugin.forward_context(), _unscaled(model):
            (outputs,) = model.forward([experience.to(module.device)])
        rows = outputs.logprobs.float().cpu().tolist()
    if holders.size < ranks.size:
        rows = ranks.broadcast_json(rows)
    return [row[: len(ids)] for row, ids in zip(rows, sequences, strict=True)]


def compare(trainer_side: list[list[float]], engine_side: list[list[float]]) -> float:
    """Mean |difference| in nats over the tokens that have a logprob."""
    differences = [
        abs(ours - theirs)
        for row, other in zip(trainer_side, engine_side, strict=True)
        for ours, theirs in list(zip(row, other, strict=True))[1:]
    ]
    return sum(differences) / len(differences)


def check(difference: float, bound: float, trainer_side: list[list[float]], engine_side: list[list[float]]) -> None:
    """Raises WeightSyncError with both sides' means if they differ by more than the bound."""
    if difference <= bound:
        return
    means = [
        sum(sum(row[1:]) for row in side) / sum(len(row) - 1 for row in side) for side in (trainer_side, engine_side)
    ]
    raise WeightSyncError(
        f"After the weight sync the probe differs by {difference:.3g} nats per token (max_probe_nats={bound:g}): the "
        f"mean logprob of its tokens is {means[0]:.4f} in the trainer and {means[1]:.4f} in the engine. The engine has "
        "other weights, a stale cache or another precision: check its dtype, or increase WeightSync.max_probe_nats."
    )


def default_bound_nats(trainer: RLTrainer, module: RLModule) -> float:
    """That of float32 if trainer and engine name no other dtype, otherwise that of bfloat16."""
    policy: Any = module.policy
    dtypes = {str(next(policy.parameters()).dtype).removeprefix("torch.")}
    dtypes.add({"32-true": "float32"}.get(str(trainer.precision), str(trainer.precision)))
    dtypes |= trainer.engine.dtypes() if isinstance(trainer.engine, NamesDtypes) else {"float32"}
    return FLOAT32_BOUND_NATS if dtypes == {"float32"} else LOW_PRECISION_BOUND_NATS


def _as_trajectory(row: int, token_ids: list[int]) -> Trajectory:
    return Trajectory(
        prompt=Prompt(id=f"probe-{row}", token_ids=token_ids[:1]),
        group_id=row,
        sample=0,
        token_ids=token_ids,
        loss_mask=[False] + [True] * (len(token_ids) - 1),
        behavior_logprobs=[0.0] * len(token_ids),
        weight_versions=[-1] * len(token_ids),  # nothing was sampled, so no end token was masked
        completion_ids=token_ids[1:],
        completion="",
        reward=0.0,
    )


@contextlib.contextmanager
def _unscaled(model: Any) -> Iterator[None]:
    """Servers score a prompt at temperature 1, whatever the request says (SGLang 0.5.23)."""
    before = getattr(model, "settings", None)
    if before is None:
        yield
        return
    model.settings = replace(before, temperature=1.0)
    try:
        yield
    finally:
        model.settings = before
