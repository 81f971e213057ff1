"""Rollouts: prompts in, judged trajectories out, asynchronously. Knows no Lightning.

Reading order:
    engine.py        the protocol of what generates, and Completion
    workflow.py      a prompt to a trajectory
    buffer.py        what may start and what may be trained on: pure functions
    controller.py    keeps groups in flight and hands over batches
    fake_engine.py   deterministic, slow or broken on request, for tests
    local_engine.py  the engine of a laptop: in this process, on its own thread
    running_batch.py   its slots: rows that decode together, join and leave
    decoder.py         what it decodes with: any Hugging Face model
    fast_decoder.py    the same for models of Llama's shape, faster
    sampler.py         logits to tokens and logprobs, one uniform number each

May import: errors, trajectory, experience, functional, rewards, weights. To add an engine: fulfil RolloutEngine and run
tests/rollout/engine_contract.py on it.
"""

from lightrl.rollout.controller import RolloutController
from lightrl.rollout.engine import Completion, RolloutEngine
from lightrl.rollout.fake_engine import FakeEngine
from lightrl.rollout.local_engine import LocalEngine
from lightrl.rollout.workflow import SingleTurn, Workflow

__all__ = ["Completion", "FakeEngine", "LocalEngine", "RolloutController", "RolloutEngine", "SingleTurn", "Workflow"]
