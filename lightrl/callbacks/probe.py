"""Probe: trainer and engine compute the logprobs of a few fixed sequences, which agree if both have the same weights.

Rounding bounds the mean difference. Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightrl.callbacks.rounding import (
    Rounding,
    bound_nats,
    check_mismatch,
    mismatch_bound_nats,
    rounding,
    skips_autocast,
)
from lightrl.engines import RolloutEngine
from lightrl.errors import LightRLError, WeightSyncError
from lightrl.experience import Experience
from lightrl.models import context_tokens
from lightrl.module import RLModule
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import ranks_of
from lightrl.trajectory import JsonObject

log = logging.getLogger(__name__)

PROBE_SEQUENCES, PROBE_TOKENS = 2, 32


class Probe:
    """Compares trainer and engine after a sync. `trainer_side`, `compare` and `check_mismatch` are collective.

    If the engine can drop replicas, a replica that differs is dropped and gets the weights again. If it still differs
    after that, or no other replica is right, the run ends.

    Args:
        num: number of sequences; with 0 nothing is compared.
    """

    def __init__(self, num: int) -> None:
        self.num = num
        self.reset()

    def reset(self) -> None:
        self._dropped: set[str] = set()
        self.interval = 0  # loads from one probe to the next
        self.rounding: Rounding | None = None  # set on every rank once an engine has computed logprobs

    def trainer_side(self, trainer: RLTrainer, module: RLModule, weight_version: int) -> list[list[float]] | None:
        """Returns the trainer's logprobs, [B, T]; None on every rank if the engine computes none or no probe is due."""
        engine = trainer.rollout.engine
        interval = 0 if engine is None or not self.num else engine.probe_every_n_loads
        self.interval = interval = ranks_of(trainer.strategy).broadcast_json(interval)
        if interval == 0 or (self.rounding is not None and weight_version % interval):
            return None
        return trainer_logprobs(trainer, module, self._sequences(module))

    def compare(self, trainer: RLTrainer, module: RLModule, logprobs: list[list[float]] | None) -> dict[str, float]:
        """Compares the logprobs after the load; returns the metrics of this sync.

        Raises WeightSyncError on every rank if a replica has other weights or cannot compute logprobs.
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
        """Checks an iteration's first minibatch, if `least_tokens` of its tokens are from the current version.

        Raises WeightSyncError on every rank if their logprobs differ by more than rounding.
        """
        num_tokens = int(metrics.get("sync/num_present_tokens", 0))
        if self.rounding is not None and num_tokens >= least_tokens:
            mean, largest = (metrics[f"sync/{name}mismatch_present_abs_dlogp_nats"] for name in ("", "max_"))
            bound = mismatch_bound_nats(self.rounding, metrics["entropy_nats"])
            check_mismatch("the present weights", num_tokens, mean, largest, bound, self.rounding.dtypes)

    def _sequences(self, module: RLModule) -> list[list[int]]:
        longest = (context_tokens(module.policy_config) or 2**31) - 1
        vocab_size = module.policy_config.get_text_config().vocab_size
        return probe_sequences(vocab_size, num=self.num, num_tokens=min(PROBE_TOKENS, longest))

    def _compare(self, trainer: RLTrainer, module: RLModule, logprobs: list[list[float]] | None) -> dict[str, float]:
        """Does rank 0's part of `compare`."""
        engine = trainer.rollout.engine
        assert engine is not None
        checks = engine.verified_by()
        verified = {name for name, check in checks.items() if check == "digests"}
        serving, scored = set(checks), {}
        if logprobs is not None:
            try:
                answers = engine.score(self._sequences(module))
            except LightRLError as error:
                raise WeightSyncError(f"The engine could not score the probe: {error}") from error
            serving |= set(answers)
            scored = {name: rows for name, rows in answers.items() if all(rows)}
        metrics = {}
        if scored and logprobs is not None:
            self.rounding = self.rounding or rounding(trainer, module)
            trainer_rows, engine_rows = as_rows(logprobs), {name: as_rows(rows) for name, rows in scored.items()}
            differences = {name: float((rows - trainer_rows).abs().mean()) for name, rows in engine_rows.items()}
            eps = max(self.rounding.trainer_eps, self.rounding.engine_eps)
            bound = bound_nats(eps, float(trainer_rows.abs().mean()))
            wrong = {
                name: f"its probe differs by {difference:.3g} nats per token (at most {bound:.3g} for "
                f"{' and '.join(self.rounding.dtypes)}): the mean logprob of its tokens is "
                f"{float(trainer_rows.mean()):.4f} in the trainer and {float(engine_rows[name].mean()):.4f} in the "
                "engine"
                for name, difference in differences.items()
                if not difference <= bound
            }
            if wrong:
                self._drop(engine, wrong, serving)
            serving -= set(wrong)
            scored = {name: rows for name, rows in scored.items() if name not in wrong}
            self._dropped -= set(scored)
            if scored:
                metrics["sync/probe_abs_dlogp_nats"] = max(differences[name] for name in scored)
        if verified:
            metrics["sync/verified_fraction"] = len(verified & serving) / max(1, len(serving))
        return metrics

    def _drop(self, engine: RolloutEngine, wrong: dict[str, str], serving: set[str]) -> None:
        """Drops the wrong replicas if others remain; raises otherwise."""
        problems = "; ".join(f"{name}: {problem}" for name, problem in wrong.items())
        can_drop = engine.can_drop_replicas and serving - set(wrong) and not self._dropped & set(wrong)
        if not can_drop:
            raise WeightSyncError(
                f"After the weight sync the engine has other weights than the trainer. {problems}. The engine ignored "
                "the update or a part of it, or computes in another precision: check its log and dtype, or set "
                "WeightSync.verify to false if it rounds its scores more."
            )
        self._dropped |= set(wrong)
        for name, problem in wrong.items():
            log.warning("Dropping %s after the weight sync: %s. It gets the weights again.", name, problem)
            engine.drop_replica(name, problem)


def probe_sequences(vocab_size: int, *, num: int, num_tokens: int) -> list[list[int]]:
    """Returns random token ids, the same in every run; they need no data and exercise every part of the model."""
    generator = random.Random(vocab_size)
    return [[generator.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(num)]


def as_rows(rows: list[list[float]]) -> Tensor:
    """Returns [B, T - 1], float64, without the sequences' first tokens, which have no logprob."""
    return torch.tensor([row[1:] for row in rows], dtype=torch.float64)


def trainer_logprobs(
    trainer: RLTrainer, module: RLModule, sequences: list[list[int]], *, is_scaled: bool = False
) -> list[list[float]]:
    """Returns the trainer's logprobs of each sequence's tokens, 0 for the first; collective.

    With `is_scaled`, they are at the training temperature instead of 1.
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
        context = plain if skips_autocast(trainer, module) else trainer.precision_plugin.forward_context()
        with torch.no_grad(), context, plain if is_scaled else _unscaled(model):
            (outputs,) = model.forward([experience.to(module.device)])
        rows = outputs.logprobs.float().cpu().tolist()
    if holders.size < ranks.size:
        rows = ranks.broadcast_json(rows)
    return [row[: len(ids)] for row, ids in zip(rows, sequences, strict=True)]


@contextlib.contextmanager
def _unscaled(model: Any) -> Iterator[None]:
    """Sets temperature 1 inside the context, at which servers compute logprobs whatever the request (SGLang 0.5.23)."""
    before = model.settings
    model.settings = replace(before, temperature=1.0)
    try:
        yield
    finally:
        model.settings = before
