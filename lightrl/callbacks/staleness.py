"""StalenessControl: by how many weight versions a trajectory may be behind the policy that trains on it."""

from __future__ import annotations

import collections
import logging
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.rollout import RolloutSettings

if TYPE_CHECKING:
    import lightning as L

    from lightrl.experience import Experience
    from lightrl.module import RLModule
    from lightrl.rollout.rl_trainer import RLTrainer

log = logging.getLogger(__name__)

ESS = "policy/ess_fraction"
LOW_ESS_FRACTION = 0.3
ESS_ITERATIONS = 10


class EssWatch:
    """Tells when the effective sample size, as a mean over `ESS_ITERATIONS`, falls below `LOW_ESS_FRACTION`.

    Both numbers are from `benchmarks.lag`: see docs/algorithms.md.
    """

    def __init__(self) -> None:
        self.last: collections.deque[float] = collections.deque(maxlen=ESS_ITERATIONS)

    def falls(self, ess_fraction: float) -> bool:
        """Whether it has fallen below with this iteration's value; False while it stays there."""
        was_low = self.is_low
        self.last.append(ess_fraction)
        return self.is_low and not was_low

    @property
    def is_low(self) -> bool:
        return len(self.last) == ESS_ITERATIONS and statistics.fmean(self.last) < LOW_ESS_FRACTION


class StalenessControl(RLCallback):
    """Bounds the staleness of every trained token: weight version now − version that sampled it, in versions.

    With 0 the loop is on-policy: it collects an iteration, learns, syncs, collects the next. With η > 0 rollouts
    continue while the policy is updated, up to (η + 1)·P groups ahead; a generation that a weight sync interrupts
    continues under the new weights. It is one loop in both cases: rollout/group_book.py decides what starts and what is
    taken.

    It also watches `policy/ess_fraction`, the effective sample size: (Σw)² / (N Σw²) over the N tokens that learn, with
    w what the loss multiplies a token's policy gradient by. A warning comes where a few tokens have got most of the
    weight, usually long before the reward falls.

    Args:
        max_staleness: η, in versions.
        max_concurrent: most groups in flight; None for no limit but the staleness.
        redraw_stragglers: restart a group instead of waiting for it when only it holds a batch back. Faster when a few
            completions are very long, but then short completions are sampled too often.
        rollout_timeout_s: the run ends if a batch is waited for and no trajectory finishes for this long.
        loop_timeout_s: the run ends if a workflow or an async reward blocks the rollouts' event loop for this long.
    """

    def __init__(
        self,
        max_staleness: int = 0,
        *,
        max_concurrent: int | None = None,
        redraw_stragglers: bool = False,
        rollout_timeout_s: float = 1800.0,
        loop_timeout_s: float = 60.0,
    ) -> None:
        if max_staleness < 0:
            raise ValueError(f"max_staleness must be 0 (on-policy) or more, got {max_staleness}.")
        if max_concurrent is not None and max_concurrent < 1:
            raise ValueError(f"max_concurrent must be at least 1 or None, got {max_concurrent}.")
        for name, seconds in (("rollout_timeout_s", rollout_timeout_s), ("loop_timeout_s", loop_timeout_s)):
            if seconds <= 0:
                raise ValueError(f"{name} must be above 0, got {seconds}.")
        self.max_staleness = max_staleness
        self.max_concurrent = max_concurrent
        self.redraw_stragglers = redraw_stragglers
        self.rollout_timeout_s = rollout_timeout_s
        self.loop_timeout_s = loop_timeout_s
        self._ess = EssWatch()

    def configure_rollout(self, trainer: RLTrainer, module: RLModule, settings: RolloutSettings) -> RolloutSettings:
        return replace(
            settings,
            max_staleness=self.max_staleness,
            max_concurrent=self.max_concurrent,
            redraw_stragglers=self.redraw_stragglers,
            rollout_timeout_s=self.rollout_timeout_s,
            loop_timeout_s=self.loop_timeout_s,
        )

    def on_experience_ready(self, trainer: RLTrainer, module: RLModule, experience: Experience) -> None:
        """Checks the bound on the tokens that are about to be trained on."""
        if trainer.rollout.is_recorded:
            return  # their versions are those of the run that wrote them
        versions = experience.weight_versions[experience.loss_mask]
        oldest = int(versions.min()) if versions.numel() else trainer.weight_version
        staleness = trainer.weight_version - oldest
        bound = trainer.rollout.settings.max_staleness
        if staleness > bound or (versions < 0).any():
            raise AssertionError(f"A token has staleness {staleness}, above the bound of {bound}.")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ess_fraction = trainer.callback_metrics.get(ESS)
        if ess_fraction is not None and self._ess.falls(float(ess_fraction)) and trainer.is_global_zero:
            log.warning(
                "%s was below %s in the mean of the last %d iterations: the trajectories are so far from the policy "
                "that a few tokens outweigh the others. Lower lr or max_staleness, or use a loss for stale "
                "trajectories, such as OAPL (docs/algorithms.md, Which loss at which lag).",
                ESS,
                LOW_ESS_FRACTION,
                ESS_ITERATIONS,
            )

    def state_dict(self) -> dict[str, Any]:
        return {"last_ess_fractions": list(self._ess.last)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._ess.last.clear()
        self._ess.last.extend(state_dict["last_ess_fractions"])
