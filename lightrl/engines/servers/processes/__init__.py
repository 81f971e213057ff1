"""Processes that an engine or `lightrl serve` starts: command lines, starts, restarts and ends.

Reading order:
    process.py        one process: start, readiness, health check, end
    model_process.py  a model's server; each kind of server has a subclass
    command.py        flags, devices and an environment without secrets, for all command lines
    keeper.py         starts and ends several processes; restarts those that end or hang
    own_processes.py  all processes of an engine, from its start to its close

May import: what servers/ may, except sync/.
"""
