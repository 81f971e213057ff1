"""Recomputes rewards, and prints a block for each trajectory and a summary that points out problems."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightrl.callbacks.trajectory_log import printable_on_stdout, shorten
from lightrl.checks.printable import count_text, escape_unprintable
from lightrl.module import RLModule
from lightrl.rewards import ReplayRow, replay

_SHOWN_COLUMNS = 600  # maximum width of each text


def recompute_rewards(source: Any, module: RLModule, repeats: int, **settings: Any) -> list[ReplayRow]:
    """Computes the reward of each trajectory `repeats` times; `source` and `settings` are arguments of `replay`."""
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
    """Prints the rows and a summary; returns 1 if a reward failed."""
    sys.stdout.write(printable_on_stdout(f"{format_blocks(rows)}\n\n{_summary(rows, options)}\n"))
    return int(any(row.reason is not None for row in rows))


def format_blocks(rows: Sequence[ReplayRow]) -> str:
    """Formats a block for each completion; long texts are cut in the middle, where answers are rare."""
    blocks = []
    for number, row in enumerate(rows, start=1):
        values = "  ".join(f"{name}={value:.3g}" for name, value in row.metrics.items())
        reward = f"failed ({row.reason}): {row.message}" if row.reward is None else f"{row.reward:.4g}  {values}"
        lines = {
            "prompt": row.prompt,
            "completion": row.completion,
            "raw": row.raw,
            "extracted": row.extracted,
            "reward": reward.rstrip(),
            "latency": ms_text(row.latency_s),
            "repeatable": None if row.is_deterministic else "no",
        }
        printable = {name: escape_unprintable(text, keep="\n") for name, text in lines.items() if text is not None}
        shown = [f"{name:<12} {shorten(text, _SHOWN_COLUMNS, keep_start=0.5)}" for name, text in printable.items()]
        blocks.append("\n".join([f"--- {number}", *shown]))
    return "\n\n".join(blocks)


def _summary(rows: Sequence[ReplayRow], options: argparse.Namespace) -> str:
    """Returns totals and means of the rows, and remarks on equal rewards and on rewards that cannot be reproduced."""
    rewards = [row.reward for row in rows if row.reward is not None]
    failed = Counter(row.reason for row in rows if row.reason is not None)
    reasons = f" ({', '.join(f'{reason} {num}' for reason, num in sorted(failed.items()))})" if failed else ""
    lines = [
        f"{count_text(len(rows), 'completion')}: {count_text(len(rewards), 'reward')}, {failed.total()} failed{reasons}"
    ]
    if rows:
        latencies = [row.latency_s for row in rows]
        lines.append(f"latency: median {ms_text(statistics.median(latencies))}, longest {ms_text(max(latencies))}")
    if rewards:
        lines.append(f"reward: mean {statistics.fmean(rewards):.3g}, from {min(rewards):.3g} to {max(rewards):.3g}")
    if names := sorted({name for row in rows for name in row.metrics}):
        metrics = [row.metrics for row in rows if row.reward is not None]
        means = (f"{name} {statistics.fmean(values.get(name, 0.0) for values in metrics):.3g}" for name in names)
        lines.append(f"means: {', '.join(means)}")
    if options.command == "reward" and options.completions == "policy" and len(rewards) > 1 == len(set(rewards)):
        lines.append(f"All rewards are {rewards[0]:.3g}: the policy learns nothing from a group with equal rewards.")
    num = sum(not row.is_deterministic for row in rows)
    if num:
        lines.append(f"Completions with different results in {options.repeats} calls: {num}. Resumed runs will differ.")
    elif options.repeats > 1:
        lines.append(f"The results of {options.repeats} calls are the same.")
    return "\n".join(lines)


def ms_text(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
