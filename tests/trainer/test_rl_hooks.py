"""Hooks: which ones are called when, with what; and what a user's own module can do with them."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from layouts_run import TinyPPO
from tiny_run import BATCH_SIZE, GROUP_SIZE, POLICY, Digits, TinyGRPO, make_trainer, train
from torch import Tensor

import lightrl
import lightrl.functional
from lightrl import GRPO, Experience, ModelCall, Outputs, RLCallback, RLModule, Sampling, Trajectory
from lightrl.trajectory import Group

HOOKS = [
    "on_rollout_start", "on_rollout_end", "on_rewards_ready", "on_experience_ready", "on_minibatch_start",
    "on_minibatch_end", "on_minibatch_start", "on_minibatch_end", "on_policy_updated", "on_weight_sync",
    "on_weights_synced", "on_train_batch_end",
]  # fmt: skip


Calls = list[tuple[str, tuple[Any, ...]]]


def record(hooks: Any, calls: Calls, num_before: int) -> None:
    """Has every hook of a callback or module noted, without the first arguments, which a module's do not have."""

    def noting(name: str) -> Any:
        return lambda *args, **kwargs: calls.append((name, args[num_before:]))

    for name in dict.fromkeys(HOOKS):
        setattr(hooks, name, noting(name))


class Logs(RLCallback):
    """Logs in every hook in which one may."""

    def on_rollout_start(self, trainer: Any, module: Any) -> None:
        module.log("mine/start", float(trainer.global_step))

    def on_rollout_progress(self, trainer: Any, module: Any, done: int, total: int) -> None:
        assert 0 <= done <= total == BATCH_SIZE * GROUP_SIZE

    def on_experience_ready(self, trainer: Any, module: Any, experience: Experience) -> None:
        module.log("mine/experience", 2.0, on_epoch=True)

    def on_minibatch_end(self, trainer: Any, module: Any, metrics: dict[str, float], index: int, total: int) -> None:
        module.log("mine/minibatch", float(index))

    def on_policy_updated(self, trainer: Any, module: Any, weight_version: int) -> None:
        module.log("mine/version", float(weight_version))

    def on_weights_synced(self, trainer: Any, module: Any, weight_version: int) -> None:
        assert trainer.engine.weight_version == weight_version


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_start", "on_minibatch_end", "on_policy_updated"])
def test_a_setting_that_a_run_has_read_is_fixed_until_its_end(hook: str, tmp_path: Path) -> None:
    module, refused = TinyGRPO(), set()

    def set_all(*_: Any) -> None:
        for name in GRPO.fixed_settings:
            with pytest.raises(ValueError, match=rf"TinyGRPO\.{name} cannot be set during a run"):
                setattr(module, name, getattr(module, name))
            refused.add(name)
        module.clip_low = 0.1  # only the loss reads it

    setattr(module, hook, set_all)
    train(tmp_path, module, max_steps=2, callbacks=[lightrl.StalenessControl(1)])
    assert {"sampling", "group_size", "lr", "reference_kl"} < refused == GRPO.fixed_settings
    module.group_size = 2  # the run has ended
    setattr(module, hook, lambda *_: None)
    train(tmp_path, module, max_steps=1)
    assert len(module.experiences[-1]) == 2 * BATCH_SIZE


def test_callbacks_and_module_see_every_hook_in_order_with_its_arguments(tmp_path: Path) -> None:
    module, callback = TinyGRPO(num_minibatches=2), RLCallback()
    of_callback: Calls = []
    of_module: Calls = []
    record(callback, of_callback, num_before=2)
    record(module, of_module, num_before=0)
    trainer = train(tmp_path, module, callbacks=[callback, Logs()], max_steps=2)
    for calls in (of_callback, of_module):
        assert [name for name, _ in calls] == ["on_weights_synced", *HOOKS, *HOOKS]
        assert calls[0][1] == (0,)
        arguments = [args for _, args in calls[13:]]  # of iteration 1
        groups, experience = arguments[1][0], arguments[3][0]
        assert [len(group.trajectories) for group in groups] == [GROUP_SIZE] * BATCH_SIZE
        assert arguments[2][0] == groups
        assert experience.advantages is not None
        assert experience.token_ids[0, :3].tolist() == groups[0].prompt.token_ids
        assert [args[1:] for args in arguments[4:8]] == [(0, 2), (0, 2), (1, 2), (1, 2)]
        assert sum(len(args[0]) for args in arguments[4:8:2]) == BATCH_SIZE * GROUP_SIZE
        assert {"loss", "ratio", "clipped_fraction", "entropy_nats", "grad_norm"} <= arguments[5][0].keys()
        assert arguments[8:11] == [(2,), (2,), (2,)]
    for name, value in {"start": 1.0, "experience": 2.0, "minibatch": 1.0, "version": 2.0}.items():
        assert trainer.callback_metrics[f"mine/{name}"] == value


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
    trainer = train(tmp_path, module, max_steps=30, callbacks=[Rewards()], limit_val_batches=1.0)
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
