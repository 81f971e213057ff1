"""RewardHook: callables of this process, in a thread; make_reward_worker: which callables those are."""

import asyncio
import functools
import logging
import math
import threading
from pathlib import Path

import pytest
import reward_functions
from reward_functions import obey, obey_async, trajectory_that
from reward_workers import outcomes, reasons, started

from lightrl.rewards import RewardHook, RewardPool, RewardResult, make_reward_worker, math_answer


def results_of(hook: RewardHook, *trajectories: object) -> list[object]:
    with started(hook):
        return outcomes(hook, *trajectories)


class Scale:
    """Stands for an RLModule whose reward uses `self`."""

    factor = 3.0

    def reward(self, trajectory):
        return self.factor * trajectory.prompt.fields["give"]

    async def reward_async(self, trajectory):
        await asyncio.sleep(0)
        return self.reward(trajectory)


@pytest.mark.parametrize("function", [Scale().reward, Scale().reward_async, lambda t: Scale().reward_async(t)])
def test_512_trajectories_each_get_their_own_reward(function):
    results = results_of(RewardHook(function), *(trajectory_that(give=float(i)) for i in range(512)))
    assert results == [RewardResult(3.0 * i) for i in range(512)]


@pytest.mark.parametrize("function", [obey, obey_async])
def test_failures_have_their_reasons_and_the_rest_its_rewards(function):
    batch = [trajectory_that(give=2.0), trajectory_that(do="raise"), trajectory_that(give=float("nan"))]
    results = results_of(RewardHook(function), *batch, trajectory_that())
    assert reasons(results) == [2.0, "raised", "not_finite", 1.0]
    assert "KeyError" in str(results[1])


def hang_until(release: threading.Event):
    def reward(trajectory):
        if trajectory.prompt.fields.get("do") == "hang":
            release.wait(600)
        return float(trajectory.sample)

    return reward


def test_a_hung_call_is_abandoned_alone_and_said_once(caplog):
    release = threading.Event()
    hook = RewardHook(hang_until(release), timeout_s=3.0)
    batch = [trajectory_that(sample=i, do="hang" if i in (2, 5) else None) for i in range(8)]
    with caplog.at_level(logging.WARNING, "lightrl.rewards.hook"):
        results = results_of(hook, *batch)
    release.set()
    assert reasons(results) == [0.0, 1.0, "timeout", 3.0, 4.0, "timeout", 6.0, 7.0]
    assert "test_hook.py" in str(results[2])
    assert len(caplog.records) == 1
    assert "cannot be killed and is abandoned" in caplog.text


def test_a_hung_async_call_is_cancelled_without_its_neighbors(caplog):
    batch = [trajectory_that(give=float(i), do="hang" if i == 2 else None) for i in range(4)]
    results = results_of(RewardHook(obey_async, timeout_s=3.0), *batch)
    assert reasons(results) == [0.0, 1.0, "timeout", 3.0]
    assert not caplog.records


def test_a_method_that_takes_no_trajectory_is_refused_before_a_rollout():
    with pytest.raises(ValueError, match=r"called with only a Trajectory, but its signature is \(\): too many"):
        RewardHook(lambda: 1.0)


def test_close_ends_the_threads():
    before = set(threading.enumerate())
    results_of(RewardHook(obey), trajectory_that())
    for thread in set(threading.enumerate()) - before:
        thread.join(600)
    assert set(threading.enumerate()) <= before


def test_a_dotted_path_becomes_a_pool():
    worker = make_reward_worker("reward_functions.length")
    assert isinstance(worker, RewardPool)
    assert worker.path == "reward_functions.length"


@pytest.mark.parametrize(
    ("function", "path"),
    [
        (reward_functions.length, "reward_functions.length"),
        (reward_functions.Constants.constant, "reward_functions.Constants.constant"),
        (math_answer, "lightrl.rewards.math_answer.answer.math_answer"),
    ],
)
def test_a_function_that_can_be_imported_becomes_a_pool_that_finds_it(function, path):
    worker = make_reward_worker(function, search_paths=[str(Path(__file__).parent)])
    assert isinstance(worker, RewardPool)
    assert worker.path == path
    worker.start()
    worker.close()


def nested():
    def reward(trajectory):
        return 1.0

    return reward


@pytest.mark.parametrize(
    "function",
    [lambda trajectory: 1.0, nested(), functools.partial(math.copysign, 1.0), Scale().reward, math.sqrt],
    ids=["lambda", "closure", "partial", "method", "builtin"],
)
def test_other_callables_stay_in_this_process(function):
    assert isinstance(make_reward_worker(function), RewardHook)


def test_a_function_of_the_started_script_stays_in_this_process(monkeypatch):
    monkeypatch.setattr(reward_functions.length, "__module__", "__main__")
    assert isinstance(make_reward_worker(reward_functions.length), RewardHook)
