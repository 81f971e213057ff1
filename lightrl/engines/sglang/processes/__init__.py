"""Processes that the engine or `lightrl serve` starts: how, and what happens when they end.

Reading order:
    process.py    one process: started, awaited, probed, ended
    command.py    the command line of an SGLang server, and its devices
    keeper.py     several processes; restarts of those that end or hang

May import: what sglang/ may, never sync/.
"""
