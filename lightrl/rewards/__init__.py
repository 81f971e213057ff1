"""Reward functions, and the code that runs them. A failed call is a RewardError with a reason, not a reward of 0.

Reading order:
    reward_result.py RewardResult, a checked result; Runner, which calls a function
    parts.py         RewardPart: a function with arguments and a weight; sums of parts
    supervisor.py    batches, deadlines, spare workers, and which call is at fault
    pool.py          RewardPool: functions by dotted path, in processes that can be killed
    worker.py        the process that imports and calls the function
    hook.py          RewardHook: calls a function in a thread; RewardWorker: the protocol for pool and hook
    evaluation.py    reward, accuracy and pass@k per group
    replay.py        FailureLog, which writes failed trajectories; replay, which recomputes their rewards
    references.py    references with several accepted answers; checks all references before the run
Reward functions:
    math_answer/     answers as numbers, expressions, sets or texts
    code_tests.py    programs against tests, in a sandbox (sandbox/)
    text_rewards.py  pattern, tags, length, repetition, JSON; fenced blocks of Markdown
    length_penalty.py OverlongPenalty, for completions near the length limit
    llm_judge.py     LLMJudge: a model with a rubric
    reasoning_gym.py rows and the reward for reasoning-gym's data sets
    environment_reward.py  the rewards that a workflow's environment returned

May import: errors, checks, concurrency, trajectory; not torch, so that workers start fast. To add a reward function,
write a file with `(Trajectory) -> float` or `-> {"reward": ..., "<name>": ...}`, export it below, and name it in YAML.
"""

from lightrl.rewards.code_tests import code_tests
from lightrl.rewards.environment_reward import environment_reward
from lightrl.rewards.hook import RewardHook, RewardWorker, make_reward_worker
from lightrl.rewards.length_penalty import OverlongPenalty
from lightrl.rewards.llm_judge import LLMJudge
from lightrl.rewards.math_answer import math_answer
from lightrl.rewards.parts import RewardPart
from lightrl.rewards.pool import RewardPool
from lightrl.rewards.replay import FailureLog, ReplayRow, replay
from lightrl.rewards.reward_result import RewardResult
from lightrl.rewards.sandbox import Limits, LocalSandbox, Run, Sandbox
from lightrl.rewards.text_rewards import (
    json_schema,
    overlong_penalty,
    regex_match,
    repetition_penalty,
    tag_format,
)  # fmt: skip

__all__ = [
    "RewardWorker", "RewardResult", "RewardHook", "RewardPart", "RewardPool", "make_reward_worker", "FailureLog",
    "ReplayRow", "replay", "math_answer", "code_tests", "Limits", "LocalSandbox", "Run", "Sandbox",
    "json_schema", "OverlongPenalty", "overlong_penalty", "regex_match", "repetition_penalty", "tag_format",
    "LLMJudge", "environment_reward",
]  # fmt: skip
