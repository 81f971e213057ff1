"""What a run takes, on paper: memory of its ranks and servers, messages, batch sizes. A leaf.

Reading order:
    costs.py        a strategy's costs, from a model's config
    memory.py       a run's ranks and servers, and which settings make fit what does not
    planned_run.py  reads the facts of a run from its classes; what a GPU's memory decides in `fit`

`lightrl plan`, `launch` and `doctor run` use it, and `lightrl fit` by its entry point (checks/entry_points.py).

May import: everything up to trainer.
"""
