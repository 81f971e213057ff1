"""Ranks: the processes of a run, what they exchange, and who notices that one fails.

Reading order:
    processes.py       sums, rows, messages from rank 0
    watch.py           a rank that fails ends all; one that hangs is named
    role_mesh.py       a role on ranks of its own
    shared_folder.py   whether all hosts see the same folder
    planned_gather.py  sharded parameters whole, each on one rank
"""
