"""How long `lightrl inspect` takes to open a large run: from the command to its curves and newest trajectories.

    python -m benchmarks.inspect_open --iterations 10000 --trajectories 100 --tokens 200

It writes such a run into a temporary folder (4 GiB), then starts the command in a process of its own, with an empty
cache, and asks for what the page asks first: the page, the runs, the curves, the first rows of the table. `--turns`
more times start with what the last one has indexed. The files have just been written: what fits is in memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUESTIONS = ("", "runs", "curves?run=0", "table?run=0&limit=100")


def write_run(folder: Path, iterations: int, trajectories: int, tokens: int) -> int:
    """Writes what CSVLogger and TrajectoryLog write; returns the bytes."""
    (folder / "trajectories").mkdir(parents=True)
    names = [f"policy/metric_{number}_nats" for number in range(28)]
    with (folder / "metrics.csv").open("w") as file:
        file.write(",".join(["epoch", "step", "rollout/reward", *names]) + "\n")
        for step in range(iterations):
            file.write(f"0,{step},{step / iterations:.6f}" + "".join(f",{step * 1e-4:.6f}" for _ in names) + "\n")
    body = json.dumps({
        "token_ids": list(range(1000, 1000 + tokens)),
        "loss_mask": [True] * tokens,
        "behavior_logprobs": [round(-0.01 * (number % 97), 4) for number in range(tokens)],
        "weight_versions": [1234] * tokens,
        "completion": "word " * (tokens // 2),
    })  # fmt: skip
    size = 0
    for iteration in range(iterations):
        lines = []
        for number in range(trajectories):
            head: dict[str, Any] = {
                "iteration": iteration, "weight_version": iteration, "advantage": 0.5 - number % 2,
                "reward": number % 2, "length": tokens, "staleness": 0, "group": number // 8, "sample": number % 8,
                "prompt": f"train-{number}", "finish": "stop", "excerpt": "word " * 24,
            }  # fmt: skip
            lines.append(f'{json.dumps(head)[:-1]}, "trajectory": {body}}}\n')
        path = folder / "trajectories" / f"iteration-{iteration:06d}.jsonl"
        size += path.write_text("".join(lines))
    return size


@contextlib.contextmanager
def opened(folder: Path, cache: Path) -> Iterator[list[float]]:
    """The command in a process of its own; seconds from its start to each answer."""
    command = [sys.executable, "-m", "lightrl", "inspect", str(folder), "--no-browser"]
    begun_s = time.perf_counter()
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            seconds = []
            for question in QUESTIONS:
                with urllib.request.urlopen(address + question) as answer:
                    assert len(answer.read()) > 100, question
                seconds.append(time.perf_counter() - begun_s)
            yield seconds
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--trajectories", type=int, default=100, help="of each iteration")
    parser.add_argument("--tokens", type=int, default=200, help="of each trajectory")
    parser.add_argument("--turns", type=int, default=5, help="with an index, after the one without")
    parser.add_argument("--work", type=Path, help="where the temporary folder is made")
    parser.add_argument("--quick", action="store_true", help="30 iterations; the numbers mean nothing")
    options = parser.parse_args()
    if options.quick:
        options.iterations, options.turns = 30, 1
    with tempfile.TemporaryDirectory(dir=options.work) as work:
        folder = Path(work, "run")
        size = write_run(folder, options.iterations, options.trajectories, options.tokens)
        total = options.iterations * options.trajectories
        print(f"{total:,} trajectories of {options.iterations:,} iterations, {size / 2**30:.1f} GiB", flush=True)
        ends = []
        for turn in range(options.turns + 1):
            with opened(folder, Path(work, "cache")) as seconds:
                parts = ", ".join(f"{name} {end:.2f} s" for name, end in zip(QUESTIONS[1:], seconds[1:], strict=True))
            ends.append(seconds[-1])
            print(f"turn {turn}: page {seconds[0]:.2f} s, {parts}; load {os.getloadavg()[0]:.1f}", flush=True)
        print(
            f"to the last answer: empty cache {ends[0]:.2f} s, then median {statistics.median(ends[1:] or ends):.2f} s"
        )


if __name__ == "__main__":
    main()
