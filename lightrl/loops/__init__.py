"""The loop: what happens between two batches of Lightning's fit loop when the module is an RLModule.

Reading order:
    rollout_stage.py  what a fit or validate opens, checks and closes: reward worker, engine, rollout
    rollout_loop.py   one iteration from groups to new weights, called by Lightning's fit loop
    score.py          model calls and advantages on the whole iteration
    run_calls.py      each call as soon as what it needs is there, where its model is
    update.py         minibatches, microbatches, loss reduction, the optimizer step
    metrics.py        means, sums and bounds that do not depend on microbatches or ranks; step_log.py: logged together
    resume.py         what a resumed run continues from; fast_dev_run's check of it
    interrupt.py      Ctrl-C and SIGTERM wait for the end of an update
    shared_rollout.py rank 0's rollout controller as every rank sees it
    sharing.py        rows, rewards and outputs of calls to the ranks that work on them; shared_tables.py: tables

May import: everything below; Lightning's private names, each listed in tests/test_structure.py.
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
