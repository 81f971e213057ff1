"""Judged completions as a table or in full, and what looks wrong in them."""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Sequence

from lightrl.callbacks.trajectory_log import num_columns, pad, printable_on_stdout, shorten
from lightrl.checks.printable import escape_unprintable
from lightrl.rewards import ReplayRow

_WIDTH_WITHOUT_TERMINAL = 120
_MIN_EQUAL = 2  # from so many completions on, equal rewards are worth a remark


def show_rewards(rows: list[ReplayRow], options: argparse.Namespace) -> int:
    width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 0)).columns
    by_policy = getattr(options, "completions", None) == "policy"
    shown = format_blocks(rows) if options.full else format_rows(rows, width)
    sys.stdout.write(printable_on_stdout(f"{shown}\n\n{summary(rows, options.repeats, by_policy=by_policy)}\n"))
    return 1 if any(row.reason is not None for row in rows) else 0


def format_rows(rows: Sequence[ReplayRow], width: int) -> str:
    """A line for each completion, at most `width` columns wide; if its reward failed, a line with the reason below.

    A prompt that is too long loses its start, a completion its middle, where answers are rare.
    """
    numbers = [
        (
            "failed" if row.reward is None else f"{row.reward:.3g}",
            ms_text(row.latency_s),
            "" if row.is_deterministic else "no",
        )
        for row in rows
    ]
    header = ("prompt", "completion", "extracted")
    texts = [tuple(map(escape_unprintable, (row.prompt, row.completion, row.extracted or ""))) for row in rows]
    room = max(width - len("  reward   latency  same"), 30) - 4
    widths = _fitted([max(num_columns(cells[column]) for cells in [header, *texts]) for column in range(3)], room)
    lines = [_line(header, widths, ("reward", "latency", "same"))]
    for row, cells, values in zip(rows, texts, numbers, strict=True):
        lines.append(_line(cells, widths, values))
        if row.message is not None:
            lines.append(
                f"    {row.reason}: {shorten(escape_unprintable(row.message), max(width - 14, 40), keep_start=0.7)}"
            )
    return "\n".join(line.rstrip() for line in lines)


def format_blocks(rows: Sequence[ReplayRow]) -> str:
    """Each completion in full."""
    blocks = []
    for number, row in enumerate(rows, start=1):
        values = "  ".join(f"{name}={value:.3g}" for name, value in row.metrics.items())
        reward = f"failed ({row.reason}): {row.message}" if row.reward is None else f"{row.reward:.4g}  {values}"
        same = "" if row.is_deterministic else "\nrepeatable   no"
        blocks.append(
            f"--- {number}\nprompt       {row.prompt}\ncompletion   {row.completion}\nextracted    {row.extracted}\n"
            f"reward       {reward}\nlatency      {ms_text(row.latency_s)}{same}"
        )
    return "\n\n".join(blocks)


def summary(rows: Sequence[ReplayRow], repeats: int, *, by_policy: bool = False) -> str:
    """Totals and means of the rows, and what looks wrong in them."""
    judged = [row for row in rows if row.reward is not None]
    failed = Counter(row.reason for row in rows if row.reason is not None)
    reasons = f" ({', '.join(f'{reason} {num}' for reason, num in sorted(failed.items()))})" if failed else ""
    lines = [f"{len(rows)} completions: {len(judged)} judged, {len(rows) - len(judged)} failed{reasons}"]
    if rows:
        latencies = [row.latency_s for row in rows]
        lines.append(f"latency: median {ms_text(statistics.median(latencies))}, longest {ms_text(max(latencies))}")
    if judged:
        rewards = [row.reward for row in judged if row.reward is not None]
        lines.append(f"reward: mean {statistics.fmean(rewards):.3g}, from {min(rewards):.3g} to {max(rewards):.3g}")
        names = sorted({name for row in judged for name in row.metrics})
        means = (f"{name} {statistics.fmean(row.metrics.get(name, 0.0) for row in judged):.3g}" for name in names)
        if names:
            lines.append(f"means: {', '.join(means)}")
        if by_policy and len(judged) >= _MIN_EQUAL and len(set(rewards)) == 1:
            lines.append(f"All rewards are {rewards[0]:.3g}: a group with equal rewards teaches nothing.")
    num_differing = sum(not row.is_deterministic for row in rows)
    if num_differing:
        lines.append(f"{num_differing} completions got different results in {repeats} calls: resumes will differ.")
    elif repeats > 1:
        lines.append(f"judged {repeats} times, with the same results")
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int], values: Sequence[str]) -> str:
    keep = (0.0, 0.5, 0.5)
    left = (
        pad(shorten(text, size, keep_start=start), size) for text, size, start in zip(cells, widths, keep, strict=True)
    )
    reward, latency, same = values
    return "  ".join([*left, f"{reward:>6}", f"{latency:>8}", f"{same:>4}"])


def _fitted(needed: Sequence[int], room: int) -> list[int]:
    """Widths that sum to at most `room`; narrow columns get what they need, the others share the rest."""
    widths: dict[int, int] = {}
    for index in sorted(range(len(needed)), key=lambda index: needed[index]):
        widths[index] = min(needed[index], room // (len(needed) - len(widths)))
        room -= widths[index]
    return [widths[index] for index in range(len(needed))]


def ms_text(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
