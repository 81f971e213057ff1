"""Clocks, files, areas and peaks of a trace, each by itself; a traced run is in test_trace.py."""

import contextlib
import json
import mmap
from pathlib import Path

import pytest

from lightrl.callbacks.trace.areas import area_times, common, summary_of, summary_text, union, without
from lightrl.callbacks.trace.files import MemoryPeaks, TraceFile, clock_offset_ns, join_traces
from lightrl.trace import Event
from lightrl.trace.spans import host_bytes

S = 10**9  # a second, in ns


def at(name: str, category: str, start: float, end: float, track: str = "trainer") -> Event:
    return Event(name, category, track, int(start * S), int(end * S), {})


def test_the_offset_of_a_clock_is_bounded_by_barriers() -> None:
    """True offset 1,000; the last to come releases everybody, who then leave at times of their own."""
    first = [(0, 60), (100, 190)]
    own = [(1_000 + 50, 1_000 + 55), (1_000 + 120, 1_000 + 130)]
    offset, error = clock_offset_ns(own, first)
    assert abs(offset - 1_000) <= error <= 45
    assert clock_offset_ns(first, first)[0] == pytest.approx(0, abs=45)


def test_events_that_overlap_get_rows_of_their_own(tmp_path: Path) -> None:
    file = TraceFile(tmp_path, 3, "rank 3", offset_ns=S, max_bytes=2**20)
    events = [at("a", "generate", 2, 4, "generations"), at("b", "generate", 3, 5, "generations")]
    events += [at("c", "generate", 4.5, 6, "generations"), at("update", "phase", 6, 7)]
    file.add(12, 2 * S, events, {"host in update": 5})
    lines = json.loads((tmp_path / "rank-00003.json").read_text().rstrip().removesuffix(",") + "]")
    blocks = {line["name"]: line for line in lines if line["ph"] == "X"}
    assert blocks["a"]["tid"] == blocks["c"]["tid"] != blocks["b"]["tid"]
    update = blocks["update"]
    assert (update["ts"], update["dur"], update["pid"]) == (5e6, 1e6, 3)
    names = {line["tid"]: line["args"]["name"] for line in lines if line["name"] == "thread_name"}
    assert names[blocks["b"]["tid"]] == "generations 2"
    assert [line["args"] for line in lines if line["name"] == "iteration 12"] == [{"iteration": 12}]
    assert [line["args"] for line in lines if line["ph"] == "C"] == [{"host in update": 5}]


def test_the_last_iterations_of_a_long_run_are_kept_within_the_bound(tmp_path: Path) -> None:
    file = TraceFile(tmp_path, 0, "rank 0", max_bytes=4_000)
    for iteration in range(100):
        file.add(iteration, iteration * S, [at("update", "phase", iteration, iteration + 1)], {})
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 5_000
    path = join_traces(tmp_path)
    kept = [line["args"]["iteration"] for line in json.loads(path.read_text()) if line["name"].startswith("iteration")]
    assert kept == list(range(kept[0], 100))
    assert len(kept) >= 3


def test_a_line_that_a_killed_process_left_is_not_joined(tmp_path: Path) -> None:
    TraceFile(tmp_path, 0, "rank 0", max_bytes=2**20)
    TraceFile(tmp_path, 1, "rank 1", max_bytes=2**20)
    with (tmp_path / "rank-00000.json").open("a") as file:
        file.write('{"name":"upda')
    path = join_traces(tmp_path)
    assert {line["pid"] for line in json.loads(path.read_text())} == {0, 1}
    assert join_traces(tmp_path / "nothing") is None


def test_intervals() -> None:
    assert union([(5, 7), (1, 3), (2, 4)]) == [(1, 4), (5, 7)]
    assert common([(1, 4), (5, 7)], [(3, 6)]) == [(3, 4), (5, 6)]
    assert without([(1, 4), (5, 7)], [(3, 6)]) == [(1, 3), (6, 7)]


# By hand: the loader takes 0 to 1. The rollout lasts from 1 to 7: from 1 to 2 prompts are made, from 2 to 5 generations
# run, of which only one from 4 on, from 5 to 6 only a reward is missing, from 6 to 7 nothing is known to run.
ITERATION = [
    at("next batch from the loader", "loader", 0, 1),
    at("rollout", "phase", 1, 7),
    at("make prompts", "data", 1, 2.5, "prompts"),
    *[at("generate", "generate", 2, 4, "generations") for _ in range(3)],
    at("generate", "generate", 2, 5, "generations"),
    at("request", "server", 2, 5, "http://a"),
    at("request", "server", 2, 3, "http://b"),
    at("reward", "reward", 4, 6, "rewards"),
    at("score", "phase", 7, 7.5),
    at("rewards", "phase", 7.5, 8),
    at("update", "phase", 8, 9),
    at("all_reduce", "collective", 8.5, 8.75),
    at("sync", "phase", 9, 9.5),
]


def test_the_time_of_an_iteration_is_divided_among_areas() -> None:
    times = area_times([*ITERATION, at("update", "phase", 11, 12)], 0, 10 * S)
    assert times.total == 10
    assert times.areas == {"rollout": 4, "reward": 1.5, "score": 0.5, "update": 1, "sync": 0.5, "data": 2}
    assert (times.tail, times.collectives, times.servers) == (1, 0.25, {"http://a": 3, "http://b": 1})


def test_the_summary_says_what_to_look_at_first_and_what_one_would_gain() -> None:
    assert summary_of([]) is None
    first = area_times([at("update", "phase", 0, 99)], 0, 100 * S)  # it warms up
    times = [first, *[area_times(ITERATION, 0, 10 * S)] * 2]
    found = summary_of(times)
    assert found["iterations"] == 2
    assert found["look_first_at"] == "rollout"
    assert found["gain"]["rollout"] == pytest.approx(10 / 6)
    assert found["areas_s"]["other"] == pytest.approx(0.5)
    assert found["overlap_gain"] == pytest.approx(10 / 6)  # what is not rollout, 6 s, is then the longer half
    text = summary_text(found)
    assert "Look first at rollout: without it an iteration would be 1.67x as fast." in text
    assert "For 25% of the rollout, fewer than half of the generations ran" in text
    overlapped = summary_of(times, overlaps=True)
    assert "StalenessControl" not in summary_text(overlapped)


def resets_peaks() -> bool:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def test_the_peak_of_a_block_has_what_it_held_for_a_while() -> None:
    memory = MemoryPeaks()
    before = host_bytes()
    memory.begin()
    hold_64_mib()
    assert memory.end("large")["host"] - before > 48 * 2**20


@pytest.mark.skipif(not resets_peaks(), reason="this process may not reset its peak of memory")
def test_the_peak_of_a_block_has_nothing_of_the_block_before() -> None:
    memory = MemoryPeaks()
    for name, block in (("large", hold_64_mib), ("small", lambda: None)):
        memory.begin()
        block()
        memory.end(name)
    assert memory.peaks["large"]["host"] - memory.peaks["small"]["host"] > 48 * 2**20


def hold_64_mib() -> None:
    with mmap.mmap(-1, 64 * 2**20) as block:  # pages that the process does not have yet
        for start in range(0, len(block), 2**12):
            block[start] = 1
