"""Tasks as folders: Harbor's format as data, its environment as the agent's machine, and its tests as the reward.

Reading order:
    folder.py      Task: one folder (instruction.md, task.toml, environment/, tests/)
    rows.py        rows: a folder of tasks as data; prepares their environments
    workflow.py    TaskWorkflow: an AgentWorkflow whose agent works in the task's environment
    verifier.py    Verifier: runs the tests on what the agent left
    runtime.py     Runtime, the interface of machines, and the names that the setting `runtime` knows
    local.py       this machine's sandbox, for environments that consist of files
    containers.py  docker, podman and apptainer

May import: what workflows/ may. To add a runtime: subclass Runtime, and name its class in the setting.
"""

from lightrl.workflows.tasks.folder import Task
from lightrl.workflows.tasks.rows import rows
from lightrl.workflows.tasks.runtime import Runtime, runtime_of
from lightrl.workflows.tasks.verifier import Verifier
from lightrl.workflows.tasks.workflow import TaskWorkflow

__all__ = ["Runtime", "Task", "TaskWorkflow", "Verifier", "rows", "runtime_of"]
