"""Probe: trainer and engine compute the logprobs of a few fixed sequences, which agree if both have the same weights.

The bounds state how much rounding can change logprobs, given the dtypes of both. Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightrl.engines import RolloutEngine
from lightrl.errors import LightRLError, WeightSyncError
from lightrl.experience import Experience
from lightrl.models import context_tokens
from lightrl.models.precision import computing_dtype
from lightrl.module import RLModule
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import PACKED_ATTENTION, SingleModel, ranks_of
from lightrl.trajectory import JsonObject

log = logging.getLogger(__name__)

PROBE_SEQUENCES, PROBE_TOKENS = 2, 32

# Rounding error of a logprob, in units of eps · (1 + mean |logprob|) because it grows with the logits. Healthy engines
# differ by at most 0.2 units for models of 0.1 M to 4 M parameters, 1.8 for a model of 2,000 parameters with peaked
# distributions, and 1.2 for large models in bfloat16, which is 0.12 nats. Depth, other kernels and longer sums increase
# the error. The factor is 32 up to `USUAL_NATS`, then 4: a false alarm ends a run, and digests find smaller errors.
ROUNDINGS = 32.0
ROUNDINGS_ABOVE = 4.0
USUAL_NATS = 0.2
LEAST_NATS = 1e-5  # allows for errors that do not shrink with eps, e.g. in tables of rotary embeddings
MISMATCH_NATS = 1e-3  # added for sampled tokens: they are at higher positions than the probe's, and may be few
MIN_MISMATCH_TOKENS = 64  # with fewer, a single token at its bound could push the mean above its bound
BIAS = 0.25  # times the bound on the mean, for the mean signed difference: rounding errors have both signs
LARGEST = 16.0  # times the bound on the mean. A million normal errors reach 6 times the mean; real tails are longer


def bound_nats(eps: float, mean_abs_logprob: float) -> float:
    """Returns the bound on the mean difference between logprobs computed with this machine epsilon."""
    rounding = eps * (1 + mean_abs_logprob)
    return max(LEAST_NATS, min(ROUNDINGS * rounding, USUAL_NATS), ROUNDINGS_ABOVE * rounding)


@dataclass
class Rounding:
    """The machine epsilons that trainer and engine compute with."""

    trainer_eps: float
    engine_eps: float  # the engine's largest epsilon
    trainer_dtype: str
    engine_dtypes: list[str]

    @property
    def eps(self) -> float:
        return max(self.trainer_eps, self.engine_eps)

    def __str__(self) -> str:
        return f"{self.trainer_dtype} in the trainer and {' and '.join(self.engine_dtypes)} in the engine"


def mismatch_bound_nats(rounding: Rounding, entropy_nats: float) -> float:
    """Returns the bound on the mean difference between logprobs of tokens under the weights that sampled them."""
    return bound_nats(rounding.eps, entropy_nats) + MISMATCH_NATS


def check_mismatch(
    weights: str, num_tokens: int, mean: float, largest: float, entropy: float, rounding: Rounding, bias: float = 0.0
) -> None:
    """Raises WeightSyncError if the engine's and the trainer's logprobs differ by more than rounding.

    Args:
        weights: the name of the weights that sampled the tokens.
        mean, largest, bias: mean and largest absolute difference, and mean signed difference, in nats.
        entropy: mean over the tokens, in nats.
    """
    bound = mismatch_bound_nats(rounding, entropy)
    mean_bound = bound if num_tokens >= MIN_MISMATCH_TOKENS else bound * (1 + LARGEST / num_tokens)
    bias_bound = bound * (BIAS + LARGEST / num_tokens)
    is_same = rounding.trainer_dtype in rounding.engine_dtypes
    other_dtypes = "" if is_same else "First set the engine's dtype to the trainer's: rounding alone may explain this. "
    if not (mean <= mean_bound and largest <= LARGEST * bound and abs(bias) <= bias_bound):
        raise WeightSyncError(
            f"The engine's logprobs of {num_tokens} tokens that it sampled with {weights} differ from the trainer's by "
            f"{mean:.3g} nats on average and {largest:.3g} at most (bounds: {mean_bound:.3g} and {LARGEST * bound:.3g} "
            f"for {rounding}); the signed mean is {bias:.3g} (at most {bias_bound:.3g}). The probe agreed after the "
            f"sync. {other_dtypes}Look for a stale KV cache (a prefix cache that was not flushed), a server "
            "that restarted with older weights, a proxy that changes answers, or sampling settings that trainer and "
            "engine apply differently; or set WeightSync.verify to false."
        )


def rounding(trainer: RLTrainer, module: RLModule) -> Rounding:
    """Returns the largest epsilons of trainer and engine. On a GPU, float32 may be TF32, with float16's epsilon."""
    policy: Any = module.policy
    dtype = str(computing_dtype(str(trainer.precision), next(policy.parameters()).dtype)).removeprefix("torch.")
    engines = {"float32"} if trainer.engine is None else trainer.engine.dtypes()
    is_gpu = trainer.strategy.root_device.type == "cuda"
    engine_eps = max(_eps(name, is_gpu=is_gpu) for name in engines)
    return Rounding(_eps(dtype, is_gpu=is_gpu), engine_eps, dtype, sorted(engines))


def _eps(dtype: str, *, is_gpu: bool) -> float:
    if dtype == "float32" and is_gpu:
        dtype = "float16"
    return torch.finfo(getattr(torch, dtype, torch.bfloat16)).eps  # bfloat16's if torch does not know the name


def skips_autocast(trainer: RLTrainer, module: RLModule) -> bool:
    """Whether to measure the lag in the parameters' dtype, because autocast would round small steps away."""
    attention = getattr(module.policy_config, "_attn_implementation", None)
    is_single = type(module.parallel_models.get("policy")) is SingleModel
    is_any_dtype = attention in ("sdpa", "eager", PACKED_ATTENTION)
    return isinstance(trainer.precision_plugin, MixedPrecision) and is_single and is_any_dtype


class Probe:
    """Compares trainer and engine after a sync. `logprobs_if_due`, `compare` and `check_mismatch` are collective.

    If the engine can drop replicas, a replica that differs is dropped and gets the weights again. If it still differs,
    or no other replica has the right weights, the run ends.

    Args:
        num: number of sequences; 0 compares nothing.
    """

    def __init__(self, num: int) -> None:
        self.num = num
        self.reset()

    def reset(self) -> None:
        self._dropped: set[str] = set()
        self.interval = 0  # number of loads from one probe to the next
        self.rounding: Rounding | None = None  # set on every rank once an engine has computed logprobs

    def logprobs_if_due(self, trainer: RLTrainer, module: RLModule, weight_version: int) -> list[list[float]] | None:
        """Returns the trainer's logprobs, [B, T]; None on every rank if the engine computes none or no probe is due."""
        engine = trainer.rollout.engine
        interval = 0 if engine is None or not self.num else engine.probe_every_n_loads
        self.interval = interval = ranks_of(trainer.strategy).broadcast_json(interval)
        if interval == 0 or (self.rounding is not None and weight_version % interval):
            return None
        return trainer_logprobs(trainer, module, self._sequences(module))

    def compare(self, trainer: RLTrainer, module: RLModule, logprobs: list[list[float]] | None) -> dict[str, float]:
        """Compares the logprobs after the load; returns the metrics of this sync.

        Raises WeightSyncError on every rank if a replica has different weights or cannot compute logprobs.
        """
        ranks = ranks_of(trainer.strategy)
        result: JsonObject = {"metrics": {}, "problem": None, "rounding": None}
        if ranks.is_main and not trainer.rollout.is_recorded:
            try:
                result["metrics"] = self._compare(trainer, module, logprobs)
            except LightRLError as error:
                result["problem"] = str(error)
            result["rounding"] = vars(self.rounding) if self.rounding is not None else None
        result = ranks.broadcast_json(result)
        if result["problem"] is not None:
            raise WeightSyncError(result["problem"])
        self.rounding = Rounding(**result["rounding"]) if result["rounding"] is not None else None
        metrics: dict[str, float] = result["metrics"]
        return metrics

    def check_mismatch(self, metrics: dict[str, float], least_tokens: int) -> None:
        """Checks an iteration's first minibatch if at least `least_tokens` tokens are from the current version.

        Raises WeightSyncError on every rank if their logprobs differ by more than rounding errors.
        """
        num_tokens = int(metrics.get("sync/num_present_tokens", 0))
        if self.rounding is not None and num_tokens >= least_tokens:
            mean, largest = (metrics[f"sync/{name}mismatch_present_abs_dlogp_nats"] for name in ("", "max_"))
            check_mismatch("the current weights", num_tokens, mean, largest, metrics["entropy_nats"], self.rounding)

    def _sequences(self, module: RLModule) -> list[list[int]]:
        """Returns random token ids, the same in every run; they need no data and exercise every part of the model."""
        num_tokens = min(PROBE_TOKENS, (context_tokens(module.policy_config) or 2**31) - 1)
        vocab_size = module.policy_config.get_text_config().vocab_size
        draw = random.Random(vocab_size)
        return [[draw.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(self.num)]

    def _compare(self, trainer: RLTrainer, module: RLModule, logprobs: list[list[float]] | None) -> dict[str, float]:
        engine = trainer.rollout.engine
        assert engine is not None
        checks = engine.verified_by()
        serving = set(checks)
        metrics = {} if logprobs is None else self._compare_logprobs(trainer, module, logprobs, serving)
        verified = {name for name, check in checks.items() if check == "digests"}
        if verified:
            metrics["sync/verified_fraction"] = len(verified & serving) / max(1, len(serving))
        return metrics

    def _compare_logprobs(
        self, trainer: RLTrainer, module: RLModule, logprobs: list[list[float]], serving: set[str]
    ) -> dict[str, float]:
        """Drops replicas that differ from the trainer, also from `serving`; returns the others' largest difference."""
        engine: Any = trainer.rollout.engine
        try:
            answers = engine.score(self._sequences(module))
        except LightRLError as error:
            raise WeightSyncError(f"The engine could not compute the probe's logprobs: {error}") from error
        serving |= set(answers)
        engine_rows = {name: as_rows(rows) for name, rows in answers.items() if all(rows)}  # an empty row: no logprobs
        if not engine_rows:
            return {}
        self.rounding = self.rounding or rounding(trainer, module)
        trainer_rows = as_rows(logprobs)
        differences = {name: float((rows - trainer_rows).abs().mean()) for name, rows in engine_rows.items()}
        bound = bound_nats(self.rounding.eps, float(trainer_rows.abs().mean()))
        wrong = {
            name: f"its probe differs by {difference:.3g} nats per token (at most {bound:.3g} for "
            f"{self.rounding}): the mean logprob of the probe's tokens is "
            f"{float(trainer_rows.mean()):.4f} in the trainer and {float(engine_rows[name].mean()):.4f} in the engine"
            for name, difference in differences.items()
            if not difference <= bound
        }
        if wrong:
            self._drop_or_raise(engine, wrong, serving)
        serving -= set(wrong)
        agreeing = set(differences) - set(wrong)
        self._dropped -= agreeing  # a replica that got the weights again
        return {"sync/probe_abs_dlogp_nats": max(differences[name] for name in agreeing)} if agreeing else {}

    def _drop_or_raise(self, engine: RolloutEngine, wrong: dict[str, str], serving: set[str]) -> None:
        """Drops these replicas; raises WeightSyncError if none would remain, or one differs again after a drop."""
        problems = "; ".join(f"{name}: {problem}" for name, problem in wrong.items())
        if not (engine.can_drop_replicas and serving - set(wrong) and not self._dropped & set(wrong)):
            raise WeightSyncError(
                f"After the weight sync, the engine has different weights from the trainer. {problems}. The engine "
                "ignored all or part of the update, or computes in a different precision: check its log and dtype, or "
                "set WeightSync.verify to false if it rounds its logprobs more coarsely."
            )
        self._dropped |= set(wrong)
        for name, problem in wrong.items():
            log.warning("Dropping %s after the weight sync: %s. It gets the weights again.", name, problem)
            engine.drop_replica(name, problem)


def as_rows(rows: list[list[float]]) -> Tensor:
    """Returns logprobs [B, T - 1], float64, without each sequence's first token, which has no logprob."""
    return torch.tensor([row[1:] for row in rows], dtype=torch.float64)


def trainer_logprobs(
    trainer: RLTrainer, module: RLModule, sequences: list[list[int]], *, is_scaled: bool = False
) -> list[list[float]]:
    """Returns the trainer's logprobs of each sequence's tokens, 0 for the first; collective.

    With `is_scaled`, they are at the training temperature instead of 1, and computed without autocast if possible.
    """
    ranks = ranks_of(trainer.strategy)
    holders = ranks.of_role("policy")
    rows: list[list[float]] = []
    if holders.is_here:
        token_ids = pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True)
        experience = Experience(
            token_ids=token_ids,
            loss_mask=pad_sequence([torch.arange(len(ids)) > 0 for ids in sequences], batch_first=True),
            behavior_logprobs=torch.zeros(token_ids.shape),
            weight_versions=torch.full_like(token_ids, -1),  # nothing was sampled, so no end token was masked
            rewards=torch.zeros(len(sequences)),
            group_ids=torch.arange(len(sequences)),
            is_truncated=torch.zeros(len(sequences), dtype=torch.bool),
            lengths=torch.tensor([*map(len, sequences)]),
        )
        model = module.parallel_models["policy"]
        plain = contextlib.nullcontext()
        context = plain if is_scaled and skips_autocast(trainer, module) else trainer.precision_plugin.forward_context()
        with torch.no_grad(), context, plain if is_scaled else _unscaled(model):
            (outputs,) = model.forward([experience.to(module.device)])
        rows = outputs.logprobs.float().cpu().tolist()
    if holders.size < ranks.size:
        rows = ranks.broadcast_json(rows)
    return [row[: len(ids)] for row, ids in zip(rows, sequences, strict=True)]


@contextlib.contextmanager
def _unscaled(model: Any) -> Iterator[None]:
    """Sets the temperature to 1, because servers compute logprobs at 1, ignoring the request (SGLang 0.5.23)."""
    before = model.settings
    model.settings = replace(before, temperature=1.0)
    try:
        yield
    finally:
        model.settings = before
