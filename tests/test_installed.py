"""What `pip install -e .` gives: a package that imports beside the clone, and constructors that type checkers know."""

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

import lightrl

ROOT = Path(__file__).parents[1]
BASES = (lightrl.Trainer, lightrl.RLModule, lightrl.DPO, lightrl.RewardModel, lightrl.PromptDataModule)
PUBLIC = [kind for name in lightrl.__all__ if isinstance(kind := getattr(lightrl, name), type)]
CLASSES = [*(kind for kind in PUBLIC if issubclass(kind, BASES)), lightrl.SGLangEngine, lightrl.VLLMEngine]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which only lightrl is installed, as `pip install --no-deps -e .` does it."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder / "venv", symlinks=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    build = f"import hatchling.build; hatchling.build.build_editable({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return folder / "venv" / "bin" / "python"


def test_it_imports_in_the_folder_that_contains_the_clone(python: Path, tmp_path: Path) -> None:
    (tmp_path / "lightrl").symlink_to(ROOT)
    command = [python, "-c", "import lightrl; print(lightrl.__version__)"]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == lightrl.__version__, done.stderr


def settings_of(kind: type) -> list[str]:
    """The arguments that a constructor takes and passes on, without those that it fixes: as in YAML."""
    names = ArgumentParser().add_class_arguments(kind, "of", fail_untyped=False)
    return list(dict.fromkeys(name.split(".")[1] for name in names))


def test_a_type_checker_knows_every_setting_and_no_other(python: Path, tmp_path: Path) -> None:
    lines = ["from typing import Any", "import lightrl", "def f(value: Any) -> None:"]
    expected = []
    for kind in CLASSES:
        given = [f"{name}=value" for name in settings_of(kind)]
        lines.append(f"    lightrl.{kind.__name__}({', '.join(given)})")
        lines.append(f"    lightrl.{kind.__name__}({', '.join([*given, 'grup_size=3'])})")
        expected.append((len(lines), kind.__name__))
    lines.append("    lightrl.DrGRPO(value, advantage_std='group')  # which it fixes")
    expected.append((len(lines), "DrGRPO"))
    lines.append("    lightrl.GRPO(value, lr='fast')")
    (tmp_path / "users.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "mypy", "--python-executable", python, "users.py"]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=600)
    found = re.findall(r"^users.py:(\d+): error: Unexpected keyword argument .* for \"(\w+)\"", done.stdout, re.M)
    assert [(int(line), name) for line, name in found] == expected, done.stdout
    (error,) = [line for line in done.stdout.splitlines() if "error:" in line and "Unexpected" not in line]
    assert 'Argument "lr" to "GRPO" has incompatible type "str"' in error
