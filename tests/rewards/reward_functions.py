"""Reward functions that the tests name by dotted path; how each behaves is the prompt's field `do`."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from lightrl.trajectory import Prompt, Trajectory

NOT_A_FUNCTION = 3


def trajectory_that(
    completion: str = "ab", finish_reason: str = "stop", sample: int = 0, **fields: object
) -> Trajectory:
    """Two prompt tokens and two of the policy's; `fields` are the prompt's."""
    return Trajectory(
        prompt=Prompt(id="train-3", token_ids=[7, 8], fields=fields), group_id=3, sample=sample, token_ids=[7, 8, 5, 1],
        loss_mask=[False, False, True, True], behavior_logprobs=[0.0, 0.0, -0.5, -1.25], weight_versions=[-1, -1, 4, 4],
        completion_ids=[5, 1], completion=completion, finish_reason=finish_reason,
    )  # fmt: skip


_leaked: list[Prompt] = []


def length(trajectory: Trajectory) -> int:
    return len(trajectory.completion_ids)


def reads_lists(trajectory: Trajectory) -> dict[str, float]:
    """What a reward may do with lists; `numpy` is 1 where that needed numpy."""
    ids, rewards = trajectory.token_ids, trajectory.rewards
    assert ids[2:4] == [5, 1]
    assert [0] + ids == [0, 7, 8, 5, 1]  # noqa: RUF005  # as users write it
    assert trajectory.completion_ids
    assert json.loads(json.dumps(ids)) == ids
    assert trajectory.loss_mask == [False, False, True, True]
    assert trajectory.behavior_logprobs[3] == -1.25
    assert (trajectory.oldest_version, trajectory.newest_version) == (4, 4)
    ids.append(9)
    return {"reward": sum(rewards), "tokens": len(trajectory.token_ids), "numpy": float("numpy" in sys.modules)}


def hold_the_interpreter() -> None:
    """Hangs in C code that lets no other thread run."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def _reply_pipe() -> int:
    """The descriptor of the worker's socket to the pool."""
    return int(Path("/proc/self/cmdline").read_bytes().split(b"\0")[3])


def _write_later(pipe: int, files: dict[str, str]) -> None:
    while not Path(files["begin"]).exists():
        time.sleep(0.01)
    os.write(pipe, b"stray\n")
    Path(files["done"]).touch()


def obey(trajectory: Trajectory) -> object:
    """Does what the prompt's field `do` says."""
    what = trajectory.prompt.fields.get("do")
    if what == "raise":
        raise KeyError("no such column")
    if what == "hang":
        time.sleep(600)
    if what == "exit":
        os._exit(3)
    if what == "abort":
        os.abort()
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "close":
        os.closerange(3, 1000)
        time.sleep(600)
    if what == "allocate":
        return len(bytearray(trajectory.prompt.fields["num_bytes"]))
    if what == "leak":
        _leaked.append(trajectory.prompt)
        return {"reward": len(_leaked), "pid": os.getpid()}
    if what == "threads":
        return float(os.environ["OMP_NUM_THREADS"])
    if what == "print":
        print('{"index": 0, "reward": 7.0, "metrics": {}, "rewards": null}')  # noqa: T201
        os.write(1, b"raw bytes on descriptor 1\n\x1b]0;title\x07\x1b[2J\n")
    if what == "write into the pipe":
        for line in trajectory.prompt.fields["lines"]:
            os.write(_reply_pipe(), line.encode())
    if what == "write into the pipe later":
        threading.Thread(target=_write_later, args=[_reply_pipe(), trajectory.prompt.fields]).start()
    if what == "print without a newline":
        for _ in range(trajectory.prompt.fields["times"]):
            os.write(1, b"." * (1 << 16))
    if what == "spawn a session":
        session = subprocess.Popen(
            ["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
        )
        return {"reward": 1.0, "child": session.pid, "grandchild": int(session.stdout.readline())}
    if what == "read":
        return len(sys.stdin.read())
    if what == "sys.exit":
        sys.exit(1)
    if what == "spawn":
        child = subprocess.Popen(["sleep", "600"])
        Path(trajectory.prompt.fields["file"]).write_text(f"{os.getpid()} {child.pid}")
        hold_the_interpreter()
    if what == "hold":
        hold_the_interpreter()
    return trajectory.prompt.fields.get("give", 1.0)


async def obey_async(trajectory: Trajectory) -> object:
    what = trajectory.prompt.fields.get("do")
    if what == "hang":
        await asyncio.sleep(600)
    if what == "meet":
        return await _meet()
    await asyncio.sleep(0)
    return obey(trajectory)


_waiting: list[asyncio.Event] = []


async def _meet() -> float:
    """Returns when a second call of it runs at the same time."""
    event = asyncio.Event()
    _waiting.append(event)
    if len(_waiting) == 2:
        for each in _waiting:
            each.set()
    await event.wait()
    return 1.0


def scaled(trajectory: Trajectory, *, factor: float = 1.0) -> dict[str, float]:
    return {"reward": factor * len(trajectory.completion), "accuracy": 1.0, "factor": factor}


def per_token(trajectory: Trajectory) -> dict[str, list[float]]:
    return {"rewards": [0.0] * (len(trajectory.token_ids) - 2) + [0.5, 0.25]}


class Counter:
    """A reward function with state, made once per process."""

    def __init__(self, start: int) -> None:
        self.count = start

    def __call__(self, trajectory: Trajectory) -> float:
        self.count += 1
        return float(self.count)


class AsyncScale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    async def __call__(self, trajectory: Trajectory) -> float:
        await asyncio.sleep(0)
        return self.factor


class Constants:
    @staticmethod
    def constant(trajectory: Trajectory) -> float:
        return 0.25


async def block_async(trajectory: Trajectory) -> float:
    """An async function that never gives the event loop back, as a forgotten synchronous request does."""
    await asyncio.sleep(0.01)
    return float(obey(trajectory))


def return_twice(trajectory: Trajectory) -> float:
    """Comes back twice: the child continues in the worker's code."""
    os.fork()
    return 0.25


def two_trajectories(trajectory: Trajectory, other: Trajectory) -> float:
    return 0.0


def has_torch(trajectory: Trajectory) -> bool:
    return "torch" in sys.modules
