"""An asynchronous run that is resumed continues the completions that were in flight, in the middle of their tokens."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import rollout_state
from tiny_run import CONFIG, Digits, TinyGRPO, make_trainer

from lightrl import FakeEngine, LocalEngine, ModelSpec, RLCallback, Sampling, StalenessControl, Trajectory
from lightrl.engines.engine import Completion

pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path., callbacks:UserWarning")
POLICY = ModelSpec(config={**CONFIG, "max_position_embeddings": 128}, tokenizer="tiny_run.tokenizer", seed=3)
CHANCE = random.SystemRandom()


class Jittery(TinyGRPO):
    """Its rewards take times that nobody can repeat, so that runs differ in what is done when."""

    def __init__(self) -> None:
        sampling = Sampling(max_new_tokens=100, min_new_tokens=90)
        super().__init__(POLICY, sampling=sampling, decoupled=True, num_minibatches=2)

    async def reward(self, trajectory: Trajectory) -> Any:
        await asyncio.sleep(CHANCE.uniform(0, 0.02))
        return super().reward(trajectory)


class Slow(RLCallback):
    """An update takes a while, so that weights change within completions."""

    def on_minibatch_start(self, *args: Any) -> None:
        time.sleep(CHANCE.uniform(0, 0.02))


def fit(folder: Path, engine: Any, *callbacks: Any, ckpt_path: Path | None = None) -> Jittery:
    module = Jittery()
    flags = {"max_steps": 6, "enable_checkpointing": bool(callbacks)}
    trainer = make_trainer(folder, engine=engine, callbacks=[StalenessControl(2), Slow(), *callbacks], **flags)
    trainer.fit(module, datamodule=Digits(), ckpt_path=ckpt_path)
    return module


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved in the middle of completions."""
    folder = tmp_path_factory.mktemp("saved")
    save = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    fit(folder, LocalEngine(max_batch=3), save)
    return folder / "step=3.ckpt"


@pytest.mark.parametrize("engine", [LocalEngine, FakeEngine])
def test_a_resumed_run_keeps_the_tokens_that_were_in_flight(engine: Any, checkpoint: Path, tmp_path: Path) -> None:
    parts = [Completion.from_state(item) for _, item in rollout_state(checkpoint)["written"]]
    assert {part.finish_reason for part in parts} >= {"abort"}
    resumed = fit(tmp_path, engine(), ckpt_path=checkpoint)
    rows = []
    for seen in resumed.experiences:
        for index, mask in enumerate(seen.loss_mask):
            fields = (seen.token_ids, seen.behavior_logprobs, seen.weight_versions)
            rows.append(tuple(values[index][mask].tolist() for values in fields))
    for part in parts:
        started = tuple(list(values) for values in (part.token_ids, part.logprobs, part.weight_versions))
        assert any(tuple(values[: len(part.token_ids)] for values in row) == started for row in rows)


class SpeedSeen(RLCallback):
    """Whether the iterations before each one have logged a speed of the rollout."""

    def __init__(self) -> None:
        self.is_logged: list[bool] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.is_logged.append("rollout/tokens_per_s" in trainer.callback_metrics)


def test_tokens_that_an_earlier_fit_wrote_are_no_speed_of_the_resumed_one(checkpoint: Path, tmp_path: Path) -> None:
    seen = SpeedSeen()
    fit(tmp_path, FakeEngine(), seen, ckpt_path=checkpoint)
    assert seen.is_logged == [False, False, True]
