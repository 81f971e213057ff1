"""Processes that an engine or `lightrl serve` starts: how, and what happens when they end.

Reading order:
    process.py        one process: started, awaited, probed, ended
    model_process.py  a server of a model; each kind has a subclass
    command.py        what command lines share: flags, devices, an environment without secrets
    keeper.py         several processes; restarts of those that end or hang
    own_processes.py  all that an engine starts, from its start to its close

May import: what servers/ may, never sync/.
"""
