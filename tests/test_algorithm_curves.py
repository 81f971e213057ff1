"""The benchmark of learning curves, in its tiny form: it trains, goes on where it stopped, and draws."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

import lightrl
from benchmarks import algorithms


def test_every_algorithm_of_the_benchmark_can_be_made(tmp_path: Path) -> None:
    from tiny import tiny_spec

    for kind, settings in algorithms.ALGORITHMS.values():
        assert getattr(lightrl, kind)(tiny_spec(), **{"reward": len, "group_size": 16, **settings})


def test_mean_and_spread_are_over_seeds() -> None:
    rows = [
        {"algorithm": name, "seed": str(seed), "iteration": "1", "reward": str(reward)}
        for name, seed, reward in (("GRPO", 0, 0.2), ("GRPO", 1, 0.4), ("DAPO", 0, 0.9))
    ]
    assert algorithms.mean_and_spread(rows, "GRPO") == ([1], [pytest.approx(0.3)], [pytest.approx(0.02**0.5)])
    assert algorithms.mean_and_spread(rows, "DAPO") == ([1], [0.9], [0.0])


def test_two_algorithms_are_compared_seed_by_seed() -> None:
    runs = (("a", 0, (0.5, 0.9)), ("b", 0, (0.5, 0.7)), ("a", 1, (0.1, 0.2)), ("b", 1, (0.3, 0.2)), ("a", 2, (0.0,)))
    rows = [
        {"algorithm": name, "seed": str(seed), "reward": str(reward)}
        for name, seed, rewards in runs
        for reward in rewards
    ]
    assert algorithms.against(rows, "a", "b") == {
        "pairs": 2,
        "last_difference": pytest.approx(0.1),  # of 0.2 and 0
        "last_error": pytest.approx(0.1),
        "whole_difference": pytest.approx(0.0),  # of 0.1 and -0.1
        "whole_error": pytest.approx(0.1),
    }
    assert algorithms.against(rows, "a", "a") == {}


def test_the_benchmark_writes_curves_and_does_not_repeat_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(algorithms.__file__).parents[1])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    command = ["--quick", "--out", str(tmp_path), "--algorithms"]
    algorithms.main([*command, "decoupled"])
    assert '"measurement": "decoupled"' in capsys.readouterr().out
    shutil.rmtree(tmp_path / "runs")  # as in a fresh checkout, which has the curves alone
    algorithms.main([*command, "decoupled"])
    assert '"measurement"' not in capsys.readouterr().out
    algorithms.main([*command, "GRPO"])  # keeps what is there
    with (tmp_path / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["algorithm"], row["seed"], row["iteration"]) for row in rows] == [
        ("GRPO", "0", "1"),
        ("GRPO", "0", "2"),
        ("decoupled", "0", "1"),
        ("decoupled", "0", "2"),
    ]
    assert (tmp_path / "curves.png").stat().st_size > 5000


def test_distillation_learns_from_a_teacher_that_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(algorithms.__file__).parents[1])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    command = ["--quick", "--out", str(tmp_path), "--algorithms"]
    algorithms.main([*command, "distillation by 4 likeliest tokens"])
    start, teacher = ((tmp_path / name / "model.safetensors") for name in ("start", "teacher"))
    made = teacher.stat().st_mtime_ns
    assert teacher.read_bytes() != start.read_bytes()
    algorithms.main([*command, "distillation"])
    assert teacher.stat().st_mtime_ns == made
    with (tmp_path / "curves.csv").open() as file:
        assert [row["algorithm"] for row in csv.DictReader(file)] == [
            *["distillation"] * 2,
            *["distillation by 4 likeliest tokens"] * 2,
        ]
