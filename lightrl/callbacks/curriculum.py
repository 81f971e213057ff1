"""PromptCurriculum: which prompts are worth a rollout, by the policy's past success on them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.callbacks.rollout_metrics import MeansSince
from lightrl.data import SuccessRateCurriculum
from lightrl.rollout import Curriculum, RolloutSettings

if TYPE_CHECKING:
    import lightning as L

    from lightrl.module import RLModule
    from lightrl.rollout.rl_trainer import RLTrainer
    from lightrl.trajectory import Group


class PromptCurriculum(RLCallback):
    """Skips prompts by their past success, so that iterations consist of prompts that teach.

    When a prompt's turn comes in an epoch, it is played with the probability that the curriculum gives it. So prompts
    keep the stream's order, some are skipped, and an epoch of the data lasts fewer iterations than the loader says. The
    curriculum's state is saved in the checkpoint with the rollouts; a resumed run plays the prompts that an
    uninterrupted one would have played.

    RolloutMetrics logs how many it skips as `rollout/skipped_prompts`. What it prefers: the mean past success of the
    prompts that it played again, and of those that it skipped since the last iteration, is logged as
    `rollout/played_success_fraction` and `rollout/skipped_success_fraction`, if the curriculum has a method
    `success_rate`, as SuccessRateCurriculum has.

    Args:
        curriculum: any object with the methods of `lightrl.rollout.Curriculum`; SuccessRateCurriculum() if None.
    """

    def __init__(self, curriculum: Curriculum | None = None) -> None:
        self.curriculum = SuccessRateCurriculum() if curriculum is None else curriculum
        self._success = MeansSince()

    def configure_rollout(self, trainer: RLTrainer, module: RLModule, settings: RolloutSettings) -> RolloutSettings:
        return replace(settings, curriculum=self.curriculum)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._success = MeansSince()

    def on_rollout_end(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        for what in ("played", "skipped"):
            names = {f"{what}_again_success": f"rollout/{what}_success_fraction"}
            for name, value in self._success.means(trainer.rollout.progress(), f"{what}_again", names).items():
                module.log(name, value, on_step=True, on_epoch=False)
