"""The guard of LocalSandbox: a process that runs one program after another and leaves nothing of it behind.

It uses the standard library only, so that it starts without lightrl's packages. It reads one JSON request per line from
stdin and writes one JSON reply per line to stdout. When its stdin closes, because the process that asked has ended in
whatever way, it kills what runs and exits.

    guard ──fork──► starter: makes the namespaces, forks, exits
                       └──fork──► keeper: first process of the pid namespace, watches number and memory of processes
                                     └──fork──► program: gives up its rights one by one, then becomes Python

When the keeper dies, Linux kills all of its namespace at once; without namespaces the guard, which inherits all orphans
(PR_SET_CHILD_SUBREAPER), kills them until there are none. Each layer of protection is tried and reported; sandbox.py
says what each is good for.

Reading order:
    guard.py    requests and replies; collects output, enforces limits, kills
    program.py  starter, keeper and program: the three processes below the guard; the port of an agent's endpoint
    layers.py   the rights that a program gives up: namespaces, user, files, system calls, resources
    memory.py   the memory of all of its processes together
"""
