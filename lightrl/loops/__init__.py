"""The loop: what happens between two batches of Lightning's fit loop when the module is an RLModule.

Reading order:
    rollout_stage.py  what a fit or validate opens, checks and closes: reward worker, engine, rollout
    rollout_loop.py   one iteration from groups to new weights, called by Lightning's fit loop
    score.py          model calls and advantages on the whole iteration
    run_calls.py      runs each call as soon as its inputs are ready, on the ranks that hold its model
    update.py         minibatches, microbatches, loss reduction, the optimizer step
    metrics.py        means, sums and bounds that do not depend on microbatches or ranks; step_log.py logs them together
    resume.py         what a resumed run continues from; the check that fast_dev_run makes of it
    interrupt.py      Ctrl-C and SIGTERM wait for the end of an update
    shared_rollout.py rank 0's rollout controller as every rank sees it
    sharing.py        sends rows, rewards and call outputs to the ranks that need them; shared_tables.py: attachments

May import: everything below; those private names of Lightning that tests/test_structure.py lists.
"""

from lightrl.loops.resume import CheckpointConnector, check_resume
from lightrl.loops.rollout_loop import RolloutLoop, logging_allowed
from lightrl.loops.rollout_stage import RolloutStage, devices_text
from lightrl.loops.shared_rollout import SharedRollout
from lightrl.loops.step_log import StepLog, keep_rows

__all__ = [
    "CheckpointConnector",
    "RolloutLoop",
    "RolloutStage",
    "SharedRollout",
    "StepLog",
    "keep_rows",
    "check_resume",
    "devices_text",
    "logging_allowed",
]
