"""Runs whose rollouts are trees of conversations: they resume, and what was written down trains the same again."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_run import BATCH_SIZE, GROUP_SIZE, Digits, TinyGRPO, are_equal, make_trainer, weights
from tree_workflow import Tree

from lightrl import Sampling, StalenessControl, Trajectory, TrajectoryDataModule, TrajectoryLog

SETTINGS: dict[str, Any] = {"workflow": Tree, "num_minibatches": 2, "decoupled": True, "microbatch_tokens": 40}


def fit(folder: Path, *callbacks: Any, ckpt_path: Path | None = None, data: Any = None, **flags: Any) -> TinyGRPO:
    module = TinyGRPO(**SETTINGS)
    trainer = make_trainer(folder, callbacks=list(callbacks), enable_checkpointing=True, **flags)
    trainer.fit(module, data or Digits(), ckpt_path=ckpt_path)
    return module


def test_a_run_with_trees_resumes_and_repeats_from_its_files_to_the_bit(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    log = TrajectoryLog(every_n_iterations=1, table_every_n_iterations=None)
    whole = fit(tmp_path, save, log)
    assert [len(experience) for experience in whole.experiences] == [BATCH_SIZE * GROUP_SIZE] * 3
    for experience in whole.experiences:
        assert (experience.forward_tokens >= experience.lengths).all()
        assert experience.loss_token_counts.equal(experience.generated_token_counts)
    assert float(whole.trainer.callback_metrics["policy/kl_behavior_nats"]) < 1e-3
    resumed = fit(tmp_path / "resumed", ckpt_path=tmp_path / "step=1.ckpt")
    assert are_equal(weights(resumed), weights(whole))
    replayed = fit(tmp_path / "again", data=TrajectoryDataModule(str(tmp_path / "trajectories")))
    assert are_equal(weights(replayed), weights(whole))


def test_finished_trees_that_wait_in_a_checkpoint_are_trained_after_it(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    fit(tmp_path, save, StalenessControl(max_staleness=2), max_steps=2)
    resumed = fit(tmp_path / "resumed", StalenessControl(max_staleness=2), ckpt_path=tmp_path / "step=1.ckpt")
    assert len(resumed.experiences) == 2
    for experience in resumed.experiences:
        assert experience.gaps is not None
        assert experience.gaps.any(1).all()


def test_validation_counts_rollouts(tmp_path: Path) -> None:
    module = TinyGRPO(**SETTINGS, validation_group_size=2, validation_sampling=Sampling(max_new_tokens=6))
    found: list[Trajectory] = []
    module.reward = lambda trajectory: found.append(trajectory) or 1.0  # type: ignore[method-assign,func-returns-value]
    trainer = make_trainer(tmp_path, limit_val_batches=1)
    trainer.validate(module, Digits(), verbose=False)
    metrics = trainer.callback_metrics
    assert metrics["val/reward"] == metrics["val/pass_at_2_fraction"] == 1
    assert float(metrics["val/length_tokens"]) == pytest.approx(
        sum(item.num_loss_tokens for item in found) / len(found)
    )
    assert metrics["val/prompts"] * 2 == len(found)
