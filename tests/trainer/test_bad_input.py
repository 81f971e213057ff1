"""What a user gets wrong is said before any training; what goes wrong during it is counted, and ends it in the end."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from tiny_run import BATCH_SIZE, GROUP_SIZE, POLICY, Digits, TinyGRPO, make_trainer, our_threads

from lightrl import DPO, SFT, Experience, FSDP2Strategy, Outputs, RewardModel, RLCallback, RLModule, Trajectory
from lightrl.workflows import Environment, MultiTurn
from lightrl.workflows.multi_turn import Step


@pytest.mark.bad_input
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_prompt_longer_than_the_context_is_named(split: str, tmp_path: Path) -> None:
    class Long(Digits):
        def make_prompts(self, wanted: str) -> Any:
            prompts = super().make_prompts(wanted)
            if wanted == split:
                prompts[1].token_ids.extend([2] * 30)
            return prompts

    with pytest.raises(ValueError, match=rf"Prompt '{split}-1' .*33 .*26"):
        make_trainer(tmp_path).fit(TinyGRPO(), datamodule=Long())


@pytest.mark.bad_input
def test_turns_that_do_not_fit_the_context_are_refused(tmp_path: Path) -> None:
    class Turns(Environment):
        def step(self, completion: str) -> Step:
            return None, 0.0, True

    module = TinyGRPO(workflow=lambda tokenizer: MultiTurn(tokenizer, Turns, max_tokens=33))
    with pytest.raises(ValueError, match=r"max_tokens=33 of MultiTurn exceeds the model's context of 32 tokens"):
        make_trainer(tmp_path).fit(module, datamodule=Digits())
    assert not module.trained


@pytest.mark.bad_input
@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict"])
def test_a_compiled_module_is_checked_like_any_other(entry: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="accumulate_grad_batches must be 1 with an RLModule, got 2"):
        getattr(trainer, entry)(torch.compile(TinyGRPO(), backend="eager"), datamodule=Digits())


@pytest.mark.bad_input
@pytest.mark.parametrize("make", [TinyGRPO, SFT, DPO, RewardModel])
def test_a_balancing_loss_is_refused_before_any_process_starts(make: Any, tmp_path: Path) -> None:
    module = make(replace(POLICY, config={**(POLICY.config or {}), "output_router_logits": True}))
    with pytest.raises(ValueError, match="output_router_logits=true, which requests the MoE load-balancing loss"):
        make_trainer(tmp_path, devices=2, strategy="FSDP2Strategy").fit(module, datamodule=Digits())
    assert "LOCAL_RANK" not in os.environ


@pytest.mark.bad_input
def test_minibatches_must_divide_the_iteration(tmp_path: Path) -> None:
    message = r"num_minibatches=3 does not divide .*8 trajectories \(2 groups × group_size=4\)\..*Change"
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path).fit(TinyGRPO(num_minibatches=3, reward="digit_reward.token_reward"), datamodule=Digits())
    assert not our_threads()


@pytest.mark.bad_input
@pytest.mark.parametrize("path", ["digit_reward.no_such_function", "no_such_module.reward"])
def test_a_wrong_reward_path_is_named_before_a_model_is_built_and_leaves_no_worker(path: str, tmp_path: Path) -> None:
    module = TinyGRPO(reward=path)
    with pytest.raises(ValueError, match=rf"^reward='{path}': .*(has no|there is no module)"):
        make_trainer(tmp_path).fit(module, datamodule=Digits())
    assert not hasattr(module, "policy")
    assert not our_threads()


class Failing(TinyGRPO):
    """One trajectory in eight gets no reward."""

    def reward(self, trajectory: Trajectory) -> Any:
        if (trajectory.group_id * GROUP_SIZE + trajectory.sample) % 8 == 0:
            raise RuntimeError("no reward today")
        return super().reward(trajectory)


class Dropped(RLCallback):
    def __init__(self) -> None:
        self.numbers: list[float] = []
        self.reasons: set[str] = set()

    def on_trajectory_dropped(self, trainer: Any, module: Any, reason: str, message: str) -> None:
        self.reasons.add(reason)

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.numbers.append(float(trainer.callback_metrics["rollout/dropped_trajectories"]))


def test_a_failed_reward_is_dropped_and_counted_and_never_zero(tmp_path: Path) -> None:
    module, dropped = Failing(), Dropped()
    make_trainer(tmp_path, callbacks=[dropped]).fit(module, datamodule=Digits())
    assert dropped.reasons == {"reward_raised"}
    assert set(dropped.numbers) == {1.0}
    for experience in module.experiences:
        assert len(experience) == BATCH_SIZE * GROUP_SIZE - 1
        shares = [
            float((row[mask] == 7).float().mean())
            for row, mask in zip(experience.token_ids, experience.loss_mask, strict=True)
        ]
        assert experience.rewards.tolist() == pytest.approx(shares)


def test_an_error_while_the_rollout_opens_leaves_nothing_behind(tmp_path: Path) -> None:
    class NoWorkflow(TinyGRPO):
        def configure_workflow(self) -> Any:
            raise KeyError("environment")

    with pytest.raises(KeyError, match="environment"):
        make_trainer(tmp_path).fit(NoWorkflow(reward="digit_reward.token_reward"), datamodule=Digits())


class LogsInLoss(TinyGRPO):
    def loss(self, experience: Experience, outputs: Outputs) -> Any:
        self.log("my/level", outputs.logprobs.mean())
        return super().loss(experience, outputs)


class NoLoss(RLModule):
    def reward(self, trajectory: Trajectory) -> float:
        return 0.0


def test_a_module_without_a_loss_is_refused_before_its_models_are_loaded(tmp_path: Path) -> None:
    module = NoLoss(TinyGRPO().policy_spec)
    with pytest.raises(TypeError, match=r"NoLoss has no loss. Write `def loss\(self, experience, outputs\)`"):
        make_trainer(tmp_path).fit(module, datamodule=Digits())
    assert not hasattr(module, "policy")


def test_the_error_for_a_loss_that_logs_says_where_metrics_go_and_nothing_of_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"LogsInLoss\.loss must not call self\.log\. Return the metric by name"):
        make_trainer(tmp_path, enable_checkpointing=True).fit(LogsInLoss(), datamodule=Digits())
    assert "No checkpoint was saved" not in caplog.text


def test_the_error_for_a_policy_that_yaml_gave_without_its_type_names_the_annotation() -> None:
    with pytest.raises(TypeError, match=r"got dict. .* annotate it there: `policy: str \| ModelSpec \| Role`"):
        TinyGRPO({"path": "my/model"})  # type: ignore[arg-type]


def test_several_devices_and_no_strategy_are_fsdp2s(tmp_path: Path) -> None:
    assert isinstance(make_trainer(tmp_path, devices=2).strategy, FSDP2Strategy)
    assert isinstance(make_trainer(tmp_path, num_nodes=2).strategy, FSDP2Strategy)
    assert isinstance(make_trainer(tmp_path).strategy, SingleDeviceStrategy)
