"""Workflows: turn a prompt into a trajectory, with an engine that generates and an environment that answers.

Reading order:
    workflow.py       Workflow, and SingleTurn: one completion for each prompt
    multi_turn/       several turns, with an environment that answers the policy
      tools/          an environment with tools that the policy calls: Python functions, or tools on an MCP server
      openenv.py      environments on an OpenEnv server
    multi_agent.py    several agents, all played by the policy
    agent_workflow/   an agent (a function or a program) that calls the policy through OpenAI's or Anthropic's API
      task_folders/   an agent in a task's environment, whose tests give the reward

May import: errors, checks, concurrency, trajectory, rewards, engines. To add one: subclass Workflow and write `run`.
"""

from typing import TYPE_CHECKING

from lightrl import loaded_on_first_use

if TYPE_CHECKING:
    from lightrl.workflows.agent_workflow import AgentResult, AgentWorkflow
    from lightrl.workflows.multi_agent import AgentEnvironment, MultiAgent
    from lightrl.workflows.multi_turn import Environment, MultiTurn, RetryWithFeedback
    from lightrl.workflows.openenv import OpenEnv, OpenEnvTools
    from lightrl.workflows.task_folders import TaskWorkflow
    from lightrl.workflows.tools import MCPServer, ToolEnvironment
    from lightrl.workflows.workflow import SingleTurn, Workflow

# Loaded on first use, so that a reward process that imports a user's environment starts without torch.
_NAMES = {
    "agent_workflow": ("AgentResult", "AgentWorkflow"),
    "multi_agent": ("AgentEnvironment", "MultiAgent"),
    "multi_turn": ("Environment", "MultiTurn", "RetryWithFeedback"),
    "openenv": ("OpenEnv", "OpenEnvTools"),
    "task_folders": ("TaskWorkflow",),
    "tools": ("MCPServer", "ToolEnvironment"),
    "workflow": ("SingleTurn", "Workflow"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "AgentEnvironment", "AgentResult", "AgentWorkflow", "Environment", "MCPServer", "MultiAgent", "MultiTurn",
    "OpenEnv", "OpenEnvTools", "RetryWithFeedback", "SingleTurn", "TaskWorkflow", "ToolEnvironment", "Workflow",
]  # fmt: skip

__getattr__ = loaded_on_first_use(__name__, _HOMES)
