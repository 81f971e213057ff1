"""Trace: what each process did when, as Chrome events, and where the time of an iteration went.

Reading order:
    spans.py    `span`: measures a block, kept while a trace is open; files of spans; peaks of memory within a block
    areas.py    the time of an iteration by area: rollout, reward, score, update, sync, data

May import: nothing of lightrl, nor torch (spans.py looks for it among what is loaded). `callbacks/trace.py` opens the
trace and prints the summary; `lightrl inspect` shows the files. To trace one more thing: `with span(...)` around it.
"""

from lightrl.trace.areas import area_times
from lightrl.trace.spans import (
    Event,
    MemoryPeaks,
    Tape,
    TraceFile,
    clock_offset_ns,
    in_microbatch_spans,
    join_traces,
    keep,
    record,
    span,
    trace_files,
)

__all__ = ["Event", "MemoryPeaks", "Tape", "TraceFile", "area_times", "clock_offset_ns"]
__all__ += ["in_microbatch_spans", "join_traces", "keep", "record", "span", "trace_files"]
