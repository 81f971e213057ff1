"""Threads, event loops and processes, and how to cross between them.

Reading order:
    loop_thread.py   an event loop in a thread of its own, and calls into it
    wake_up.py       calls and results for event loops, from other threads
    in_thread.py     a blocking function in a thread, awaited; user code with a deadline; call_all: steps of an end
    daemon_future.py  the same for a caller that blocks, with a deadline; several at once
    abandon.py       tasks that are waited for together, and abandoned when nobody needs them
    owner.py         whose a file is, and whether that process still runs
    line_buffer.py   the lines of a stream, the body of an HTTP answer, in bounded memory
    parent_guard.py  child processes that end with their parent, whatever happens to it
    channel.py       messages between the event loops of two processes
    guarded_processes.py  commands under such guards, by name; an interpreter that imports what this one does

May import: nothing of lightrl but errors.
"""
