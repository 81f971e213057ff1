"""Files that a run leaves for `lightrl inspect`: the trainer's logprobs, token texts, problems."""

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from tiny_run import BATCH_SIZE, GROUP_SIZE, Digits, TinyGRPO, make_trainer, tokenizer

from lightrl import Experience, RolloutProgressBar, StalenessControl, Trace, TrajectoryLog
from lightrl.callbacks import run_files
from lightrl.callbacks.run_files import ProblemLog
from lightrl.commands.inspect.answers import Answers
from lightrl.commands.inspect.run_folder import find_runs
from lightrl.trajectory import Trajectory


def records(folder: Path, iteration: int = 1) -> list[dict[str, Any]]:
    lines = (folder / "trajectories" / f"iteration-{iteration:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("settings", "num"), [({}, 0), ({"score_per_iteration": 3}, 3)], ids=["not asked for", "of three"]
)
def test_the_trainers_logprobs_are_written_where_asked_for(settings: Any, num: int, tmp_path: Path) -> None:
    log = TrajectoryLog(table_every_n_iterations=None, **settings)
    module = TinyGRPO(microbatch_tokens=12)
    make_trainer(tmp_path, callbacks=[log], max_steps=1).fit(module, datamodule=Digits())
    found = records(tmp_path)
    assert [index for index, one in enumerate(found) if "trainer_logprobs" in one] == list(range(num))
    for one in found[:num]:
        engine = torch.tensor(one["trajectory"]["behavior_logprobs"])
        torch.testing.assert_close(torch.tensor(one["trainer_logprobs"]), engine, rtol=0, atol=1e-4)


def test_the_trainers_logprobs_are_of_the_precision_that_it_trains_in(tmp_path: Path) -> None:
    log = TrajectoryLog(table_every_n_iterations=None, score_per_iteration=3)
    module = TinyGRPO(microbatch_tokens=12)
    make_trainer(tmp_path, callbacks=[log], max_steps=1, precision="bf16-mixed").fit(module, datamodule=Digits())
    one, *_ = records(tmp_path)
    difference = torch.tensor(one["trainer_logprobs"]) - torch.tensor(one["trajectory"]["behavior_logprobs"])
    assert 1e-4 < difference.abs().max() < 0.1  # the engine's are float32, which agrees to 1e-6


def test_logprobs_that_the_update_needs_are_written_without_asking(tmp_path: Path) -> None:
    callbacks = [TrajectoryLog(1, table_every_n_iterations=None), StalenessControl(0)]
    module = TinyGRPO(num_minibatches=2, decoupled=True)
    make_trainer(tmp_path, callbacks=callbacks, max_steps=1).fit(module, datamodule=Digits())
    assert module.experiences[0].proximal_logprobs is not None
    assert all(len(one["trainer_logprobs"]) == len(one["trajectory"]["token_ids"]) for one in records(tmp_path))


def test_the_page_shows_what_a_run_wrote(tmp_path: Path) -> None:
    log = TrajectoryLog(1, table_every_n_iterations=None, score_per_iteration=4)
    trainer = make_trainer(tmp_path, callbacks=[log], logger=CSVLogger(tmp_path, name="", version=""))
    trainer.fit(TinyGRPO(), datamodule=Digits())
    answers = Answers(find_runs([tmp_path]), tmp_path / "cache")
    answers.runs[0].index.update()
    table = answers.answer("table", {"query": "iteration=2", "order": "asc"})
    assert table["total"] == BATCH_SIZE * GROUP_SIZE
    row = table["rows"][0]
    shown = answers.answer("trajectory", {"id": str(row["id"])})
    trajectory = Trajectory.from_json(records(tmp_path, 2)[0]["trajectory"])
    assert (row["reward"], row["length"]) == (trajectory.reward, trajectory.num_loss_tokens)
    assert row["staleness"] == 0
    texts = [shown["texts"][id_] for id_ in trajectory.token_ids]
    assert texts == [tokenizer().decode([id_]) for id_ in trajectory.token_ids]
    assert len(shown["group_rows"]) == GROUP_SIZE


class Warned(TinyGRPO):
    def on_experience_ready(self, experience: Experience) -> None:
        logging.getLogger("lightrl.own").warning("of the trainer, at version %d", self.weight_version)


def test_a_run_counts_iterations_from_1_everywhere_and_validates_before_training_at_0(tmp_path: Path, capsys) -> None:
    """In the lines that it prints, in metrics, curve, trajectories, trace and problems, and on the page."""
    callbacks = [TrajectoryLog(1, table_every_n_iterations=1), LearningRateMonitor("step")]
    callbacks += [ProblemLog(), Trace(max_cost=1.0), RolloutProgressBar(print_every_n_iterations=1)]
    settings = {"limit_val_batches": 1.0, "num_sanity_val_steps": -1, "val_check_interval": 2, "max_steps": 4}
    settings |= {"logger": CSVLogger(tmp_path, name="", version=""), "check_val_every_n_epoch": None}
    trainer = make_trainer(tmp_path, callbacks=callbacks, enable_progress_bar=True, **settings)
    trainer.fit(Warned(), datamodule=Digits())
    trained, validated = [1, 2, 3, 4], [0, 2, 4]
    lines = [line.split("  ")[0].split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in lines if re.fullmatch(r"iteration \d", line)] == [f"iteration {num}" for num in trained]
    assert [line for line in lines if re.match(r"iteration \d/", line)] == [f"iteration {num}/4" for num in trained]
    whens = ["before iteration 1", "after iteration 2", "after iteration 4"]
    assert [line for line in lines if line.startswith("validation")] == [f"validation {when}" for when in whens]
    answers = Answers(find_runs([tmp_path]), tmp_path / "cache")
    answers.runs[0].index.update()
    curves = answers.answer("curves", {})
    assert {"val/reward", "rollout/reward", "lr-AdamW"} <= curves.keys()
    for name, curve in curves.items():
        assert curve["x"] == (validated if name.startswith("val/") else trained), name
    assert {row["iteration"] for row in answers.answer("table", {})["rows"]} == {*trained}
    assert {row["iteration"] - row["weight_version"] for num in trained for row in records(tmp_path, num)} == {1}
    assert answers.answer("runs", {})[0]["traced"] == trained
    problems = map(json.loads, (tmp_path / "problems" / "rank-00000.jsonl").read_text().splitlines())
    assert [(one["iteration"], one["message"][-1]) for one in problems] == [(n, str(n - 1)) for n in trained]


class Failing(TinyGRPO):
    """Every reward of sample 1 fails; the third iteration ends in an error."""

    def reward(self, trajectory: Trajectory) -> Any:
        if trajectory.sample == 1:
            raise ValueError("no answer in <b>it</b>")
        return super().reward(trajectory)

    def on_policy_updated(self, weight_version: int) -> None:
        logging.getLogger("lightrl.engines.own").warning("a server of version %d is slow", weight_version)
        if weight_version == 2:
            raise RuntimeError("the disk is gone")


def test_drops_warnings_and_the_final_error_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_files, "_MAX_DROPS", 1)
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = make_trainer(tmp_path, callbacks=[ProblemLog()], logger=logger)
    handlers = logging.getLogger("lightrl").handlers[:]
    with pytest.raises(RuntimeError, match="the disk is gone"):
        trainer.fit(Failing(), datamodule=Digits())
    assert logging.getLogger("lightrl").handlers == handlers
    lines = (tmp_path / "problems" / "rank-00000.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    dropped = [one for one in found if one["kind"] == "dropped: reward_raised"]
    assert [(one["iteration"], one["source"]) for one in dropped] == [(1, "reward"), (2, "reward")]
    assert "no answer in <b>it</b>" in dropped[0]["message"]
    (rest,) = [one for one in found if one["kind"] == "dropped"]  # of the iteration that ended
    assert rest["message"] == f"{BATCH_SIZE} trajectories in total: {BATCH_SIZE} reward_raised"
    servers = [one["message"] for one in found if one["source"] == "server"]
    assert servers == ["a server of version 1 is slow", "a server of version 2 is slow"]
    assert (found[-1]["kind"], found[-1]["message"]) == ("error", "RuntimeError: the disk is gone")
