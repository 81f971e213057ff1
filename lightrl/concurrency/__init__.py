"""Threads, event loops and processes, and how to cross between them.

Reading order:
    loop_thread.py   an event loop in a thread of its own, and calls into it; calls and results for any loop
    in_thread.py     a blocking function in a thread, awaited or waited for; user code with a deadline; steps of an end
    abandon.py       tasks that are waited for together, and abandoned when nobody needs them
    owner.py         whose a file is, and whether that process still runs
    streams.py       lines, the body of an HTTP answer, messages between the event loops of two processes
    listener.py      the connections of a server, limited for those without its key
    child_process.py child processes that end with their parent, whatever happens to it
    parent_guard.py  the process between the two that ends them

May import: nothing of lightrl but errors.
"""
