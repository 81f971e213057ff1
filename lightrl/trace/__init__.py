"""Trace: records what each process did and when, as Chrome events, and computes where an iteration's time went.

Reading order:
    spans.py    `span` measures a block, and records it while a trace is open; trace files; peak memory of a block
    areas.py    the time of an iteration by area: rollout, reward, score, update, sync, data

May import neither lightrl nor torch (spans.py uses torch only if it is already imported). `callbacks/trace.py` opens
the trace and prints the summary; `lightrl inspect` shows the files. To trace a block, put `with span(...)` around it.
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
    record,
    set_tape,
    span,
    trace_files,
)

__all__ = ["Event", "MemoryPeaks", "Tape", "TraceFile", "area_times", "clock_offset_ns"]
__all__ += ["in_microbatch_spans", "join_traces", "record", "set_tape", "span", "trace_files"]
