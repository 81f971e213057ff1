"""StalenessControl: by how many weight versions a trajectory may be behind the policy that trains on it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.rollout import RolloutSettings

if TYPE_CHECKING:
    from lightrl.experience import Experience
    from lightrl.module import RLModule
    from lightrl.rollout.rl_trainer import RLTrainer
    from lightrl.trajectory import Group


log = logging.getLogger(__name__)

MIN_BIAS = 0.01  # of the groups drawn again, to warn
MIN_GROUPS = 100  # drawn until then


class StalenessControl(RLCallback):
    """Bounds the staleness of every trained token: weight version now − version that sampled it, in versions.

    With 0 the loop is on-policy: it collects an iteration, learns, syncs, collects the next. With η > 0 rollouts
    continue while the policy is updated, up to (η + 1)·P groups ahead; a generation that a weight sync interrupts
    continues under the new weights. It is one loop in both cases: rollout/group_book.py decides what starts and what is
    taken.

    Groups are trained on in the order of the prompt stream, none is thrown away, and where the next one is slow the
    trainer waits for it (`time/straggler_wait_s`). So trained lengths are distributed as sampled ones; see
    docs/async.md.

    Args:
        max_staleness: η, in versions.
        max_concurrent: most groups in flight; None for no limit but the staleness.
        redraw_stragglers: instead of waiting for a group that would exceed the bound, start it again with new seeds.
            Faster when a few completions are very long, but then the policy learns from short ones too often:
            `staleness/redrawn_fraction`, of all groups drawn since the start, bounds the Kolmogorov-Smirnov distance
            between sampled and trained durations, and is close to it. Above 1 % a warning says so.
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
        self._num_taken = 0  # groups, in this process
        self._has_warned = False

    def configure_rollout(self, trainer: RLTrainer, module: RLModule, settings: RolloutSettings) -> RolloutSettings:
        return replace(
            settings,
            max_staleness=self.max_staleness,
            max_concurrent=self.max_concurrent,
            redraw_stragglers=self.redraw_stragglers,
            rollout_timeout_s=self.rollout_timeout_s,
            loop_timeout_s=self.loop_timeout_s,
        )

    def on_rollout_end(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        """Measures the bias of redrawing."""
        if not self.redraw_stragglers or trainer.rollout.is_recorded:
            return
        self._num_taken += len(groups)
        num_redrawn = trainer.rollout.progress()["redrawn_groups"]
        num_drawn = self._num_taken + num_redrawn
        fraction = num_redrawn / num_drawn
        module.log("staleness/redrawn_fraction", fraction, on_step=True, on_epoch=False)
        if fraction > MIN_BIAS and num_drawn >= MIN_GROUPS and not self._has_warned and trainer.is_global_zero:
            self._has_warned = True
            log.warning(
                "redraw_stragglers=True has thrown away %.1f %% of the groups drawn so far, the slowest ones: the "
                "policy learns from shorter completions than it samples (staleness/redrawn_fraction). To wait for them "
                "instead, set redraw_stragglers to False and increase max_staleness.",
                100 * fraction,
            )

    def on_experience_ready(self, trainer: RLTrainer, module: RLModule, experience: Experience) -> None:
        """Checks the bound on the tokens that are about to be trained on."""
        if trainer.rollout.is_recorded:
            return  # their versions are those of the run that wrote them
        own = experience.own
        versions = own.weight_versions[own.loss_mask]
        oldest = int(versions.min()) if versions.numel() else trainer.weight_version
        staleness = trainer.weight_version - oldest
        bound = trainer.rollout.settings.max_staleness
        if staleness > bound or (versions < 0).any():
            raise AssertionError(f"A token has staleness {staleness}, above the bound of {bound}.")
