"""DynamicSampling and PromptCurriculum in whole runs of the trainer: sizes, metrics, configuration, resume."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from tiny_run import BATCH_SIZE, GROUP_SIZE, POLICY, Digits, TinyGRPO, are_equal, make_trainer, train, weights

from lightrl import GDPO, GRPO, DynamicSampling, PromptCurriculum, RLCallback, Sampling, StalenessControl, Trajectory
from lightrl.callbacks import SuccessRateCurriculum


class HalfSolved(TinyGRPO):
    """Prompts train-0, 1 and 2 are solved by every trajectory, the others by each second one."""

    def reward(self, trajectory: Trajectory) -> Any:
        right = float(int(trajectory.prompt.id.split("-")[1]) < 3 or trajectory.sample % 2)
        return {"reward": right, "accuracy": right}


class Metrics(Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def total(self, name: str) -> float:
        return sum(row.get(name, 0.0) for row in self.rows)


def fit(folder: Path, *callbacks: Callback, max_steps: int = 4, **kwargs: Any) -> tuple[HalfSolved, Metrics]:
    torch.manual_seed(2)
    module, metrics = HalfSolved(), Metrics()
    ckpt_path = kwargs.pop("ckpt_path", None)
    train(folder, module, ckpt_path=ckpt_path, callbacks=[metrics, *callbacks], max_steps=max_steps, **kwargs)
    return module, metrics


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_groups_without_variance_are_replaced_and_counted(tmp_path: Path, max_staleness: int) -> None:
    module, metrics = fit(tmp_path, DynamicSampling(), StalenessControl(max_staleness))
    assert [len(positions) for positions in module.trained] == [BATCH_SIZE] * 4
    assert all(row["rollout/zero_variance_fraction"] == 0 for row in metrics.rows)
    dropped = metrics.total("rollout/dropped_groups")
    assert dropped > 0
    assert metrics.total("rollout/dropped_groups_filtered_zero_variance") == dropped
    assert metrics.total("rollout/dropped_trajectories_filtered_zero_variance") == dropped * GROUP_SIZE
    assert metrics.total("rollout/dropped_trajectories") == dropped * GROUP_SIZE
    rows = [row for row in metrics.rows if row["rollout/dropped_groups"] and "rollout/dropped_length_tokens" in row]
    assert rows
    assert all(0 < row["rollout/dropped_length_tokens"] <= 6 for row in rows)
    assert all(row["rollout/accuracy_fraction"] < 1 for row in rows)
    assert all(row["rollout/dropped_accuracy_fraction"] == 1 for row in rows)  # only solved groups are dropped


class TwoRewards(GDPO):
    """All sums are 1; prompts train-0, 1 and 2 have equal parts, and a trajectory of train-3 lacks one."""

    def reward(self, trajectory: Trajectory) -> Any:
        number = int(trajectory.prompt.id.split("-")[1])
        right = float(number < 3 or trajectory.sample % 2)
        short = {} if (number, trajectory.sample) == (3, 0) else {"short": 1 - right}
        return {"reward": 1.0, "right": right, **short}


def test_several_rewards_are_compared_one_by_one_and_one_that_is_missing_fails(tmp_path: Path) -> None:
    dropped: dict[str, set[str]] = {}

    class Drops(RLCallback):
        def on_trajectory_dropped(self, trainer: Any, module: Any, reason: str, message: str) -> None:
            dropped.setdefault(reason, set()).add(message)

    weights_of_rewards = {"right": 1.0, "short": 0.5}
    module = TwoRewards(POLICY, reward_weights=weights_of_rewards, sampling=Sampling(max_new_tokens=6), group_size=4)
    train(tmp_path, module, callbacks=[DynamicSampling(), Drops()], max_steps=3)
    assert {message.split("'")[1] for message in dropped.pop("filtered_zero_variance")} == {
        "train-0", "train-1", "train-2"
    }  # fmt: skip
    (message,) = dropped.pop("reward_invalid")
    assert message.startswith("The reward of a trajectory for prompt 'train-3' lacks ['short']; it has")
    assert not dropped


def test_a_curriculum_passes_over_what_is_solved(tmp_path: Path) -> None:
    curriculum = PromptCurriculum(SuccessRateCurriculum(solved_times=1))
    module, metrics = fit(tmp_path, curriculum, max_steps=6)
    solved = [bool((experience.rewards == 1).all()) for experience in module.experiences[3:]]
    assert not any(solved)
    assert metrics.total("rollout/skipped_prompts") > 0
    last = metrics.rows[-1]
    assert last["rollout/skipped_success_fraction"] == 1 > last["rollout/played_success_fraction"]


def test_a_resumed_run_is_the_one_that_never_stopped_to_the_bit(tmp_path: Path) -> None:
    def callbacks() -> list[Callback]:
        saved = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        return [DynamicSampling(), PromptCurriculum(SuccessRateCurriculum(solved_times=2)), saved]

    whole, _ = fit(tmp_path, *callbacks(), max_steps=5, enable_checkpointing=True)
    resumed, _ = fit(tmp_path, *callbacks(), max_steps=5, enable_checkpointing=True, ckpt_path=tmp_path / "step=2.ckpt")
    assert resumed.trained == whole.trained[2:]
    assert are_equal(weights(whole), weights(resumed))


def test_fast_dev_run_accepts_their_state(tmp_path: Path) -> None:
    fit(tmp_path, DynamicSampling(oversample_fraction=0.5), PromptCurriculum(), max_steps=-1, fast_dev_run=True)


def test_over_sampling_trains_on_whole_iterations(tmp_path: Path) -> None:
    module, metrics = fit(tmp_path, DynamicSampling(drop_zero_variance=False, oversample_fraction=0.5))
    assert [len(positions) for positions in module.trained] == [BATCH_SIZE] * 4
    assert metrics.total("rollout/dropped_groups_oversampled") == 3  # the last iteration starts what the run needs
    given_up = [row["rollout/given_up_fraction"] for row in metrics.rows]
    assert given_up == pytest.approx([1 / (1 + BATCH_SIZE)] * 3 + [0])


def test_settings_are_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="incomplete_groups must be train, resample or drop, got 'keep'"):
        DynamicSampling(incomplete_groups="keep")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="oversample_fraction must be between 0 and 10, got -1"):
        DynamicSampling(oversample_fraction=-1)
    with pytest.raises(ValueError, match=r"rule='no\.such\.rule': there is no module 'no'"):
        DynamicSampling(rule="no.such.rule")
    with pytest.raises(ValueError, match="A trainer takes one DynamicSampling callback, got 2"):
        make_trainer(tmp_path, callbacks=[DynamicSampling(), DynamicSampling()]).fit(HalfSolved(), Digits())
    rewarded_later = GRPO(POLICY, reward_model=POLICY, group_size=4, sampling=Sampling(max_new_tokens=6))
    with pytest.raises(ValueError, match="drops every group if a reward model is the only reward"):
        make_trainer(tmp_path, callbacks=[DynamicSampling()]).fit(rewarded_later, Digits())
    alone: Any = HalfSolved(group_size=1, advantage_mean="batch", advantage_std="batch")
    alone.configure_callbacks = lambda: [DynamicSampling()]  # which Lightning attaches later than the trainer's
    with pytest.raises(ValueError, match=r"With group_size=1, .* drops every group"):
        make_trainer(tmp_path).fit(alone, Digits())


@pytest.mark.parametrize("callbacks", [(), (DynamicSampling(drop_zero_variance=False),)], ids=["alone", "with rules"])
def test_a_failed_reward_does_not_part_a_pair(tmp_path: Path, callbacks: tuple[Callback, ...]) -> None:
    """An odd group has no pairs, so it is sampled again."""
    failed: list[str] = []

    class InPairs(TinyGRPO):
        loss_unit = "pair"

        def reward(self, trajectory: Trajectory) -> Any:
            if not failed:
                failed.append(trajectory.prompt.id)
                raise RuntimeError("the reward is away")
            return super().reward(trajectory)

    module = InPairs()
    make_trainer(tmp_path, callbacks=list(callbacks), max_steps=2).fit(module, Digits())
    assert failed
    assert [len(experience) for experience in module.experiences] == [BATCH_SIZE * GROUP_SIZE] * 2
