"""Threads, event loops and processes, and the ways between them.

Reading order:
    loop_thread.py  an event loop in a thread of its own, and calls into it
    call_within.py  user code with a deadline that never blocks the loop

May import: nothing of lightrl but errors.
"""
