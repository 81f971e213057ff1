"""lightrl.testing: its page's tests pass as written, and nothing else in the package imports it."""

import re
from pathlib import Path
from typing import Any

import pytest

import lightrl.testing

PAGE = Path(__file__).parents[1] / "docs" / "test-your-code.md"
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("name", re.findall(r"^def (test_\w+)", CODE, re.MULTILINE))
def test_the_tests_of_the_page_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(CODE, names)
    names[name]()


def test_public_names_exist() -> None:
    assert all(getattr(lightrl.testing, name) is not None for name in lightrl.testing.__all__)


def test_nothing_in_the_package_imports_it() -> None:
    package = Path(lightrl.__file__).parent
    others = [file for file in package.rglob("*.py") if file.parent.name != "testing"]
    assert not [file for file in others if "lightrl.testing" in file.read_text()]


def test_groups_have_the_rewards_and_a_prompt_each() -> None:
    groups = lightrl.testing.make_groups([[1.0, 0.0], [0.5, 0.5]])
    assert [[item.reward for item in group.trajectories] for group in groups] == [[1.0, 0.0], [0.5, 0.5]]
    assert [group.prompt.id for group in groups] == ["prompt-0", "prompt-1"]
