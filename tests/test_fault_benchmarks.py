"""The kill matrix gives in every cell what it must; a short soak leaks nothing and logs finite numbers only.

What always runs are tests of trainer, strategies, engines and rewards, which kill one process of each kind.
"""

import json
import sys

import forked
import pytest

from benchmarks.kill_matrix import CELLS, Cell

pytestmark = pytest.mark.extra


def rows(*words: str) -> list[dict]:
    done = forked.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, check=False,
        children_fork=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return [
        row for line in done.stdout.splitlines() if line.startswith("{") and "measurement" in (row := json.loads(line))
    ]


def assert_as_expected(cells: tuple[Cell, ...]) -> None:
    names = ",".join(f"{cell.actor} {cell.phase} {cell.signal}" for cell in cells)
    played = rows("benchmarks.kill_matrix", "--cells", names)
    assert {(row["actor"], row["phase"], row["signal"]) for row in played} == {
        (cell.actor, cell.phase, cell.signal) for cell in cells
    }
    assert [row["problems"] for row in played] == [[]] * len(cells)


@pytest.mark.parametrize("actor", sorted({cell.actor for cell in CELLS}))
def test_killed_anywhere_a_run_loses_no_trajectory_in_silence_and_trains_on_none_twice(actor: str) -> None:
    assert_as_expected(tuple(cell for cell in CELLS if cell.actor == actor))


def test_a_short_soak_with_failing_rewards_and_killed_servers_ends_with_what_it_began() -> None:
    (row,) = rows("benchmarks.soak", "--iterations", "60", "--kill-every", "25", "--staleness", "2")
    assert (row["iterations"], row["killed_servers"], row["not_finite"]) == (60, 2, 0)
    assert row["numbers_logged"] > 1000
    assert abs(row["threads_slope"]) * 60 < 4
    assert abs(row["open_files_slope"]) * 60 < 20  # sockets of the server that is starting again
