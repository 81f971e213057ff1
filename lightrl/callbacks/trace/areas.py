"""Computes an iteration's time by area, and the possible speed-up, from the events in rank 0's process.

An iteration lasts until the next one starts. An area is what the trainer's thread did or waited for:

    rollout   waited while at least one generation ran       score     ran model calls, computed advantages
    reward    waited only for rewards                        update    trained on minibatches
    data      waited for the loader's batch, or only         sync      sent weights to the engine
              for prompts                                    other     loggers, callbacks, checkpoints, validation
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lightrl.trace.spans import Event

AREAS = ("rollout", "reward", "score", "update", "sync", "data")
_PHASES = {"rewards": "reward", "score": "score", "update": "update", "sync": "sync"}

SummaryJson = dict[str, Any]  # see `summary_of`
Intervals = list[tuple[int, int]]  # disjoint, in order

_ADVICE = {
    "reward": "Increase model.reward_workers or make the reward faster; an LLM judge may need replicas.",
    "score": "Increase model.microbatch_tokens as far as memory allows, or remove models that you do not need.",
    "update": "Increase model.microbatch_tokens as far as memory allows, use more devices, or set update_epochs=1.",
    "sync": "Sync less often: make iterations larger, or set WeightSync.every_n_iterations.",
    "data": "Preparing prompts is too slow: prepare them once, or read them from local files.",
}


@dataclass
class AreaTimes:
    """The times of one iteration, in seconds."""

    total: float
    areas: dict[str, float]  # area → seconds
    tail: float = 0.0  # time of the rollout during which fewer than half of the peak number of generations ran
    collectives: float = 0.0  # time during which the trainer's thread waited for other ranks
    servers: dict[str, float] = field(default_factory=dict)  # address → time with at least one running request


def area_times(events: Iterable[Event], start_ns: int, end_ns: int) -> AreaTimes:
    """Computes the times of the iteration from `start_ns` to `end_ns`."""
    by_category: dict[str, list[Event]] = {}
    for event in events:
        if event.end_ns > start_ns and event.start_ns < end_ns:
            by_category.setdefault(event.category, []).append(event)
    areas = dict.fromkeys(AREAS, 0)
    waiting: Intervals = []
    for phase in by_category.get("phase", ()):
        if phase.name == "rollout":
            waiting.append((phase.start_ns, phase.end_ns))
        else:
            areas[_PHASES[phase.name]] += phase.end_ns - phase.start_ns
    generating, rewarding, preparing_data = (
        union((event.start_ns, event.end_ns) for event in by_category.get(category, ()))
        for category in ("generate", "reward", "data")
    )
    areas["reward"] += length(only_rewards := without(common(waiting, rewarding), generating))
    areas["data"] += length(only_data := without(common(waiting, preparing_data), generating + rewarding))
    areas["data"] += sum(event.end_ns - event.start_ns for event in by_category.get("loader", ()))
    areas["rollout"] += length(waiting) - length(only_rewards) - length(only_data)
    servers: dict[str, list[tuple[int, int]]] = {}
    for event in by_category.get("server", ()):
        servers.setdefault(event.track, []).append((event.start_ns, event.end_ns))
    iteration = [(start_ns, end_ns)]
    return AreaTimes(
        total=(end_ns - start_ns) / 1e9,
        areas={name: value / 1e9 for name, value in areas.items()},
        tail=_tail_ns(by_category.get("generate", []), waiting) / 1e9,
        collectives=sum(event.end_ns - event.start_ns for event in by_category.get("collective", ())) / 1e9,
        servers={url: length(common(union(busy), iteration)) / 1e9 for url, busy in servers.items()},
    )


def union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Returns the union of intervals, disjoint and in order."""
    result: Intervals = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def common(left: Intervals, right: Intervals) -> Intervals:
    """Intersects two lists of intervals."""
    result: Intervals = []
    first = second = 0
    while first < len(left) and second < len(right):
        start, end = max(left[first][0], right[second][0]), min(left[first][1], right[second][1])
        if start < end:
            result.append((start, end))
        if left[first][1] < right[second][1]:
            first += 1
        else:
            second += 1
    return result


def without(left: Intervals, right: Iterable[tuple[int, int]]) -> Intervals:
    """Subtracts the intervals `right` from the intervals `left`."""
    edges = [(-(2**63), -(2**63)), *union(right), (2**63, 2**63)]
    gaps = [(before[1], after[0]) for before, after in pairwise(edges)]
    return common(left, gaps)


def length(intervals: Intervals) -> int:
    return sum(end - start for start, end in intervals)


def _tail_ns(generations: Sequence[Event], waiting: Intervals) -> int:
    """Returns the waiting time during which generations ran, but fewer than half of the peak number."""
    edges = sorted([(event.start_ns, 1) for event in generations] + [(event.end_ns, -1) for event in generations])
    peak = num = 0
    for _, change in edges:
        num += change
        peak = max(peak, num)
    num, tail = 0, []
    for (time_ns, change), (next_ns, _) in pairwise(edges):
        num += change
        if 0 < 2 * num < peak:
            tail.append((time_ns, next_ns))
    return length(common(waiting, union(tail)))


def summary_of(all_times: Sequence[AreaTimes], *, overlaps: bool = False) -> SummaryJson | None:
    """Returns the mean times of an iteration, in seconds, and the area to look at first; None without iterations.

    The first iteration is a warm-up, and is left out if there are others. `gain` is an upper bound: an iteration's
    speed-up if the area took no time. `overlaps` means that rollouts already run during the update.
    """
    times = all_times[1:] or all_times
    if not times:
        return None
    total = statistics.fmean(iteration.total for iteration in times)
    areas = {name: statistics.fmean(iteration.areas[name] for iteration in times) for name in AREAS}
    longest = max(areas, key=lambda name: areas[name])
    servers = sorted({url for iteration in times for url in iteration.servers})
    return {
        "iterations": len(times),
        "total_s": total,
        "areas_s": {**areas, "other": max(0.0, total - sum(areas.values()))},
        "gain": {name: total / max(total - seconds, 1e-9) for name, seconds in areas.items()},
        "look_first_at": longest,
        "overlap_gain": None if overlaps else total / max(areas["rollout"], total - areas["rollout"], 1e-9),
        "rollout_tail_s": statistics.fmean(iteration.tail for iteration in times),
        "collectives_s": statistics.fmean(iteration.collectives for iteration in times),
        "servers_busy_s": {url: statistics.fmean(item.servers.get(url, 0.0) for item in times) for url in servers},
    }


def summary_text(summary: SummaryJson) -> str:
    """Formats the summary that a run prints at the end."""
    total, areas, first = summary["total_s"], summary["areas_s"], summary["look_first_at"]
    lines = [f"Where the time went: {_seconds(total)} per iteration ({summary['iterations']} traced)"]
    for name, seconds in areas.items():
        gain = f"  at most {summary['gain'][name]:.2f}x" if name in summary["gain"] else ""
        lines.append(f"  {name:<8} {_seconds(seconds):>8} {seconds / total:>5.0%}{gain}")
    lines.append(f"Look first at {first}: without it an iteration would be {summary['gain'][first]:.2f}x as fast.")
    lines.append(f"  {advice_of(summary)}")
    if summary["collectives_s"] > 0.05 * total:
        lines.append(
            f"  Collectives and waiting for other ranks took {summary['collectives_s'] / total:.0%} of rank 0's time."
        )
    return "\n".join(lines)


def advice_of(summary: SummaryJson) -> str:
    """Returns the settings that shorten the area to look at first."""
    rollout = summary["areas_s"]["rollout"]
    if summary["look_first_at"] != "rollout":
        return _ADVICE[summary["look_first_at"]]
    advice = []
    if summary["overlap_gain"] is not None:
        gain = summary["overlap_gain"]
        advice.append(f"Rollouts during the update (StalenessControl(max_staleness=1)) give at most {gain:.2f}x.")
    share = summary["rollout_tail_s"] / rollout if rollout else 0.0
    if share > 0.2:
        advice.append(f"For {share:.0%} of the rollout, fewer than half of the generations ran: long ones delay it.")
    return " ".join(advice) or "Add servers (trainer.engine), or shorten completions (model.sampling.max_new_tokens)."


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
