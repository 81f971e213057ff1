"""Rollouts: prompts in, judged trajectories out, asynchronously. Knows no Lightning.

Reading order:
    engine.py, workflow.py  the protocol of what generates, and Completion; a prompt to a trajectory
    multi_turn.py    a workflow of several turns: conversation.py its tokens, environment.py what answers the policy
      tools.py, deadline.py  an environment of functions that the policy calls; none can hang the others
    agent_workflow.py  a workflow that runs an agent, which talks to openai_endpoint.py as to OpenAI
      agent_session.py, chat_protocol.py  its requests as tokens; what may be asked and is answered
    buffer.py        what may start and what may be trained on: pure functions
    prompt_cursor.py which prompt comes next; group_filter.py, drop_tally.py  which groups are replaced, and how many
    controller.py    keeps groups in flight and hands over batches; recorded.py hands over those of an earlier run
      loop_thread.py, trajectory_task.py, judging.py  its event loop; one trajectory; rewards, awaited when needed
    fake_engine.py   deterministic, slow or broken on request, for tests
    local_engine.py  the engine of a laptop: running_batch.py its slots, sampler.py logits to tokens and logprobs
      decoder.py, fast_decoder.py  what it decodes with: any Hugging Face model; Llama's shape, faster
    sglang/          the engine of a fleet: SGLang's servers over HTTP, and a fake one; a room of its own

May import: errors, trajectory, experience, functional, rewards, weights. To add an engine: fulfil RolloutEngine and run
tests/rollout/engine_contract.py on it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightrl.rollout.agent_workflow import AgentWorkflow
    from lightrl.rollout.controller import RolloutController
    from lightrl.rollout.engine import Completion, RolloutEngine
    from lightrl.rollout.environment import Environment, RetryWithFeedback
    from lightrl.rollout.fake_engine import FakeEngine
    from lightrl.rollout.group_filter import GroupFilter
    from lightrl.rollout.local_engine import LocalEngine
    from lightrl.rollout.multi_turn import MultiTurn
    from lightrl.rollout.prompt_cursor import Curriculum
    from lightrl.rollout.recorded import RecordedRollout
    from lightrl.rollout.sglang.engine import SGLangEngine
    from lightrl.rollout.sglang.fake_server_process import FakeServerProcess
    from lightrl.rollout.tools import ToolEnvironment
    from lightrl.rollout.workflow import SingleTurn, Workflow

# Loaded when first used: the fake server with a script starts without torch.
_HOMES = {
    "AgentWorkflow": "agent_workflow",
    "Completion": "engine",
    "Curriculum": "prompt_cursor",
    "Environment": "environment",
    "FakeEngine": "fake_engine",
    "FakeServerProcess": "sglang.fake_server_process",
    "GroupFilter": "group_filter",
    "LocalEngine": "local_engine",
    "MultiTurn": "multi_turn",
    "RecordedRollout": "recorded",
    "RetryWithFeedback": "environment",
    "RolloutController": "controller",
    "RolloutEngine": "engine",
    "SGLangEngine": "sglang.engine",
    "SingleTurn": "workflow",
    "ToolEnvironment": "tools",
    "Workflow": "workflow",
}

__all__ = [
    "AgentWorkflow", "Completion", "Curriculum", "Environment", "FakeEngine", "FakeServerProcess", "GroupFilter",
    "LocalEngine", "MultiTurn", "RecordedRollout", "RetryWithFeedback", "RolloutController", "RolloutEngine",
    "SGLangEngine", "SingleTurn", "ToolEnvironment", "Workflow",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
