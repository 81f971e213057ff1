"""FailureLog and replay: what failed is written, and one call computes it again."""

import json
from pathlib import Path

import pytest
from reward_functions import trajectory_that
from reward_workers import outcomes, started

from lightrl.errors import RewardError
from lightrl.rewards import FailureLog, RewardHook, RewardPart, RewardResult, replay

HERE = str(Path(__file__).parent)


def failures_of(function: object, path: Path, *trajectories: object, **settings: object) -> list[object]:
    log = FailureLog(path, **settings)
    with started(RewardHook(function)) as worker:
        results = outcomes(worker, *trajectories)
    for trajectory, result in zip(trajectories, results, strict=True):
        if isinstance(result, RewardError):
            log.write(trajectory, result)
    return results


def test_what_failed_is_written_and_raised_and_the_rest_has_a_reward(tmp_path):
    path = tmp_path / "run" / "failed_rewards.jsonl"
    results = failures_of(lambda t: 1.0 / t.sample, path, trajectory_that(sample=0), trajectory_that(sample=2))
    assert isinstance(results[0], RewardError)
    assert results[1] == RewardResult(0.5)
    (record,) = map(json.loads, path.read_text().splitlines())
    assert record["reason"] == "raised"
    assert "ZeroDivisionError" in record["message"]
    assert record["trajectory"] == json.loads(json.dumps(trajectory_that(sample=0).to_json()))


def test_no_more_failures_are_written_than_asked_for(tmp_path):
    path = tmp_path / "failed.jsonl"
    failures_of(lambda t: 1.0 / t.sample, path, *[trajectory_that(sample=0)] * 9, max_failures=3)
    assert len(path.read_text().splitlines()) == 3


def test_a_disk_that_refuses_ends_the_log_and_not_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "file" / "failed.jsonl"
    results = failures_of(lambda t: 1.0 / t.sample, path, *[trajectory_that(sample=0)] * 2)
    assert [type(item) for item in results] == [RewardError] * 2
    assert len(caplog.records) == 1


def write(path: Path, *trajectories: object) -> Path:
    path.write_text("".join(json.dumps({"trajectory": item.to_json()}) + "\n" for item in trajectories))
    return path


def test_replay_tells_what_was_read_the_reward_the_time_and_the_failure(tmp_path):
    path = write(tmp_path / "log.jsonl", trajectory_that("#### 42", answer="42"), trajectory_that("#### 42"))
    right, wrong = replay(path, RewardPart("lightrl.rewards.math_answer", arguments={"format_reward": 0.2}))
    assert (right.prompt, right.completion, right.extracted, right.reward) == ("7 8", "#### 42", "42", 1.0)
    assert right.metrics["accuracy"] == 1.0
    assert right.latency_s > 0
    assert right.is_deterministic
    assert (wrong.reward, wrong.reason) == (None, "raised")
    assert "needs a reference" in str(wrong.message)


@pytest.mark.bad_input
def test_a_reward_that_read_a_workspace_cannot_be_replayed(tmp_path):
    path, failed = tmp_path / "failed.jsonl", trajectory_that(sample=0)
    failed.workspace = str(tmp_path / "work")
    failures_of(lambda t: 1.0 / t.sample, path, failed)
    with pytest.raises(
        ValueError, match=r"Line 1 of '.*failed\.jsonl' cannot be replayed: .* read the workspace .*work"
    ):
        replay(path, len)


def test_replay_finds_out_that_a_reward_is_not_deterministic(tmp_path):
    path = write(tmp_path / "log.jsonl", trajectory_that(), trajectory_that())
    rows = replay(path, RewardPart("reward_functions.Counter", arguments={"start": 0}), search_paths=[HERE], num=1)
    assert [row.is_deterministic for row in rows] == [False]


def test_replay_shows_what_special_tokens_the_completion_leaves_out(tmp_path):
    path = write(tmp_path / "log.jsonl", trajectory_that("42"))
    (row,) = replay(path, "lightrl.rewards.math_answer", decode=lambda ids: f"tokens {ids}")
    assert (row.completion, row.raw) == ("42", "tokens [5, 1]")


def test_a_line_without_a_trajectory_is_named(tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match=r"Line 1 of '.*other\.jsonl' is neither a TrajectoryLog trajectory"):
        replay(path, "lightrl.rewards.math_answer")
