"""Layouts: ways to run a microbatch through a model without padding. All give the same results.

Reading order:
    probes.py            tests with a few tokens which layouts a model allows; packing_trial.py uses the meta device
    shared_prefix.py     computes a prefix that several rows share once, not once per row
    packed_attention.py  attention over a packed row without a mask; context parallelism
    branches.py          turns a trajectory that is a tree of conversations into rows
    pieces.py            splits an oversized microbatch without changing the loss or gradient
    halves.py            runs a small model in two threads
"""
