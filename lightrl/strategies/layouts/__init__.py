"""Layouts: how a microbatch goes through a model without its padding; all give the same numbers.

Reading order:
    forms.py             rectangles, shared prompts or a packed row: which for this microbatch, and its forward
    probes.py            what a model can do, found on a few tokens
    shared_prefix.py     a group's prompt goes through the model once, or once for several completions
    packed_attention.py  attention over a packed row, without a mask of its width; context parallelism
    branches.py          a trajectory that is a tree of conversations, as rows
    halves.py            two threads for a small model
"""
