"""The guard of LocalSandbox: a process that runs one program after another and cleans up after each.

It uses only the standard library, so it starts without lightrl's dependencies. It reads a JSON request per line from
stdin, and writes a reply per line to stdout. When stdin closes (its client has ended), it kills the program and exits.

    guard ──fork──► starter: makes the namespaces, forks, exits
                       └──fork──► keeper: first process of the pid namespace, counts the processes and their memory
                                     └──fork──► program: drops its privileges one by one, then executes Python

When the keeper dies, Linux kills its whole namespace; without namespaces the guard, which inherits all orphans
(PR_SET_CHILD_SUBREAPER), kills them until none is left. It reports the layers of protection in force (see local.py).

Reading order:
    guard.py    requests and replies; collects output, enforces limits, kills
    program.py  starter, keeper and program: the three processes below the guard
    layers.py   how a program drops privileges: namespaces, user, files, system calls, resources
    view.py     the machine as an agent sees it: its own /etc and /tmp
    network.py  what an agent can reach from its network namespace: its endpoint, and a proxy to allowed hosts
    memory.py   limits on the total memory of a program's processes, and on the size of its files
"""
