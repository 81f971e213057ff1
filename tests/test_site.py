"""The documentation site, without its packages; `mkdocs build --strict` in .ci/run checks the rest."""

import re
import sys
from pathlib import Path

import pytest

import lightrl
from lightrl import GRPO, Sampling, StalenessControl

DOCS = Path(__file__).parents[1] / "docs"
SITE = DOCS.parent / "scripts/docs_site"


@pytest.fixture(scope="module")
def settings_page():
    sys.path.insert(0, str(SITE))
    try:
        import settings_page

        yield settings_page
    finally:
        sys.path.remove(str(SITE))


def test_the_page_of_settings_has_each_constructors_defaults(settings_page):
    page = settings_page.page()
    staleness = page.split("### StalenessControl")[1].split("###")[0]
    assert "| `max_staleness` | <code>int</code> | <code>0</code> |" in staleness
    assert "| `lr` | <code>float</code> | " in page.split("### RLModule")[1].split("\n## ")[0]
    assert not re.search(r" at 0x|<factory>", page)


@pytest.mark.parametrize("kind", [GRPO, Sampling, StalenessControl])
def test_a_setting_has_its_text_from_the_docstring_or_from_behind_the_field(settings_page, kind):
    settings = settings_page.settings_of(kind)
    assert settings
    assert not [setting.name for setting in settings if not setting.text]


def test_every_public_name_is_in_the_reference():
    pages = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"^::: [\w.]+\.(\w+)$", pages, re.MULTILINE))
    assert set(lightrl.__all__) - {"__version__"} <= documented


def test_every_page_is_in_the_sites_navigation():
    config = (DOCS.parent / "mkdocs.yml").read_text()
    assert [path for path in DOCS.rglob("*.md") if str(path.relative_to(DOCS)) not in config] == []
