"""An asynchronous run that repeats a recorded schedule is that run, bit for bit."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_run import CONFIG, Digits, TinyGRPO, are_equal, make_trainer, weights

from lightrl import FakeEngine, LocalEngine, ModelSpec, RLCallback, Sampling, StalenessControl, Trajectory
from lightrl.engines.engine import Completion
from lightrl.errors import RolloutError
from lightrl.loops.resume_check import ROLLOUT_LOOP_KEY

pytestmark = [
    pytest.mark.replay,
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path., callbacks:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]
NUM_ITERATIONS = 8
POLICY = ModelSpec(config={**CONFIG, "max_position_embeddings": 128}, tokenizer="tiny_run.tokenizer", seed=3)


class Jittery(TinyGRPO):
    """Its rewards take times that nobody can repeat, so that runs differ in what is done when."""

    def __init__(self, policy: ModelSpec = POLICY, **kwargs: Any) -> None:
        settings = {
            "sampling": Sampling(max_new_tokens=100, min_new_tokens=90),
            "decoupled": True,
            "num_minibatches": 2,
            **kwargs,
        }
        super().__init__(policy, **settings)
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
    module = Jittery(flags.pop("policy", POLICY))
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Jittery, dict[str, Any]]:
    """A run with a checkpoint amid completions, and the rollout's part of the checkpoint."""
    folder = tmp_path_factory.mktemp("saved")
    save = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    module = fit(folder, LocalEngine(max_batch=3), callbacks=[save], enable_checkpointing=True)
    checkpoint = torch.load(folder / "step=3.ckpt", weights_only=True)
    return folder, module, checkpoint["loops"]["fit_loop"][ROLLOUT_LOOP_KEY]["rollout"]


def test_a_replay_from_a_checkpoint_continues_what_was_in_flight_bit_for_bit(saved: Any, tmp_path: Path) -> None:
    folder, module, state = saved
    assert state["unfinished"]
    again = fit(tmp_path, LocalEngine(max_batch=3), schedule=folder, ckpt_path=folder / "step=3.ckpt")
    assert_same_run(module, again, since=3)


@pytest.mark.parametrize("engine", [LocalEngine, FakeEngine])
def test_a_resumed_run_keeps_the_tokens_that_were_in_flight(engine: Any, saved: Any, tmp_path: Path) -> None:
    folder, _, state = saved
    parts = [Completion.from_state(item) for _, item in state["written"]]
    assert {part.finish_reason for part in parts} >= {"abort"}
    resumed = fit(tmp_path, engine(), ckpt_path=folder / "step=3.ckpt")
    rows = []
    for seen in resumed.experiences:
        for index, mask in enumerate(seen.loss_mask):
            fields = (seen.token_ids, seen.behavior_logprobs, seen.weight_versions)
            rows.append(tuple(values[index][mask].tolist() for values in fields))
    for part in parts:
        fields = (part.token_ids, part.logprobs, part.weight_versions)
        begun = tuple(list(values) for values in fields)
        assert any(tuple(values[: len(part.token_ids)] for values in row) == begun for row in rows)


@pytest.mark.parametrize("engine", [LocalEngine, FakeEngine])
def test_a_resumed_run_is_replayed_from_its_checkpoint(engine: Any, saved: Any, tmp_path: Path) -> None:
    checkpoint = saved[0] / "step=3.ckpt"
    resumed = fit(tmp_path / "resumed", engine(), ckpt_path=checkpoint)
    (file,) = (tmp_path / "resumed").glob("schedule-*.jsonl")
    assert json.loads(file.read_text().splitlines()[0])["continues"] == {"file": "schedule-000000.jsonl", "mark": 0}
    again = fit(tmp_path / "again", engine(), schedule=tmp_path / "resumed", ckpt_path=checkpoint)
    assert_same_run(resumed, again)
    with pytest.raises(RolloutError, match=r"no schedule-000000\.jsonl, nor one that continues it"):
        fit(tmp_path / "other", engine(), schedule=tmp_path / "resumed", ckpt_path=saved[0] / "step=6.ckpt")


def test_a_replay_of_other_settings_is_refused(saved: Any, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"other settings: max_staleness=1 \(recorded 2\)"):
        fit(tmp_path, LocalEngine(max_batch=3), eta=1, schedule=saved[0])


def test_a_replay_ends_where_the_recorded_run_ended(saved: Any, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match=r"ends before the batch of version 8. Set max_steps to 8."):
        fit(tmp_path, LocalEngine(max_batch=3), schedule=saved[0], max_steps=9)


def test_a_replay_from_other_weights_names_the_first_trajectory_that_differs(saved: Any, tmp_path: Path) -> None:
    policy = replace(POLICY, seed=4)
    with pytest.raises(
        RolloutError, match=r"deviates at group \d, sample \d: checksum and versions of its tokens were"
    ):
        fit(tmp_path, LocalEngine(max_batch=3), schedule=saved[0], policy=policy)
