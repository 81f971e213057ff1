"""RLCallback: Lightning's Callback with hooks for the phases of an iteration.

One iteration calls, in this order:

    on_train_batch_start                                        (Lightning's)
      on_rollout_start → on_rollout_progress … → on_rollout_end
      on_rewards_progress … → on_rewards_ready
      on_experience_ready                                       scored, advantages set
      on_minibatch_start → on_minibatch_end …                   once per update
      on_policy_updated → on_weights_synced
    on_train_batch_end                                          (Lightning's)

All are called on the main thread, and `module.log` works inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import Callback

if TYPE_CHECKING:
    import lightning as L

    from lightrl.experience import Experience
    from lightrl.trajectory import Group


class RLCallback(Callback):
    """Adds the RL hooks to Lightning's; each does nothing until it is overridden.

    The trainer calls an RL hook on every callback that defines it, and on the module, so inheriting from this class is
    a convenience: it gives the names and signatures.
    """

    def on_rollout_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Called when an iteration starts to wait for its groups."""

    def on_rollout_progress(self, trainer: L.Trainer, module: L.LightningModule, done: int, total: int) -> None:
        """Called a few times a second while waiting: `done` of this iteration's `total` trajectories are finished."""

    def on_rollout_end(self, trainer: L.Trainer, module: L.LightningModule, groups: list[Group]) -> None:
        """Called when the iteration's groups are taken; some rewards may be None and still be awaited."""

    def on_rewards_progress(self, trainer: L.Trainer, module: L.LightningModule, done: int, total: int) -> None:
        """Called a few times a second while rewards are awaited: `done` of the `total` trajectories have theirs."""

    def on_rewards_ready(self, trainer: L.Trainer, module: L.LightningModule, groups: list[Group]) -> None:
        """Called when the rewards of the iteration's groups are set; those that failed have left their groups.

        On-policy that may be after the models have scored the trajectories, else right after `on_rollout_end`.
        """

    def on_experience_ready(
        self, trainer: L.Trainer, module: L.LightningModule, experience: Experience
    ) -> Experience | None:
        """Called when the trajectories are scored and their advantages set, before the update.

        Returns:
            None to leave it as it is, or an Experience that differs in loss mask and advantages only.
        """
        return None

    def on_minibatch_start(
        self, trainer: L.Trainer, module: L.LightningModule, minibatch: Experience, index: int, total: int
    ) -> None:
        """Called before minibatch `index` (from 0) of this iteration's `total`, update epochs included."""

    def on_minibatch_end(
        self, trainer: L.Trainer, module: L.LightningModule, metrics: dict[str, float], index: int, total: int
    ) -> None:
        """Called after the optimizer step on minibatch `index`; `metrics` are the loss's, averaged over its tokens."""

    def on_policy_updated(self, trainer: L.Trainer, module: L.LightningModule, weight_version: int) -> None:
        """Called once all minibatches are done: the policy now is `weight_version`; the engine may not have it yet."""

    def on_weights_synced(self, trainer: L.Trainer, module: L.LightningModule, weight_version: int) -> None:
        """Called when all routable engines have acknowledged `weight_version`."""

    def on_trajectory_dropped(self, trainer: L.Trainer, module: L.LightningModule, reason: str, message: str) -> None:
        """Called for each trajectory that will not be trained on; `reason` is one word for counting."""
