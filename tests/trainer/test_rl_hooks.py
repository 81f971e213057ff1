"""Hooks: which ones are called when, with what; and what a user's own module can do with them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_reward import token_reward
from ppo_ranks_run import TinyPPO
from tiny_run import BATCH_SIZE, GROUP_SIZE, POLICY, Digits, TinyGRPO, make_trainer
from torch import Tensor

import lightrl
import lightrl.functional
from lightrl import Experience, ModelCall, Outputs, RLCallback, RLModule, Sampling, Trajectory
from lightrl.trajectory import Group

HOOKS = [
    "on_rollout_start",
    "on_rollout_end",
    "on_rewards_ready",
    "on_experience_ready",
    "on_minibatch_start",
    "on_minibatch_end",
    "on_minibatch_start",
    "on_minibatch_end",
    "on_policy_updated",
    "on_weights_synced",
    "on_train_batch_end",
]


class Recorder(RLCallback):
    """Writes down every hook, and logs in each."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def note(self, name: str, *args: Any) -> None:
        self.calls.append((name, args))

    def on_rollout_start(self, trainer: Any, module: Any) -> None:
        self.note("on_rollout_start")
        module.log("mine/start", float(trainer.global_step))

    def on_rollout_progress(self, trainer: Any, module: Any, done: int, total: int) -> None:
        assert 0 <= done <= total == BATCH_SIZE * GROUP_SIZE

    def on_rollout_end(self, trainer: Any, module: Any, groups: list[Group]) -> None:
        self.note("on_rollout_end", groups)
        module.log("mine/end", 1.0)

    def on_rewards_ready(self, trainer: Any, module: Any, groups: list[Group]) -> None:
        assert all(item.reward is not None for group in groups for item in group.trajectories)
        self.note("on_rewards_ready", groups)

    def on_experience_ready(self, trainer: Any, module: Any, experience: Experience) -> None:
        self.note("on_experience_ready", experience)
        module.log("mine/experience", 2.0, on_epoch=True)

    def on_minibatch_start(self, trainer: Any, module: Any, minibatch: Experience, index: int, total: int) -> None:
        self.note("on_minibatch_start", minibatch, index, total)

    def on_minibatch_end(self, trainer: Any, module: Any, metrics: dict[str, float], index: int, total: int) -> None:
        self.note("on_minibatch_end", metrics, index, total)
        module.log("mine/minibatch", float(index))

    def on_policy_updated(self, trainer: Any, module: Any, weight_version: int) -> None:
        self.note("on_policy_updated", weight_version)
        module.log("mine/version", float(weight_version))

    def on_weights_synced(self, trainer: Any, module: Any, weight_version: int) -> None:
        self.note("on_weights_synced", weight_version)
        assert trainer.engine.weight_version == weight_version

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.note("on_train_batch_end")


class RecordingModule(TinyGRPO):
    """The module's own hooks, without trainer and module as arguments."""

    def __init__(self) -> None:
        super().__init__(num_minibatches=2)
        self.recorder = Recorder()
        self.first_sync: list[int] = []

    def on_rollout_start(self) -> None:
        self.recorder.on_rollout_start(self.trainer, self)

    def on_rollout_end(self, groups: list[Group]) -> None:
        self.recorder.note("on_rollout_end", groups)

    def on_rewards_ready(self, groups: list[Group]) -> None:
        self.recorder.note("on_rewards_ready", groups)

    def on_experience_ready(self, experience: Experience) -> None:
        self.recorder.note("on_experience_ready", experience)

    def on_minibatch_start(self, minibatch: Experience, index: int, total: int) -> None:
        self.recorder.note("on_minibatch_start", minibatch, index, total)

    def on_minibatch_end(self, metrics: dict[str, float], index: int, total: int) -> None:
        self.recorder.note("on_minibatch_end", metrics, index, total)

    def on_policy_updated(self, weight_version: int) -> None:
        self.recorder.note("on_policy_updated", weight_version)

    def on_weights_synced(self, weight_version: int) -> None:
        self.recorder.note("on_weights_synced", weight_version)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.recorder.note("on_train_batch_end")


def test_callbacks_and_module_see_every_hook_in_order_with_its_arguments(tmp_path: Path) -> None:
    module, recorder = RecordingModule(), Recorder()
    trainer = make_trainer(tmp_path, callbacks=[recorder], max_steps=2)
    trainer.fit(module, datamodule=Digits())
    for calls in (recorder.calls, module.recorder.calls):
        assert [name for name, _ in calls] == ["on_weights_synced", *HOOKS, *HOOKS]
        assert calls[0][1] == (0,)
        arguments = [args for _, args in calls[12:]]  # of iteration 1
        groups, experience = arguments[1][0], arguments[3][0]
        assert [len(group.trajectories) for group in groups] == [GROUP_SIZE] * BATCH_SIZE
        assert arguments[2][0] == groups
        assert experience.advantages is not None
        assert experience.token_ids[0, :3].tolist() == groups[0].prompt.token_ids
        assert [args[1:] for args in arguments[4:8]] == [(0, 2), (0, 2), (1, 2), (1, 2)]
        assert sum(len(args[0]) for args in arguments[4:8:2]) == BATCH_SIZE * GROUP_SIZE
        assert {"loss", "ratio", "clipped_fraction", "entropy_nats", "grad_norm"} <= arguments[5][0].keys()
        assert arguments[8:10] == [(2,), (2,)]
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("mine/")}
    assert logged["mine/start"] == 1.0
    assert (logged["mine/end"], logged["mine/experience"], logged["mine/minibatch"], logged["mine/version"]) == (
        1.0,
        2.0,
        1.0,
        2.0,
    )


class Change(RLCallback):
    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.trained: list[Experience] = []

    def on_experience_ready(self, trainer: Any, module: Any, experience: Experience) -> Experience:
        return replace(experience, **{name: change(experience) for name, change in self.fields.items()})

    def on_minibatch_start(self, trainer: Any, module: Any, minibatch: Experience, index: int, total: int) -> None:
        self.trained.append(minibatch)


def test_a_hook_may_take_tokens_out_and_change_advantages(tmp_path: Path) -> None:
    change = Change(
        loss_mask=lambda seen: seen.loss_mask & (seen.token_ids != 7),
        advantages=lambda seen: torch.ones_like(seen.behavior_logprobs),
    )
    make_trainer(tmp_path, callbacks=[change]).fit(TinyGRPO(), datamodule=Digits())
    assert len(change.trained) == 3
    for trained in change.trained:
        assert trained.advantages is not None
        assert torch.equal(trained.advantages, trained.loss_mask.float())
        assert not (trained.token_ids[trained.loss_mask] == 7).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (Change(rewards=lambda seen: seen.rewards + 1), "changed 'rewards', but may change only loss_mask and adv"),
        (Change(reference_logprobs=lambda seen: seen.behavior_logprobs), "changed 'reference_logprobs', but may"),
        (Change(loss_mask=lambda seen: seen.loss_mask | True), "added [0-9]+ tokens to loss_mask, but may only remove"),
    ],
    ids=["rewards", "a new field", "prompt tokens"],
)
def test_a_hook_may_change_nothing_else(change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, callbacks=[change]).fit(TinyGRPO(), datamodule=Digits())


def test_dropped_trajectories_are_reported_with_their_reason(tmp_path: Path) -> None:
    class Unreliable(TinyGRPO):
        def reward(self, trajectory: Trajectory) -> float:
            if trajectory.sample == 0 and trajectory.group_id == 1:
                raise OSError("the judge is out")
            return token_reward(trajectory)

    class Drops(RLCallback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, str]] = []

        def on_trajectory_dropped(self, trainer: Any, module: Any, reason: str, message: str) -> None:
            self.seen.append((reason, message))

    drops = Drops()
    module = Unreliable()
    make_trainer(tmp_path, callbacks=[drops]).fit(module, datamodule=Digits())
    ((reason, message),) = drops.seen
    assert reason == "reward_raised"
    assert "the judge is out" in message
    assert [len(seen) for seen in module.experiences] == [7, 8, 8]


class Own(RLModule):
    """A reward that uses `self`, group means without a standard deviation, and a loss of its own."""

    wanted = 7

    def reward(self, trajectory: Trajectory) -> dict[str, float]:
        share = sum(token == self.wanted for token in trajectory.completion_ids) / len(trajectory.completion_ids)
        return {"reward": share, "accuracy": float(share == 1)}

    def advantages(self, experience: Experience) -> Tensor:
        return lightrl.functional.group_advantages(experience.rewards, experience.group_ids, std=None)

    def loss(self, experience: Experience, outputs: Outputs) -> dict[str, Tensor]:
        ratio = (outputs.logprobs - experience.proximal_logprobs).exp()
        return {"loss": -ratio * experience.advantages, "squared_ratio": ratio.detach() ** 2}


def test_a_module_of_a_few_lines_learns(tmp_path: Path) -> None:
    logged: list[float] = []

    class Rewards(RLCallback):
        def on_rewards_ready(self, trainer: Any, module: Any, groups: list[Group]) -> None:
            rewards = [float(item.reward) for group in groups for item in group.trajectories]
            logged.append(sum(rewards) / len(rewards))

    module = Own(POLICY, group_size=8, sampling=Sampling(max_new_tokens=4), lr=0.03)
    trainer = make_trainer(tmp_path, max_steps=30, callbacks=[Rewards()], limit_val_batches=1.0)
    trainer.fit(module, datamodule=Digits())
    assert sum(logged[-5:]) / 5 > sum(logged[:5]) / 5 + 0.2
    assert trainer.callback_metrics["policy/squared_ratio"] == pytest.approx(1)
    assert 0 <= trainer.callback_metrics["val/accuracy_fraction"] <= 1


def test_updates_run_in_the_order_of_the_graph(tmp_path: Path) -> None:
    order: list[str] = []

    class CriticFirst(TinyPPO):
        def train_calls(self) -> list[ModelCall]:
            policy, critic = super().train_calls()
            return [replace(policy, after=("critic_update",)), critic]

        def on_minibatch_start(self, minibatch: Experience, index: int, total: int) -> None:
            for role in ("policy", "critic"):
                model: Any = self.parallel_models[role]
                model.forward_backward = partial(self.noted, role, type(model).forward_backward, model)

        def noted(self, role: str, forward_backward: Any, *args: Any) -> None:
            order.append(role)
            forward_backward(*args)

    make_trainer(tmp_path, max_steps=1).fit(CriticFirst(), datamodule=Digits())
    assert order == ["critic", "policy"]
