"""An export that is killed at any step: what stands under its name is whole, and the next one clears the rest."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from lightrl.checks import publish
from lightrl.models import model_folder
from lightrl.models.model_folder import replaced_folder

# Each step of an export, as (module, function): it is killed before the step.
STEPS = [("model_folder", "sync_files"), ("model_folder", "publish"), ("publish", "_swap"), ("publish", "remove_path")]


def export(place: Path, text: str) -> None:
    with replaced_folder(place) as folder:
        (folder / "config.json").write_text(text)


def killed_export(place: Path, module: str, function: str) -> None:
    """Exports in a child, which kills itself when it comes to the step."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        return
    try:
        home = {"publish": publish, "model_folder": model_folder}[module]
        vars(home)[function] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        export(place, "new")
    finally:
        os._exit(1)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # the child only exports
@pytest.mark.parametrize(("module", "function"), STEPS, ids=[function for _, function in STEPS])
def test_an_export_killed_at_any_step_is_whole_and_the_next_one_clears_the_rest(
    module: str, function: str, tmp_path: Path
) -> None:
    place = tmp_path / "export"
    export(place, "old")
    killed_export(place, module, function)
    assert (place / "config.json").read_text() == ("new" if function == "remove_path" else "old")
    export(place, "newest")
    assert (place / "config.json").read_text() == "newest"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_without_exchanging_renames_the_next_export_gives_the_old_folder_its_name_back(tmp_path: Path) -> None:
    place = tmp_path / "export"
    export(place, "old")
    place.rename(place.with_name("export.replaced"))  # killed between two renames
    publish.restore(place)
    assert (place / "config.json").read_text() == "old"
