"""Environments and agents with an error: each drops its trajectory with one message, and the run goes on."""

import asyncio
import os
import threading
import time

import pytest
from bad_input_rows import each, row
from chat_texts import END, Scripted, chat_prompt, chat_tokenizer, play, played, writes

from lightrl import Environment, MultiTurn
from lightrl.errors import RolloutError
from lightrl.rewards.hook import RewardHook

pytestmark = pytest.mark.bad_input

DONE = (None, 1.0, True)
LONG = "a" * 4_000_001
NAMES = dict.fromkeys(map(str, range(10**5)), 1.0)
HANG = threading.Event()  # never set


class Odd(Environment):
    """Its methods call, or return, what they are given."""

    def __init__(self, **what):
        self.what = what

    def _do(self, method, otherwise=None):
        what = self.what.get(method, otherwise)
        return what() if callable(what) else what

    def reset(self, prompt):
        return self._do("reset")

    def step(self, completion):
        return self._do("step", DONE)

    def metrics(self):
        return self._do("metrics", {})


def exits():
    raise SystemExit(3)


def recurses():
    return recurses()


async def sleeps():
    await asyncio.sleep(600)


ENVIRONMENTS = [
    row("environment: reset gives a number", {"reset": 3}, "The observation from Odd.reset must be text", "got 3"),
    row("environment: reset gives messages without role", {"reset": [{"content": "a"}]}, "Odd.reset", "with role and content"),
    row("environment: a very long observation", {"step": (LONG, 0.0, False)}, "Odd.step has 4,000,001 characters", "at most 4,000,000"),
    row("environment: step gives one number", {"step": 1.0}, "Odd.step must return (observation, reward, done), got 1.0"),
    row("environment: a reward of NaN", {"step": (None, float("nan"), True)}, "a finite number", "reward=nan"),
    row("environment: a reward of 1e300", {"step": (None, 1e300, True)}, "up to 1e15", "reward=1e+300"),
    row("environment: a text for done", {"step": (None, 1.0, "no")}, "True or False", "done='no'"),
    row("environment: nothing to read and not done", {"step": (None, 1.0, False)}, "Odd.step returned no observation and done=False"),
    row("environment: metrics that are a list", {"metrics": [1.0]}, "Odd.metrics must return", "numbers up to 1e15, got [1.0]"),
    row("environment: metrics with a text", {"metrics": {"a": "1"}}, "Odd.metrics must return", "{'a': '1'}"),
    row("environment: metrics of 10^5 names", {"metrics": NAMES}, "Odd.metrics must return a dict of at most 1,000"),
    row("environment: it exits", {"step": exits}, "Odd.step raised SystemExit: 3"),
    row("environment: it calls itself", {"step": recurses}, "Odd.step raised RecursionError"),
    row("environment: it hangs", {"step": lambda: HANG.wait(600)}, "Odd.step did not finish within 1 s"),
    row("environment: it hangs in metrics", {"metrics": lambda: HANG.wait(600)}, "Odd.metrics did not finish within 1 s"),
    row("environment: it awaits without end", {"step": sleeps}, "Odd.step did not finish within 1 s"),
]  # fmt: skip


@each(ENVIRONMENTS)
def test_a_trajectory_is_dropped_with_one_message(case):
    hangs = any("did not finish" in words for words in case.says)
    flow = MultiTurn(chat_tokenizer(), lambda: Odd(**case.given), step_timeout_s=1 if hangs else 600)
    with pytest.raises(RolloutError) as caught:
        played(flow, writes([END]))
    HANG.set()  # threads that hang end
    HANG.clear()
    case.check(str(caught.value))


def forked(written):
    """A function that forks and returns in both processes; the copy's process id is sent to the pipe."""

    def fork(*_):
        pid = os.fork()
        if pid:
            os.write(written, f"{pid}\n".encode())
        return DONE

    return fork


class Awaited(Odd):
    async def step(self, completion):
        return self._do("step")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kind", [Odd, Awaited], ids=["in a thread", "on the event loop"])
def test_the_copy_of_an_environment_that_forks_ends_and_the_original_continues(kind):
    read, written = os.pipe()
    flow = MultiTurn(chat_tokenizer(), lambda: kind(step=forked(written)))
    assert played(flow, writes([END])).rewards[-1] == 1.0
    assert ended_in_time(int(os.read(read, 99)))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_copy_of_a_reward_that_forks_in_this_process_ends():
    read, written = os.pipe()
    fork = forked(written)
    hook = RewardHook(lambda trajectory: fork()[1], timeout_s=600)
    hook.start()

    async def computed():
        trajectory = await play(MultiTurn(chat_tokenizer(), lambda: Scripted(DONE)), writes([END]), chat_prompt())
        return await hook.compute_rewards([trajectory])[0]

    assert asyncio.run(computed()).reward == 1.0
    hook.close()
    assert ended_in_time(int(os.read(read, 99)))


def ended_in_time(pid):
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False
