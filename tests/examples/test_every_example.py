"""Each YAML says how it is started and can be built; those that no other file here starts are started."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_sglang import python_of_fakes
from parsed import BuildingOnly, BuiltError
from rank_scripts import finished
from test_make_model import make_folder

from examples.gsm8k import make_model
from lightrl.commands.cli import run

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts/docs_site"))
import metrics_page  # noqa: E402

CONFIGS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*.yaml"))
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k"
TWO = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]
TWO += ["--trainer.num_sanity_val_steps=0", "--trainer.enable_checkpointing=false", "--trainer.callbacks=[]"]
DIGITS = ["--data.batch_size=4", "--data.num_validation=20", "--trainer.accelerator=cpu"]


pytestmark = pytest.mark.usefixtures("as_a_command")


def configs_of(name: str) -> list[str]:
    """The `--config` options of the command at the top of an example; others below it may name other files."""
    header = re.match(r"(#.*\n)*", (ROOT / name).read_text())
    commands = re.findall(r"lightrl ((?:fit|launch)(?: --config [\w/.-]+)+)", header[0] if header else "")
    (command, *_) = [command for command in commands if command.endswith(name)]
    return [word if word == "--config" else str(ROOT / word) for word in str(command).split()[1:]]


@pytest.mark.parametrize("name", CONFIGS)
def test_each_example_says_at_its_top_what_it_needs_takes_and_reaches(name: str) -> None:
    first, *lines = (ROOT / name).read_text().splitlines()
    assert re.fullmatch(r"# [A-Z0-9].*\S", first)
    assert [re.match(r"# (\w+): .+\.?$", line)[1] for line in lines[:3]] == ["Needs", "Takes", "Reaches"]  # type: ignore[index]
    assert lines[3].startswith("#   ")  # a command


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("name", CONFIGS)
def test_each_example_is_built_from_the_command_at_its_top(
    name: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for program in ("claude", "codex", "python"):  # stand-ins: they are looked for, and not started
        (tmp_path / program).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for folder in set(re.findall(r": (runs/\w+/\w+)\b", (ROOT / name).read_text())):  # of an earlier stage
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        Path(folder).symlink_to(base)
    settings = ["--trainer.accelerator=cpu"]
    with pytest.raises(BuiltError):
        BuildingOnly(["fit", *configs_of(name), *settings])


def fit(folder: Path, configs: list[str], *options: str) -> None:
    assert run(["fit", *configs, *TWO, f"--trainer.default_root_dir={folder}", *options]) == 0
    has_run(folder)


def has_run(folder: Path) -> None:
    (metrics,) = folder.rglob("metrics.csv")
    header, *rows = metrics.read_text().splitlines()
    iterations = {dict(zip(header.split(","), row.split(","), strict=True))["step"] for row in rows}
    assert iterations >= {"1", "2"}
    assert metrics_page.undescribed({name for name in header.split(",") if "/" in name}) == set()


@pytest.mark.parametrize(
    "name", ["quickstart/grpo.yaml", "ppo/async.yaml", pytest.param("ppo/sync.yaml", marks=pytest.mark.extra)]
)
def test_the_digit_examples_start(name: str, tmp_path: Path) -> None:
    fit(tmp_path, ["--config", f"examples/{name}"], *DIGITS)


def test_the_servers_example_starts_with_servers_of_its_kind(tmp_path: Path, forked_children: None) -> None:
    python = python_of_fakes(tmp_path, "--vocab-size", "14")
    other: dict[str, Any] = {"trainer": {"engine": {"init_args": {"sglang_python": python}}}}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other))
    configs = [*configs_of("examples/quickstart/sglang_cpu.yaml"), "--config", str(tmp_path / "other.yaml")]
    fit(tmp_path, configs, *DIGITS)


@pytest.mark.parametrize(
    "name", ["fsdp2", *(pytest.param(name, marks=pytest.mark.extra) for name in ("ppo_meshes", "3d_4", "3d_8"))]
)
@pytest.mark.extra
def test_the_examples_of_several_processes_start(name: str, tmp_path: Path) -> None:
    configs = configs_of(f"examples/parallel/{name}.yaml")
    options = [*TWO, *DIGITS, f"--trainer.default_root_dir={tmp_path}"]
    done = finished(Path(__file__).with_name("lightrl_command.py"), ROOT, "fit", *configs, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    has_run(tmp_path)


def gsm8k(tmp_path: Path, questions: Path) -> None:
    """SFT, then GRPO from its export, on the first rows of a file."""
    rows = f"{tmp_path}/rows.jsonl"
    Path(rows).write_text("".join(questions.read_text(encoding="utf-8").splitlines(keepends=True)[:24]))
    data = [f"--data.train={rows}", f"--data.validation={rows}", "--data.batch_size=2"]
    data += ["--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=1"]
    export = ["--trainer.callbacks=HuggingFaceExport", f"--trainer.callbacks.to={tmp_path}/sft"]
    sft = [f"--model.policy={tmp_path}/base", *data, *export]
    fit(tmp_path / "first", ["--config", "examples/gsm8k/sft.yaml"], *sft)
    grpo = [f"--model.policy={tmp_path}/sft", *data, "--model.sampling.max_new_tokens=8", "--model.group_size=2"]
    fit(tmp_path / "then", ["--config", "examples/gsm8k/grpo.yaml"], *grpo)


def test_gsm8k_starts_on_rows_of_its_form(tmp_path: Path) -> None:
    make_folder(tmp_path)
    gsm8k(tmp_path, tmp_path / "train.jsonl")


@pytest.mark.extra
@pytest.mark.skipif(not GSM8K.is_dir(), reason=f"GSM8K is not at hand: {GSM8K} does not exist")
def test_gsm8k_starts_on_its_own_rows(tmp_path: Path) -> None:
    sizes = ["--vocab-size", "1000", "--hidden-size", "32", "--num-layers", "1"]
    make_model.main(["--questions", str(GSM8K / "test.jsonl"), "--to", str(tmp_path / "base"), *sizes])
    gsm8k(tmp_path, GSM8K / "train.jsonl")
