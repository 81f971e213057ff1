"""AgentWorkflow: serves the policy to an agent through OpenAI's or Anthropic's API, and records trajectories.

Reading order:
    workflow.py           AgentWorkflow: runs a function, or a program (command.py)
    endpoint.py           the HTTP server that agents call; frozen_models.py forwards requests to other models
    policy_access.py      serves the policy to evaluation tools; nothing is recorded
    session.py            records the requests of one trajectory as turns of tokens
    constraints.py        turns the answer format that a request asks for into a grammar for the engine
    completion_parser.py  splits a completion into thinking, text and tool calls
    protocol.py           requests and answers; chat_protocol.py, messages_protocol.py and responses_protocol.py
                          implement the routes of OpenAI and Anthropic

May import: the same as workflows/.
"""

from lightrl.workflows.agent_workflow.command import (
    AgentCommand,
    AgentFailed,
    AgentLimits,
    AgentResult,
    StartProgram,
    hide_secrets,
    row_folder,
    run_under_guard,
)
from lightrl.workflows.agent_workflow.endpoint import serving_policy
from lightrl.workflows.agent_workflow.frozen_models import FrozenModel
from lightrl.workflows.agent_workflow.policy_access import PolicyAccess
from lightrl.workflows.agent_workflow.protocol import RequestPattern
from lightrl.workflows.agent_workflow.workflow import AgentWorkflow

__all__ = ["AgentLimits", "AgentResult", "AgentWorkflow", "FrozenModel", "PolicyAccess", "RequestPattern"]
__all__ += ["AgentCommand", "AgentFailed", "StartProgram", "hide_secrets", "row_folder", "run_under_guard"]
__all__ += ["serving_policy"]
