"""Examples with a reward, environment or judge of their own, in a short form through the command line's own door."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_make_model import make_folder

from examples.multi_turn import calculator
from lightrl.commands.cli import run
from lightrl.engines.servers.processes.process import HeldPort

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES.parent / "scripts/docs_site"))
import metrics_page  # noqa: E402

SHORT = ["--trainer.max_steps=2", "--trainer.val_check_interval=2"]
QUIET = "--trainer.callbacks=[]"

pytestmark = pytest.mark.usefixtures("as_a_command")


def fit(config: str | Path, folder: Path, *options: str) -> None:
    command = ["fit", "--config", str(EXAMPLES / config), *SHORT, f"--trainer.default_root_dir={folder}"]
    assert run([*command, *options]) == 0


def export(folder: Path) -> list[str]:
    return ["--trainer.callbacks=HuggingFaceExport", f"--trainer.callbacks.to={folder}"]


def metrics(folder: Path) -> dict[str, float]:
    """The last value of each metric."""
    (path,) = folder.rglob("metrics.csv")
    header, *lines = path.read_text().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        values = zip(header.split(","), line.split(","), strict=True)
        found |= {key: float(value) for key, value in values if value}
    return found


def small_policy(tmp_path: Path) -> list[str]:
    return [f"--model.policy={make_folder(tmp_path)}", "--model.sampling.max_new_tokens=8", "--model.group_size=2"]


def test_the_agent_example_trains(tmp_path: Path) -> None:
    fit("agent/grpo.yaml", tmp_path, QUIET, "--data.batch_size=2", "--data.num_validation=2")
    logged = metrics(tmp_path)
    assert logged["rollout/turns"] == 2
    assert metrics_page.undescribed({name for name in logged if "/" in name}) == set()


@pytest.mark.extra
def test_the_code_example_trains_and_runs_each_program(tmp_path: Path) -> None:
    one = ["--trainer.max_steps=1", "--trainer.val_check_interval=1"]
    fit("code/grpo.yaml", tmp_path, QUIET, *small_policy(tmp_path), *one)
    assert "rollout/passed_fraction" in metrics(tmp_path)


@pytest.mark.extra
def test_the_countdown_example_trains_on_what_its_supervised_steps_export(tmp_path: Path) -> None:
    few = ["--data.validation.max_rows=8", "--data.batch_size=2"]
    fit("countdown/sft.yaml", tmp_path, *few, *export(tmp_path / "sft"))
    fit("countdown/grpo.yaml", tmp_path, *few, f"--model.policy={tmp_path}/sft", "--model.group_size=2", QUIET)


@pytest.mark.extra
def test_the_judge_example_trains_on_what_the_judge_says(tmp_path: Path) -> None:
    port = HeldPort("127.0.0.1")
    text = (EXAMPLES / "judge/grpo.yaml").read_text()
    (tmp_path / "run.yaml").write_text(text.replace("8123", str(port.number)))
    command = [sys.executable, "-m", "examples.judge.fake_judge", str(port.number)]
    judge = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        policy = small_policy(tmp_path)
        data = [f"--data.train={tmp_path}/train.jsonl", "--data.batch_size=2"]
        fit(tmp_path / "run.yaml", tmp_path, QUIET, *policy, *data, "--trainer.max_steps=1")
    finally:
        judge.kill()
        judge.wait()
        port.close()
    assert "rollout/score" in metrics(tmp_path)


@pytest.mark.extra
def test_the_vision_example_trains_and_exports_its_image_processor(tmp_path: Path) -> None:
    few = ["--data.train.max_rows=8", "--data.validation.max_rows=4", "--data.batch_size=4"]
    few += ["--model.group_size=2"]
    fit("vision/clevr_count.yaml", tmp_path, *few, *export(tmp_path / "policy"))
    assert (tmp_path / "policy" / "preprocessor_config.json").is_file()
    fit("vision/clevr_count.yaml", tmp_path, *few, f"--model.policy={tmp_path}/policy", QUIET)


@pytest.mark.extra
def test_the_calculator_example_trains_on_what_its_supervised_steps_export(tmp_path: Path) -> None:
    few = ["--data.batch_size=4", "--trainer.limit_val_batches=1"]
    fit("multi_turn/calculator_sft.yaml", tmp_path / "first", *few, *export(tmp_path / "sft"))
    fit("multi_turn/calculator.yaml", tmp_path / "then", QUIET, f"--model.policy={tmp_path}/sft", "--data.batch_size=4")
    assert 1 <= metrics(tmp_path / "then")["rollout/turns"] <= 2


def test_a_call_that_the_calculator_examples_policy_writes_is_answered() -> None:
    async def play() -> tuple[Any, float, bool]:
        (call,) = calculator.parse(":17*6")
        assert (call.name, call.arguments) == ("calculator", {"expression": "17*6"})
        assert calculator.parse("102") == []
        return await calculator.tools().step(":17*6")

    assert asyncio.run(play()) == ([{"role": "tool", "name": "calculator", "content": "102"}], 0.0, False)


@pytest.mark.extra
def test_the_retry_example_trains_on_rows_of_gsm8ks_form(tmp_path: Path) -> None:
    policy = [f"--model.policy={make_folder(tmp_path)}", "--model.sampling.max_new_tokens=16"]
    rows = f"{tmp_path}/train.jsonl"
    data = [f"--data.train={rows}", f"--data.validation={{source: {rows}, max_rows: 4, name: null}}"]
    fit("multi_turn/retry.yaml", tmp_path, QUIET, *policy, *data, "--data.batch_size=2")
    assert metrics(tmp_path)["rollout/first_turn_accuracy"] == 0


@pytest.mark.parametrize("files", ["agent/[gt][rw]*", "agent/tasks.yaml", "code/*.yaml", "judge/*", "vision/*",
                                   "multi_turn/calculator*.*", "multi_turn/retry*.*"])  # fmt: skip
def test_an_example_has_at_most_60_lines(files: str) -> None:
    lines = [line for path in EXAMPLES.glob(files) if path.is_file() for line in path.read_text().splitlines()]
    assert 0 < len([line for line in lines if line.strip() and not line.startswith("#")]) <= 60
