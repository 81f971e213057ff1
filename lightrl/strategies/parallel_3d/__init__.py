"""Parallel3DStrategy: pipeline, data and tensor parallelism for models whose families have plans in transformers.

Reading order:
    strategy.py         Parallel3DStrategy, and a split model's forward and backward
    stages.py           this rank's part of a model; pipeline.py: plans and runs pipeline schedules
    tensor_plans.py     how to split a model, from transformers' plans
    tensor_parallel.py  splits parameters over tp, and computes logprobs of a split vocabulary

May import: the same as strategies/.
"""

from lightrl.strategies.parallel_3d.strategy import Parallel3DStrategy
from lightrl.strategies.parallel_3d.tensor_plans import check_sizes, head_size, split_layers

__all__ = ["Parallel3DStrategy", "check_sizes", "head_size", "split_layers"]
