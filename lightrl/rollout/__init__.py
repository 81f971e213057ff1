"""Rollouts turn prompts into trajectories with rewards, asynchronously and with any engine.

Reading order:
    protocol.py         the interface, Rollout, and RecordedRollout, which replays the groups from an earlier run
    controller.py       keeps groups in flight and hands over batches; saves its state in checkpoints
    group_scheduler.py  decides which groups start, are trained on and are replaced, as set in RolloutSettings
    runner.py           runs the trajectories in a group and computes rewards; lets groups start together
      workflow_pool.py  runs workflows in other processes, each of which executes workflow_worker.py
    prompts.py          decides which prompt comes next
    rl_trainer.py       RLTrainer, the part of the trainer that loops and callbacks use; only this file needs Lightning

May import: errors, checks, concurrency, trajectory, rewards, weights, engines, workflows.
"""

from lightrl.rollout.controller import RolloutController
from lightrl.rollout.group_scheduler import Drop, GroupFilter, RolloutSettings
from lightrl.rollout.prompts import Curriculum
from lightrl.rollout.protocol import RecordedRollout, Rollout

__all__ = ["Curriculum", "Drop", "GroupFilter", "RecordedRollout", "Rollout", "RolloutController", "RolloutSettings"]
