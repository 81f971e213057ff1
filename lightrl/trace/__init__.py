"""Trace: records what each process did and when, while a trace is open.

Reading order:
    spans.py    `span` measures a block, and records it while a trace is open; reads the memory of process and host

May import neither lightrl nor torch. `callbacks/trace/` opens the trace, writes its files and prints the summary;
`lightrl inspect` shows the files. To trace a block, put `with span(...)` around it.
"""

from lightrl.trace.spans import Event, Tape, in_microbatch_spans, record, set_tape, span, trace_files

__all__ = ["Event", "Tape", "in_microbatch_spans", "record", "set_tape", "span", "trace_files"]
