"""Trace: records what each process did and when, in a file for Perfetto, and summarizes where the time went."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.profilers import Profiler

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.callbacks.trace.areas import AreaTimes, SummaryJson, area_times, summary_of, summary_text
from lightrl.callbacks.trace.files import MemoryPeaks, TraceFile, clock_offset_ns, join_traces
from lightrl.checks.bounds import check_bounds
from lightrl.checks.files import write_problem
from lightrl.strategies import Ranks, local, ranks_of
from lightrl.trace import Event, Tape, set_tape
from lightrl.trace.spans import child_bytes

if TYPE_CHECKING:
    import lightning as L
    from torch import Tensor
    from torch.optim import Optimizer

    from lightrl.module import RLModule

log = logging.getLogger(__name__)

_BARRIERS = 8  # number of barriers that measure the offset of a rank's clock
_TIMEOUT_S = 60.0  # maximum wait for the slowest rank at the end
_LEAST_NS = 1_000_000  # shorter Lightning callbacks and hooks are left out
_EVENT_S = 2e-6  # cost of recording one event
_MIB = 2**20


class Trace(RLCallback):
    """Writes `<run folder>/trace/`: one file per process, and at the end `trace.json`, which joins them on one clock.

    Open the trace at https://ui.perfetto.dev, which uploads nothing, or in `lightrl inspect`, even during a fit. At
    the end, a summary is printed and written to `summary.json`: the mean time of each area, the area to look at first,
    the speed-up of an iteration without that area, each phase's peak memory, and the memory of each role's model. The
    callback skips as many iterations as needed to stay within `max_cost`.

    Times are measured on the host, which only launches GPU kernels; kernel time appears in the next step that waits for
    a result (`profiler: pytorch` shows kernels). Collectives in FSDP's layers are part of forward and backward.

    Args:
        max_cost: maximum share of the run's time that tracing may take, 0 to 1.
        max_mib: maximum size of one process's files; the oldest iterations are deleted.
    """

    run_folder_output = "trace"  # two runs must not write it at the same time

    def __init__(self, max_cost: float = 0.005, max_mib: int = 256) -> None:
        if not 0 < max_cost <= 1:
            raise ValueError(f"max_cost must be above 0 and at most 1, as a share of the run's time, got {max_cost}.")
        check_bounds(1, max_mib=max_mib)
        self.max_cost = max_cost
        self.max_mib = max_mib
        self._tape: Tape | None = None  # None while no fit is traced
        self._undo: list[Callable[[], None]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        folder = trainer.log_dir or trainer.default_root_dir  # log_dir is a collective, so all ranks read it
        if getattr(trainer, "fast_dev_run", False) or not hasattr(trainer, "phase_seconds"):
            return
        ranks = ranks_of(trainer.strategy)
        self._folder = Path(folder) / "trace"
        self._rank = trainer.global_rank
        self._times: list[AreaTimes] = []
        self._memory = MemoryPeaks()
        self._children: dict[str, int] = {}
        self._cost_s = 0.0
        offset_ns = _offset_ns(ranks)
        self._file: TraceFile | None = None
        try:
            title = f"rank {self._rank}"
            max_bytes = self.max_mib * _MIB
            self._file = TraceFile(self._folder, self._rank, title, offset_ns=offset_ns, max_bytes=max_bytes)
        except OSError as error:
            self._stop_writing(error)
        self._tape = Tape()
        self._start_s = time.perf_counter()
        self._since_ns = time.perf_counter_ns()
        self._watch_profiler(trainer)
        set_tape(self._tape)

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if self._tape is None:
            return
        now_ns = time.perf_counter_ns()
        events = self._tape.take()
        if self._tape.is_recording:
            self._add_iteration(trainer.global_step, events, now_ns)
        now_s = time.perf_counter()
        self._cost_s += len(events) * _EVENT_S + now_s - now_ns / 1e9  # recording and writing
        self._tape.is_recording = self._cost_s <= self.max_cost * (now_s - self._start_s)  # False skips iterations
        self._since_ns = time.perf_counter_ns()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Joins the files once every rank has written its file."""
        if self._tape is None:
            return
        self.teardown()
        ranks_of(trainer.strategy).gather_json(None, timeout_s=_TIMEOUT_S)
        if not trainer.is_global_zero:
            return
        rollout: Any = getattr(trainer, "rollout", None)
        summary = summary_of(self._times, overlaps=rollout.settings.max_staleness > 0)
        if summary is None:
            return
        summary["memory_peak_mib"] = _in_mib(self._memory.peaks)
        summary["memory_of_roles_mib"] = _in_mib(role_bytes(pl_module, trainer.optimizers))  # type: ignore[arg-type]
        summary["memory_of_children_mib"] = {name: round(size / _MIB, 1) for name, size in self._children.items()}
        summary["trace_cost_fraction"] = self._cost_s / (time.perf_counter() - self._start_s)
        text = summary_text(summary) + "\n" + memory_text(summary)
        try:
            (self._folder / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
            path = join_traces(self._folder) if self._file is not None else None
            text += f"\nTrace: {path}, for https://ui.perfetto.dev" if path else ""
        except OSError as error:
            self._stop_writing(error)
        pl_module.print(text)  # above the progress bar

    def on_exception(self, trainer: Any, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Keeps the events of the iteration that failed."""
        if self._tape is not None:
            self._add_iteration(trainer.iteration, self._tape.take(), time.perf_counter_ns(), is_whole=False)
        self.teardown()

    def teardown(self, *_: object, **__: object) -> None:
        if self._tape is not None:
            set_tape(None)
            self._tape = None
        while self._undo:
            self._undo.pop()()

    def _add_iteration(self, iteration: int, events: list[Event], now_ns: int, *, is_whole: bool = True) -> None:
        if is_whole and self._rank == 0:
            self._times.append(area_times(events, self._since_ns, now_ns))
            self._children = {name: max(size, self._children.get(name, 0)) for name, size in child_bytes().items()}
        if self._file is None:
            return
        peaks = self._last_peaks.items()
        memory = {f"{kind} in {phase}": value for phase, kinds in peaks for kind, value in kinds.items()}
        try:
            self._file.add(iteration, self._since_ns, events, memory)
        except OSError as error:
            self._stop_writing(error)

    def _stop_writing(self, error: OSError) -> None:
        self._file = None
        problem = write_problem(error, self._folder)
        log.warning(
            "The trace cannot be written to %s: %s. The run continues without trace files.", self._folder, problem
        )

    def _watch_profiler(self, trainer: Any) -> None:
        """Wraps the profiler to record the steps that Lightning and the loop report to it."""
        profiler = trainer.profiler
        started: dict[str, int] = {}
        self._last_peaks: dict[str, dict[str, int]] = {}

        def start(name: str) -> None:
            started[name] = time.perf_counter_ns()
            if name in _PHASES and self._tape is not None and self._tape.is_recording:
                self._run_and_count_cost(self._memory.begin)

        def stop(name: str) -> None:
            start_ns, tape = started.pop(name, 0), self._tape
            if tape is None or not tape.is_recording or not start_ns:
                return
            end_ns = time.perf_counter_ns()
            if name in _PHASES:
                self._run_and_count_cost(functools.partial(self._keep_peak, _PHASES[name]))
            elif name.endswith("train_dataloader_next"):
                tape.events.append(Event("next batch from the loader", "loader", "trainer", start_ns, end_ns, {}))
            elif end_ns - start_ns >= _LEAST_NS and not name.startswith("run_training"):
                tape.events.append(Event(name, "step", "trainer", start_ns, end_ns, {}))

        trainer.profiler = _WatchedProfiler(profiler, start, stop)
        self._undo.append(functools.partial(setattr, trainer, "profiler", profiler))

    def _keep_peak(self, phase: str) -> None:
        peaks = self._memory.end(phase)
        self._last_peaks[phase] = {kind: round(value / _MIB) for kind, value in peaks.items()}

    def _run_and_count_cost(self, action: Callable[[], object]) -> None:
        start_s = time.perf_counter()
        action()
        self._cost_s += time.perf_counter() - start_s


_PHASES = {f"rl/{name}": name for name in ("rollout", "rewards", "score", "update", "sync")}


class _WatchedProfiler:
    """Wraps Lightning's profiler; calls `on_start` and `on_stop` before its `start` and `stop`."""

    def __init__(self, profiler: Any, on_start: Callable[[str], None], on_stop: Callable[[str], None]) -> None:
        self._profiler = profiler
        self._on_start = on_start
        self._on_stop = on_stop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._profiler, name)

    def start(self, action_name: str) -> None:
        self._on_start(action_name)
        self._profiler.start(action_name)

    def stop(self, action_name: str) -> None:
        self._on_stop(action_name)
        self._profiler.stop(action_name)

    profile = Profiler.profile  # calls this class's `start` and `stop`


def _offset_ns(ranks: Ranks) -> int:
    """Measures how far this process's clock is ahead of rank 0's. Collective."""
    if ranks.size == 1:
        return 0
    readings = []
    for _ in range(_BARRIERS):
        before_ns = time.perf_counter_ns()
        ranks.max_each([0])
        readings.append((before_ns, time.perf_counter_ns()))
    first = ranks.broadcast_json(readings)
    return clock_offset_ns(readings, first)[0] if ranks.rank else 0


def role_bytes(module: RLModule, optimizers: Iterable[Optimizer]) -> dict[str, dict[str, int]]:
    """Returns role → kind → bytes of the role's model on this rank; shared parameters count for the first role."""
    states = {parameter: state for optimizer in optimizers for parameter, state in optimizer.state.items()}
    counted_ids: set[int] = set()
    result: dict[str, dict[str, int]] = {}
    for role in getattr(module, "parallel_models", {}):
        sizes = result.setdefault(role, {"parameters": 0, "gradients": 0, "optimizer": 0})
        for parameter in getattr(module, role).parameters():
            if id(parameter) in counted_ids:
                continue
            counted_ids.add(id(parameter))
            sizes["parameters"] += _num_bytes(parameter)
            sizes["gradients"] += _num_bytes(parameter.grad)
            state = states.get(parameter, {})
            sizes["optimizer"] += sum(_num_bytes(value) for value in state.values() if hasattr(value, "element_size"))
    return result


def _num_bytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else local(tensor).nbytes


def memory_text(summary: SummaryJson) -> str:
    """Formats the memory of this process by phase, of models by role, and of child processes."""
    peaks = [f"{phase} {_joined(kinds)}" for phase, kinds in summary["memory_peak_mib"].items()]
    roles = [f"{role} {_joined(sizes)}" for role, sizes in summary["memory_of_roles_mib"].items()]
    lines = ["Memory of rank 0 in MiB", f"  peak of each phase: {'; '.join(peaks)}"]
    lines += [f"  models: {'; '.join(roles)}"] if roles else []
    children = summary["memory_of_children_mib"]
    return "\n".join([*lines, *([f"  processes it started: {_joined(children)}"] if children else [])])


def _in_mib(sizes: dict[str, dict[str, int]]) -> dict[str, dict[str, float]]:
    return {name: {kind: round(size / _MIB, 2) for kind, size in kinds.items()} for name, kinds in sizes.items()}


def _joined(sizes: dict[str, float]) -> str:
    return ", ".join(f"{kind} {size:.6g}" for kind, size in sizes.items())
