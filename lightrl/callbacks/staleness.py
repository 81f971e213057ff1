"""StalenessControl: bounds how many weight versions a trajectory may be behind the policy that trains on it."""

from __future__ import annotations

import collections
import logging
import math
import statistics
from collections.abc import Iterable
from dataclasses import replace

import lightning as L

from lightrl.callbacks.lag_probe import STEP
from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.bounds import check_bounds, check_positive
from lightrl.errors import EngineError
from lightrl.experience import Experience
from lightrl.module import RLModule
from lightrl.rollout import RolloutSettings
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.trajectory import JsonObject

log = logging.getLogger(__name__)

ESS, KL, GRAD_NORM = "policy/ess_fraction", "policy/kl_behavior_nats", "policy/grad_norm"
LOW_ESS_FRACTION = 0.15
HIGH_KL_NATS = 2.8  # per token
LAG_ITERATIONS = 10
LARGE_STEP_NATS = 0.014  # per token at gradient norm 1; proportional to the norm's square root
STEP_ITERATIONS = 30
FIRST_ITERATIONS = 20  # even healthy runs take large steps here


class LagWatch:
    """Reports when the policy is, or soon will be, too far from the trajectories that it learns from.

    It compares means over the last iterations with three bounds. If the effective sample size is below
    `LOW_ESS_FRACTION`, a few tokens carry most of the weight. If KL(behavior ‖ policy) is above `HIGH_KL_NATS`, the
    policy is far from the behavior policy. If the geometric mean of KL(before ‖ after) is above `LARGE_STEP_NATS` ·
    √(mean gradient norm), steps are larger than the gradients explain, as AdamW's can be. docs/algorithms.md and
    `benchmarks.lag` explain the bounds.
    """

    def __init__(self, last: Iterable[tuple[float, float, float, float]] = ()) -> None:
        self.last = collections.deque(last, maxlen=STEP_ITERATIONS)
        self.means: list[float] = []  # sample size, KL, step ÷ √gradient; empty before iteration `LAG_ITERATIONS`
        self._problem = self._find_problem()

    def new_problem(self, ess_fraction: float, kl_nats: float, step_nats: float, grad_norm: float) -> str | None:
        """Adds an iteration's values; returns the problem they reveal, or None if there is no new problem.

        `step_nats` is 0 if unknown, and during the `FIRST_ITERATIONS`; `grad_norm` is measured before clipping.
        """
        had_problem = self._problem is not None
        self.last.append((ess_fraction, kl_nats, step_nats, grad_norm))
        self._problem = self._find_problem()
        return None if had_problem else self._problem

    def _find_problem(self) -> str | None:
        if len(self.last) < LAG_ITERATIONS:
            return None
        ess_fractions, kls_nats, steps_nats, grad_norms = zip(*self.last, strict=True)
        ess_fraction, kl_nats = (statistics.fmean(values[-LAG_ITERATIONS:]) for values in (ess_fractions, kls_nats))
        are_steps_known = len(steps_nats) == STEP_ITERATIONS and min(steps_nats) > 0
        step_nats = statistics.geometric_mean(steps_nats) if are_steps_known else 0.0
        root = math.sqrt(statistics.fmean(grad_norms)) or math.inf  # without a gradient, no step counts as too large
        self.means = [ess_fraction, kl_nats, step_nats / root]
        in_mean = f"mean of the last {LAG_ITERATIONS} iterations"
        if ess_fraction < LOW_ESS_FRACTION:
            return f"{ESS} was {ess_fraction:.3g}, below {LOW_ESS_FRACTION}, in the {in_mean}"
        if kl_nats > HIGH_KL_NATS:
            return f"{KL} was {kl_nats:.3g}, above {HIGH_KL_NATS}, in the {in_mean}"
        if step_nats > LARGE_STEP_NATS * root:
            in_mean = f"geometric mean of the last {STEP_ITERATIONS} iterations"
            bound = f"{LARGE_STEP_NATS * root:.3g} = {LARGE_STEP_NATS} · √{GRAD_NORM}"
            return f"{STEP} was {step_nats:.3g}, above {bound}, in the {in_mean}"
        return None


class StalenessControl(RLCallback):
    """Bounds the staleness of every trained token: current weight version − version that sampled it, in versions.

    With 0, the loop is on-policy: it collects an iteration, learns, syncs, and collects the next. With η > 0, rollouts
    continue during updates, up to (η + 1)·P groups ahead; generations interrupted by a sync continue with new weights.

    The trainer uses groups in the order of the prompt stream and discards none. It waits for a slow group
    (`time/straggler_wait_s`), so that lengths have the same distribution in training as in sampling; see docs/async.md.

    It warns if a few tokens carry most of the weight (`policy/ess_fraction`, see loops/update.py), if the policy is far
    from the behavior policy (`policy/kl_behavior_nats`), or if its steps (`policy/step_k3_nats`, see lag_probe.py) are
    larger than its gradients explain (`policy/grad_norm`). These warnings often come long before the reward falls.

    Args:
        max_staleness: η, in versions.
        max_concurrent: maximum number of groups in flight; None sets no limit beyond the staleness bound.
        rollout_timeout_s: the run ends if the trainer waits for a batch and no trajectory finishes for this long.
    """

    def __init__(
        self, max_staleness: int = 0, *, max_concurrent: int | None = None, rollout_timeout_s: float = 1800.0
    ) -> None:
        check_bounds(0, max_staleness=max_staleness)
        check_bounds(1, max_concurrent=max_concurrent)
        check_positive(rollout_timeout_s=rollout_timeout_s)
        self.max_staleness = max_staleness
        self.max_concurrent = max_concurrent
        self.rollout_timeout_s = rollout_timeout_s
        self._lag = LagWatch()

    def configure_rollout(self, trainer: RLTrainer, module: RLModule, settings: RolloutSettings) -> RolloutSettings:
        if module.reward_timeout_s > self.rollout_timeout_s and trainer.is_global_zero:
            log.warning(
                "reward_timeout_s=%g is above rollout_timeout_s=%g: a slow reward can end the run. "
                "Increase StalenessControl.rollout_timeout_s, or lower model.reward_timeout_s.",
                module.reward_timeout_s,
                self.rollout_timeout_s,
            )
        return replace(
            settings,
            max_staleness=self.max_staleness,
            max_concurrent=self.max_concurrent,
            rollout_timeout_s=self.rollout_timeout_s,
        )

    def on_experience_ready(self, trainer: RLTrainer, module: RLModule, experience: Experience) -> None:
        if trainer.rollout.is_recorded:
            return  # recorded versions come from a different run
        local = experience.local
        newest = trainer.weight_version
        oldest = max(0, newest - trainer.rollout.settings.max_staleness)
        is_wrong = local.loss_mask & ((local.weight_versions < oldest) | (local.weight_versions > newest))
        if is_wrong.any():
            row, token = is_wrong.nonzero()[0].tolist()
            raise EngineError(
                f"{type(trainer.rollout.engine).__name__} reports that weight version "
                f"{int(local.weight_versions[row, token])} sampled token {token} of a trajectory in group "
                f"{int(local.group_ids[row])}, but the version must be from {oldest} to {newest} (max_staleness="
                f"{trainer.rollout.settings.max_staleness}). Fix the versions of the engine's completions."
            )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        metrics = trainer.callback_metrics
        step_nats = metrics.get(STEP, 0.0) if trainer.global_step > FIRST_ITERATIONS else 0.0
        values = (metrics.get(ESS, 1.0), metrics.get(KL, 0.0), step_nats, metrics.get(GRAD_NORM, 1.0))
        problem = self._lag.new_problem(*map(float, values))
        if problem and trainer.is_global_zero:
            log.warning(
                "%s: the trajectories are too far from the policy to learn from, or soon will be. Lower lr or "
                "max_staleness, or use a loss for stale trajectories, for example TOPR with betas [0.9, 0.999] "
                "(docs/algorithms.md, Which loss at which lag).",
                problem,
            )

    def state_dict(self) -> JsonObject:
        return {"last_lags": [list(values) for values in self._lag.last]}

    def load_state_dict(self, state_dict: JsonObject) -> None:
        self._lag = LagWatch((ess, kl, step, norm) for ess, kl, step, norm in state_dict.get("last_lags", ()))
