"""Estimates what a run needs: memory of its ranks and servers, communication, batch sizes. A leaf.

Reading order:
    costs.py        a strategy's costs, from a model's config
    memory.py       the memory of a run's ranks and servers, and the settings to change if it is too small
    speed.py        the time of an iteration by phase, and its cost, on known GPUs
    planned_run.py  makes a PlannedRun from a run's classes; in `fit`, chooses the settings that depend on GPU memory

`lightrl plan`, `launch` and `doctor run` import it; `lightrl fit` uses its entry point (checks/entry_points.py).

May import: everything up to trainer.
"""

from lightrl.plan.costs import USABLE_FRACTION
from lightrl.plan.memory import (
    Misfit,
    PlannedRun,
    UnknownMemory,
    bytes_text,
    decoding_rows,
    engine_memory,
    memory_line,
    misfits,
    num_devices,
    rank_memories,
    ranks_text,
    role_cost,
    rows_of,
)
from lightrl.plan.planned_run import TrainerSettings, planned, use_estimate
from lightrl.plan.speed import GPUS, MBU, MFU, Gpu, PlannedTime, planned_time

__all__ = ["GPUS", "MBU", "MFU", "USABLE_FRACTION", "Gpu", "Misfit", "PlannedRun", "PlannedTime", "TrainerSettings"]
__all__ += ["UnknownMemory", "bytes_text", "decoding_rows", "engine_memory", "memory_line", "misfits", "num_devices"]
__all__ += ["planned", "rank_memories", "ranks_text", "planned_time", "role_cost", "rows_of", "use_estimate"]
