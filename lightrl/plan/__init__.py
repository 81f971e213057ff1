"""An optional part that estimates a run's needs: memory of its ranks and servers, communication, batch sizes.

Reading order:
    sizes.py        a model's size: parameters and widths of its decoder layers, counted on the meta device
    costs.py        a strategy's costs, from a model's size
    memory.py       the memory of a run's ranks and servers
    speed.py        the time of each phase of an iteration, and the iteration's cost, on known GPUs
    advice.py       the layouts in which a run fits, and the settings to change if it needs too much memory
    planned_run.py  makes a PlannedRun from a run's classes; in `fit`, chooses the settings that depend on GPU memory

`lightrl plan`, `launch` and `doctor run` import it; `lightrl fit` uses its entry point (checks/entry_points.py).

May import: everything up to trainer.
"""

from lightrl.plan.advice import DEFAULT_GPU, Choice, Misfit, choices, misfits, settings_of, settings_text, smallest
from lightrl.plan.costs import USABLE_FRACTION
from lightrl.plan.memory import (
    NODE_RANKS,
    PlannedRun,
    UnknownMemory,
    bytes_text,
    decoding_rows,
    engine_memory,
    memory_line,
    num_devices,
    num_nodes,
    rank_memories,
    ranks_text,
    role_cost,
    rows_of,
)
from lightrl.plan.planned_run import TrainerSettings, planned, use_estimate
from lightrl.plan.speed import GPUS, MBU, MFU, Gpu, PlannedTime, planned_time

__all__ = ["DEFAULT_GPU", "GPUS", "MBU", "MFU", "NODE_RANKS", "USABLE_FRACTION", "Choice", "Gpu", "Misfit"]
__all__ += ["PlannedRun", "PlannedTime", "TrainerSettings", "UnknownMemory", "bytes_text", "choices", "decoding_rows"]
__all__ += ["engine_memory", "memory_line", "misfits", "num_devices", "num_nodes", "planned", "planned_time"]
__all__ += ["rank_memories", "ranks_text", "role_cost", "rows_of", "settings_of", "settings_text", "smallest"]
__all__ += ["use_estimate"]
