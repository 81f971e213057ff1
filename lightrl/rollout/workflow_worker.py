"""A workflow worker: a process that runs workflows for workflow_pool.py, with an engine that follows rank 0's engine.

    pool ─► worker   (key, "run", ...), (key, "cancel"), (None, "end group", ...),
                     (key, "follow", state of the servers), (key, "state")
    worker ─► pool   (process id) when it is ready; then for each sample of a run (key, sample, the trajectory's
                     bytes) or (key, sample, error), (key, answer or exception), and (None, a report on a server)

The worker exits when the pool closes the channel. If the pool's process dies, a guard kills it and its descendants.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
from typing import Any

from lightrl.checks.user_code import named_user_code
from lightrl.columns import register
from lightrl.concurrency.abandon import Tasks, abandon
from lightrl.concurrency.child_process import connect_to_parent
from lightrl.concurrency.streams import Channel
from lightrl.engines.engine import Completion
from lightrl.engines.servers.follower import Follower
from lightrl.errors import EngineError, RolloutError
from lightrl.rollout.prompts import State
from lightrl.rollout.runner import TrajectoryRunner
from lightrl.trajectory import Prompt, Trajectory
from lightrl.workflows.workflow import RunResult, Workflow

END_S = 2.0  # time for cancelled workflows to clean up


def main() -> None:
    """Serves the pool until it closes the channel."""
    asyncio.run(_serve(connect_to_parent()))


async def _serve(end: socket.socket) -> None:
    channel = await Channel.open(end)
    job = await channel.receive()
    assert job is not None
    name, log_level, columns, engine, workflow = job
    for column in columns:
        register(column)
    logging.basicConfig(level=log_level, format=f"[{name}] %(message)s")
    worker = WorkflowWorker(channel, engine, workflow)
    await engine.open(lambda *report: channel.send(None, report))
    gc.collect()
    gc.freeze()
    channel.send(os.getpid())  # ready
    await worker.serve()


class WorkflowWorker:
    """Executes the pool's requests."""

    def __init__(self, channel: Channel, engine: Follower, workflow: Workflow) -> None:
        self._channel = channel
        self._engine = engine
        self._tasks = Tasks()
        self._runner = TrajectoryRunner(engine, workflow)  # type: ignore[arg-type]  # a Follower only generates
        self._running: dict[int, asyncio.Task[None]] = {}  # key of the request → task

    async def serve(self) -> None:
        while (message := await self._channel.receive()) is not None:
            key, kind, *values = message
            if kind == "run":
                self._start(key, *values)
            elif kind == "follow":
                self._engine.follow(*values)
                self._channel.send(key, self._engine.state)
            elif kind == "state":
                self._tasks.spawn(self._send_state(key))
            elif kind == "cancel" and key in self._running:
                abandon([self._running[key]])
            elif kind == "end group":
                self._runner.end_group(*values)
        running = list(self._running.values())
        abandon(running)
        await asyncio.wait([*running, asyncio.ensure_future(self._engine.close())], timeout=END_S)

    def _start(self, key: int, started: State | None, *run: Any) -> None:
        """Starts samples in a group; `started` is their state from a checkpoint, or None in validation."""
        if started is not None:
            self._runner.in_flight.take_over(run[-1], started)
        task = self._running[key] = self._tasks.spawn(self._run_group(key, *run))
        task.add_done_callback(lambda task: self._running.pop(key, None))

    async def _run_group(self, key: int, prompt: Prompt, *run: Any) -> None:
        try:
            async with contextlib.aclosing(self._runner.run_group(prompt, *run)) as results:
                async for sample, result in results:
                    self._send(key, sample, result, prompt)
        except EngineError as error:
            self._channel.send(key, None, EngineError(str(error)))

    def _send(self, key: int, sample: int, result: RunResult, prompt: Prompt) -> None:
        try:
            with named_user_code("Sending the trajectory", on=f"prompt {prompt.id!r}"):
                if isinstance(result, Trajectory):
                    has_own_prompt = result.prompt is not prompt  # otherwise the pool has it
                    self._channel.send_bytes(key, sample, result.to_bytes(None if has_own_prompt else b""))
                else:
                    self._channel.send(key, sample, result)
        except RolloutError as error:
            self._channel.send(key, sample, error)

    async def _send_state(self, key: int) -> None:
        try:
            unfinished: dict[int, Completion] = await self._engine.unfinished()
            self._channel.send(key, self._runner.in_flight.state_dict(unfinished))
        except EngineError as error:
            self._channel.send(key, EngineError(str(error)))
