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
def site_path():
    sys.path.insert(0, str(SITE))
    yield
    sys.path.remove(str(SITE))


@pytest.fixture
def settings_page(site_path):
    import settings_page

    return settings_page


@pytest.fixture
def drawings(site_path):
    import drawings

    return drawings


def test_the_pages_of_settings_have_each_constructors_defaults(settings_page):
    pages = settings_page.pages()
    staleness = pages["callbacks"].split("## StalenessControl")[1].split("\n## ")[0]
    assert "| `max_staleness` | <code>int</code> | <code>0</code> |" in staleness
    assert "| `lr` | <code>float</code> | " in pages["algorithms"].split("## RLModule")[1].split("\n## ")[0]
    assert not re.search(r" at 0x|<factory>", "".join(pages.values()))


def test_every_drawing_is_the_scripts_and_stands_on_a_page(drawings):
    made = {f"{drawing.name}.svg": drawing.svg() for drawing in (make() for make in drawings.DRAWINGS)}
    assert {path.name: path.read_text() for path in (DOCS / "drawings").iterdir()} == made
    text = "".join(path.read_text() for path in DOCS.glob("*.md"))
    assert [name for name in made if f"](drawings/{name})" not in text] == []


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


def test_the_site_needs_no_other_host():
    config = (DOCS.parent / "mkdocs.yml").read_text()
    assert "font: false" in config
    assert "\n  - offline" in config
    (script,) = re.findall(r"polyfills: \[(.*iframe-worker.*)\]", config)  # the offline plugin's own is on another host
    assert (DOCS / script).is_file()
    assert "mermaid" not in config + "".join(path.read_text() for path in DOCS.rglob("*.md"))


def test_links_between_files_of_the_repository_exist():
    pages = [*DOCS.glob("*.md"), DOCS.parent / "README.md"]
    links = [(page, link) for page in pages for link in re.findall(r"\]\((?!\w+:|#)([^)#]+)", page.read_text())]
    assert len(links) > 100
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []
