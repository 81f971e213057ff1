"""Estimates what a run needs: memory of its ranks and servers, communication, batch sizes. A leaf.

Reading order:
    costs.py        a strategy's costs, from a model's config
    memory.py       a run's ranks and servers, and the settings to change if they do not fit
    planned_run.py  reads the facts of a run from its classes; sets what a GPU's memory decides in `fit`

`lightrl plan`, `launch` and `doctor run` use it, and `lightrl fit` through its entry point (checks/entry_points.py).

May import: everything up to trainer.
"""
