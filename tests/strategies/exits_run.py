"""Ends some processes right after a collective of gloo, whose thread still waits for the interpreter's lock.

Prints the exit codes of those that did not end well.
"""

import os
import sys

import torch
import torch.distributed as dist

from lightrl.strategies.fsdp2 import destroy_groups_at_exit

NUM_PROCESSES = 16


def leave_after_a_collective() -> None:
    destroy_groups_at_exit()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sys.modules["kept"] = dist.group.WORLD  # as a strategy keeps it
    sys.setswitchinterval(1000.0)  # the lock goes to another thread only where this one waits
    tensor = torch.ones(3)
    work = dist.broadcast(tensor, 0, async_op=True)
    while not work.is_completed():
        pass


def main() -> None:
    children = []
    for _ in range(NUM_PROCESSES):
        child = os.fork()
        if child == 0:
            leave_after_a_collective()
            return
        children.append(child)
    codes = (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    sys.stdout.write(f"{[code for code in codes if code]}\n")


if __name__ == "__main__":
    main()
