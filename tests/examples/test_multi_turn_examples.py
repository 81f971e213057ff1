"""The examples of several turns, each run in a short form through the command line's own door."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from test_make_model import make_folder

from examples.multi_turn import calculator
from lightrl.commands.cli import run

EXAMPLES = Path(__file__).parents[2] / "examples" / "multi_turn"
QUIET = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.callbacks=[]"]


@pytest.fixture(autouse=True)
def _as_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parents[1])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's, as the command sets it
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that what a test seeds is undone with it


def fitted(name: str, folder: Path, *options: str) -> None:
    assert run(["fit", "--config", str(EXAMPLES / name), *QUIET, f"--trainer.default_root_dir={folder}", *options]) == 0


def metrics(folder: Path) -> dict[str, float]:
    """The last value of each metric."""
    (path,) = folder.rglob("metrics.csv")
    header, *lines = path.read_text().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        values = zip(header.split(","), line.split(","), strict=True)
        found |= {key: float(value) for key, value in values if value}
    return found


def test_the_calculator_example_trains_on_what_its_supervised_steps_export(tmp_path: Path):
    export = ["--trainer.callbacks=HuggingFaceExport", f"--trainer.callbacks.to={tmp_path}/sft"]
    fitted("calculator_sft.yaml", tmp_path / "first", "--data.batch_size=4", "--trainer.limit_val_batches=1", *export)
    fitted("calculator.yaml", tmp_path / "then", f"--model.policy={tmp_path}/sft", "--data.batch_size=4")
    assert 1 <= metrics(tmp_path / "then")["rollout/turns"] <= 2


def test_a_call_that_the_calculator_examples_policy_writes_is_answered():
    async def play() -> tuple[Any, float, bool]:
        (call,) = calculator.parse(":17*6")
        assert (call.name, call.arguments) == ("calculator", {"expression": "17*6"})
        assert calculator.parse("102") == []
        return await calculator.tools().step(":17*6")

    assert asyncio.run(play()) == ([{"role": "tool", "name": "calculator", "content": "102"}], 0.0, False)


def test_the_retry_example_trains_on_rows_of_gsm8ks_form(tmp_path: Path):
    folder = make_folder(tmp_path)
    rows = str(tmp_path / "train.jsonl")
    data = [f"--data.train={rows}", f"--data.validation={rows}", "--data.max_validation_prompts=4"]
    policy = [f"--model.policy={folder}", "--model.sampling.max_new_tokens=16"]
    fitted("retry.yaml", tmp_path, *policy, *data, "--data.batch_size=2")
    assert metrics(tmp_path)["rollout/first_turn_accuracy"] == 0


@pytest.mark.parametrize("name", ["calculator", "retry"])
def test_an_example_has_at_most_60_lines(name: str):
    lines = [line for path in EXAMPLES.glob(f"{name}*.*") for line in path.read_text().splitlines()]
    assert len([line for line in lines if line.strip() and not line.startswith("#")]) <= 60
