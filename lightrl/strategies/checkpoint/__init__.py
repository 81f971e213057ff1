"""Checkpoints are written completely or not at all, and read as data, so that no code runs.

Reading order:
    one_file.py      saves and loads a single process's checkpoints
    folder.py        checkpoints from several processes: each rank saves its part, under global parameter names
    fit.py           checks whether a checkpoint fits the run, with errors that name the difference
    safe_reader.py   reads torch's formats without running pickles; refuses damaged files and mixed folders
    atomic_write.py  writes files that are complete or absent, also in the background
"""

from lightrl.strategies.checkpoint.one_file import AtomicCheckpointIO

__all__ = ["AtomicCheckpointIO"]
