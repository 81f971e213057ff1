"""RewardPool: runs a reward function, named by its dotted path, in processes that can be killed.

The processes get a path and bytes, never a pickled callable. A function that hangs or crashes costs only its own
trajectory and one process; `worker.py` is the other end of the pipes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.checks.bounds import check_bounds
from lightrl.checks.printable import escape_unprintable
from lightrl.concurrency.child_process import ChildProcess, ending_of, import_path
from lightrl.concurrency.streams import LineBuffer
from lightrl.errors import RewardError
from lightrl.rewards.parts import Reward, parts_of
from lightrl.rewards.reward_result import Outcome, RewardResult
from lightrl.rewards.supervisor import Supervisor, WorkerDied
from lightrl.trajectory import Prompt, Trajectory, encode_json

_NONE = type(None)
_OUTCOMES: tuple[dict[str, tuple[type, ...]], ...] = (
    {"index": (int,), "error": (str,), "reason": (str,)},
    {"index": (int,), "reward": (float,), "metrics": (dict,), "rewards": (list, _NONE), "extracted": (str, _NONE)},
)
_REASONS = ("raised", "invalid", "not_finite", "timeout", "killed")
_READ_BYTES = 1 << 16
_MAX_REPLY_BYTES = 1 << 24
_MAX_PROMPTS = 256  # cached as JSON; a group's trajectories arrive at about the same time
_STACK_WAIT_S = 0.5
_CLOSED_WAIT_S = 3.0  # for a process to exit after it closed the socket; its descendants get one second
_MAX_LOG_LINES = 30  # the last lines that a worker printed, shown when it dies


class RewardPool(Supervisor[bytes]):
    """Computes rewards in warm child processes, from copies of the trajectories, with a deadline for each call.

    Invariants: each call ends in a RewardResult or a RewardError, never in a reward of 0 for a failure; a process that
    hangs or dies is replaced; no process outlives this one, even after `kill -9`. Output goes to stderr with a prefix.

    Args:
        reward: `package.module.function`, a RewardPart, or several of them, which are added up; a function takes a
            Trajectory, may be async, and returns a number, or a dict with `reward` and other named numbers, or with
            `rewards`, one number for each token.
        workers: number of processes; one is enough for an async function.
        timeout_s: deadline for one call, in seconds; a process that misses it is killed.
        startup_timeout_s: deadline for importing the function's module, in seconds.
        search_paths: folders to put before this process's import path in the workers.
        memory_limit_mib: limit on the data of each process and each of its children; a call that needs more fails
            with reason `killed` and its process is replaced. None for no limit. Not enforced on macOS.
        recycle_after: number of calls after which a process is replaced, as soon as its successor is ready; for
            functions that leak memory. None for never.

    Example:
        pool = RewardPool("lightrl.rewards.math_answer", workers=2)
        pool.start()
        results = await asyncio.gather(*pool.compute_rewards(trajectories))
    """

    def __init__(
        self,
        reward: Reward,
        *,
        workers: int = 1,
        timeout_s: float = 30.0,
        startup_timeout_s: float = 120.0,
        search_paths: Sequence[str] = (),
        memory_limit_mib: int | None = 4096,
        recycle_after: int | None = None,
    ) -> None:
        check_bounds(1, memory_limit_mib=memory_limit_mib, recycle_after=recycle_after)
        parts = parts_of(reward)
        self.path = " + ".join(part.path for part in parts)
        settings = {"parts": [*map(vars, parts)], "timeout_s": timeout_s, "memory_limit_mib": memory_limit_mib}
        self._prompts: dict[int, tuple[Prompt, bytes]] = {}  # keys are `id(prompt)`; oldest first
        super().__init__(
            self.path,
            functools.partial(WorkerProcess, settings, import_path=import_path(*search_paths)),
            workers=workers,
            timeout_s=timeout_s,
            startup_timeout_s=startup_timeout_s,
            recycle_after=recycle_after,
        )

    def _request_of(self, trajectory: Trajectory) -> tuple[bytes, int]:
        try:
            prompt = trajectory.prompt
            encoded_prompt, encoded = self._prompts.get(id(prompt), (None, b""))
            if encoded_prompt is not prompt:  # encode it once: the trajectories in a group share the prompt
                encoded = encode_json(prompt)
                if len(self._prompts) >= _MAX_PROMPTS:
                    del self._prompts[next(iter(self._prompts))]
                self._prompts[id(prompt)] = (prompt, encoded)
            request = trajectory.to_bytes(encoded, for_training=False)
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"Prompt {trajectory.prompt.id!r} or its trajectory cannot be sent to the reward process as JSON: "
                f"{error}. Use numbers, strings, lists and dicts in its fields."
            ) from error
        return request, len(request)


class WorkerProcess:
    """A child process (see worker.py), the socket to it, and the pipe with its output."""

    def __init__(self, settings: Mapping[str, object], *, import_path: Sequence[str]) -> None:
        self.runs_together = False
        self._child, self._socket = ChildProcess.of_module("lightrl.rewards.worker", import_path, log=subprocess.PIPE)
        self._socket.setblocking(False)
        os.set_blocking(self._child.output.fileno(), False)
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN | select.POLLOUT)
        self._poller.register(self._child.output, select.POLLIN)
        self._outgoing = memoryview(json.dumps(settings).encode() + b"\n")
        self._reply_bytes = bytearray()
        self._printed = LineBuffer()
        self._log: deque[str] = deque(maxlen=_MAX_LOG_LINES)
        self._is_ready = False
        self._is_ended = False  # whether the child has closed the socket
        self._first = self._next = 0  # number of calls before this batch, and before the next batch

    def is_ready(self, wait_s: float) -> bool:
        for line in [] if self._is_ready else self._receive_lines(wait_s):
            ready = _reply(line, {"problem": (str,)}, {"runs_together": (bool,)})
            if "problem" in ready:
                raise ValueError(ready["problem"])
            self.runs_together = ready["runs_together"]
            self._is_ready = True
        return self._is_ready

    def is_alive(self) -> bool:
        self._exchange(0.0)
        return not self._is_ended and not self._reply_bytes  # a reply now would be unexpected

    def send(self, requests: Sequence[bytes]) -> None:
        self._log.clear()
        self._first, self._next = self._next, self._next + len(requests)
        lengths = json.dumps([len(request) for request in requests])
        self._outgoing = memoryview(b"".join([lengths.encode(), b"\n", *requests]))
        self._poller.modify(self._socket, select.POLLIN | select.POLLOUT)

    def receive(self, wait_s: float) -> list[tuple[int, Outcome]]:
        outcomes: list[tuple[int, Outcome]] = []
        lines = self._receive_lines(wait_s)
        for number, line in enumerate(lines):
            try:
                record = _reply(line, *_OUTCOMES)
                index, is_error = record.pop("index") - self._first, "error" in record
                outcomes.append(
                    (index, RewardError(record.pop("error"), **record) if is_error else RewardResult(**record))
                )
            except WorkerDied:
                if not outcomes:
                    raise
                self._reply_bytes[:0] = b"\n".join([*lines[number:], b""])  # keep them for the next call
                break
        return outcomes

    def stack(self) -> str:
        self._log.clear()
        self._child.show_stack()
        deadline = time.monotonic() + _STACK_WAIT_S
        is_quiet = False
        while not (self._log and is_quiet) and not self._is_ended and time.monotonic() < deadline:
            is_quiet = not self._exchange(0.05, forward=False)
        hidden = ("lightrl/rewards/", '"<string>"')
        lines = [line for line in self._log if line.startswith("  File") and not any(text in line for text in hidden)]
        return "\n".join(lines)

    def end(self) -> None:
        self._exchange(0.0)  # forwards its last output
        self._is_ended = True
        self._child.end(0.0)
        self._socket.close()

    def _receive_lines(self, wait_s: float) -> list[bytes]:
        if b"\n" not in self._reply_bytes:
            self._exchange(wait_s)
        *lines, rest = self._reply_bytes.split(b"\n")
        if not lines and len(rest) > _MAX_REPLY_BYTES:
            return [bytes(rest)]
        if not lines and self._is_ended:
            has_ended = self._child.wait(_CLOSED_WAIT_S)
            how = ending_of(self._child.end(0.0)) if has_ended else "it closed its connection to the pool"
            how += " (out of memory?)" if how == "signal SIGKILL" else ""
            raise WorkerDied("\n".join([f"{how}. It last printed:", *self._log]) if self._log else how)
        self._reply_bytes = rest
        return [bytes(line) for line in lines]

    def _exchange(self, wait_s: float, *, forward: bool = True) -> bool:
        """Waits up to `wait_s`, then writes and reads as much as possible; returns False if nothing was ready."""
        if self._is_ended:
            return False
        ready = self._poller.poll(wait_s * 1000)
        for descriptor, events in ready:
            if events & select.POLLOUT:
                try:
                    self._outgoing = self._outgoing[os.write(descriptor, self._outgoing) :]
                except BlockingIOError:
                    continue
                except (BrokenPipeError, ConnectionResetError):  # the process ended; reading will notice it
                    self._outgoing = memoryview(b"")
                if not self._outgoing:
                    self._poller.modify(descriptor, select.POLLIN)
            if events == select.POLLOUT:
                continue
            try:
                data = os.read(descriptor, _READ_BYTES)
            except BlockingIOError:  # no data after all
                continue
            except ConnectionResetError:  # the process ended before it had read everything
                data = b""
            if descriptor == self._socket.fileno():
                self._is_ended = not data
                self._reply_bytes += data
                continue
            if not data:
                self._poller.unregister(descriptor)
            for line in self._printed.lines(data):
                text = escape_unprintable(line.decode(errors="replace"), keep="\t")
                self._log.append(text)
                if forward:
                    sys.stderr.write(f"[reward worker {self._child.pid}] {text}\n")
        return bool(ready)


def _reply(line: bytes, *schemas: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """Decodes a reply; raises WorkerDied if it fits none of these schemas: the worker cannot have written it."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        schema = next((one for one in schemas if isinstance(record, dict) and record.keys() == one.keys()), {})
        is_reply = schema and all(type(record[name]) in types for name, types in schema.items())
        if is_reply and record.get("reason", "raised") in _REASONS:
            return record  # type: ignore[no-any-return]
    raise WorkerDied(
        f"its reply pipe carried {bytes(line[:200])!r}, which is not a reply. The reward, or a process that it "
        "started, wrote to a file descriptor that it did not open; print to standard output instead"
    )
