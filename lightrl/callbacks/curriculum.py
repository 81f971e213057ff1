"""PromptCurriculum: which prompts are worth a rollout, by the policy's past success on them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lightrl.callbacks.rl_callback import RLCallback
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

    It logs `rollout/skipped_prompts`, since the last iteration.

    Args:
        curriculum: any object with the methods of `lightrl.rollout.Curriculum`; SuccessRateCurriculum() if None.
    """

    def __init__(self, curriculum: Curriculum | None = None) -> None:
        self.curriculum = SuccessRateCurriculum() if curriculum is None else curriculum
        self._num_logged = 0  # skipped prompts of this fit

    def configure_rollout(self, trainer: RLTrainer, module: RLModule, settings: RolloutSettings) -> RolloutSettings:
        return replace(settings, curriculum=self.curriculum)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._num_logged = 0

    def on_rollout_end(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        num_skipped = trainer.rollout.progress()["skipped_prompts"]
        module.log("rollout/skipped_prompts", float(num_skipped - self._num_logged), on_step=True, on_epoch=False)
        self._num_logged = num_skipped
