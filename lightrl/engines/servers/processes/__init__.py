"""Processes that an engine or `lightrl serve` starts: how they are started, restarted and stopped.

Reading order:
    process.py        one process: start, readiness, health check, stop
    model_process.py  a model server; each kind has a subclass
    command.py        helpers for all command lines: flags, devices, an environment without secrets
    keeper.py         several processes; restarts those that exit or hang

May import: the same as servers/, except sync/.
"""
