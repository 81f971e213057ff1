"""PromptCurriculum: which prompts are worth a rollout, by the policy's past success on them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.data import SuccessRateCurriculum
from lightrl.rollout import Curriculum, RolloutSettings

if TYPE_CHECKING:
    from lightrl.module import RLModule
    from lightrl.rollout.rl_trainer import RLTrainer


class PromptCurriculum(RLCallback):
    """Skips prompts by their past success, so that iterations consist of prompts that teach.

    When a prompt's turn comes in an epoch, it is played with the probability that the curriculum gives it. So prompts
    keep the stream's order, some are skipped, and an epoch of the data lasts fewer iterations than the loader says. The
    curriculum's state is saved in the checkpoint with the rollouts; a resumed run plays the prompts that an
    uninterrupted one would have played.

    RolloutMetrics logs how many it skips as `rollout/skipped_prompts`.

    Args:
        curriculum: any object with the methods of `lightrl.rollout.Curriculum`; SuccessRateCurriculum() if None.
    """

    def __init__(self, curriculum: Curriculum | None = None) -> None:
        self.curriculum = SuccessRateCurriculum() if curriculum is None else curriculum

    def configure_rollout(self, trainer: RLTrainer, module: RLModule, settings: RolloutSettings) -> RolloutSettings:
        return replace(settings, curriculum=self.curriculum)
