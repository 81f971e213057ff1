"""The pages for people who come from other libraries: what they show parses, and is what `lightrl convert` gives."""

import re
from pathlib import Path

import pytest
import yaml
from parsed import parsed

from lightrl.commands.convert import convert

DOCS = Path(__file__).parents[2] / "docs"


def shown(page: str, name: str) -> str:
    found = re.search(
        rf"<!-- test: {name} -->\n```yaml\n(.*?)```", (DOCS / f"coming-from-{page}.md").read_text(), re.DOTALL
    )
    assert found, (page, name)
    return found[1]


@pytest.mark.parametrize("page", ["areal", "trl", "verl"])
def test_the_yaml_on_the_page_parses(page, tmp_path, monkeypatch):
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's, as the command sets it
    file = tmp_path / "run.yaml"
    file.write_text(shown(page, "lightrl"))
    assert parsed("fit", "--config", str(file)).model.class_path.endswith("GRPO")


def test_the_page_shows_what_areals_settings_become():
    result = convert(yaml.safe_load(shown("areal", "areal")))
    assert result.settings == yaml.safe_load(shown("areal", "lightrl"))
    assert not result.left
    assert not result.unknown
