"""Trace: a callback that records what each process of a run did and when, and prints where the time went.

Reading order:
    callback.py  Trace, which opens the trace, measures its own cost and writes the summary
    files.py     trace files in Chrome's format, clocks of several machines, peak memory of a block
    areas.py     the time of an iteration by area: rollout, reward, score, update, sync, data

May import: what callbacks/ may.
"""

from lightrl.callbacks.trace.areas import advice_of, area_times, summary_of
from lightrl.callbacks.trace.callback import Trace

__all__ = ["Trace", "advice_of", "area_times", "summary_of"]
