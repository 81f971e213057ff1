"""Layouts: ways to run a microbatch through a model without padding. All give the same results.

Reading order:
    probes.py            find out, on a few tokens, which layouts a model supports; packing_trial.py: without memory
    shared_prefix.py     runs a group's prompt once, or once for several completions
    packed_attention.py  attention over a packed row without a mask; context parallelism
    branches.py          turns a trajectory that is a tree of conversations into rows
    halves.py            runs a small model in two threads
"""
