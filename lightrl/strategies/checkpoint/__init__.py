"""Checkpoints: written whole or not at all, and read as data, so that no code runs.

Reading order:
    one_file.py      checkpoints of one process; how one process resumes
    folder.py        checkpoints of several processes, each rank's part by global names
    fit.py           whether a checkpoint fits the run, with errors that say what differs
    safe_reader.py   torch's formats without its pickles; damaged bytes and mixed folders are refused
    atomic_write.py  files that are whole or absent; writes in the background
"""

from lightrl.strategies.checkpoint.one_file import AtomicCheckpointIO

__all__ = ["AtomicCheckpointIO"]
