"""Iterations per second with max_staleness η = 0, 1, 2, 4, and how long the trainer waits for rollouts.

    python -m benchmarks.async_overlap [--quick] [--rollout-to-update 0.9,2] [--threads 2]
    python -m benchmarks.async_overlap --engine sglang --threads 1        also η = 8
    python -m benchmarks.async_overlap --simulated                        only the first table

The first table is simulated: whether training sees the sampled lengths (stream_order.py). The others are measured.

The engine plays back recorded lengths like a remote server: a long tail, a fixed pace, any number of concurrent
requests, no work for this computer. On a weight sync, running completions stop between two tokens and continue with the
new version. The update is real work of fixed size: forward, backward and AdamW on the same number of trajectories.

The fastest update of a first run sets the pace: the longest completion takes `rollout_to_update` updates. If that is at
most 1, the update can hide the rollout: with η ≥ 1, iterations take as long as updates, and the trainer should idle (in
phase `rollout`) for at most 5 % of the time. If it is 2, η = 1 cannot hide all of the rollout.

With `--engine sglang`, a fake server in another process plays back: SGLangEngine sends it HTTP requests, and every sync
is real (pause, a folder in shared memory that the server reads and hashes, checksums, resume). Lengths are lognormal:
the 95th percentile is 3.7 times the median, the longest of 128 6 times the mean. Load does not slow the server.

Columns: iterations/s and their ratio to η = 0 by round; `idle_fraction`; staleness reached, in versions; fraction of
trajectories with several weight versions; time of a sync; server utilization; `ks_distance` (stream_order.py).
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import dataclasses
import functools
import json
import logging
import math
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from fake_sglang import server as fake
from fake_sglang.faults import Fault
from fake_sglang.process import FakeServerProcess
from fake_sglang.script import Run, ScriptedModel
from forked import end_with_parent
from transformers import Qwen3Config

import lightrl
from benchmarks import stream_order
from benchmarks.grpo_vs_trl import odd_fraction, save_model
from benchmarks.lengths import lognormal_lengths, session_length, skewed_lengths
from benchmarks.report import PeakMemory, Report, interleaved, median_ratio
from benchmarks.stream_order import ks_distance
from examples.quickstart.task import LargestDigit, tokenizer
from lightrl.engines import Completion, RolloutEngine, SGLangEngine
from lightrl.errors import EngineError
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket

if TYPE_CHECKING:
    from transformers import PretrainedConfig

IDLE_GOAL = 0.05
_SHORTEST_SLEEP_S = 0.002
WARM_UP = 3  # iterations that fill the pipeline, not measured


class PlaybackEngine(RolloutEngine):
    """Simulates a remote server: completions of recorded lengths, at a fixed pace.

    Its clock stops while it is paused or loads weights. A completion sleeps until its last token is due, then reads
    from the history of loads which version sampled each token; so it costs this computer one or two wake-ups, whatever
    its length and the number of interruptions. Tokens and logprobs are those of a uniform policy.

    Args:
        lengths: tokens of the completions, by position of the prompt and number of the sample; the list repeats.
        group_size: G, samples of a prompt.
        seconds_per_token: the server's pace, at any load.
        load_s: seconds for which a weight load interrupts it.
    """

    def __init__(
        self, lengths: Sequence[int], *, group_size: int, seconds_per_token: float, load_s: float = 0.01
    ) -> None:
        self.weight_version = -1
        self.lengths = lengths
        self.group_size = group_size
        self.seconds_per_token = seconds_per_token
        self.load_s = load_s
        self._vocab_size = 1
        self._lock = threading.Lock()  # guards what follows
        self._is_paused = False
        self._is_loading = False
        self._is_closed = False
        self._clock_s = 0.0  # when the clock last stopped or started
        self._runs_since: float | None = time.monotonic()  # None while the clock is stopped
        self._loads: list[tuple[float, int]] = []  # clock and version
        self._writers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def start(self, config: PretrainedConfig) -> None:
        self._vocab_size = config.vocab_size

    async def generate(
        self, token_ids: list[int], sampling: Sampling, *, session: str, **request: Any
    ) -> list[Completion]:
        """Returns a completion of the session's length; see `RolloutEngine`."""
        length = min(session_length(session, self.lengths, self.group_size), sampling.max_new_tokens)
        started_s = self.clock_s()
        await self._sleep_until(started_s + length * self.seconds_per_token)
        draw = random.Random(sampling.seed)
        return [
            Completion(
                token_ids=[draw.randrange(2, self._vocab_size) for _ in range(length)],
                logprobs=[-math.log(self._vocab_size)] * length,
                weight_versions=self._versions([started_s + place * self.seconds_per_token for place in range(length)]),
                finish_reason="length",
            )
        ]

    def queue_depths(self) -> dict[str, int]:
        with self._lock:
            return {"running": len(self._writers), "waiting": 0}

    async def pause(self) -> None:
        with self._lock:
            self._is_paused = True
            self._set_clock()

    async def resume(self) -> None:
        with self._lock:
            self._is_paused = False
            self._set_clock()

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Interrupts all completions for `load_s`; their next tokens carry the new version."""
        with self._lock:
            self._is_loading = True
            self._set_clock()
        for _ in buckets:  # what would be sent to a server
            pass
        time.sleep(self.load_s)
        with self._lock:
            self.weight_version = weight_version
            self._loads.append((self._clock_s, weight_version))
            self._is_loading = False
            self._set_clock()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            writers = list(self._writers)
        for loop, closed in writers:
            try:
                loop.call_soon_threadsafe(closed.set)
            except RuntimeError:  # the loop is closed: nothing waits any more
                continue

    def clock_s(self) -> float:
        """The seconds that it has spent generating."""
        with self._lock:
            return self._clock_s + (0.0 if self._runs_since is None else time.monotonic() - self._runs_since)

    def _set_clock(self) -> None:
        now = time.monotonic()
        if self._runs_since is not None:
            self._clock_s += now - self._runs_since
        self._runs_since = None if self._is_paused or self._is_loading else now

    async def _sleep_until(self, due_s: float) -> None:
        """Sleeps until the clock shows `due_s`; only `close` wakes it early."""
        writer = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._writers.add(writer)
        try:
            while not self._is_closed:
                left_s = due_s - self.clock_s()
                if left_s <= 0:
                    return
                with contextlib.suppress(asyncio.TimeoutError):
                    # While the clock is stopped `left_s` stays the same: check again in a moment.
                    await asyncio.wait_for(writer[1].wait(), max(left_s, _SHORTEST_SLEEP_S))
        finally:
            with self._lock:
                self._writers.discard(writer)
        raise EngineError("PlaybackEngine was closed before the completion finished.")

    def _versions(self, written_s: list[float]) -> list[int]:
        """Returns the weight version at each of these clock times."""
        with self._lock:
            loads = list(self._loads)
        return [loads[bisect.bisect_right(loads, (clock_s, math.inf)) - 1][1] for clock_s in written_s]


class PlayedModel(ScriptedModel):
    """The model of the fake server: generates the requested tokens at a fixed pace, each with its version."""

    def __init__(self, vocab_size: int, seconds_per_token: float) -> None:
        super().__init__(vocab_size=vocab_size)
        # The request sets the length of its completion, and loading takes its real time.
        self._playback = PlaybackEngine([sys.maxsize], group_size=1, seconds_per_token=seconds_per_token, load_s=0.0)
        self._playback.start(Qwen3Config(vocab_size=vocab_size))

    async def write(self, run: Run) -> Literal["stop", "length", "abort"]:
        if run.params["max_new_tokens"] == 0:  # the probe of a sync, which requests its prompt's logprobs
            return "length"
        sampling = Sampling(max_new_tokens=run.params["max_new_tokens"], seed=run.params["sampling_seed"])
        (completion,) = await self._playback.generate(run.prompt, sampling, session="0:/0")
        run.token_ids += completion.token_ids
        run.logprobs += completion.logprobs
        run.versions += [str(version) for version in completion.weight_versions]
        return "length"

    async def pause(self) -> None:
        await self._playback.pause()

    async def resume(self) -> None:
        await self._playback.resume()

    async def load_folder(self, folder: str, version: str | None, fault: Fault | None = None) -> None:
        await super().load_folder(folder, version, fault)
        await asyncio.to_thread(self._playback.load_weights, [], weight_version=int(self.version))


class PlayedServer(FakeServerProcess):
    """A fake server that plays back lengths, in another process."""

    def __init__(self, seconds_per_token: float) -> None:
        super().__init__()
        self.seconds_per_token = seconds_per_token

    def start(self, port: int = 0) -> PlayedServer:
        command = [sys.executable, "-m", "benchmarks.async_overlap", "--serve", str(self.seconds_per_token)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(json.loads(self._process.stdout.readline())["port"])
        return self


async def serve(seconds_per_token: float) -> None:
    await fake.serve(fake.FakeServer(PlayedModel(len(tokenizer()), seconds_per_token), arguments={}))


class PlayedSGLangEngine(SGLangEngine):
    """Requests completions of recorded lengths, by position of the prompt and number of the sample."""

    def __init__(self, lengths: Sequence[int], *, group_size: int, url: str) -> None:
        super().__init__(urls=[url])
        self.lengths = lengths
        self.group_size = group_size

    async def generate(self, token_ids: list[int], sampling: Sampling, **request: Any) -> list[Completion]:
        length = min(session_length(request["session"], self.lengths, self.group_size), sampling.max_new_tokens)
        sampling = dataclasses.replace(sampling, max_new_tokens=length)
        return await super().generate(token_ids, sampling, **request)


@dataclass
class Timeline(lightrl.RLCallback):
    """Times and training data of a run's iterations."""

    seconds: list[float] = field(default_factory=list)
    rollout_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    sync_s: list[float] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    mixed_fraction: list[float] = field(default_factory=list)
    trained_tokens: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of all trajectories trained on
    num_dropped: int = 0  # trajectories
    started: float = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.started = time.perf_counter()

    def on_experience_ready(self, trainer: Any, module: Any, experience: Any) -> None:
        self.trained_tokens.append(experience.num_loss_tokens)
        self.lengths += experience.loss_mask.sum(dim=1).tolist()

    def on_trajectory_dropped(self, trainer: Any, module: Any, reason: str, message: str) -> None:
        self.num_dropped += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self.started)
        self.started = now
        self.rollout_s.append(trainer.phase_seconds["rollout"])
        self.update_s.append(trainer.phase_seconds["update"])
        self.sync_s.append(trainer.phase_seconds["sync"])
        self.staleness.append(float(trainer.callback_metrics["staleness/max_versions"]))
        self.mixed_fraction.append(float(trainer.callback_metrics["rollout/mixed_version_fraction"]))


def played_lengths(arguments: argparse.Namespace) -> list[int]:
    """Returns the lengths of an iteration's completions, which later iterations repeat."""
    make_lengths = lognormal_lengths if arguments.engine == "sglang" else skewed_lengths
    return make_lengths(arguments.prompts * arguments.group_size, arguments.cap)


def make_engine(seconds_per_token: float, arguments: argparse.Namespace, url: str | None) -> RolloutEngine:
    """Returns an engine that plays back lengths in this process, or one for the server at `url`."""
    lengths = played_lengths(arguments)
    if url is not None:
        return PlayedSGLangEngine(lengths, group_size=arguments.group_size, url=url)
    return PlaybackEngine(lengths, group_size=arguments.group_size, seconds_per_token=seconds_per_token)


def train(max_staleness: int, engine: RolloutEngine, num_iterations: int, arguments: argparse.Namespace) -> Timeline:
    """Trains with the usual Trainer and this engine."""
    timeline = Timeline()
    with tempfile.TemporaryDirectory(prefix="async_overlap_") as folder:
        save_model(Path(folder) / "model")
        trainer = lightrl.Trainer(
            engine=engine,
            callbacks=[lightrl.StalenessControl(max_staleness), timeline],
            max_steps=WARM_UP + num_iterations,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            default_root_dir=folder,
        )
        module = lightrl.GRPO(
            f"{folder}/model",
            reward=odd_fraction,
            group_size=arguments.group_size,
            sampling=Sampling(max_new_tokens=arguments.cap),
            lr=1e-6,
        )
        trainer.fit(module, datamodule=LargestDigit(batch_size=arguments.prompts))
    return timeline


def measure(
    report: Report,
    rollout_to_update: float,
    update_s: float,
    arguments: argparse.Namespace,
    server: PlayedServer | None = None,
) -> dict[str, Any]:
    """Adds all rows of one pace; returns the ratios to η = 0 and the idle fractions."""
    seconds_per_token = rollout_to_update * update_s / arguments.cap
    etas = [int(eta) for eta in arguments.max_staleness.split(",")]
    timelines: dict[str, list[Timeline]] = {str(eta): [] for eta in etas}
    memory: dict[str, dict[str, float]] = {}
    server_busy: dict[str, float] = {}
    url = server.url if server is not None else None

    def run(eta: int) -> float:
        engine = make_engine(seconds_per_token, arguments, url)
        busy_s, started = server.stats()["processor_s"] if server is not None else 0.0, time.perf_counter()
        with PeakMemory() as peak:
            timeline = train(eta, engine, arguments.iterations, arguments)
        if server is not None:
            server_busy[str(eta)] = (server.stats()["processor_s"] - busy_s) / (time.perf_counter() - started)
        memory[str(eta)] = peak.values()
        timelines[str(eta)].append(timeline)
        return statistics.mean(timeline.seconds[WARM_UP:])

    runs = {str(eta): functools.partial(run, eta) for eta in etas}
    seconds = interleaved(runs, repeats=arguments.repeats)
    summary: dict[str, Any] = {}
    played = sorted(played_lengths(arguments))
    for eta, rounds in timelines.items():
        total = sum(sum(item.seconds[WARM_UP:]) for item in rounds)
        waited = sum(sum(item.rollout_s[WARM_UP:]) for item in rounds)
        against = {} if eta == "0" or "0" not in seconds else median_ratio(seconds["0"], seconds[eta])
        row = report.add(
            "overlap",
            order="windowed",
            rollout_to_update=rollout_to_update,
            staleness=int(eta),
            ks_distance=round(
                ks_distance(
                    [length for item in rounds for length in item.lengths],
                    lambda length: bisect.bisect_right(played, length) / len(played),
                    lambda length: bisect.bisect_left(played, length) / len(played),
                ),
                4,
            ),
            discarded_groups=sum(item.num_dropped for item in rounds) / arguments.group_size,
            iterations_per_s=round(1 / statistics.median(seconds[eta]), 3),
            seconds=round(statistics.median(seconds[eta]), 4),
            update_s=round(statistics.median(value for item in rounds for value in item.update_s[WARM_UP:]), 4),
            sync_s=round(statistics.median(value for item in rounds for value in item.sync_s[WARM_UP:]), 4),
            longest_rollout_s=round(seconds_per_token * arguments.cap, 4),
            **against,
            idle_fraction=round(waited / total, 4),
            goal=IDLE_GOAL if eta != "0" and rollout_to_update <= 1 else None,
            staleness_reached_versions=max(max(item.staleness[WARM_UP:]) for item in rounds),
            mixed_version_fraction=round(
                statistics.mean(value for item in rounds for value in item.mixed_fraction[WARM_UP:]), 3
            ),
            trained_tokens=round(statistics.mean(count for item in rounds for count in item.trained_tokens[WARM_UP:])),
            server_busy_fraction=round(server_busy[eta], 3) if eta in server_busy else None,
            **memory[eta],
        )
        summary[f"idle_fraction_{rollout_to_update:g}_eta_{eta}"] = row["idle_fraction"]
        if against:
            summary[f"ratio_{rollout_to_update:g}_eta_{eta}"] = against["ratio"]
    return summary


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["playback", "sglang"], default="playback")
    parser.add_argument("--max-staleness", help="default: 0,1,2,4 and, with sglang, 8")
    parser.add_argument("--rollout-to-update", default="0.9,2", help="longest completion, in updates")
    parser.add_argument("--prompts", type=int, default=16, help="P")
    parser.add_argument("--group-size", type=int, default=8, help="G")
    parser.add_argument("--cap", type=int, default=64, help="longest completion, in tokens")
    parser.add_argument("--iterations", type=int, default=10, help=f"measured in a run; {WARM_UP} more warm up")
    parser.add_argument("--repeats", type=int, default=3, help="rounds over all settings")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--simulated", action="store_true", help="only the orders on a simulated clock")
    parser.add_argument("--quick", action="store_true", help="4 prompts × 2, cap 8, η = 0 and 1, 3 iterations")
    parser.add_argument("--serve", type=float, metavar="SECONDS_PER_TOKEN", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.serve is not None:
        end_with_parent()
        asyncio.run(serve(arguments.serve))
        return
    if arguments.max_staleness is None:
        arguments.max_staleness = "0,1,2,4,8" if arguments.engine == "sglang" else "0,1,2,4"
    if arguments.quick:
        arguments.prompts, arguments.group_size, arguments.cap = 4, 2, 8
        arguments.max_staleness, arguments.rollout_to_update = "0,1", "0.9"
        arguments.iterations, arguments.repeats = 3, 1
    etas = [0, 1] if arguments.quick else [0, 1, 2, 4, 8]
    stream_order.measure(etas, paces=(0.9, 4.0), num_trajectories=1_000 if arguments.quick else 10_000)
    if arguments.simulated:
        return
    torch.set_num_threads(arguments.threads)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    report = Report(
        "async_overlap",
        engine=arguments.engine,
        threads=arguments.threads,
        prompts=arguments.prompts,
        group_size=arguments.group_size,
        cap_tokens=arguments.cap,
    )
    # The fastest, so that a busy moment does not make the pace slower than the updates measured later.
    update_s = min(train(0, make_engine(1e-5, arguments, None), 8, arguments).update_s[WARM_UP:])
    summary: dict[str, Any] = {}
    for ratio in arguments.rollout_to_update.split(","):
        if arguments.engine == "playback":
            summary |= measure(report, float(ratio), update_s, arguments)
            continue
        with PlayedServer(float(ratio) * update_s / arguments.cap) as server:
            summary |= measure(report, float(ratio), update_s, arguments, server)
    report.finish(
        [
            "rollout_to_update", "staleness", "iterations_per_s", "ratio", "idle_fraction", "goal", "update_s",
            "sync_s", "longest_rollout_s", "staleness_reached_versions", "mixed_version_fraction", "ks_distance",
            "discarded_groups", "server_busy_fraction", "peak_rss_mib",
        ],
        **summary,
    )  # fmt: skip


if __name__ == "__main__":
    main()
