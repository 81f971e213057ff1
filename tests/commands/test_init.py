"""lightrl init: a folder with an example that runs without the clone."""

import re
from pathlib import Path

import pytest
import yaml

from lightrl.commands import init
from lightrl.commands.main import main

CONFIG_FLAG = re.compile(r"--config (\S+)")
DOTTED = re.compile(r"\bexamples\.(\w+)\.(\w+)\.(\w+)")


@pytest.mark.parametrize("example", init.example_names())
def test_an_example_needs_no_file_of_the_clone(
    example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"
    assert main(["init", str(folder), "--example", example]) == 0
    configs = CONFIG_FLAG.findall(capsys.readouterr().out)
    assert configs
    assert [config for config in configs if not (folder / config).is_file()] == []
    for file in filter(Path.is_file, folder.rglob("*")):
        assert not re.search(r"(?<![\w/])examples\.\w|examples/\w+/", file.read_text()), file
    for source in (init.examples_folder() / example).glob("*.yaml"):
        text = (folder / source.name).read_text()
        assert yaml.safe_load(text)
        for other, module, name in DOTTED.findall(source.read_text()):
            path = module if other == example else f"{other}.{module}"
            code = (folder / f"{path.replace('.', '/')}.py").read_text()
            compile(code, path, "exec")
            if f"python -m {path}" not in text:
                assert f"{path}.{name}" in text
                assert re.search(rf"^(def |class |async def )?{name}\b", code, re.MULTILINE), (path, name)


def test_what_needs_more_than_the_package_comes_last_with_its_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "new")]) == 0
    _, ready, *others = capsys.readouterr().out.split("\n\n")
    assert "--config grpo.yaml" in ready
    assert "Needs" not in ready
    assert [text for text in others if "sglang_cpu.yaml" in text and text.startswith("  # Needs: ")] == others


def test_a_new_folder_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["init", str(tmp_path / "new")]) == 0
    monkeypatch.chdir(tmp_path / "new")
    reward = Path("reward.py")
    reward.write_text(reward.read_text().replace('"accuracy": right', '"accuracy": right, "edited": 1.0'))
    assert (
        main(["fit", "--config", "grpo.yaml", "--trainer.max_steps", "1", "--trainer.num_sanity_val_steps", "0"]) == 0
    )
    (metrics,) = Path("runs/quickstart/lightning_logs").glob("*/metrics.csv")
    assert "rollout/edited" in metrics.read_text()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["{folder}", "--example", "quikstart"], "There is no example 'quikstart'. Did you mean quickstart?"),
        (["{folder}/full"], "full exists and is not an empty folder"),
        (["{folder}/full/file"], "file exists and is not an empty folder"),
    ],
)
def test_nothing_is_written(
    arguments: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    assert main(["init", *(text.format(folder=tmp_path) for text in arguments)]) == 2
    assert problem in capsys.readouterr().err
    assert [file.read_text() for file in tmp_path.rglob("*") if file.is_file()] == ["mine"]
