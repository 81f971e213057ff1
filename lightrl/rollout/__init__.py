"""Rollouts: prompts in, judged trajectories out, asynchronously. Knows no Lightning.

Reading order:
    engine.py        the protocol of what generates, and Completion
    workflow.py      a prompt to a trajectory
    multi_turn.py    a workflow of several turns with an environment
      conversation.py  its tokens: what the policy wrote, and what the chat template puts between
      environment.py   what answers the policy
      tools.py, deadline.py  an environment of functions that the policy calls; none can hang the others
    agent_workflow.py  a workflow that runs an agent, which talks to openai_endpoint.py as to OpenAI
      agent_session.py, chat_protocol.py  its requests as tokens; what may be asked and is answered
    buffer.py        what may start and what may be trained on: pure functions
    prompt_cursor.py which prompt comes next; by a curriculum, which are passed over
    group_filter.py, drop_tally.py  which judged groups are dropped and replaced; how many may be
    controller.py    keeps groups in flight and hands over batches
      loop_thread.py   its event loop, and the ways across from the main thread
      trajectory_task.py  playing and judging one trajectory
    fake_engine.py   deterministic, slow or broken on request, for tests
    local_engine.py  the engine of a laptop: in this process, on its own thread
    running_batch.py   its slots: rows that decode together, join and leave
    decoder.py, fast_decoder.py  what it decodes with: any Hugging Face model; Llama's shape, faster
    sampler.py         logits to tokens and logprobs, one uniform number each
    sglang_client.py what one SGLang server is asked over HTTP

May import: errors, trajectory, experience, functional, rewards, weights. To add an engine: fulfil RolloutEngine and run
tests/rollout/engine_contract.py on it.
"""

from lightrl.rollout.agent_workflow import AgentWorkflow
from lightrl.rollout.controller import RolloutController
from lightrl.rollout.engine import Completion, RolloutEngine
from lightrl.rollout.environment import Environment, RetryWithFeedback
from lightrl.rollout.fake_engine import FakeEngine
from lightrl.rollout.group_filter import GroupFilter
from lightrl.rollout.local_engine import LocalEngine
from lightrl.rollout.multi_turn import MultiTurn
from lightrl.rollout.prompt_cursor import Curriculum
from lightrl.rollout.tools import ToolEnvironment
from lightrl.rollout.workflow import SingleTurn, Workflow

__all__ = [
    "AgentWorkflow", "Completion", "Curriculum", "Environment", "FakeEngine", "GroupFilter", "LocalEngine", "MultiTurn",
    "RetryWithFeedback", "RolloutController", "RolloutEngine", "SingleTurn", "ToolEnvironment", "Workflow",
]  # fmt: skip
