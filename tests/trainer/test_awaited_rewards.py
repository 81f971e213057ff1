"""On-policy the models score while rewards are awaited: the same run as if all rewards had been there before."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import BATCH_SIZE, GROUP_SIZE, POLICY, Digits, TinyGRPO, are_equal, make_trainer, weights

from lightrl import PPO, AdaptiveKL, DynamicSampling, ModelCall, ModelSpec, RLCallback, StalenessControl, Trajectory
from lightrl.dataflow import DataFlowGraph
from lightrl.errors import RolloutError
from lightrl.trajectory import Group


class Seen(RLCallback):
    """Which way a run takes, what it logs, what its hooks are given."""

    def __init__(self) -> None:
        self.defers_rewards: bool | None = None
        self.logged: list[dict[str, float]] = []
        self.drops: list[str] = []
        self.sizes: list[list[int]] = []

    def on_rollout_end(self, trainer: Any, module: Any, groups: list[Group]) -> None:
        self.defers_rewards = trainer.rollout.settings.defers_rewards

    def on_rewards_ready(self, trainer: Any, module: Any, groups: list[Group]) -> None:
        self.sizes.append([len(group.trajectories) for group in groups])

    def on_trajectory_dropped(self, trainer: Any, module: Any, reason: str, message: str) -> None:
        self.drops.append(reason)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.logged.append(
            {name: value for name, value in found.items() if not name.startswith("time/") and "_per_s" not in name}
        )


class FailingSome(TinyGRPO):
    """Every third group loses one trajectory, whose reward raises; some of the rewards are per token."""

    fails = True

    def reward(self, trajectory: Trajectory) -> Any:
        if self.fails and trajectory.group_id % 3 == 1 and trajectory.sample == 2:
            raise ValueError("no answer found")
        value = super().reward(trajectory)
        if trajectory.sample == 1:
            return {"rewards": [0.0] * (len(trajectory.token_ids) - 1) + [value], "tries": trajectory.group_id}
        return {"reward": value, "tries": trajectory.group_id}


class FailingPPO(FailingSome, PPO):
    def __init__(self) -> None:
        reference = ModelSpec(config=POLICY.config, tokenizer=POLICY.tokenizer, seed=4)
        super().__init__(reference=AdaptiveKL(0.1, reference), num_minibatches=2)


def played(module: TinyGRPO, folder: Path, *callbacks: Any, **flags: Any) -> Seen:
    seen = Seen()
    make_trainer(folder, callbacks=[seen, *callbacks], **flags).fit(module, datamodule=Digits())
    return seen


KINDS = [FailingPPO, lambda: FailingSome(decoupled=True, num_minibatches=2)]


def played_both_ways(kind, folder, monkeypatch, **attributes):
    """Module and records of a run whose rewards come after its model calls, and of one where they come before."""
    later, before = kind(), kind()
    vars(later).update(attributes)
    vars(before).update(attributes)
    seen = played(later, folder)
    assert seen.defers_rewards
    monkeypatch.setattr(DataFlowGraph, "before_rewards", lambda self: set())
    expected = played(before, folder)
    assert not expected.defers_rewards
    return later, seen, before, expected


@pytest.mark.parametrize("kind", KINDS, ids=["PPO", "GRPO"])
def test_a_run_is_the_same_to_the_bit_whether_it_defers_rewards_or_not(kind, tmp_path, monkeypatch):
    later, seen, before, expected = played_both_ways(kind, tmp_path, monkeypatch, fails=False)
    assert are_equal(weights(later), weights(before))
    assert seen.logged == expected.logged
    assert seen.drops == expected.drops == []
    for left, right in zip(later.experiences, before.experiences, strict=True):
        assert left.tensors().keys() == right.tensors().keys()
        for name, value in left.tensors().items():
            assert torch.equal(value, right[name]), name


@pytest.mark.parametrize("kind", KINDS, ids=["PPO", "GRPO"])
def test_what_is_dropped_after_it_was_scored_leaves_no_trace(kind, tmp_path, monkeypatch):
    """To rounding: the trajectories that are scored together differ, and so do the shapes of matrix products."""
    later, seen, before, expected = played_both_ways(kind, tmp_path, monkeypatch)
    assert seen.drops == ["reward_raised"] * 2
    assert [4, 3] in seen.sizes
    assert (seen.drops, seen.sizes) == (expected.drops, expected.sizes)
    left, right = later.experiences[0], before.experiences[0]  # later ones follow an optimizer that amplifies rounding
    assert left.tensors().keys() == right.tensors().keys()
    for name, value in left.tensors().items():
        torch.testing.assert_close(value, right[name], msg=name)


def test_what_the_loss_reads_together_is_dropped_together(tmp_path: Path) -> None:
    module = FailingSome(decoupled=True, num_minibatches=2)
    module.loss_unit = "group"
    seen = played(module, tmp_path)
    assert seen.drops == ["reward_raised", "loss_unit", "loss_unit", "loss_unit"] * 2
    assert module.trained == [[0], [2, 3], [5]]
    assert seen.sizes == [[4], [4, 4], [4]]


@pytest.mark.parametrize(
    "callback", [StalenessControl(1), DynamicSampling()], ids=["max_staleness above 0", "groups chosen by reward"]
)
def test_rewards_come_first_where_something_else_needs_them(callback: Any, tmp_path: Path) -> None:
    assert not played(TinyGRPO(decoupled=True, num_minibatches=2), tmp_path, callback, max_steps=1).defers_rewards


def test_a_call_that_reads_rewards_without_a_word_is_refused(tmp_path: Path) -> None:
    class Silent(TinyGRPO):
        def model_calls(self) -> list[ModelCall]:
            call = ModelCall("doubled", outputs=("doubled",), run=lambda experience, _: 2 * experience.rewards)
            return [*super().model_calls(), call]

    with pytest.raises(ValueError, match=r"'doubled' before the rewards were known.*add 'rewards' to its inputs"):
        played(Silent(), tmp_path)


def test_a_group_without_any_reward_is_left_out(tmp_path: Path) -> None:
    class Failing(TinyGRPO):
        def reward(self, trajectory: Trajectory) -> Any:
            if trajectory.group_id == 1:
                raise ValueError("no answer found")
            return super().reward(trajectory)

    module = Failing(decoupled=True, num_minibatches=2)
    seen = played(module, tmp_path)
    assert seen.defers_rewards
    assert module.trained == [[0], [2, 3], [4, 5]]
    assert seen.sizes == [[4], [4, 4], [4, 4]]
    assert seen.logged[0]["rollout/dropped_trajectories_reward_raised"] == GROUP_SIZE


class FailingAll(TinyGRPO):
    def reward(self, trajectory: Trajectory) -> Any:
        raise ValueError("no answer found")


def test_a_run_of_which_no_trajectory_has_a_reward_ends(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No trajectory has a reward"):
        played(FailingAll(decoupled=True, num_minibatches=2, max_failed_fraction=1.0), tmp_path)


def test_a_reward_that_never_comes_is_named(tmp_path: Path) -> None:
    over = threading.Event()

    class Silent(TinyGRPO):
        def reward(self, trajectory: Trajectory) -> Any:
            over.wait(600)
            return super().reward(trajectory)

    module = Silent(decoupled=True, num_minibatches=2, reward_timeout_s=600)
    try:
        with pytest.raises(RolloutError, match=r"waited for the rewards, .* rollout_timeout_s=3"):
            played(module, tmp_path, StalenessControl(rollout_timeout_s=3))
    finally:
        over.set()
        for thread in threading.enumerate():
            if thread.name == "reward-hook":  # was abandoned; it ends now
                thread.join(600)


@pytest.mark.parametrize("is_later", [True, False], ids=["awaits rewards", "has rewards first"])
def test_a_checkpoint_keeps_groups_whose_rewards_are_awaited(is_later, tmp_path, monkeypatch):
    saved = threading.Event()
    path = tmp_path / "amid.ckpt"

    class Saving(TinyGRPO):
        def reward(self, trajectory: Trajectory) -> Any:
            if trajectory.newest_version == 1 and trajectory.sample == 1:
                assert saved.wait(600)
            return super().reward(trajectory)

        def on_rollout_end(self, groups: list[Group]) -> None:
            if self.trainer.global_step == 1:
                self.trainer.save_checkpoint(path)
                saved.set()

    whole = Saving(decoupled=True, num_minibatches=2)
    played(whole, tmp_path)
    loops = torch.load(path)["loops"]["fit_loop"]
    states = loops["epoch_loop.automatic_optimization.state_dict"]["rollout"]["finished"]
    groups = [Group.from_state(state).trajectories for state in states]
    unrewarded = [[trajectory.sample for trajectory in group if trajectory.reward is None] for group in groups]
    assert all(1 in samples for samples in unrewarded)
    assert len(unrewarded) == BATCH_SIZE

    if not is_later:
        monkeypatch.setattr(DataFlowGraph, "before_rewards", lambda self: set())
    resumed = TinyGRPO(decoupled=True, num_minibatches=2)
    make_trainer(tmp_path).fit(resumed, datamodule=Digits(), ckpt_path=path)
    assert resumed.trained == whole.trained[1:]
    assert are_equal(weights(resumed), weights(whole))
