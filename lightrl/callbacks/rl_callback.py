"""RLCallback: Lightning's Callback with hooks for the phases of an iteration.

`before_fit` and `configure_rollout` are called before the first iteration. Each iteration calls, in this order:

    on_train_batch_start                                        (Lightning's)
      on_rollout_start → on_rollout_progress … → on_rollout_end
      on_rewards_progress … → on_rewards_ready
      on_experience_ready                                       logprobs and advantages are set
      on_minibatch_start → on_minibatch_end …                   once per update
      on_policy_updated → on_weight_sync → on_weights_synced
    on_train_batch_end                                          (Lightning's)

All are called on the main thread. `module.log` works in all of them except these two.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from lightrl.experience import Experience
from lightrl.module import RLModule
from lightrl.rollout import RolloutSettings
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.trajectory import Group


class RLCallback(Callback):
    """Adds the RL hooks to Lightning's Callback; a hook does nothing unless it is overridden.

    The trainer calls an RL hook on every callback that defines it, and on the module (without `trainer` and `module`).
    Inheriting from this class is therefore optional; it documents the names and signatures.
    """

    is_single = False  # True if a trainer takes at most one callback of this class

    def before_fit(self, trainer: RLTrainer, module: Any, data: Any) -> None:
        """Checks settings before a model is loaded or a process starts. May be called twice; `data` may be None."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":  # no earlier call: Lightning's Trainer makes none, nor does ours for `configure_callbacks`
            self.before_fit(trainer, pl_module, getattr(trainer, "datamodule", None))

    def configure_rollout(self, trainer: RLTrainer, module: RLModule, settings: RolloutSettings) -> RolloutSettings:
        """Called before the rollout opens in fit, validate, test and predict, but not for recorded trajectories.

        Callbacks are called in order, then the module; each gets the settings that the previous one returned. Every
        rank calls the hook, but numbers and strings come from rank 0, which alone uses `group_filter` and `curriculum`.

        Returns:
            `settings`, or `dataclasses.replace(settings, ...)`.
        """
        return settings

    def on_rollout_start(self, trainer: RLTrainer, module: RLModule) -> None:
        """Called when an iteration starts waiting for groups."""

    def on_rollout_progress(self, trainer: RLTrainer, module: RLModule, done: int, total: int) -> None:
        """Called a few times a second while waiting: `done` of the iteration's `total` trajectories are finished."""

    def on_rollout_end(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        """Called when the iteration has its groups; some rewards may still be None."""

    def on_rewards_progress(self, trainer: RLTrainer, module: RLModule, done: int, total: int) -> None:
        """Called a few times a second while waiting for rewards: `done` of the `total` trajectories have one."""

    def on_rewards_ready(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        """Called once the iteration's rewards are set and trajectories whose reward failed have been removed.

        On-policy runs may first make model calls that need no rewards; other runs call it right after `on_rollout_end`.
        """

    def on_experience_ready(self, trainer: RLTrainer, module: RLModule, experience: Experience) -> Experience | None:
        """Called before the update, when model calls are done and advantages are set.

        Returns:
            None, or `dataclasses.replace(experience.local, ...)` with a smaller loss mask or different advantages.
        """
        return None

    def on_minibatch_start(
        self, trainer: RLTrainer, module: RLModule, minibatch: Experience, index: int, total: int
    ) -> None:
        """Called before minibatch `index` (from 0) of the iteration's `total`, counted over all update epochs."""

    def on_minibatch_end(
        self, trainer: RLTrainer, module: RLModule, metrics: dict[str, float], index: int, total: int
    ) -> None:
        """Called after the optimizer step on minibatch `index`; `metrics` are means over the minibatch."""

    def on_policy_updated(self, trainer: RLTrainer, module: RLModule, weight_version: int) -> None:
        """Called after all minibatches: the policy is now at `weight_version`. Hooks may still change its weights."""

    def on_weight_sync(self, trainer: RLTrainer, module: RLModule, weight_version: int) -> None:
        """Called in each iteration after all `on_policy_updated` hooks; if a sync is due, WeightSync makes it here."""

    def on_weights_synced(self, trainer: RLTrainer, module: RLModule, weight_version: int) -> None:
        """Called when every serving replica has acknowledged `weight_version`."""

    def on_trajectory_dropped(self, trainer: RLTrainer, module: RLModule, reason: str, message: str) -> None:
        """Called for each trajectory that will not be trained on; metrics count drops by `reason` (one word)."""
