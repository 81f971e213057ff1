"""StalenessControl: by how many weight versions a trajectory may be behind the policy that trains on it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.rollout import RolloutSettings

if TYPE_CHECKING:
    from lightrl.experience import Experience
    from lightrl.module import RLModule
    from lightrl.rollout.rl_trainer import RLTrainer


class StalenessControl(RLCallback):
    """Bounds the staleness of every trained token: weight version now − version that sampled it, in versions.

    With 0 the loop is on-policy: it collects an iteration, learns, syncs, collects the next. With η > 0 rollouts
    continue while the policy is updated, up to (η + 1)·P groups ahead; a generation that a weight sync interrupts
    continues under the new weights. It is one loop in both cases: rollout/group_book.py decides what starts and what is
    taken.

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
        own = experience.own
        versions = own.weight_versions[own.loss_mask]
        oldest = int(versions.min()) if versions.numel() else trainer.weight_version
        staleness = trainer.weight_version - oldest
        bound = trainer.rollout.settings.max_staleness
        if staleness > bound or (versions < 0).any():
            raise AssertionError(f"A token has staleness {staleness}, above the bound of {bound}.")
