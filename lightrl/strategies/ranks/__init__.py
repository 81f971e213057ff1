"""Ranks: a run's processes, their communication, and failure detection.

Reading order:
    processes.py       exchanges sums, rows and messages from rank 0
    watch.py           ends all ranks if one fails; names a rank that hangs
    role_mesh.py       roles that have separate ranks
    shared_folder.py   checks that all hosts see the same folder
    planned_gather.py  gathers sharded parameters, each on one rank
"""
