"""The documentation site, without its packages; `mkdocs build --strict` in .ci/run checks the rest."""

import dataclasses
import re
from pathlib import Path

import drawings
import metrics_page
import pytest
import settings_page

import lightrl
from lightrl import GRPO, Experience, Group, Prompt, Sampling, StalenessControl, Trajectory, rewards
from lightrl.testing import make_trajectory
from lightrl.trainer import LightningSettings

DOCS = Path(__file__).parents[1] / "docs"


def test_the_pages_of_settings_have_each_constructors_defaults():
    pages = settings_page.pages()
    staleness = pages["callbacks"].split("## StalenessControl")[1].split("\n## ")[0]
    assert "| `max_staleness` | <code>int</code> | <code>0</code> |" in staleness
    assert "| `lr` | <code>float</code> | " in pages["algorithms"].split("## RLModule")[1].split("\n## ")[0]
    assert not re.search(r" at 0x|<factory>", "".join(pages.values()))


def test_every_setting_of_a_class_on_a_page_has_its_row_on_one():
    names = {name for *_, names in settings_page.PAGES.values() for name in names}
    homes = {item.home.__name__ for name in names for item in settings_page.settings_of(settings_page.class_of(name))}
    assert homes - names == set()


def test_the_page_of_metrics_is_the_scripts():
    assert metrics_page.PAGE.read_text() == metrics_page.page()
    names = {"rollout/reward", "val/turns", "lr-AdamW", "dpo/new", "rollout/own"}
    assert metrics_page.undescribed(names) == {"dpo/new", "rollout/own"}


def test_the_page_of_metrics_names_settings_that_exist():
    classes = {name: settings_page.class_of(name) for *_, names in settings_page.PAGES.values() for name in names}
    known = {setting.name for kind in classes.values() for setting in settings_page.settings_of(kind)} | {*classes}
    known |= {*LightningSettings.__annotations__, *rewards.__all__, "LearningRateMonitor", "metrics", "accuracy"}
    texts = "".join(text for cells in metrics_page.metrics().values() for text in cells)
    names = set(re.findall(r"`(?:[a-z_]+\.|\w+\.)?(\w+)`", re.sub(r"\w+\.(jsonl|csv|log)`", "", texts)))
    assert len(names) > 30
    assert names - known == set()


def test_the_page_of_variables_has_all_that_a_user_may_set():
    set_by_lightrl = {"LIGHTRL_RUN_START", "LIGHTRL_RESUME", "LIGHTRL_HOSTS", "LIGHTRL_MODEL", "LIGHTRL_RESULTS"}
    sources = "".join(path.read_text() for path in (DOCS.parent / "lightrl").rglob("*.py"))
    page = (DOCS / "sweeps-and-python.md").read_text()
    names = set(re.findall(r"\bLIGHTRL_[A-Z]\w+", sources)) - set_by_lightrl
    assert len(names) > 3
    assert [name for name in names if f"`{name}`" not in page and f"`{name}=" not in page] == []


def test_every_drawing_is_the_scripts_and_stands_on_a_page():
    made = {f"{drawing.name}.svg": drawing.svg() for drawing in (make() for make in drawings.DRAWINGS)}
    assert {path.name: path.read_text() for path in (DOCS / "drawings").iterdir()} == made
    text = "".join(path.read_text() for path in DOCS.glob("*.md"))
    assert [name for name in made if f"](drawings/{name})" not in text] == []


@pytest.mark.parametrize("kind", [GRPO, Sampling, StalenessControl])
def test_a_setting_has_its_text_from_the_docstring_or_from_behind_the_field(kind):
    settings = settings_page.settings_of(kind)
    assert settings
    assert not [setting.name for setting in settings if not setting.text]


def test_the_reference_has_every_field_of_an_experience_with_its_dtype_and_shape():
    page = settings_page.with_fields((DOCS / "reference/trajectories.md").read_text())
    for kind in (Prompt, Trajectory, Group, Experience):
        assert not [item.name for item in dataclasses.fields(kind) if f"\n| `{item.name}` | " not in page]
    assert not re.findall(r"^\| `\w+` \|  \|$", page, re.MULTILINE)
    assert "| `advantages` | float32 [B, T] |" in page


def test_the_row_of_two_turns_in_the_reference_is_an_experiences():
    (text,) = re.findall(r"```text\n.*\n((?:.+\n)+)```", (DOCS / "reference/trajectories.md").read_text())
    words = {name: values for name, *values in (line.split() for line in text.splitlines())}
    words["loss_mask"] = [value == "x" for value in words["loss_mask"]]
    shown = {name: [*map(int, values)] for name, values in words.items()}
    fields = {name: values[: shown["token_ids"].index(0)] for name, values in shown.items()}
    row = dataclasses.replace(make_trajectory(reward=1.0), **fields)
    longest = make_trajectory(reward=1.0, completion_ids=[5] * (len(shown["token_ids"]) - 3))
    experience = Experience.from_trajectories([row, longest])
    assert {name: experience[name][0].tolist() for name in shown} == shown


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
