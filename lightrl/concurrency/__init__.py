"""Threads, event loops and processes, and how to cross between them.

Reading order:
    loop_thread.py   an event loop in its own thread, and calls into it; results for futures of any loop
    in_thread.py     runs a blocking function in a thread; user code with a deadline; shutdown steps that all run
    abandon.py       waits for several tasks, and abandons those that nobody needs; tasks whose first error ends the run
    owner.py         which process created a file, and whether that process is still running
    streams.py       lines, the body of an HTTP response, messages between the event loops of two processes
    listener.py      a server's connections, with limits for clients without its key
    child_process.py child processes that exit with their parent, even if it is killed
    parent_guard.py  the process between parent and child that ends the child

May import: nothing of lightrl but errors.
"""
