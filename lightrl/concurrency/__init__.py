"""Threads, event loops and processes, and how to cross between them.

Reading order:
    loop_thread.py   an event loop in a thread of its own, and calls into it
    wake_up.py       calls and results for event loops, from other threads
    in_thread.py     a blocking function in a thread, awaited
    abandon.py       tasks that are waited for together, and abandoned when nobody needs them
    daemon_future.py  the same for a caller that blocks, with a deadline; side_by_side.py: several at once
    call_within.py   user code with a deadline, which never blocks the loop; every step of an end (call_all)
    body.py          an HTTP answer, as much of it as may be in memory
    owner.py         whose a file is, and whether that process still runs
    line_buffer.py   the lines of a stream, in bounded memory
    parent_guard.py  child processes that end with their parent, whatever happens to it
    fresh_python.py  another interpreter that imports what this one does; channel.py: messages between their event loops
    guarded_processes.py  commands under such guards, started, watched and ended by name

May import: nothing of lightrl but errors.
"""
