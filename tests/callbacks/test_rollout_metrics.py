"""Expected numbers are worked by hand from the trajectories in each test."""

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripted_run import run

from lightrl.callbacks.rollout_metrics import RolloutMetrics, experience_metrics, explain_zero_variance, reward_metrics
from lightrl.experience import Experience
from lightrl.testing import make_groups, make_trajectory
from lightrl.trajectory import Group


def test_reward_metrics_of_two_groups_worked_by_hand() -> None:
    metrics = reward_metrics(make_groups([[1.0, 0.0], [0.5, 0.5]]))
    assert metrics["rollout/reward"] == pytest.approx(0.5)
    assert metrics["rollout/reward_std"] == pytest.approx(math.sqrt((0.25 + 0.25) / 4))
    assert metrics["rollout/zero_variance_fraction"] == 0.5
    assert "rollout/accuracy_fraction" not in metrics  # the reward gives none


def test_accuracy_is_the_metric_of_that_name_where_the_reward_gives_one() -> None:
    metrics = reward_metrics(make_groups([[1.0, 1.0]], metrics={"accuracy": 0.0, "format": 1.0}))
    assert metrics["rollout/accuracy_fraction"] == 0.0
    assert metrics["rollout/format"] == 1.0
    assert "rollout/accuracy" not in metrics


def test_a_metric_that_some_trajectories_lack_is_averaged_over_the_others() -> None:
    with_metric, without = make_trajectory(reward=1.0, metrics={"num_tool_calls": 4.0}), make_trajectory(reward=0.0)
    metrics = reward_metrics([Group(0, with_metric.prompt, [with_metric, without])])
    assert metrics["rollout/num_tool_calls"] == 4.0


def test_groups_that_lost_all_trajectories_count_nowhere() -> None:
    lost = Group(7, make_trajectory(reward=0.0).prompt, [])
    assert reward_metrics([*make_groups([[1.0, 0.0]]), lost])["rollout/zero_variance_fraction"] == 0.0
    with pytest.raises(ValueError, match="There are no trajectories"):
        reward_metrics([lost])


def test_lengths_staleness_and_mixed_versions_worked_by_hand() -> None:
    experience = Experience.from_trajectories(
        [
            make_trajectory(reward=1.0, completion_ids=[5, 6, 7], versions=[3, 4, 5]),
            make_trajectory(reward=0.0, completion_ids=[5], versions=[5], is_truncated=True),
        ]
    )
    assert experience_metrics(experience, weight_version=5) == {
        "rollout/length_tokens": 2.0,
        "rollout/truncated_fraction": 0.5,
        "rollout/mixed_version_fraction": 0.5,
        "staleness/mean_versions": 1.0,
        "staleness/max_versions": 2.0,
    }


def test_every_name_of_the_contract_is_logged_once_per_iteration() -> None:
    trainer = run(lambda _: make_groups([[1.0, 0.0]]), RolloutMetrics(), num_iterations=2)
    metrics = {name: float(value) for name, value in trainer.logged_metrics.items()}
    assert metrics == {
        "rollout/reward": 0.5,
        "rollout/reward_std": 0.5,
        "rollout/zero_variance_fraction": 0.0,
        "rollout/dropped_trajectories": 0.0,
        "rollout/length_tokens": 2.0,
        "rollout/truncated_fraction": 0.0,
        "rollout/mixed_version_fraction": 0.0,
        "rollout/tokens_per_s": 4 / 2.0,
        "staleness/mean_versions": 1.0,  # written by version 0, used at version 1
        "staleness/max_versions": 1.0,
        "update/tokens_per_s": 4 / 0.5,
        "time/rollout_s": 2.0,
        "time/score_s": 0.0,
        "time/update_s": 0.5,
        "time/sync_s": 0.25,
    }


def test_overlapped_rollouts_are_timed_by_the_iteration_not_by_the_wait() -> None:
    on_policy = run(lambda _: make_groups([[1.0, 0.0]]), RolloutMetrics(), num_iterations=3)
    overlapped = run(lambda _: make_groups([[1.0, 0.0]]), RolloutMetrics(), num_iterations=3, max_staleness=1)
    assert on_policy.logged_metrics["rollout/tokens_per_s"] == 2.0
    # The scripted iteration claims to wait for 2 s but takes milliseconds.
    assert overlapped.logged_metrics["rollout/tokens_per_s"] > 2.0
    assert overlapped.logged_metrics["time/straggler_wait_s"] == 0.0
    assert "time/straggler_wait_s" not in on_policy.logged_metrics


def test_dropped_trajectories_are_counted_once() -> None:
    metrics = RolloutMetrics()

    def dropping(iteration: int) -> list[Group]:
        if iteration == 0:
            for training in (True, False):  # what validation drops is not training's
                trainer: Any = SimpleNamespace(training=training)
                metrics.on_trajectory_dropped(trainer, trainer, "reward_timeout", "")
        return make_groups([[1.0, 0.0]])

    first = run(dropping, metrics, num_iterations=1).logged_metrics["rollout/dropped_trajectories"]
    second = run(lambda _: make_groups([[1.0, 0.0]]), metrics).logged_metrics["rollout/dropped_trajectories"]
    assert (first, second) == (1.0, 0.0)


def test_failed_trajectories_are_reported_at_the_first_and_whenever_there_are_twice_as_many(caplog):
    metrics = RolloutMetrics()

    def dropping(iteration: int) -> list[Group]:
        trainer: Any = SimpleNamespace(training=True)
        metrics.on_trajectory_dropped(trainer, trainer, "reward_timeout", f"{iteration} took too long")
        metrics.on_trajectory_dropped(trainer, trainer, "filtered_zero_variance", "all alike")
        return make_groups([[1.0, 0.0]])

    with caplog.at_level(logging.WARNING, logger="lightrl"):
        run(dropping, metrics, num_iterations=5)
    told = [record.getMessage() for record in caplog.records if "Dropped" in record.getMessage()]
    assert [text.partition("last failure: ")[2] for text in told] == [f"{number} took too long" for number in (0, 1, 3)]
    assert "1 reward_timeout, 1 filtered_zero_variance (4 failed so far)" in told[2]


def test_zero_variance_warns_once_and_again_only_after_it_recovered(caplog: pytest.LogCaptureFixture) -> None:
    flat, varied = [[0.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]
    plan = [flat] * 5 + [varied] + [flat] * 3
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        run(lambda iteration: make_groups(plan[iteration]), RolloutMetrics(), num_iterations=len(plan))
    assert len(caplog.messages) == 2
    assert "for 3 iterations" in caplog.messages[0]


@pytest.mark.parametrize(
    ("rewards", "warnings"),
    [
        pytest.param([[0.0], [0.0]], 0, id="groups of one alone"),
        pytest.param([[0.0], [0.0, 0.0]], 1, id="beside one that could be compared"),
    ],
)
def test_a_group_of_one_is_no_reason_to_warn(rewards, warnings, caplog):
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        run(lambda _: make_groups(rewards), RolloutMetrics(), num_iterations=4)
    assert len(caplog.messages) == warnings
    assert all("(1 groups of two or more)" in message for message in caplog.messages)


@pytest.mark.parametrize("has_teacher", [False, True], ids=["rewards alone", "a teacher's likeliest tokens"])
def test_what_a_teacher_says_teaches_without_variance(has_teacher: bool, caplog: pytest.LogCaptureFixture) -> None:
    groups, metrics = make_groups([[0.0, 0.0]]), RolloutMetrics(zero_variance_patience=1)
    experience = Experience.from_trajectories([item for group in groups for item in group.trajectories])
    found = {"advantages": torch.zeros(experience.token_ids.shape)}
    if has_teacher:
        found["teacher_topk_ids"] = experience.token_ids[..., None]
    rollout = SimpleNamespace(progress=lambda: {"skipped_prompts": 0})
    trainer: Any = SimpleNamespace(weight_version=0, is_global_zero=True, rollout=rollout)
    module: Any = SimpleNamespace(log=lambda *args, **kwargs: None)
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        metrics.on_rewards_ready(trainer, module, groups)
        metrics.on_experience_ready(trainer, module, experience.with_tensors(found))
    assert bool(caplog.messages) is not has_teacher


def test_the_count_of_flat_iterations_survives_a_resume() -> None:
    before, after = RolloutMetrics(), RolloutMetrics()
    run(lambda _: make_groups([[0.0, 0.0]]), before, num_iterations=2)
    after.load_state_dict(before.state_dict())
    assert after.state_dict()["num_flat_iterations"] == 2


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        pytest.param([[0.0, 0.0], [0.0, 0.0]], "All fail", id="all fail"),
        pytest.param([[1.0, 1.0], [1.0, 1.0]], "All succeed", id="all succeed"),
        pytest.param([[1.0, 1.0], [0.0, 0.0]], "always or never", id="by prompt"),
    ],
)
def test_the_warning_says_why_nothing_is_learnt(rewards: list[list[float]], why: str) -> None:
    assert why in explain_zero_variance(make_groups(rewards), 3)


def test_the_warning_says_when_sampling_gives_one_completion_only() -> None:
    same = [make_trajectory(reward=0.0, sample=sample) for sample in range(4)]
    assert "all completions are the same" in explain_zero_variance([Group(0, same[0].prompt, same)], 3)


def test_the_warning_says_first_that_completions_were_cut() -> None:
    cut = [make_trajectory(reward=0.0, sample=sample, finish_reason="length") for sample in range(4)]
    text = explain_zero_variance([Group(0, cut[0].prompt, cut)], 3)
    assert "100% were cut at the length limit" in text
    assert "max_new_tokens" in text
    assert "reward function" not in text


def test_patience_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="zero_variance_patience must be >= 1"):
        RolloutMetrics(zero_variance_patience=0)
