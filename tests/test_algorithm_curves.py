"""The benchmark of learning curves, in its tiny form: it trains, goes on where it stopped, and draws."""

import csv
import shutil
from pathlib import Path

import lightrl
from benchmarks import algorithms


def test_every_algorithm_of_the_benchmark_can_be_made(tmp_path: Path) -> None:
    from tiny import tiny_spec

    for kind, settings in algorithms.ALGORITHMS.values():
        assert getattr(lightrl, kind)(tiny_spec(), **{"reward": len, "group_size": 16, **settings})


def test_the_benchmark_writes_curves_and_does_not_repeat_a_run(tmp_path, capsys, monkeypatch):
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
