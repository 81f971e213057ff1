"""Rollouts: prompts in, trajectories with rewards out, asynchronously. Works with any engine.

Reading order:
    protocol.py         Rollout: what the loop and the callbacks use; RecordedRollout: the groups of an earlier run
    controller.py       keeps groups in flight and hands over batches; the rollout's part of a checkpoint
    group_scheduler.py  decides which groups start, are trained on and are replaced, within RolloutSettings
    runner.py           runs the trajectories of a group and computes their rewards; groups start together
      workflow_pool.py  runs them in other processes, each of which executes workflow_worker.py
    prompts.py          which prompt comes next
    rl_trainer.py       RLTrainer: the trainer as the loop and the callbacks see it; the only file that needs Lightning

May import: errors, checks, concurrency, trajectory, rewards, weights, engines, workflows.
"""

from lightrl.rollout.controller import RolloutController
from lightrl.rollout.group_scheduler import Drop, GroupFilter, RolloutSettings
from lightrl.rollout.prompts import Curriculum
from lightrl.rollout.protocol import RecordedRollout, Rollout

__all__ = ["Curriculum", "Drop", "GroupFilter", "RecordedRollout", "Rollout", "RolloutController", "RolloutSettings"]
