"""Runs whose rollouts are trees of conversations: they resume, and what was written down trains the same again."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from tiny import rollout_state
from tiny_run import BATCH_SIZE, GROUP_SIZE, Digits, TinyGRPO, are_equal, make_trainer, weights
from tree_workflow import Tree

import lightrl
from lightrl.engines import Completion

SETTINGS: dict[str, Any] = {"workflow": Tree, "num_minibatches": 2, "decoupled": True, "microbatch_tokens": 40}


def fit(folder: Path, *callbacks: Any, ckpt_path: Path | None = None, data: Any = None, **flags: Any) -> TinyGRPO:
    module = TinyGRPO(**SETTINGS)
    trainer = make_trainer(folder, callbacks=list(callbacks), enable_checkpointing=True, **flags)
    trainer.fit(module, data or Digits(), ckpt_path=ckpt_path)
    return module


class Late(lightrl.LocalEngine):
    """Gets each request after a random delay, so later turns come in another order, and to other batches, in each run.

    A row's logprobs depend on the batch by their rounding, so only an engine with one slot repeats them to the bit.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(max_batch=1)
        self.random = random.Random(seed)

    async def generate(self, *args: Any, **kwargs: Any) -> list[Completion]:
        await asyncio.sleep(self.random.uniform(0, 0.001))
        return await super().generate(*args, **kwargs)


class WaitForGroups(Callback):
    """Blocks after the first iteration until `num` finished groups wait for the trainer."""

    def __init__(self, num: int) -> None:
        self.num = num

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        deadline = time.monotonic() + 600
        while trainer.global_step == 1 and trainer.rollout.progress()["finished_groups"] < self.num:
            assert time.monotonic() < deadline, f"{self.num} groups are not finished: {trainer.rollout.progress()}"
            time.sleep(0.01)


def rows_of(experience: lightrl.Experience) -> list[tuple[list[int], list[int], list[bool]]]:
    """Tokens, gaps and loss mask of each trajectory."""
    rows = zip(experience.token_ids, experience.gaps, experience.loss_mask, experience.lengths, strict=True)
    return [(ids[:n].tolist(), gaps[:n].tolist(), mask[:n].tolist()) for ids, gaps, mask, n in rows]


def test_a_run_with_trees_resumes_and_repeats_from_its_files_to_the_bit(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    log = lightrl.TrajectoryLog(every_n_iterations=1, table_every_n_iterations=None)
    whole = fit(tmp_path, save, log, engine=Late(seed=0))
    assert [len(experience) for experience in whole.experiences] == [BATCH_SIZE * GROUP_SIZE] * 3
    for experience in whole.experiences:
        is_shared = experience.token_ids[:, 0] % 2 == 0  # a subagent reads 2 tokens of an even question once more
        assert experience.forward_tokens.equal(experience.lengths + 2 * is_shared)
        assert experience.loss_token_counts.equal(experience.generated_token_counts)
    repeated = [int((experience.forward_tokens - experience.lengths).sum()) for experience in whole.experiences]
    assert sum(repeated) == 3 * GROUP_SIZE * 2  # of 6 prompts each second one
    assert float(whole.trainer.callback_metrics["policy/kl_behavior_nats"]) < 1e-3
    for seed in (1, 2):
        resumed = fit(tmp_path / "resumed", ckpt_path=tmp_path / "step=1.ckpt", engine=Late(seed))
        assert are_equal(weights(resumed), weights(whole))
    replayed = fit(tmp_path / "again", data=lightrl.TrajectoryDataModule(str(tmp_path / "trajectories")))
    assert are_equal(weights(replayed), weights(whole))


def test_finished_trees_that_wait_in_a_checkpoint_are_trained_after_it(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    whole = fit(tmp_path, save, lightrl.StalenessControl(max_staleness=2), WaitForGroups(2 * BATCH_SIZE))
    groups = [lightrl.Group.from_state(state) for state in rollout_state(tmp_path / "step=1.ckpt")["finished"]]
    waiting = [trajectory for group in groups for trajectory in group.trajectories]
    assert len(waiting) == 2 * BATCH_SIZE * GROUP_SIZE
    resumed = fit(tmp_path / "resumed", lightrl.StalenessControl(max_staleness=2), ckpt_path=tmp_path / "step=1.ckpt")
    assert len(resumed.experiences) == 2
    trained = [row for experience in resumed.experiences for row in rows_of(experience)]
    assert sorted(trained) == sorted(
        (list(item.token_ids), list(item.gaps or []), list(item.loss_mask)) for item in waiting
    )
    assert are_equal(weights(resumed), weights(whole))


def test_validation_counts_rollouts(tmp_path: Path) -> None:
    module = TinyGRPO(**SETTINGS, validation_group_size=2, validation_sampling=lightrl.Sampling(max_new_tokens=6))
    found: list[lightrl.Trajectory] = []
    module.reward = lambda trajectory: found.append(trajectory) or 1.0  # type: ignore[method-assign,func-returns-value]
    trainer = make_trainer(tmp_path, limit_val_batches=1)
    trainer.validate(module, Digits(), verbose=False)
    metrics = trainer.callback_metrics
    assert metrics["val/reward"] == metrics["val/pass_at_2_fraction"] == 1
    assert float(metrics["val/length_tokens"]) == pytest.approx(
        sum(item.num_loss_tokens for item in found) / len(found)
    )
    assert metrics["val/prompts"] * 2 == len(found)
