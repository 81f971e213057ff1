"""A workflow worker: the process of workflow_pool.py in which workflows run, with an engine that follows rank 0's.

    pool ─► worker   (key, "play", ...), (key, "follow", news), (key, "written"); (key, "cancel"), (None, "forget", ...)
    worker ─► pool   (process id) when it is ready; then (key, result or exception), and (None, a report of a server)

It ends when the pool closes the channel. If the pool's process ends, its guard kills it, and whatever it started.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import pickle
import signal
import socket
import sys
from typing import Any

from lightrl.checks.user_code import named_user_code
from lightrl.concurrency.channel import Channel
from lightrl.engines.engine import Completion
from lightrl.engines.sglang.follower import SGLangFollower
from lightrl.errors import EngineError, RewardError, RolloutError
from lightrl.rollout.player import Interactions
from lightrl.rollout.tasks import Tasks
from lightrl.trajectory import Prompt, Sampling
from lightrl.workflows.workflow import Workflow

END_S = 2.0  # for workflows to clean up when they are cancelled


def main() -> None:
    """Serves the pool at the other end of the socket whose descriptor is `sys.argv[1]`."""
    end = socket.socket(fileno=int(sys.argv[1]))
    del sys.argv[1:]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the pool asks where it hangs
    asyncio.run(_serve(end))


async def _serve(end: socket.socket) -> None:
    channel = await Channel.open(end)
    job = await channel.receive()
    assert job is not None
    name, log_level, engine, workflow = job
    logging.basicConfig(level=log_level, format=f"[{name}] %(message)s")
    worker = WorkflowWorker(channel, engine, workflow)
    await engine.open(lambda *report: channel.send(None, report))
    gc.collect()
    gc.freeze()
    channel.send(os.getpid())  # ready
    await worker.serve()


class WorkflowWorker:
    """Does what the pool sends."""

    def __init__(self, channel: Channel, engine: SGLangFollower, workflow: Workflow) -> None:
        self._channel = channel
        self._engine = engine
        self._tasks = Tasks()
        self._player = Interactions(engine, workflow, self._tasks)  # type: ignore[arg-type]  # it generates, no more
        self._running: dict[int, asyncio.Task[None]] = {}  # by key

    async def serve(self) -> None:
        while (message := await self._channel.receive()) is not None:
            key, kind, *values = message
            if kind == "play":
                self._start(key, *values)
            elif kind == "follow":
                self._engine.follow(*values)
                self._channel.send(key, self._engine.state)
            elif kind == "written":
                self._tasks.spawn(self._send_written(key))
            elif kind == "cancel" and key in self._running:
                self._tasks.give_up([self._running[key]])
            elif kind == "forget":
                self._player.written.forget(*values)
        playing = list(self._running.values())
        self._tasks.give_up(playing)
        ending = [*playing, asyncio.ensure_future(self._engine.close())]
        await asyncio.wait(ending, timeout=END_S)

    def _start(self, key: int, seed_name: str, lent: dict[str, Any] | None, *interaction: Any) -> None:
        """Starts to play; what a checkpoint has of it is `lent`, None if a checkpoint needs nothing of it."""
        if lent is not None:
            self._player.written.borrow(seed_name, lent)
        task = self._running[key] = self._tasks.spawn(self._play(key, seed_name, *interaction))
        task.add_done_callback(lambda task: self._running.pop(key, None))

    async def _play(self, key: int, seed_name: str, prompt: Prompt, sample: int, sampling: Sampling, seed: int) -> None:
        try:
            trajectory = await self._player.interact(prompt, sample, sampling, seed, seed_name)
            if trajectory.prompt is prompt:
                trajectory.prompt = None  # type: ignore[assignment]  # the pool has it
            with named_user_code("Sending the trajectory", on=f"prompt {prompt.id!r}"):
                data = pickle.dumps((key, trajectory), pickle.HIGHEST_PROTOCOL)
        except (RewardError, RolloutError) as error:
            data = pickle.dumps((key, error))
        except EngineError as error:
            data = pickle.dumps((key, EngineError(str(error))))
        self._channel.send_pickled(data)

    async def _send_written(self, key: int) -> None:
        try:
            unfinished: dict[int, Completion] = await self._engine.unfinished()
            self._channel.send(key, self._player.written.state_dict(self._player.workflow, unfinished))
        except EngineError as error:
            self._channel.send(key, EngineError(str(error)))
