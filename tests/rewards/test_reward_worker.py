"""make_reward_worker: processes where another process can import the function, else a thread."""

import functools
import math
from pathlib import Path

import pytest
import reward_functions

from lightrl.rewards import RewardHook, RewardPool, make_reward_worker, math_answer

HERE = str(Path(__file__).parent)


def test_a_dotted_path_becomes_a_pool():
    worker = make_reward_worker("reward_functions.length")
    assert isinstance(worker, RewardPool)
    assert worker.path == "reward_functions.length"


@pytest.mark.parametrize(
    ("function", "path"),
    [
        (reward_functions.length, "reward_functions.length"),
        (reward_functions.Constants.constant, "reward_functions.Constants.constant"),
        (math_answer, "lightrl.rewards.math_answer.math_answer"),
    ],
)
def test_a_function_that_can_be_imported_becomes_a_pool_that_finds_it(function, path):
    worker = make_reward_worker(function, search_paths=[HERE])
    assert isinstance(worker, RewardPool)
    assert worker.path == path
    worker.start()
    worker.close()


def nested():
    def reward(trajectory):
        return 1.0

    return reward


class Scale:
    def score(self, trajectory):
        return 1.0


@pytest.mark.parametrize(
    "function",
    [lambda trajectory: 1.0, nested(), functools.partial(math.copysign, 1.0), Scale().score, math.sqrt],
    ids=["lambda", "closure", "partial", "method", "builtin"],
)
def test_other_callables_stay_in_this_process(function):
    assert isinstance(make_reward_worker(function), RewardHook)


def test_a_function_of_the_started_script_stays_in_this_process(monkeypatch):
    monkeypatch.setattr(reward_functions.length, "__module__", "__main__")
    assert isinstance(make_reward_worker(reward_functions.length), RewardHook)
