"""`lightrl doctor run` from the outside, and what it says of a whole run."""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import tiny_spec

from examples.quickstart.task import LargestDigit
from lightrl import GRPO, ModelSpec, Sampling, Trainer
from lightrl.checks.printable import duration_text
from lightrl.commands.doctor.run import (
    Finding,
    Trial,
    bottleneck_findings,
    disk_finding,
    forecast,
    memory_on_paper,
    run_length,
)
from lightrl.commands.main import main
from lightrl.plan.memory import bytes_text, rank_memories
from lightrl.plan.planned_run import planned_run


def statuses(text: str) -> dict[str, set[str]]:
    """Area → its statuses."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        status, _, rest = line.partition(" ")
        if status in ("ok", "warning", "fails"):
            found.setdefault(rest.split()[0], set()).add(status)
    return found


def files() -> set[str]:
    return {str(path) for path in Path().rglob("*")}


def test_a_good_run_is_checked_from_environment_to_hours_and_nothing_is_kept(settings, config, capsys):
    settings["trainer"]["max_steps"] = 200
    settings["trainer"]["callbacks"] += [
        {"class_path": "TrajectoryLog", "init_args": {"every_n_iterations": 1}},
        {"class_path": "HuggingFaceExport", "init_args": {"to": "exported"}},
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"dirpath": "kept"}},
    ]
    name = config(settings)
    before = files()
    assert main(["doctor", "run", "--config", name]) == 0
    text = capsys.readouterr().out
    assert set(statuses(text)) == {
        "environment", "devices", "memory", "disk", "model", "tokenizer", "template", "data", "trial", "logprobs",
        "completions", "reward", "time", "run",
    }  # fmt: skip
    assert "fails" not in set.union(*statuses(text).values())
    words = " ".join(text.split())  # where lines break depends on the folder's name
    assert "HuggingFaceExport, ModelCheckpoint" in words
    assert "200 iterations take about" in words
    assert files() == before


def test_memory_on_paper_is_that_of_the_plan_and_a_warning_where_no_config_tells_it(tmp_path):
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    data = LargestDigit(batch_size=32)
    module = GRPO(tiny_spec(), reward=len, sampling=Sampling(max_new_tokens=4))
    (finding,) = memory_on_paper(module, trainer, data)
    total = bytes_text(rank_memories(planned_run(module, trainer, data))[0].total)
    assert (finding.status, finding.text) == ("ok", f"Estimated memory per rank: {total}.")
    (finding,) = memory_on_paper(GRPO(ModelSpec(path=str(tmp_path)), reward=len), trainer, data)
    assert finding.status == "warning"
    assert finding.text.startswith("Memory was not checked: ")
    assert str(tmp_path) in finding.text


def test_a_reward_that_raises_fails_with_its_message_and_the_code_is_1(settings, config, capsys):
    settings["model"]["init_args"]["reward"] = "tiny_rewards.broken"
    assert main(["doctor", "run", "--config", config(settings)]) == 1
    text = capsys.readouterr().out
    assert statuses(text)["trial"] == {"fails"}
    assert "RuntimeError: this reward is broken" in " ".join(text.split())


def test_an_engine_with_other_logprobs_than_the_trainer_fails(settings, config, capsys):
    settings["trainer"]["engine"] = {"class_path": "FakeEngine", "init_args": {"logprob_error_nats": 0.5}}
    assert main(["doctor", "run", "--config", config(settings)]) == 1
    text = capsys.readouterr().out
    assert statuses(text)["logprobs"] == {"fails"}
    assert re.search(r"differ by 0.5\d* nats per token on the sampled tokens", " ".join(text.split()))


def with_rows(settings: dict, train: list[str], validation: list[str], **more) -> dict:
    for name, words in (("train.jsonl", train), ("validation.jsonl", validation)):
        lines = (json.dumps({"question": word, "answer": "1"}) for word in words)
        Path(name).write_text("\n".join(lines))
    arguments = {"train": "train.jsonl", "validation": "validation.jsonl", "batch_size": 2, **more}
    return settings | {"data": {"class_path": "PromptDataModule", "init_args": arguments}}


def test_prompts_of_both_splits_and_repeated_ones_are_counted(settings, config, capsys):
    name = config(with_rows(settings, ["1", "2", "2", "3"], ["3", "4"]))
    assert main(["doctor", "run", "--config", name]) == 0
    text = capsys.readouterr().out
    assert "Train prompts that repeat another one: 1." in text
    assert "Validation prompts that are also train prompts: 1 of 2." in text
    assert statuses(text)["data"] == {"ok", "warning"}


def test_the_trial_validates_part_of_a_batch_that_is_the_whole_validation_set(settings, config, monkeypatch):
    monkeypatch.setattr(sys.modules[Trial.__module__], "MAX_VALIDATION_PROMPTS", 3)
    sizes = []
    monkeypatch.setattr(Trial, "on_validation_batch_end", lambda *args: sizes.append(len(args[4])))
    assert main(["doctor", "run", "--config", config(settings)]) == 0
    assert sizes == [3]  # of 8


def test_a_warning_about_the_data_is_printed_once(settings, config, capsys):
    name = config(with_rows(settings, ["1", "2", "3", "4"], ["5"], bad_rows="drop", max_bad_fraction=0.5))
    Path("train.jsonl").write_text(Path("train.jsonl").read_text() + "\nnot JSON\n")
    assert main(["doctor", "run", "--config", name]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(lines) == len(set(lines))
    assert [line for line in lines if "Dropped 1 of 5 train rows as bad" in line]


def test_the_data_alone_are_compared_too(settings, config, capsys):
    name = config(with_rows(settings, ["1", "2", "2"], ["2", "4"]))
    assert main(["doctor", "data", "--config", name]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "train prompts that repeat another one: 1",
        "validation prompts that are also train prompts: 1 of 2",
    ]


def test_a_setting_that_does_not_exist_is_code_2(settings, config, capsys):
    assert main(["doctor", "run", "--config", config(settings), "--model.lrr", "1"]) == 2
    assert "lrr" in capsys.readouterr().err


def test_a_server_that_does_not_answer_fails_the_trial_soon_and_with_its_url(settings, config, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules[Trial.__module__], "_ANSWER_S", 0.2)
    settings["trainer"]["engine"] = {"class_path": "SGLangEngine", "init_args": {"urls": ["http://127.0.0.1:9"]}}
    assert main(["doctor", "run", "--config", config(settings)]) == 1
    text = capsys.readouterr().out
    assert statuses(text)["trial"] == {"fails"}
    assert "http://127.0.0.1:9" in text


def test_a_disk_too_small_for_the_run_fails(tmp_path):
    assert disk_finding(str(tmp_path / "not" / "there")).status == "ok"
    assert disk_finding(str(tmp_path), needed_bytes=1e18).status == "fails"


@pytest.mark.parametrize(
    ("val_check_batch", "every_n_epochs", "checkpoint", "expected"),
    [
        pytest.param(10, 1, {"save_last": True}, (100, 10, 2), id="each epoch of ten"),
        pytest.param(10, 5, {"save_last": True}, (100, 2, 2), id="each fifth epoch"),
        pytest.param(20, None, {}, (100, 5, 1), id="each 20 iterations"),
        pytest.param(5, 1, {"save_top_k": -1, "every_n_train_steps": 10}, (100, 20, 10), id="all checkpoints"),
    ],
)
def test_validations_and_checkpoints_of_a_run_are_counted(val_check_batch, every_n_epochs, checkpoint, expected):
    trainer = SimpleNamespace(
        estimated_stepping_batches=100,
        num_training_batches=10,
        val_check_batch=val_check_batch,
        check_val_every_n_epoch=every_n_epochs,
    )
    assert run_length(trainer, [ModelCheckpoint(**checkpoint)]) == expected


def test_a_forecast_adds_iterations_validations_checkpoints_and_trajectories(tmp_path):
    measured = Trial(length=(100, 5, 2), iterations_s=[9.0, 2.0], validation_batch_s=3.0, checkpoint_bytes=7)
    _, run, disk = forecast(measured, str(tmp_path), logged_bytes=1.1, validation_batches=4)
    seconds, validation_s = 100 * 2 + 5 * 4 * 3, 5 * 4 * 3
    assert f"about {duration_text(seconds)} (including {duration_text(validation_s)} of validation)" in run.text
    assert disk.text.endswith("the run writes about 124 B.")


def test_a_run_without_an_end_is_warned_of(tmp_path):
    measured = Trial(length=(math.inf, 0, 0), iterations_s=[9.0, 2.0])
    assert [item.status for item in forecast(measured, "", logged_bytes=1, validation_batches=1)] == ["ok", "warning"]


def test_a_slow_reward_is_a_warning_and_a_slow_update_is_none():
    (finding,) = bottleneck_findings("reward", "94% was the wait. Increase reward_workers.")
    assert (finding.status, finding.text, finding.fix) == ("warning", "94% was the wait.", "Increase reward_workers.")
    assert [one.status for one in bottleneck_findings("update", "60% was the update. Use more.")] == ["ok"]
    assert list(bottleneck_findings("", "")) == []


def test_completions_that_are_all_cut_are_the_first_cause(settings, config, capsys):
    sampling = {"max_new_tokens": 1, "min_new_tokens": 1}
    settings["model"]["init_args"] |= {"reward": "tiny_rewards.never", "sampling": sampling}
    main(["doctor", "run", "--config", config(settings)])
    text = " ".join(capsys.readouterr().out.split())
    assert "100% were cut at max_new_tokens=1" in text
    assert "fix: The completions are cut before a reward or environment sees their end" in text
    assert "stronger model" not in text


def test_a_finding_has_its_fix_below_and_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = str(Finding("disk", "word " * 20, "fails", "Free disk space."))
    assert max(map(len, text.splitlines())) <= 60
    assert text.splitlines()[0].startswith("fails    disk         word")
    assert text.splitlines()[-1].strip() == "fix: Free disk space."
