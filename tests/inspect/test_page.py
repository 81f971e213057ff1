"""The page in a headless Chromium: what a person sees, and that nothing a model wrote is ever run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import MISSING, Browser, is_missing
from made_run import HOSTILE, make_run, write_metrics

from lightrl.inspect.answers import Answers
from lightrl.inspect.export import export
from lightrl.inspect.run_folder import find_runs
from lightrl.inspect.server import PageServer

pytestmark = [pytest.mark.extra, pytest.mark.skipif(is_missing(), reason=MISSING)]

READY = "document.documentElement.dataset.ready"
ROWS = "document.querySelectorAll('tbody tr').length"
TOKENS = "document.querySelector('#tokens')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "version_0")
    write_metrics(root / "version_1", 40, seed=1)
    answers = Answers(find_runs([root / "version_0", root / "version_1"]), root / "cache")
    answers.start()
    answers.runs[0].index.update()
    made = PageServer(answers)
    made.start()
    yield made
    made.close()


def look(browser: Browser, url: str) -> None:
    browser.open("about:blank")
    browser.problems()
    browser.open(url)
    browser.wait(READY)


def ink(browser: Browser, selector: str) -> int:
    """How many pixels of a canvas are drawn on."""
    script = """const canvas = document.querySelector(arguments[0]);
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        let num = 0; for (let i = 3; i < data.length; i += 4) num += data[i] > 0; return num"""
    return int(browser.run(script, selector))


def test_curves_of_all_runs_lie_over_each_other_and_can_be_filtered(browser: Browser, server: PageServer) -> None:
    look(browser, server.url)
    assert browser.count(".chart") == 3
    assert ink(browser, ".chart canvas") > 500
    assert browser.text(".chart output").count("·") == 1  # the last values of two runs
    browser.type("#filter", "kl")
    browser.wait("document.querySelectorAll('.chart').length === 1")
    assert browser.text("#runs").startswith("runs:")
    browser.click("#runs button:nth-of-type(2)")
    browser.wait("!document.querySelector('.chart output').innerText.includes('·')")
    assert browser.problems() == []


def test_a_trajectory_is_shown_token_by_token_in_colors(browser: Browser, server: PageServer) -> None:
    look(browser, f"{server.url}#trajectories?run=0")
    browser.wait(ROWS)
    browser.type("#query", "iteration=1 group=1 sample=3")
    browser.wait(f"{ROWS} === 1")
    browser.click("tbody tr")
    browser.wait(TOKENS)
    assert "answer 7" in browser.text("#tokens")
    assert browser.count(".card") == 4
    assert browser.text(".card[aria-current] p") == "answer 7"
    colors = {}
    for mode in ("advantage", "logprob", "difference", "version", "mask", "plain"):
        browser.click(f"[data-mode={mode}]")
        script = "return [...document.querySelectorAll('#tokens span:not(.turn)')].map((one) => one.style.background)"
        colors[mode] = browser.run(script)
        assert len(colors[mode]) == 4 + len("answer 7")
    assert set(colors["plain"]) == {""}
    assert len(set(colors["advantage"][4:])) == 1
    assert len(set(colors["logprob"][4:])) == 8
    assert len(set(colors["difference"][4:])) == 7
    browser.run("document.querySelectorAll('#tokens span')[6].dispatchEvent(new Event('mouseenter'))")
    assert "|Δlogp|" in browser.text(".status")
    browser.click(".card")
    browser.wait("document.querySelector('.card').getAttribute('aria-current')")
    assert "answer 4" in browser.text("#tokens")
    assert browser.problems() == []


HARMED = (
    "return [window.harmed ?? null, document.querySelectorAll('main script, main iframe, main img, main style, main "
)
HARMED += "svg, main object, main input[autofocus], main form, main link, main a, main details').length]"


@pytest.mark.parametrize("is_exported", [False, True], ids=["served", "exported"])
def test_twenty_hostile_completions_are_text_also_on_an_exported_page(
    is_exported: bool, browser: Browser, server: PageServer, tmp_path: Path
) -> None:
    assert len(HOSTILE) == 20
    url = server.url
    if is_exported:
        export(server.answers, tmp_path / "page.html")
        url = (tmp_path / "page.html").as_uri()
        assert (tmp_path / "page.html").read_text().lower().count("</script") == 2  # the data's and the script's own
        look(browser, url)
        assert ink(browser, ".chart canvas") > 500
        look(browser, f"{url}#timeline?run=0")
        browser.wait("document.querySelector('.timeline canvas')")
        assert ink(browser, ".timeline canvas") > 5_000
    look(browser, f"{url}#trajectories?run=0")
    browser.type("#query", "iteration=2 group>=0")
    browser.wait(f"{ROWS} === 20")
    assert HOSTILE[0] in browser.text("tbody")
    assert browser.run(HARMED) == [None, 0]
    for row in range(20):
        browser.run("location.hash = 'trajectories?run=0'")
        browser.wait(f"{ROWS} === 20")
        browser.run("document.querySelectorAll('tbody tr')[arguments[0]].click()", row)
        browser.wait(TOKENS)
        # The driver cannot pass a lone surrogate on.
        shown = browser.run("return document.querySelector('#tokens').textContent.replace(/[\\ud800-\\udfff]/g, '')")
        assert any(text[:40] in shown for text in HOSTILE)
        assert browser.run(HARMED) == [None, 0]
    browser.run("location.hash = 'complaints?run=0'")
    browser.wait("document.querySelector('main').innerText.includes(arguments[0])", HOSTILE[2])
    assert browser.run(HARMED) == [None, 0]
    assert browser.problems() == []
