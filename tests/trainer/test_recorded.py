"""Training without rollouts: iterations that were written down are repeated bit for bit, or trained on again."""

import json
import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tiny_run import POLICY, Digits, TinyGRPO, are_equal, make_trainer, our_threads, train, weights

from lightrl import PPO, AdaptiveKL, Sampling, TrajectoryDataModule, TrajectoryLog
from lightrl.callbacks import StalenessControl
from lightrl.trajectory import Prompt, Trajectory, encode_json


class NoReward(TinyGRPO):
    def reward(self, trajectory: Trajectory) -> Any:
        raise AssertionError("recorded trajectories have rewards already")


class TinyPPO(TinyGRPO, PPO):
    pass


class NoRewardPPO(NoReward, PPO):
    pass


def record(folder, steps=3, callbacks=(), kind=TinyGRPO, **settings):
    """A run that rolls out, with each iteration written down."""
    module = kind(**settings)
    log = TrajectoryLog(every_n_iterations=1, table_every_n_iterations=None)
    make_trainer(folder, max_steps=steps, callbacks=[log, *callbacks]).fit(module, Digits())
    return module


def replay(folder: Path, module: TinyGRPO, path: Path, **settings: Any) -> Any:
    return train(folder, module, TrajectoryDataModule(str(path)), max_epochs=1, **settings)


TRUNCATED = Sampling(max_new_tokens=6, top_p=0.9, top_k=6, temperature=0.8)  # of a vocabulary of 8


@pytest.mark.parametrize(
    ("settings", "callbacks"),
    [
        ({}, []),
        ({"num_minibatches": 2, "update_epochs": 2, "decoupled": True}, []),
        ({"entropy_coef": 0.1, "lr_decay": "linear"}, []),
        ({"num_minibatches": 2, "sampling": TRUNCATED}, []),
        ({"num_minibatches": 2, "decoupled": True}, [StalenessControl(2)]),
    ],
    ids=["one update", "four decoupled updates", "decay to the end of the run", "top-p and top-k", "asynchronous"],
)
def test_the_files_of_a_run_repeat_it_bit_for_bit(tmp_path: Path, settings: dict[str, Any], callbacks: Any) -> None:
    online = record(tmp_path, steps=4, callbacks=callbacks, **settings)
    offline = NoReward(**settings)
    trainer = replay(tmp_path / "again", offline, tmp_path / "trajectories")
    assert trainer.global_step == trainer.weight_version == 4
    assert "update/tokens_per_s" in trainer.callback_metrics
    assert "rollout/tokens_per_s" not in trainer.callback_metrics  # nobody wrote
    assert are_equal(weights(online), weights(offline))
    for one, other in zip(online.experiences, offline.experiences, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.tensors().items())


@pytest.mark.parametrize(
    "settings",
    [
        {"num_minibatches": 2, "update_epochs": 2, "reference": AdaptiveKL(0.1, POLICY, target_nats=0.01)},
        {"critic": "shared", "decoupled": True, "num_minibatches": 2, "critic_warmup_iterations": 1},
    ],
    ids=["a critic of its own", "a critic on the policy's body"],
)
def test_ppo_is_repeated_with_its_critic(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings |= {"value_normalization": "running"}
    online, offline = record(tmp_path, kind=TinyPPO, **settings), NoRewardPPO(**settings)
    replay(tmp_path / "again", offline, tmp_path / "trajectories")
    start = TinyPPO(**settings)
    start.configure_model()
    assert not are_equal(start.state_dict(), online.state_dict())
    assert are_equal(online.state_dict(), offline.state_dict())
    assert (online.kl_coef, online.normalizer) == (offline.kl_coef, offline.normalizer)


def test_one_iteration_is_repeated_from_the_checkpoint_before_it(tmp_path: Path) -> None:
    class SaveAtTwo(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "two.ckpt")

    module = record(tmp_path, callbacks=(SaveAtTwo(),))
    again = NoReward()
    last = tmp_path / "trajectories" / "iteration-000003.jsonl"
    make_trainer(tmp_path / "again", max_steps=3).fit(
        again, TrajectoryDataModule(str(last)), ckpt_path=tmp_path / "two.ckpt", weights_only=True
    )
    assert are_equal(weights(module), weights(again))


def test_no_engine_no_worker_and_no_thread_is_started(tmp_path: Path) -> None:
    record(tmp_path)
    trainer = make_trainer(tmp_path / "again", max_epochs=2)
    assert not our_threads()
    module = NoReward()
    module.on_rollout_end = lambda groups: seen.append(our_threads())
    seen: list[list[str]] = []
    trainer.fit(module, TrajectoryDataModule(str(tmp_path / "trajectories")))
    assert seen == [[]] * 6
    assert trainer.engine is None
    assert trainer.open_rollout is None


@pytest.mark.parametrize("name", ["reward", "rewards", "behavior_logprobs"])
def test_a_line_with_nan_is_refused_before_anything_is_trained(name: str, tmp_path: Path) -> None:
    mask, versions = [False, True], [-1, 0]
    good = Trajectory(Prompt("p", token_ids=[1]), 0, 0, [1, 2], mask, [0.0] * 2, versions, [2], "", reward=0.0)
    bad = json.loads(encode_json(good)) | {name: math.nan if name == "reward" else [0.0, math.nan]}
    (tmp_path / "recorded.jsonl").write_text(f"{json.dumps(bad)}\n")
    with pytest.raises(ValueError, match=f"Line 1 of .* has NaN or infinity in '{name}'"):
        TrajectoryDataModule(str(tmp_path)).setup("fit")


def test_groups_can_be_cut_into_other_iterations(tmp_path: Path) -> None:
    record(tmp_path)
    data = TrajectoryDataModule(str(tmp_path / "trajectories"), batch_size=3, max_iterations=1)
    module = NoReward()
    make_trainer(tmp_path / "again", max_epochs=1).fit(module, data)
    assert [len(groups) for groups in module.trained] == [3]


def test_a_run_on_recorded_trajectories_can_be_checked_and_resumed(tmp_path: Path) -> None:
    online = record(tmp_path)
    make_trainer(tmp_path / "check", fast_dev_run=2).fit(
        NoReward(), TrajectoryDataModule(str(tmp_path / "trajectories"))
    )
    half = NoReward()
    trainer = train(tmp_path / "half", half, TrajectoryDataModule(str(tmp_path / "trajectories")), max_steps=2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest = NoReward()
    make_trainer(tmp_path / "rest", max_steps=3).fit(
        rest, TrajectoryDataModule(str(tmp_path / "trajectories")), ckpt_path=tmp_path / "half.ckpt", weights_only=True
    )
    assert are_equal(weights(online), weights(rest))
