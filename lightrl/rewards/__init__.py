"""Reward functions, and what runs them so that a failure is a RewardError with a reason and never a reward of 0.

Reading order:
    judgment.py      Judgment, the checked result; Runner, which calls a function
    supervisor.py    batches, deadlines, and who is to blame for a hang
    pool.py          RewardPool: functions by dotted path, in processes that can be killed
    worker.py        the other end of its pipes: imports and calls the function
    hook.py          RewardHook: callables of this process, in a thread
    judge.py         Judge, what both are; make_judge, which chooses
    math_answer.py   a reward function: GSM8K-like answers, checked by math-verify
    environment_reward.py   another: what the environment of a workflow gave

May import: errors, trajectory. No torch: a worker starts in a fraction of a second.

One more reward function: a file with a function `(Trajectory) -> float` or `-> {"reward": ..., "<name>": ...}` and an
export below; then `reward: lightrl.rewards.<function>` in YAML.
"""

from lightrl.rewards.code_tests import code_tests
from lightrl.rewards.environment_reward import environment_reward
from lightrl.rewards.hook import RewardHook
from lightrl.rewards.judge import Judge, make_judge
from lightrl.rewards.judgment import Judgment
from lightrl.rewards.math_answer import math_answer
from lightrl.rewards.parts import RewardPart
from lightrl.rewards.pool import RewardPool
from lightrl.rewards.sandbox import Limits, LocalSandbox, Run, Sandbox

__all__ = [
    "Limits",
    "LocalSandbox",
    "Run",
    "Sandbox",
    "environment_reward",
    "Judge",
    "Judgment",
    "RewardHook",
    "RewardPart",
    "RewardPool",
    "code_tests",
    "make_judge",
    "math_answer",
]
