"""Two processes on gloo: what they log and resume, and how they end; test_layouts.py compares them with one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_scripts import ROUNDING, finished, left_by, run, run_once
from several_run import muon_result, turns_result
from tiny_run import BATCH_SIZE, GROUP_SIZE, POLICY, Digits, TinyGRPO, are_equal, make_trainer

from lightrl import FSDP2Strategy

SCRIPT = Path(__file__).with_name("several_ranks_run.py")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each of two ranks, which are started once for all tests."""
    folder = tmp_path_factory.mktemp("two_ranks")
    run(SCRIPT, folder, "resume")
    found = left_by(2, folder)
    files = (folder / "trajectories").glob("iteration-*.jsonl")
    found[0]["log"] = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    found[0]["trace"] = json.loads((folder / "trace" / "trace.json").read_text())
    return found


@pytest.mark.parametrize("name", ["resume", "resume of pieces"])
def test_a_resume_on_two_ranks_repeats_the_run_bit_for_bit(name: str, two_ranks: Any) -> None:
    found = two_ranks[0][name]
    assert all(torch.equal(found["whole"][key], found["resumed"][key]) for key in found["whole"])
    assert found["trained"][0][2:] == found["trained"][1]
    assert 0 <= found["val/reward"] <= 1
    assert {"step=2.ckpt", "step=4.ckpt"} <= set(found["files"])
    assert not [name for name in found["files"] if name.endswith(".part")]


def test_all_ranks_continue_from_the_last_checkpoint_that_rank_0_finds_or_refuse_together(two_ranks: Any) -> None:
    for found in (ranks["newest"] for ranks in two_ranks):
        assert found["path"].endswith("online/project/run-a/checkpoints/last.ckpt")
        assert found["num_trained"] == 2
        assert "has no last*.ckpt from an earlier run. Pass the path to a checkpoint." in found["refusal"]


def test_advantages_sees_the_prompt_of_each_trajectory_on_every_rank(two_ranks: Any) -> None:
    prompts, group_ids = two_ranks[0]["resume"]["prompts"], two_ranks[0]["resume"]["group_ids"]
    assert two_ranks[1]["resume"]["prompts"] == prompts
    assert len(set(zip(prompts, group_ids, strict=True))) == len(set(prompts)) == BATCH_SIZE


def test_the_traces_of_two_ranks_are_joined_on_one_clock(two_ranks: Any) -> None:
    """After the update both ranks meet in the sync: one's update cannot end before the other's has begun."""
    updates = [
        [event for event in two_ranks[0]["trace"] if event["name"] == "update" and event["pid"] == rank]
        for rank in (0, 1)
    ]
    assert len(updates[0]) == len(updates[1]) == 2  # of the resumed run
    for one, other in zip(*updates, strict=True):
        assert one["ts"] < other["ts"] + other["dur"]
        assert other["ts"] < one["ts"] + one["dur"]
    assert {event["pid"] for event in two_ranks[0]["trace"] if event.get("cat") == "collective"} == {0, 1}


def test_a_validation_on_two_ranks_counts_each_prompt_once_and_warns_of_nothing(two_ranks: Any) -> None:
    for found in (ranks["resume"] for ranks in two_ranks):
        assert found["val/prompts"] == 4
        assert not [text for text in found["warned"] if "sync_dist" in text]


def test_a_callback_that_decides_otherwise_on_a_rank_does_not_split_them(two_ranks: Any) -> None:
    first, second = (ranks["configured"] for ranks in two_ranks)
    assert first["settings"] == second["settings"]
    assert first["settings"]["defers_rewards"]
    assert first["settings"]["max_concurrent"] is None
    assert all(torch.equal(first["weights"][key], second["weights"][key]) for key in first["weights"])


@pytest.mark.extra
def test_turns_on_different_ranks_are_compared_as_in_one_process(several_ranks: Any, tmp_path: Path) -> None:
    alone = turns_result(tmp_path)
    tensors = alone["tensors"]
    by_row = [advantages[mask] for advantages, mask in zip(tensors["advantages"], tensors["loss_mask"], strict=True)]
    assert any(row.unique().numel() > 1 for row in by_row)  # not only one for each trajectory
    for rank in several_ranks:
        for name in ("token_ids", "turn_states", "advantages"):
            torch.testing.assert_close(rank["turns"]["tensors"][name], tensors[name], rtol=0, atol=ROUNDING)
        for name, value in alone["weights"].items():
            bound = ROUNDING * float(value.abs().max())
            torch.testing.assert_close(rank["turns"]["weights"][name], value, rtol=0, atol=bound)


def test_muon_resumes_from_a_folder_bit_for_bit_and_in_one_process(several_ranks, tmp_path, tmp_path_factory):
    whole = several_ranks[0]["muon"]["weights"]
    for rank in several_ranks:
        assert rank["muon resumed"]["num_trained"] == 2
        assert all(torch.equal(value, whole[name]) for name, value in rank["muon resumed"]["weights"].items())
    saved = run_once(Path(__file__).with_name("several_run.py"), tmp_path_factory) / "muon" / "step=2.ckpt"
    assert saved.is_dir()
    # Muon iterates in bfloat16, which enlarges what sums in another order change: a few percent of the way at most.
    start = POLICY.load_model().state_dict()
    for found in (muon_result(tmp_path / "alone"), muon_result(tmp_path / "resumed", saved)):
        for name, value in found["weights"].items():
            assert (value - whole[name]).norm() < 0.05 * (value - start[name]).norm(), name


def test_the_trajectory_log_has_the_trainers_logprobs_of_every_ranks_trajectories(two_ranks: Any) -> None:
    records = two_ranks[0]["log"]
    assert len(records) == 3 * BATCH_SIZE * GROUP_SIZE
    for record in records:
        trajectory = record["trajectory"]
        mask = torch.tensor(trajectory["loss_mask"])
        engine, trainer = torch.tensor(trajectory["behavior_logprobs"]), torch.tensor(record["trainer_logprobs"])
        torch.testing.assert_close(trainer[mask], engine[mask], rtol=0, atol=1e-4)


def test_a_rank_that_raises_ends_all_with_its_rank_and_traceback(tmp_path: Path) -> None:
    done = finished(SCRIPT, tmp_path, "fail", "1", "raise", real=True)
    assert done.returncode != 0
    assert "[rank 0, in 'update'] Rank 1 failed in 'update'" in done.stderr
    assert 'raise ValueError("raised on purpose")' in done.stderr
    assert "Rank 1 failed in 'update': ValueError: raised on purpose" in done.stderr  # the ranks' ends have no order
    assert done.stderr.count("No checkpoint was saved") <= 1  # of the rank that failed, not of the one that had to end
    assert not (tmp_path / "raise").exists()  # no checkpoint of half the ranks


@pytest.mark.extra
@pytest.mark.parametrize(("rank", "how"), [("1", "hang"), ("1", "hang at the start"), ("0", "hang at the start")])
def test_a_rank_that_hangs_is_named_after_the_deadline(rank: str, how: str, tmp_path: Path) -> None:
    done = finished(SCRIPT, tmp_path, "fail", rank, how)
    assert done.returncode != 0
    assert f"It waits for rank {rank}." in done.stderr
    assert "time.sleep(600)" in done.stderr  # where it hangs


@pytest.mark.extra
@pytest.mark.parametrize(
    ("how", "cause"),
    [("SIGSTOP", "Rank 1 has not reported for hang_timeout_s=20"), ("SIGKILL", "Rank 1 was killed, or its machine")],
)
def test_the_last_line_names_a_rank_that_was_stopped_or_killed(how, cause, tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    command = [sys.executable, str(SCRIPT), str(tmp_path), "fail", "1", how]
    ranks = [  # started one by one, as `lightrl launch` does: Lightning's own launcher kills all at the first death
        subprocess.Popen(command, env={**os.environ, **place, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    said, _ = (rank.communicate()[1] for rank in ranks)
    assert ranks[0].returncode == 1
    assert cause in said.rstrip().rpartition("\n")[2], said[-3000:]


def test_ctrl_c_ends_all_ranks_at_the_same_place_with_a_checkpoint(tmp_path: Path) -> None:
    done = finished(SCRIPT, tmp_path, "fail", "0", "interrupt")
    assert done.returncode == 130
    assert [path.is_dir() for path in (tmp_path / "interrupt").iterdir()] == [True] * 2  # the last one too
    assert "Traceback" not in done.stderr


@pytest.mark.extra
def test_sigterm_while_rank_0_waits_for_an_engine_ends_all_ranks_in_order(tmp_path: Path) -> None:
    done = finished(SCRIPT, tmp_path, "fail", "0", "terminate")
    assert done.returncode == 143, done.stderr
    assert "Rank 0 failed" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.extra
def test_failures_of_rank_0s_rollouts_are_raised_on_all_ranks(tmp_path: Path) -> None:
    done = finished(SCRIPT, tmp_path, "fail", "0", "reward")
    assert done.returncode != 0
    assert "failed on purpose" in done.stderr
    assert "Rank 0 raised RolloutError" in done.stderr


def test_replicas_that_do_not_divide_the_processes_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, devices=4, strategy=FSDP2Strategy(num_replicas=3))
    with pytest.raises(ValueError, match=r"num_replicas=3 must divide the 4 processes.*Set it to 2 or 4"):
        trainer.fit(TinyGRPO(), datamodule=Digits())


def test_moments_in_bfloat16_resume_from_a_folder_bit_for_bit_with_and_without_offload(several_ranks: Any) -> None:
    for rank in several_ranks:
        assert rank["bf16 resumed"]["num_trained"] == 2
        assert are_equal(rank["bf16 resumed"]["weights"], several_ranks[0]["bf16"]["weights"])
