"""evaluate: the prompts of a validation, test or predict batch become judged groups."""

from __future__ import annotations

from typing import Any, cast

from lightning.pytorch.trainer.states import TrainerFn

from lightrl.data import prompts_of
from lightrl.models.stop_tokens import with_stop_tokens
from lightrl.module import RLModule
from lightrl.rollout.protocol import OnWait
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.trajectory import Group


class JudgedGroups(list[Group]):
    """The groups of a batch; Lightning may move it to a device, which leaves it as it is."""

    def to(self, *args: Any, **kwargs: Any) -> JudgedGroups:
        return self


def evaluate(trainer: RLTrainer, batch: Any, on_wait: OnWait) -> JudgedGroups:
    """Rolls out and judges the prompts of a batch.

    Args:
        trainer: evaluates an RLModule.
        batch: prompts, or rows of a user's own loader.
        on_wait: see Rollout.
    """
    module = cast("RLModule", trainer.lightning_module)
    groups = trainer.rollout.evaluate(
        prompts_of(
            batch,
            module.tokenizer,
            name=f"{cast('TrainerFn', trainer.state.fn).value}-{_index_of_batch(trainer)}",
            max_prompt_tokens=module.max_prompt_tokens,
        ),
        sampling=with_stop_tokens(module.validation_sampling, module.stop_token_ids()),
        num_samples=module.validation_group_size,
        on_wait=on_wait,
    )
    return JudgedGroups(groups)


def _index_of_batch(trainer: RLTrainer) -> int:
    """Within its loop: ids, and with them the seeds, are the same in each validation."""
    loops: dict[Any, Any] = {
        TrainerFn.FITTING: trainer.fit_loop.epoch_loop.val_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    return int(loops[trainer.state.fn].batch_progress.current.ready)
