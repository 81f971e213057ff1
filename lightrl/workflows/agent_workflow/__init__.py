"""AgentWorkflow: an agent that uses this process as its OpenAI or Anthropic, and becomes trajectories.

Reading order:
    workflow.py           AgentWorkflow: runs a function, or a program (command.py)
    endpoint.py           the HTTP server that agents call
    session.py            the requests of one trajectory as turns of tokens
    completion_parser.py  a completion as thinking, text and tool calls
    protocol.py           a request and its answer; chat_protocol.py, messages_protocol.py, responses_protocol.py: the
                          routes of OpenAI and Anthropic

May import: what workflows/ may.
"""

from lightrl.workflows.agent_workflow.workflow import AgentWorkflow

__all__ = ["AgentWorkflow"]
