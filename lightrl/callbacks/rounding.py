"""Bounds on the difference between the engine's and the trainer's logprobs that rounding explains, by dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision

from lightrl.errors import WeightSyncError
from lightrl.module import RLModule
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import PACKED_ATTENTION, SingleModel

# Rounding of a logprob, in units of eps · (1 + mean |logprob|) because it grows with the logits. Healthy engines differ
# by at most 0.2 units for models of 0.1 M to 4 M parameters, 1.8 for a model of 2,000 parameters with very peaked
# distributions, and 1.2 for large models in bfloat16, which is 0.12 nats. Depth, other kernels and longer sums add to
# it. The factor is 32 up to `USUAL_NATS`, and 4 above: a false alarm ends a run, and digests find smaller errors.
ROUNDINGS = 32.0
ROUNDINGS_ABOVE = 4.0
USUAL_NATS = 0.2
LEAST_NATS = 1e-5  # for errors that do not shrink with the format, such as those of rotary embedding tables
MISMATCH_NATS = 1e-3  # added for sampled tokens: they are further from the context's start, and may be few
MIN_MISMATCH_TOKENS = 64  # with fewer, a single token at its bound may raise the mean
LARGEST = 16.0  # × the bound of the mean: the largest of a million normal errors is 6 means; real tails are longer


def bound_nats(eps: float, mean_abs_logprob: float) -> float:
    """Returns the bound on the mean difference between logprobs that were computed with this machine epsilon."""
    rounding = eps * (1 + mean_abs_logprob)
    return max(LEAST_NATS, min(ROUNDINGS * rounding, USUAL_NATS), ROUNDINGS_ABOVE * rounding)


@dataclass
class Rounding:
    """The machine epsilons of trainer and engine."""

    trainer_eps: float  # the trainer's, in the probe
    training_eps: float  # the trainer's, in an update
    engine_eps: float  # the engine's largest
    dtypes: list[str]  # of the probe and the engine


def mismatch_bound_nats(rounding: Rounding, entropy_nats: float) -> float:
    """Returns the bound on the mean difference for tokens whose logprobs come from the weights that sampled them."""
    return bound_nats(max(rounding.training_eps, rounding.engine_eps), entropy_nats) + MISMATCH_NATS


def check_mismatch(weights: str, num_tokens: int, mean: float, largest: float, bound: float, dtypes: list[str]) -> None:
    """Raises WeightSyncError if the engine's and the trainer's logprobs differ by more than rounding.

    Args:
        weights: name of the weights that sampled the tokens.
        mean, largest: differences in nats.
        bound: on the mean over many tokens.
    """
    mean_bound = bound if num_tokens >= MIN_MISMATCH_TOKENS else bound * (1 + LARGEST / num_tokens)
    if not (mean <= mean_bound and largest <= LARGEST * bound):
        raise WeightSyncError(
            f"The {num_tokens} tokens that the engine sampled with {weights} differ by {mean:.3g} nats each from the "
            f"trainer's logprobs, and one of them by {largest:.3g} (at most {mean_bound:.3g} and {LARGEST * bound:.3g} "
            f"for {' and '.join(dtypes)}), although the probe agreed after the sync. Look for stale key-values (a "
            "prefix cache that was not flushed), a server that restarted with older weights, a proxy that changes "
            "answers, or sampling settings that trainer and engine apply differently; or set WeightSync.verify to "
            "false."
        )


def rounding(trainer: RLTrainer, module: RLModule) -> Rounding:
    """Returns the largest epsilons of trainer and engine; float32 on a GPU may be TF32, with float16's epsilon."""
    policy: Any = module.policy
    weight_dtype = str(next(policy.parameters()).dtype).removeprefix("torch.")
    precision = str(trainer.precision).split("-")[0]
    training = {weight_dtype, {"16": "float16", "bf16": "bfloat16", "64": "float64"}.get(precision, "float32")}
    probe = {weight_dtype} if skips_autocast(trainer, module) else training
    engine = {"float32"} if trainer.engine is None else trainer.engine.dtypes()
    is_gpu = trainer.strategy.root_device.type == "cuda"
    eps = {name: _eps(name, is_gpu=is_gpu) for name in training | engine}
    return Rounding(
        max(eps[name] for name in probe),
        max(eps[name] for name in training),
        max(eps[name] for name in engine),
        sorted(probe | engine),
    )


def _eps(dtype: str, *, is_gpu: bool) -> float:
    if dtype == "float32" and is_gpu:
        dtype = "float16"
    return torch.finfo(getattr(torch, dtype, torch.bfloat16)).eps  # unknown names count as bfloat16


def skips_autocast(trainer: RLTrainer, module: RLModule) -> bool:
    """Whether the trainer computes the probe in the parameters' dtype, which reveals smaller changes than autocast."""
    attention = getattr(module.policy_config, "_attn_implementation", None)
    is_single = type(module.parallel_models.get("policy")) is SingleModel
    is_any_dtype = attention in ("sdpa", "eager", PACKED_ATTENTION)
    return isinstance(trainer.precision_plugin, MixedPrecision) and is_single and is_any_dtype
