from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from scripted_run import ScriptedTrainer, run

from lightrl.callbacks.run_files import KINDS, RunFiles, contents, run_folder
from lightrl.testing import make_groups


def run_with_files(folder: Path, **settings: object) -> ScriptedTrainer:
    groups = make_groups([[1.0, 0.0]])
    return run(lambda _: groups, RunFiles(), logger=CSVLogger(folder), default_root_dir=folder, **settings)


def test_the_runs_folder_says_what_each_of_its_files_is(tmp_path: Path) -> None:
    folder = Path(str(run_with_files(tmp_path).log_dir))
    text = (folder / "README.txt").read_text()
    for path in folder.iterdir():
        assert path.name == "README.txt" or path.name in text
    assert all(kind in text for kind in KINDS.values())
    assert max(map(len, text.splitlines())) <= 100


def test_a_dry_run_leaves_no_file(tmp_path: Path) -> None:
    run_with_files(tmp_path, fast_dev_run=True)
    assert not list(tmp_path.rglob("README.txt"))


def test_only_the_kinds_that_are_there_are_listed_in_80_columns(tmp_path: Path) -> None:
    for name in ("metrics.csv", "events.out.tfevents.1.2"):
        (tmp_path / name).touch()
    names = [line.split()[0] for line in contents(tmp_path)]
    assert names == ["metrics.csv", "events.out.tfevents*"]
    assert max(len(f"  {name:<22}{kind}") for name, kind in KINDS.items()) <= 80


def test_a_full_disk_leaves_the_readme_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightrl.callbacks.run_files.write_whole", full)
    assert run_with_files(tmp_path).global_step == 1


@pytest.mark.parametrize("settings", [{"loggers": []}, {"loggers": [None], "fast_dev_run": True}], ids=str)
def test_without_a_run_folder_no_rank_waits_for_rank_0(settings: dict[str, Any]) -> None:
    assert run_folder(SimpleNamespace(**settings)) is None  # has no log_dir, whose value rank 0 broadcasts
