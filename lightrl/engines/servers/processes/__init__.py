"""Processes that an engine or `lightrl serve` starts: command lines, starts, restarts and ends.

Reading order:
    process.py        one process: start, readiness, health check, end
    model_process.py  a server of a model; each kind has a subclass
    command.py        shared by all command lines: flags, devices, an environment without secrets
    keeper.py         several processes; restarts those that end or hang

May import: what servers/ may, except sync/.
"""
