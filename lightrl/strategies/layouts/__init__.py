"""Layouts: ways to run a microbatch through a model without padding. All give the same results.

Reading order:
    probes.py            find out, on a few tokens, which layouts a model supports; packing_trial.py: without memory
    shared_prefix.py     computes the tokens with which rows begin alike once
    packed_attention.py  attention over a packed row without a mask; context parallelism
    branches.py          turns a trajectory that is a tree of conversations into rows
    pieces.py            cuts a microbatch that is too large, with the same loss and gradient
    halves.py            runs a small model in two threads
"""
