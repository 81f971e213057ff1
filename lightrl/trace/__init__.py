"""Trace: what each process did when, as Chrome events, and where the time of an iteration went.

Reading order:
    spans.py    `span`: measures a block, and keeps it while a trace is open
    file.py     spans to Chrome's JSON, a line for each; one file per process, joined at the end
    areas.py    the time of an iteration by area: rollout, reward, score, update, sync, data
    memory.py   peaks of the host's and the device's memory within a block

May import: nothing of lightrl, nor torch (memory.py looks for it among what is loaded). `callbacks/trace.py` opens the
trace and prints the summary; `lightrl inspect` shows the files. To trace one more thing: `with span(...)` around it.
"""

from lightrl.trace.areas import Summary, area_times
from lightrl.trace.file import TraceFile, join_traces, trace_files
from lightrl.trace.memory import MemoryPeaks
from lightrl.trace.spans import Event, Tape, clock_offset_ns, in_microbatch_spans, keep, record, span

__all__ = [
    "Event",
    "MemoryPeaks",
    "Summary",
    "Tape",
    "TraceFile",
    "area_times",
    "clock_offset_ns",
    "in_microbatch_spans",
    "join_traces",
    "keep",
    "record",
    "span",
    "trace_files",
]
