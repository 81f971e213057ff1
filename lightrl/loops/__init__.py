"""The training loop: for each training batch, Lightning's fit loop runs one iteration of an RLModule.

Reading order:
    rollout_stage.py  opens, checks and closes the reward worker, engine and rollout of a fit or validate
    rollout_loop.py   one iteration from groups to new weights, called by Lightning's fit loop; Ctrl-C and SIGTERM
    score.py          model calls and advantages on the whole iteration, each as soon as its inputs are ready
    update.py         loss and metrics for a minibatch, which do not depend on its division into microbatches or ranks
    step_log.py       logs an iteration's numbers together
    resume.py         the state that a resumed run continues from, and the check of this state in fast_dev_run
    shared_rollout.py gives every rank the results of rank 0's rollout controller
    sharing.py        sends rows, rewards and call outputs to the ranks that need them; shared_tables.py: attachments

May import: everything below, and the private names of Lightning that tests/test_structure.py lists.
"""

from lightrl.loops.resume import CheckpointConnector, check_exists, check_resume
from lightrl.loops.rollout_loop import RolloutLoop, logging_allowed
from lightrl.loops.rollout_stage import RolloutStage, devices_text
from lightrl.loops.shared_rollout import SharedRollout
from lightrl.loops.step_log import StepLog, keep_rows

__all__ = ["CheckpointConnector", "RolloutLoop", "RolloutStage", "SharedRollout", "StepLog", "check_exists"]
__all__ += ["check_resume", "devices_text", "keep_rows", "logging_allowed"]
