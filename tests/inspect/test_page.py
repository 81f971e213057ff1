"""The page in a headless Chromium: what a person sees, and that nothing a model wrote is ever run."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import MISSING, Browser, is_missing
from made_run import HOSTILE, as_tree, head_and_trajectory, make_run, page_of, write_iteration, write_metrics

from lightrl.commands.inspect import export
from lightrl.commands.inspect.server import PageServer

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
    with page_of([root / "version_0", root / "version_1"], root / "cache") as server:
        server.answers.runs[0].index.update()
        yield server


@pytest.fixture(scope="module")
def six_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """Six runs that differ in lr; the first has 120 trajectories, and a warning eight times."""
    root = tmp_path_factory.mktemp("six")
    for number in range(6):
        write_metrics(root / str(number), 40, seed=number)
        (root / str(number) / "config.yaml").write_text(f"model: {{lr: {number}, group_size: 8}}")
    records = [head_and_trajectory(0, index // 8, index % 8, f"answer {index}") for index in range(120)]
    write_iteration(root / "0", 0, records)
    (root / "0" / "problems").mkdir()
    lines = [
        {"at": 1.7e9 + rank, "iteration": 3 * rank, "rank": rank, "source": "trainer", "kind": "warning"}
        | {"message": f"{rank + 1} of 9 groups have equal rewards."}
        for rank in range(8)
    ]
    (root / "0" / "problems" / "rank-00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with page_of([root / str(number) for number in range(6)], root / "cache") as server:
        yield server


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
    assert "\nHealthy: " in browser.run("return document.querySelector('.chart b').title")
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


def test_a_rollout_of_several_conversations_shows_its_tree(browser: Browser, tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", 3)
    write_iteration(tmp_path / "run", 0, [as_tree(head_and_trajectory(0, 0, 0, "abcdef"))])
    with page_of([tmp_path / "run"], tmp_path / "cache") as server:
        look(browser, f"{server.url}#trajectories?run=0")
        browser.wait(ROWS)
        browser.click("tbody tr")
        browser.wait(TOKENS)
        assert browser.count(".rows li") == 3
        shared = browser.run("return [...document.querySelectorAll('.rows .given')].map((one) => one.innerText)")
        assert shared == ["", "<prompt>" * 4, ""]
        assert [
            text in browser.text(f".rows li:nth-child({place})") for place, text in ((1, "abcd"), (2, "e"), (3, "f"))
        ]
        indents = browser.run("return [...document.querySelectorAll('.rows li')].map((one) => one.style.marginLeft)")
        assert indents == ["0px", "24px", "0px"]
        assert "after token 3" in browser.text("#tokens")
        assert "a new conversation" in browser.text("#tokens")
        browser.click(".rows li:nth-child(2)")
        assert browser.problems() == []


def test_a_curve_has_a_log_scale_and_is_enlarged_by_a_click(browser: Browser, six_runs: PageServer) -> None:
    look(browser, six_runs.url)
    read_chart = "return document.querySelector('.chart canvas').toDataURL()"
    linear = browser.run(read_chart)
    browser.click("#log")
    assert browser.run(read_chart) != linear
    assert browser.count("canvas[aria-label$='log scale']") == 3
    browser.click(".chart canvas")
    assert browser.run("return document.querySelector('.large canvas').clientHeight") > 300
    browser.press("Escape")
    browser.wait("!document.querySelector('.large')")
    assert browser.problems() == []


def test_more_than_four_runs_have_a_legend_and_are_hidden_at_once(browser: Browser, six_runs: PageServer) -> None:
    look(browser, six_runs.url)
    assert browser.text(".chart output") == "6 runs"
    browser.run("document.querySelector('.chart canvas').dispatchEvent(new MouseEvent('mousemove', {clientX: 200}))")
    assert browser.count(".legend span") == 6
    browser.click("#runs button")
    browser.wait("document.querySelector('main').innerText.startsWith('No metrics')")
    browser.click("#runs button:nth-of-type(3)")
    browser.wait("document.querySelector('.chart')")
    assert "·" not in browser.text(".chart output")


def test_arrow_keys_lead_through_the_table_also_to_its_next_page(browser: Browser, six_runs: PageServer) -> None:
    look(browser, f"{six_runs.url}#trajectories?run=0")
    browser.wait(f"{ROWS} === 100")
    assert "How much is 6 x 0?" in browser.text("tbody tr")
    browser.click("tbody tr:last-child")
    place = "document.querySelector('#place')?.innerText === arguments[0]"
    browser.wait(place, "100 of 120 in the table")
    browser.press("ArrowRight")
    browser.wait(place, "101 of 120 in the table")
    assert "answer 100" in browser.text("#tokens")
    browser.press("ArrowLeft")
    browser.wait(place, "100 of 120 in the table")
    browser.press("Escape")
    browser.wait(f"{ROWS} === 100")
    browser.type("#query", "rewrd<1")
    browser.wait("document.querySelector('.note')?.innerText.endsWith('Did you mean reward?')")
    browser.press("ArrowLeft")  # moves the cursor
    assert browser.run("return document.activeElement.selectionStart") == len("rewrd<1") - 1
    assert browser.problems() == []


def test_problems_that_differ_in_numbers_only_are_one_row(browser: Browser, six_runs: PageServer) -> None:
    look(browser, f"{six_runs.url}#problems?run=0")
    browser.wait(f"{ROWS} === 1")
    assert browser.text("tbody tr").split("\t")[1:4] == ["▸ 8×", "0 to 21", "0, 1, 2, 3, 4, 5, 6, 7"]
    browser.click("tbody tr")
    browser.wait(f"{ROWS} === 9")


def test_settings_that_differ_between_runs_are_shown_first(browser: Browser, six_runs: PageServer) -> None:
    look(browser, f"{six_runs.url}#settings")
    browser.wait(f"{ROWS} === 1")
    assert browser.text("tbody tr").split("\t") == ["model.lr", *"012345"]
    browser.click("#differences")
    assert browser.text("tbody tr:last-child").split("\t") == ["model.group_size", *"888888"]


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
    browser.run("location.hash = 'problems?run=0'")
    browser.wait("document.querySelector('main').innerText.includes(arguments[0])", HOSTILE[2])
    assert browser.run(HARMED) == [None, 0]
    assert browser.problems() == []
