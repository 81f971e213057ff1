"""The example of an algorithm with state of its own: its equation, its metric, and a resume."""

from pathlib import Path
from typing import Any

import torch
from digit_reward import token_reward
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_run import GROUP_SIZE, POLICY, Logged, are_equal, train, weights

from examples.quickstart.running_baseline import RunningBaseline
from lightrl import Experience, Sampling
from lightrl.testing import make_groups, tiny_policy


def test_advantages_are_rewards_minus_the_prompts_running_mean() -> None:
    module, logged = RunningBaseline(tiny_policy(), reward=len, decay=0.5), {}
    module.log = logged.__setitem__  # type: ignore[method-assign]

    def advantages(rewards: list[list[float]]) -> list[float]:
        trajectories = [item for group in make_groups(rewards) for item in group.trajectories]
        module.prompts = [item.prompt for item in trajectories]
        return module.advantages(Experience.from_trajectories(trajectories)).tolist()

    assert advantages([[1.0, 0.0], [1.0, 1.0]]) == [0.5, -0.5, 0.0, 0.0]  # means 1/2 and 1, of the groups
    assert advantages([[1.0, 1.0], [0.0, 0.0]]) == [0.5, 0.5, -1.0, -1.0]
    assert logged == {"policy/baseline_reward": 0.75}
    assert module.means == {"prompt-0": 0.75, "prompt-1": 0.5}


def test_a_resumed_run_continues_with_the_same_means(tmp_path: Path) -> None:
    def run(ckpt_path: Path | None = None) -> tuple[RunningBaseline, list[float]]:
        settings: dict[str, Any] = {"group_size": GROUP_SIZE, "sampling": Sampling(max_new_tokens=6), "lr": 1e-2}
        module, baselines = RunningBaseline(POLICY, reward=token_reward, **settings), Logged("policy/baseline_reward")
        save = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
        train(
            tmp_path, module, ckpt_path=ckpt_path, callbacks=[save, baselines], enable_checkpointing=True, max_steps=7
        )
        return module, baselines.values

    (whole, baselines), (resumed, later) = run(), run(tmp_path / "step=4.ckpt")
    assert len(whole.means) == 6  # prompts, each visited more than once
    assert resumed.means == whole.means
    assert later == baselines[4:]
    assert are_equal(weights(resumed), weights(whole))  # type: ignore[arg-type]
    assert torch.tensor(baselines).isfinite().all()
