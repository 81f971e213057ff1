"""Report: prints a benchmark's output: a line for the machine, a JSON line per measurement, a final table.

    report = Report("local_engine")
    for setting in settings:
        with PeakMemory() as memory:
            times = [run(setting) for _ in range(5)]
        report.add("decode", parameters="27M", batch=64, tokens_per_s=tokens / median(times), **memory.values())
    report.finish()

`python -m benchmarks.x | grep '^{'` extracts the data; units are in the names.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_MIB = 2**20


class Report:
    """Collects the measurements of a benchmark; prints each immediately, in case the run is cut short.

    Args:
        benchmark: its module's name, in every line.
        settings: common to all measurements (task, precision, seed); in the machine line.
    """

    def __init__(self, benchmark: str, **settings: Any) -> None:
        self.benchmark = benchmark
        self.rows: list[dict[str, Any]] = []
        _print_json({"benchmark": benchmark, "machine": machine(), **settings})

    def add(self, measurement: str, **values: Any) -> dict[str, Any]:
        """Prints one measurement and keeps it for the table; adds peak memory if missing."""
        row = {"measurement": measurement, **values}
        if not any(name.startswith("peak_rss") for name in row):
            row["peak_rss_since_start_mib"] = peak_rss_mib()
        self.rows.append(row)
        _print_json({"benchmark": self.benchmark, **row})
        return row

    def table(self, columns: Sequence[str] | None = None) -> str:
        """Returns the measurements as a Markdown table, by default with all columns, in order of first appearance."""
        columns = columns or list(dict.fromkeys(name for row in self.rows for name in row))
        cells = [list(columns), *([_cell(row.get(name)) for name in columns] for row in self.rows)]
        widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
        is_number = [any(isinstance(row.get(name), (int, float)) for row in self.rows) for name in columns]
        lines = [
            "| "
            + " | ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, is_number, strict=True))
            + " |"
            for line in cells
        ]
        rule = "|" + "|".join("-" * (w + 1) + (":" if n else "-") for w, n in zip(widths, is_number, strict=True)) + "|"
        return "\n".join([lines[0], rule, *lines[1:]])

    def finish(self, columns: Sequence[str] | None = None, **summary: Any) -> None:
        """Prints the table, and the summary, if any, as JSON on the last line."""
        print(f"\n{self.table(columns)}\n", flush=True)
        if summary:
            _print_json(summary)


class PeakMemory:
    """Measures the largest resident memory of this process while the block runs, in MiB.

    Linux can reset the earlier peak. If that fails (`is_since_start`), the peak is since the process started, and each
    measurement needs its own process.
    """

    def __init__(self) -> None:
        self.peak_rss_mib = 0.0
        self.start_rss_mib = 0.0
        self.is_since_start = True

    def __enter__(self) -> PeakMemory:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM restarts from the current size
            self.is_since_start = False
        except OSError:
            self.is_since_start = True
        self.start_rss_mib = rss_mib()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.peak_rss_mib = peak_rss_mib()

    def values(self) -> dict[str, float]:
        """Returns the measurement for `Report.add`."""
        name = "peak_rss_since_start_mib" if self.is_since_start else "peak_rss_mib"
        return {"start_rss_mib": round(self.start_rss_mib, 1), name: round(self.peak_rss_mib, 1)}


def peak_rss_mib() -> float:
    """Returns the largest resident memory of this process since its start or the last PeakMemory, in MiB."""
    peak_mib = _proc_status_mib("VmHWM")
    if peak_mib is not None:
        return peak_mib
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (_MIB if sys.platform == "darwin" else 1024), 1)  # bytes on macOS, KiB elsewhere


def rss_mib() -> float:
    """Returns the resident memory of this process now, in MiB, or its peak if the system does not report it."""
    now_mib = _proc_status_mib("VmRSS")
    return peak_rss_mib() if now_mib is None else now_mib


def machine() -> dict[str, Any]:
    """Describes the machine for comparisons: processor, cores, memory, versions, thread settings, load."""
    import torch

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 2),  # above 0 at the start: something else was running
    }


def interleaved(contenders: Mapping[str, Callable[[], float]], *, repeats: int) -> dict[str, list[float]]:
    """Calls each contender in turn for `repeats` rounds, in reverse order every other round.

    This way changes in the machine's speed favor no contender.

    Returns:
        Their results (seconds, or anything to compare) by name, in order of rounds.
    """
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(repeats):
        names = list(contenders) if index % 2 == 0 else list(contenders)[::-1]
        for name in names:
            results[name].append(contenders[name]())
    return results


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Returns the median, lowest and highest ratio of measurements made pair by pair."""
    ratios = [above / below for above, below in zip(numerators, denominators, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
    }


def _print_json(record: Mapping[str, Any]) -> None:
    print(json.dumps(record), flush=True)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def _proc_status_mib(name: str) -> float | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    values = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return round(int(values[0]) / 1024, 1) if values else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
