"""Task folders in Harbor's format: their environment is the agent's machine, and their tests give the reward.

Reading order:
    folder.py      TaskFolder: one folder (instruction.md, task.toml, environment/, tests/)
    rows.py        rows: turns a folder of tasks into data, and prepares their environments
    workflow.py    TaskWorkflow: an AgentWorkflow whose agent works in the task's environment
    verifier.py    Verifier: runs the tests on the agent's work
    runtime.py     Runtime, the interface to machines, and the built-in values of the `runtime` setting
    local.py       this machine's sandbox, for environments that consist of files
    containers.py  docker and podman

May import: the same as workflows/. To add a runtime: subclass Runtime, and name its class in the setting.
"""

from lightrl.workflows.task_folders.folder import TaskFolder
from lightrl.workflows.task_folders.rows import rows
from lightrl.workflows.task_folders.runtime import Runtime, runtime_of
from lightrl.workflows.task_folders.verifier import Verifier
from lightrl.workflows.task_folders.workflow import TaskWorkflow

__all__ = ["Runtime", "TaskFolder", "TaskWorkflow", "Verifier", "rows", "runtime_of"]
