"""Layouts: how a microbatch goes through a model without its padding; all give the same results.

Reading order:
    probes.py            tests on a few tokens which layouts a model supports
    shared_prefix.py     a group's prompt goes through the model once, or once for several completions
    packed_attention.py  attention over a packed row without a mask; context parallelism
    branches.py          a trajectory that is a tree of conversations, as rows
    halves.py            two threads for a small model
"""
