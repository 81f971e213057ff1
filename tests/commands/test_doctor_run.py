"""`lightrl doctor run` from the outside, and what it says of a whole run."""

import json
import math
import re
import socket
from pathlib import Path

import pytest

from lightrl.checks.printable import duration_text
from lightrl.commands.doctor.findings import Finding
from lightrl.commands.doctor.machine import disk, ports
from lightrl.commands.doctor.trial import Trial, forecast, run_length
from lightrl.commands.main import main


def verdicts(text: str) -> dict[str, set[str]]:
    """Area → its verdicts."""
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        verdict, _, rest = line.partition(" ")
        if verdict in ("ok", "warning", "fails"):
            found.setdefault(rest.split()[0], set()).add(verdict)
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
    assert set(verdicts(text)) == {
        "environment", "devices", "memory", "ports", "disk", "model", "tokenizer", "template", "data", "context",
        "trial", "logprobs", "completions", "reward", "time", "run",
    }  # fmt: skip
    assert "fails" not in set.union(*verdicts(text).values())
    words = " ".join(text.split())  # where lines break depends on the folder's name
    assert "HuggingFaceExport, ModelCheckpoint" in words
    assert "200 iterations take about" in words
    assert files() == before


def test_a_reward_that_raises_fails_with_its_message_and_the_code_is_1(settings, config, capsys):
    settings["model"]["init_args"]["reward"] = "tiny_rewards.broken"
    assert main(["doctor", "run", "--config", config(settings)]) == 1
    text = capsys.readouterr().out
    assert verdicts(text)["trial"] == {"fails"}
    assert "RuntimeError: this reward is broken" in " ".join(text.split())


def test_an_engine_with_other_logprobs_than_the_trainer_fails(settings, config, capsys):
    settings["trainer"]["engine"] = {"class_path": "FakeEngine", "init_args": {"logprob_error_nats": 0.5}}
    assert main(["doctor", "run", "--config", config(settings)]) == 1
    text = capsys.readouterr().out
    assert verdicts(text)["logprobs"] == {"fails"}
    assert re.search(r"differ by 0.5\d* on what the engine sampled", " ".join(text.split()))


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
    assert "1 train prompts repeat another one." in text
    assert "1 of 2 validation prompts are train prompts too." in text
    assert verdicts(text)["data"] == {"ok", "warning"}


def test_the_data_alone_are_compared_too(settings, config, capsys):
    name = config(with_rows(settings, ["1", "2", "2"], ["2", "4"]))
    assert main(["doctor", "data", "--config", name]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == ["1 train prompts repeat another one", "1 validation prompts are train prompts too"]


def test_a_setting_that_does_not_exist_is_code_2(settings, config, capsys):
    assert main(["doctor", "run", "--config", config(settings), "--model.lrr", "1"]) == 2
    assert "lrr" in capsys.readouterr().err


def test_a_port_in_use_fails():
    with socket.create_server(("", 0)) as server:
        (finding,) = ports(None, server.getsockname()[1])
    assert finding.verdict == "fails"
    assert "MASTER_PORT" in finding.fix


def test_a_server_that_does_not_listen_fails():
    from lightrl.engines import SGLangEngine

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert [item.verdict for item in ports(SGLangEngine(urls=[address]), None)] == ["ok", "ok"]
    assert [item.verdict for item in ports(SGLangEngine(urls=[address]), None)] == ["fails", "ok"]


def test_a_disk_too_small_for_the_run_fails(tmp_path):
    assert disk(str(tmp_path / "not" / "there")).verdict == "ok"
    assert disk(str(tmp_path), needed_bytes=1e18).verdict == "fails"


@pytest.mark.parametrize(
    ("settings", "iterations", "validations", "checkpoints"),
    [
        pytest.param({"max_steps": 100}, 100, 10, 2, id="epochs of ten"),
        pytest.param({"max_steps": -1, "max_epochs": 3}, 30, 3, 2, id="three epochs"),
        pytest.param({"max_steps": -1, "max_epochs": -1}, math.inf, math.nan, 2, id="without end"),
        pytest.param(
            {"max_steps": 100, "val_check_interval": 20, "check_val_every_n_epoch": None}, 100, 5, 2, id="steps"
        ),
        pytest.param({"max_steps": 100, "val_check_interval": 0.5}, 100, 20, 2, id="twice per epoch"),
        pytest.param(
            {"max_steps": 100, "checkpoints": [{"save_top_k": -1, "every_n_train_steps": 10}]}, 100, 10, 10, id="all"
        ),
    ],
)
def test_the_length_of_a_run_follows_from_its_settings(settings, iterations, validations, checkpoints):
    checkpoints_of = settings.pop("checkpoints", [{"save_last": True}])
    length = run_length({"check_val_every_n_epoch": 1, **settings}, checkpoints_of, 10)
    assert length == pytest.approx((iterations, validations, checkpoints), nan_ok=True)


def test_a_forecast_adds_iterations_validations_checkpoints_and_trajectories():
    measured = Trial(iterations_s=[9.0, 2.0], validation_batch_s=3.0, checkpoint_bytes=7)
    finding, num_bytes = forecast((100, 5, 2), measured, logged_bytes=1.1, validation_batches=4)
    seconds, validation_s = 100 * 2 + 5 * 4 * 3, 5 * 4 * 3
    assert f"about {duration_text(seconds)} (validation {duration_text(validation_s)} of it)" in finding.text
    assert num_bytes == pytest.approx(2 * 7 + 100 * 1.1)


def test_a_finding_has_its_fix_below_and_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    text = str(Finding("disk", "word " * 20, "fails", "Free disk space."))
    assert max(map(len, text.splitlines())) <= 60
    assert text.splitlines()[0].startswith("fails    disk         word")
    assert text.splitlines()[-1].strip() == "fix: Free disk space."
