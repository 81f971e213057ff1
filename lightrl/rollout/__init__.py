"""Rollouts: prompts in, judged trajectories out, asynchronously. Knows no engine by name, and no
Lightning, rl_trainer.py aside.

Reading order:
    protocol.py       Rollout: what the loop and the callbacks use
    settings.py       RolloutSettings: sizes, bounds, what is dropped
    controller.py     keeps groups in flight and hands over batches
      group_book.py   decides what starts and what may be trained on; group_runs.py  starts and reports it
      player.py       plays and judges one trajectory; group_player.py  those of a group in one request
      pooled_player.py  plays it in another process: workflow_pool.py  has them, workflow_worker.py  is one
      tasks.py        the first error of a task ends the run
    prompt_cursor.py  which prompt comes next
    group_filter.py, drop_tally.py  which groups are replaced, and how many
    saved_state.py    what a checkpoint has of all this; written.py  of the groups that run
    recorded.py       hands over the groups of an earlier run
    rl_trainer.py     RLTrainer: the trainer as the loop and the callbacks see it

May import: errors, checks, concurrency, trajectory, rewards, weights, engines, workflows.
"""

from lightrl.rollout.controller import RolloutController
from lightrl.rollout.drop_tally import Drop
from lightrl.rollout.group_filter import GroupFilter
from lightrl.rollout.prompt_cursor import Curriculum
from lightrl.rollout.protocol import Rollout
from lightrl.rollout.recorded import RecordedRollout
from lightrl.rollout.settings import RolloutSettings

__all__ = ["Curriculum", "Drop", "GroupFilter", "RecordedRollout", "Rollout", "RolloutController", "RolloutSettings"]
