"""Results in the docs are made from records, and stated nowhere without one."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import records

ROOT = Path(__file__).parents[1]
# Sentences with a percentage that are no result of a run.
FACTS = (
    "The best constant answer, 9, is right for 32.6 % of the held-out prompts",
    "At 97 % the policy has learned the frequent answers 4 to 9",
    "The rare answers 0 to 3 make up 3 % of the prompts",
    "Always answering `9` is right for 33 % of them",
    "so a change is small against noise where accuracy is 50 %",
)


def claims(text: str) -> list[str]:
    """Sentences that tell a share of right answers outside of what is written from records."""
    text = re.sub(r"<!-- records: .*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^# (Takes|Reaches): .*$", "", text, flags=re.MULTILINE)
    sentences = re.split(r"(?<=[.:;|])\s+|\n\s*\n", re.sub(r"\n#?\s*(?=\S)", " ", text))
    shares = [one for one in sentences if re.search(r"\d ?%", one)]
    results = [one for one in shares if re.search(r"held-out|greedy|\bright\b|accuracy|of (the )?samples", one)]
    return [one for one in results if "no record" not in one and not any(fact in one for fact in FACTS)]


def test_what_is_said_of_results_is_what_the_records_give() -> None:
    differing = [str(path) for path, text in records.rewritten().items() if path.read_text() != text]
    assert not differing, "run: python -m benchmarks.records"


def test_no_result_is_claimed_without_a_record() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    pages += [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".md", ".yaml", ".py")]
    found = {str(page.relative_to(ROOT)): claims(page.read_text()) for page in pages}
    assert not {page: sentences for page, sentences in found.items() if sentences}


def test_a_record_tells_the_result_of_each_validation_set() -> None:
    curve = {"val/accuracy_fraction": [[0, 0.1], [2, 0.2]], "val/accuracy_fraction/hard": [[0, 0.0], [2, 0.125]]}
    record = {"example": "pretrained/calls_grpo", "seed": 3, "curve": curve}
    assert records.reaches([record], "hard") == "12.5 % of held-out prompts after 2 iterations, seed 3 (0.0 % before)"
    folders = [folder for _, folder in records.writers_of("pretrained/calls_sft")]
    assert folders == ["runs/pretrained/smollm2", "runs/pretrained/calls"]


@pytest.mark.slow
@pytest.mark.extra
def test_a_run_leaves_its_record(tmp_path: Path) -> None:
    arguments = ["--run", "quickstart/grpo", "--seeds", "7", "--quick", "--threads", "1"]
    records.main([*arguments, "--work", str(tmp_path / "work"), "--out", str(tmp_path)])
    record = json.loads((tmp_path / "quickstart-grpo-7.json").read_text())
    assert record["command"] == "lightrl fit --config examples/quickstart/grpo.yaml --seed_everything 7"
    assert re.fullmatch(r"[0-9a-f]{40}", record["commit"])
    assert record["settings"] == records.settings_digest("quickstart/grpo")
    assert records.result_of(record) == "val/accuracy_fraction"
    assert [iteration for iteration, _ in record["curve"]["val/accuracy_fraction"]] == [0, 2]
    assert [iteration for iteration, _ in record["curve"]["rollout/accuracy_fraction"]] == [0, 1]
    assert record["cpu_seconds"] > 0
    assert 0.1 < record["peak_rss_gb"] < 20
