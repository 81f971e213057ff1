"""The `agents` column: which agent in an episode generated a token; -1 for tokens that the policy only read.

A value is `role * COPIES + copy`: role counts the names in the environment's `agents`, and copy counts the agents with
one role, for example several solvers of one proposed task.
"""

from lightrl.columns.column import Column

COPIES = 1 << 16
AGENTS = Column("agents", "i", fill=-1, as_runs=True)
