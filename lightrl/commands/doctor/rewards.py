"""Trajectories judged again, as a table or in full, and what looks wrong in them."""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightrl.callbacks.trajectory_log import num_columns, pad, printable_on_stdout, shorten
from lightrl.checks.printable import escape_unprintable
from lightrl.module import RLModule
from lightrl.rewards import ReplayRow, replay

_WIDTH_WITHOUT_TERMINAL = 120
_MIN_EQUAL = 2  # from so many completions on, equal rewards are worth a remark


def judge_again(source: Any, module: RLModule, repeats: int, **settings: Any) -> list[ReplayRow]:
    """Each trajectory judged `repeats` times by the module's reward; `source` and settings as in `replay`."""
    return replay(
        source,
        module.reward_source if module.reward_source is not None else module.reward,
        repeats=repeats,
        search_paths=[str(Path.cwd())],
        timeout_s=module.reward_timeout_s,
        memory_limit_mib=module.reward_memory_mib,
        **settings,
    )


def show_rewards(rows: list[ReplayRow], options: argparse.Namespace) -> int:
    """Prints them; returns 1 if a reward failed."""
    width = shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 0)).columns
    by_policy = getattr(options, "completions", None) == "policy"
    shown = format_blocks(rows) if options.full else format_rows(rows, width)
    sys.stdout.write(printable_on_stdout(f"{shown}\n\n{_summary(rows, options.repeats, by_policy=by_policy)}\n"))
    return int(any(row.reason is not None for row in rows))


def format_rows(rows: Sequence[ReplayRow], width: int) -> str:
    """A line for each completion, at most `width` columns wide; if its reward failed, a line with the reason below.

    A prompt that is too long loses its start, a completion its middle, where answers are rare.
    """
    table: list[tuple[str, ...]] = [("prompt", "completion", "extracted", "reward", "latency", "same")]
    for row in rows:
        texts = tuple(map(escape_unprintable, (row.prompt, row.completion, row.extracted or "")))
        reward = "failed" if row.reward is None else f"{row.reward:.3g}"
        table.append((*texts, reward, ms_text(row.latency_s), "" if row.is_deterministic else "no"))
    room = max(width - len("  reward   latency  same"), 30) - 4
    needed = [max(num_columns(cells[column]) for cells in table) for column in range(3)]
    widths = [0, 0, 0]
    for place, column in enumerate(sorted(range(3), key=needed.__getitem__)):  # narrow ones get what they need
        widths[column] = min(needed[column], room // (3 - place))
        room -= widths[column]
    lines = []
    for judged, cells in zip([None, *rows], table, strict=True):
        left = [
            pad(shorten(text, size, keep_start=keep), size)
            for text, size, keep in zip(cells[:3], widths, (0.0, 0.5, 0.5), strict=True)
        ]
        lines.append("  ".join([*left, f"{cells[3]:>6}", f"{cells[4]:>8}", f"{cells[5]:>4}"]).rstrip())
        if judged is not None and judged.message is not None:
            message = shorten(escape_unprintable(judged.message), max(width - 14, 40), keep_start=0.7)
            lines.append(f"    {judged.reason}: {message}".rstrip())
    return "\n".join(lines)


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


def _summary(rows: Sequence[ReplayRow], repeats: int, *, by_policy: bool = False) -> str:
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


def ms_text(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
