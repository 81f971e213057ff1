"""The notebook runs in a real kernel, from its folder, as a reader starts it."""

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import notebook_page
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/quickstart/quickstart.ipynb"
ITERATIONS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def executed(folder: Path) -> Any:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    environment = {
        **os.environ,
        "LIGHTRL_NOTEBOOK_ITERATIONS": str(ITERATIONS),
        "LIGHTRL_NOTEBOOK_RUNS": str(folder),
        "IPYTHONDIR": str(folder / "ipython"),  # not the user's settings and history
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "OMP_NUM_THREADS": "1",
    }
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}})
    return client.execute(env=environment)


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.extra
def test_each_cell_runs_and_the_curve_is_shown(executed: Any) -> None:
    code = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert [output for output in outputs(executed) if "image/png" in output.get("data", {})]
    text = "".join(output.get("text", "") for output in outputs(executed))
    assert f"iteration-{ITERATIONS:06d}.jsonl" in text
    assert "look first at" in text
    assert "page.html: " in text


@pytest.mark.extra
def test_it_leaves_a_run_that_others_can_look_at(executed: Any, folder: Path) -> None:
    (run,) = (folder / "notebook").rglob("version_0")
    assert {"learning_curve.png", "metrics.csv", "page.html", "trajectories", "trace"} <= {
        path.name for path in run.iterdir()
    }


def test_the_committed_outputs_are_those_of_a_whole_run() -> None:
    kept = nbformat.read(NOTEBOOK, as_version=4)
    assert [output for output in outputs(kept) if "image/png" in output.get("data", {})]
    assert not [output for output in outputs(kept) if output.output_type == "error"]
    home = str(Path.home())
    assert not [output for output in outputs(kept) if home in str(output) or sys.prefix in str(output)]


def test_the_site_shows_cells_outputs_and_images() -> None:
    page = notebook_page.page(NOTEBOOK)
    assert page.startswith("# The quickstart in a notebook")
    assert "```python\ntrainer.fit(module, datamodule=data)\n```" in page
    assert "](data:image/png;base64," in page
    assert "```text\n" in page
