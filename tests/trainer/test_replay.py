"""An asynchronous run that repeats a recorded schedule is that run, bit for bit."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import CONFIG, Digits, TinyGRPO, are_equal, make_trainer, weights

from lightrl import FakeEngine, LocalEngine, ModelSpec, RLCallback, Sampling, StalenessControl, Trajectory

pytestmark = pytest.mark.replay
NUM_ITERATIONS = 8
POLICY = ModelSpec(config={**CONFIG, "max_position_embeddings": 128}, tokenizer="tiny_run.tokenizer", seed=3)


class Jittery(TinyGRPO):
    """Its rewards take times that nobody can repeat, so that runs differ in what is done when."""

    def __init__(self, **kwargs: Any) -> None:
        settings = {"sampling": Sampling(max_new_tokens=100), "decoupled": True, "num_minibatches": 2, **kwargs}
        super().__init__(POLICY, **settings)
        self.losses: list[float] = []

    async def reward(self, trajectory: Trajectory) -> Any:
        import asyncio

        await asyncio.sleep(random.SystemRandom().uniform(0, 0.02))
        return super().reward(trajectory)

    def on_minibatch_end(self, metrics: dict[str, float], index: int, total: int) -> None:
        self.losses.append(metrics["loss"])


class Slow(RLCallback):
    """An update takes a while, so that weights change within completions."""

    def on_minibatch_start(self, *args: Any) -> None:
        time.sleep(random.SystemRandom().uniform(0, 0.02))


def fit(folder: Path, engine: Any, *, eta: int = 2, schedule: Path | None = None, **flags: Any) -> Jittery:
    torch.manual_seed(5)
    module = Jittery()
    flags = {"max_steps": NUM_ITERATIONS, **flags}
    ckpt_path = flags.pop("ckpt_path", None)
    callbacks = [StalenessControl(eta, rollout_timeout_s=20), Slow(), *flags.pop("callbacks", ())]
    trainer = make_trainer(folder, engine=engine, callbacks=callbacks, **flags)
    trainer.fit(module, datamodule=Digits(schedule=schedule), ckpt_path=ckpt_path)
    return module


def assert_same_run(module: Jittery, other: Jittery, since: int = 0) -> None:
    assert module.trained[since:] == other.trained
    for left, right in zip(module.experiences[since:], other.experiences, strict=True):
        assert torch.equal(left.token_ids, right.token_ids)
        assert torch.equal(left.weight_versions, right.weight_versions)
        assert torch.equal(left.behavior_logprobs, right.behavior_logprobs)
    assert module.losses[2 * since :] == other.losses
    assert are_equal(weights(module), weights(other))


def test_an_asynchronous_run_of_local_engine_repeats_bit_for_bit(tmp_path: Path) -> None:
    module = fit(tmp_path / "first", LocalEngine(max_batch=3))
    versions = [experience.weight_versions[experience.loss_mask] for experience in module.experiences]
    assert any((rows != rows[0]).any() for rows in versions)  # or nothing was on its way when weights changed
    again = fit(tmp_path / "again", LocalEngine(max_batch=3), schedule=tmp_path / "first")
    assert_same_run(module, again)


def test_any_engine_that_is_seeded_repeats_the_versions_of_each_token(tmp_path: Path) -> None:
    pace = {"seconds_per_token": lambda prompt, sampling: random.SystemRandom().uniform(0, 0.004)}
    module = fit(tmp_path / "first", FakeEngine(**pace))
    again = fit(tmp_path / "again", FakeEngine(**pace), schedule=tmp_path / "first")
    assert_same_run(module, again)


def test_a_schedule_takes_fewer_than_100_bytes_per_trajectory(tmp_path: Path) -> None:
    module = fit(tmp_path, LocalEngine())
    (file,) = tmp_path.glob("schedule-*.jsonl")
    assert json.loads(file.read_text().splitlines()[0])["settings"]["max_staleness"] == 2
    num = sum(len(experience) for experience in module.experiences)
    assert file.stat().st_size / num < 100
