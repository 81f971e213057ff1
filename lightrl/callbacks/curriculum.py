"""PromptCurriculum: which prompts are worth a rollout, from what the policy made of them before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.data import SuccessRateCurriculum
from lightrl.rollout import Curriculum

if TYPE_CHECKING:
    import lightning as L

    from lightrl.trajectory import Group


class PromptCurriculum(RLCallback):
    """Passes over prompts by their past success, so that iterations are made of those that teach.

    At its turn in each epoch a prompt is played with the probability that the curriculum gives it. So the prompts come
    in the stream's order, some are left out, and an epoch of the data lasts fewer iterations than the loader says. What
    the curriculum knows travels in the checkpoint with the rollouts; a resumed run plays the prompts that one without
    a stop would have played.

    It logs `rollout/skipped_prompts`, since the last iteration.

    Args:
        curriculum: any object with the methods of `lightrl.rollout.Curriculum`; SuccessRateCurriculum() if None.
    """

    def __init__(self, curriculum: Curriculum | None = None) -> None:
        self.curriculum = SuccessRateCurriculum() if curriculum is None else curriculum
        self._num_logged = 0  # skipped prompts of this fit

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._num_logged = 0

    def on_rollout_end(self, trainer: L.Trainer, module: L.LightningModule, groups: list[Group]) -> None:
        rl_trainer: Any = trainer
        num_skipped = rl_trainer.rollout.progress()["skipped_prompts"]
        module.log("rollout/skipped_prompts", float(num_skipped - self._num_logged), on_step=True, on_epoch=False)
        self._num_logged = num_skipped
