"""Threads, event loops and processes, and how to cross between them.

Reading order:
    loop_thread.py   runs an event loop in its own thread, and calls into it; sets futures' results on any loop
    in_thread.py     runs blocking functions in threads; runs user code with a deadline; runs every step of a shutdown
    abandon.py       waits for several tasks, and abandons those no longer needed; ends a run at a task's first error
    owner.py         finds which process created a file, and whether that process is still running
    streams.py       reads lines and HTTP bodies; exchanges messages between the event loops of two processes
    listener.py      accepts a server's connections, and limits clients without the key
    child_process.py starts child processes that exit with their parent, even if the parent is killed
    parent_guard.py  the process between parent and child that ends the child

May import only errors from lightrl.
"""
