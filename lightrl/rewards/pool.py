"""RewardPool: runs a reward function, named by its dotted path, in processes that can be killed.

The processes get a path and bytes, never a pickled callable. A function that hangs or crashes costs only its own
trajectory and one process; `worker.py` is the other end of the pipes.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.checks.bounds import check_bounds
from lightrl.checks.printable import escape_unprintable
from lightrl.concurrency.child_process import ONE_THREAD, command, import_path
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
_PIPE_BYTES = 1 << 20  # holds a batch, so that one write sends it
_MAX_PROMPTS = 256  # whose JSON is cached: the trajectories of a group come at about the same time
_STACK_WAIT_S = 0.5
_END_TIMEOUT_S = 5.0
_MAX_LOG_LINES = 30  # the last lines that a worker printed, shown when it dies


class RewardPool(Supervisor[bytes]):
    """Computes rewards in warm child processes, from copies of the trajectories, with a deadline for each call.

    Invariants: each call ends in a RewardResult or a RewardError, and a failure is never a reward of 0; a process that
    hangs or dies is replaced; no process outlives this one, not even after `kill -9`. What the function prints appears
    on this process's stderr with a prefix.

    Args:
        reward: `package.module.function`, a RewardPart, or several of them, which are added up; a function takes a
            Trajectory, may be async, and returns a number, or a dict with `reward` and other named numbers, or with
            `rewards`, one number for each token.
        workers: number of processes; one is enough for an async function.
        timeout_s: deadline of one call in seconds; a process that misses it is killed.
        startup_timeout_s: deadline for importing the function's module in seconds.
        search_paths: folders that come first on the workers' import path; the rest is as in this process.
        memory_limit_mib: limit on the data of each process and each of its children; a call that needs more fails
            with reason `killed` and its process is replaced. None for no limit. Not enforced on macOS.
        recycle_after: calls after which a process is replaced by a new one, which starts before the old one ends; for
            functions that leak memory. None for never.

    Example:
        pool = RewardPool("lightrl.rewards.math_answer", workers=2)
        pool.start()
        result = await pool.compute_reward(trajectory)
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
        settings = {
            "parts": [vars(part) for part in parts],
            "timeout_s": timeout_s,
            "memory_limit_mib": memory_limit_mib,
        }
        self._prompts: dict[int, tuple[Prompt, bytes]] = {}  # keys are ids; the oldest first
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
            if encoded_prompt is not prompt:  # encode it once: the trajectories of a group share the prompt
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
    """A child process (a guardian with its worker, see worker.py) and the three pipes to and from it."""

    def __init__(self, settings: Mapping[str, object], *, import_path: Sequence[str]) -> None:
        self.runs_together = False
        self._process = subprocess.Popen(
            command("lightrl.rewards.worker", str(os.getpid()), import_path),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**ONE_THREAD, **os.environ},
        )
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._pipes = [pipe for pipe in pipes if pipe is not None]
        self._requests, self._replies, self._errors = (pipe.fileno() for pipe in self._pipes)
        self._poller = select.poll()
        for descriptor in (self._requests, self._replies, self._errors):
            os.set_blocking(descriptor, False)
        self._poller.register(self._replies, select.POLLIN)
        self._poller.register(self._errors, select.POLLIN)
        self._outgoing = memoryview(b"")
        self._reply_bytes = bytearray()
        self._printed = LineBuffer()
        self._log: deque[str] = deque(maxlen=_MAX_LOG_LINES)
        self._is_ready = False
        self._is_ended = False  # whether its reply pipe has ended
        self._first = self._next = 0  # numbers, since the start, of the first call of this batch and of the next
        with contextlib.suppress(AttributeError, OSError):  # only on Linux, and up to a system limit
            fcntl.fcntl(self._requests, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._send_bytes(json.dumps(settings).encode() + b"\n")

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
        return not self._is_ended and not self._exit() and not self._reply_bytes  # a reply now would be unexpected

    def send(self, requests: Sequence[bytes]) -> None:
        self._log.clear()
        self._first, self._next = self._next, self._next + len(requests)
        lengths = json.dumps([len(request) for request in requests])
        self._send_bytes(b"".join([lengths.encode(), b"\n", *requests]))

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
                self._reply_bytes[:0] = b"\n".join([*lines[number:], b""])  # for the next call
                break
        return outcomes

    def stack(self) -> str:
        self._log.clear()
        os.kill(self._process.pid, signal.SIGUSR1)  # faulthandler writes the stack to stderr
        deadline = time.monotonic() + _STACK_WAIT_S
        is_quiet = False
        while not (self._log and is_quiet) and not self._is_ended and time.monotonic() < deadline:
            is_quiet = not self._exchange(0.05, forward=False)
        own = ("lightrl/rewards/", '"<string>"')
        lines = [line for line in self._log if line.startswith("  File") and not any(part in line for part in own)]
        return "\n".join(lines)

    def end(self) -> None:
        if self._process.returncode is None:
            self._exchange(0.0)  # forwards its last output
            self._process.terminate()
            try:
                self._process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for pipe in self._pipes:
            pipe.close()

    def _send_bytes(self, data: bytes) -> None:
        self._outgoing = memoryview(data)
        self._poller.register(self._requests, select.POLLOUT)

    def _receive_lines(self, wait_s: float) -> list[bytes]:
        if b"\n" not in self._reply_bytes:
            self._exchange(wait_s)
        if b"\n" not in self._reply_bytes and len(self._reply_bytes) > _MAX_REPLY_BYTES:
            return [bytes(self._reply_bytes)]
        if b"\n" not in self._reply_bytes and (self._is_ended or self._exit()):
            while self._exchange(0.0):  # reads its last output
                pass
            if b"\n" not in self._reply_bytes:
                raise WorkerDied(self._cause_of_death())
        *lines, self._reply_bytes = self._reply_bytes.split(b"\n")
        return [bytes(line) for line in lines]

    def _exchange(self, wait_s: float, *, forward: bool = True) -> bool:
        """Waits up to `wait_s` for a pipe, then writes and reads; returns whether one was ready."""
        if self._is_ended:
            return False
        ready = self._poller.poll(wait_s * 1000)
        for descriptor, _ in ready:
            if descriptor == self._requests:
                self._write()
            elif descriptor == self._replies:
                data = _read(descriptor)
                self._is_ended = self._is_ended or data == b""
                self._reply_bytes += data or b""
            else:
                data = _read(descriptor)
                if data == b"":
                    self._poller.unregister(descriptor)
                for line in self._printed.lines(data) if data is not None else []:
                    text = escape_unprintable(line.decode(errors="replace"), keep="\t")
                    self._log.append(text)
                    if forward:
                        sys.stderr.write(f"[reward worker {self._process.pid}] {text}\n")
        return bool(ready)

    def _write(self) -> None:
        try:
            self._outgoing = self._outgoing[os.write(self._requests, self._outgoing) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it ended, which `_receive_lines` notices after the last output
            self._outgoing = memoryview(b"")
        if not self._outgoing:
            self._poller.unregister(self._requests)

    def _exit(self) -> os.waitid_result | None:
        # WNOWAIT: `end` reaps it, and until then no other process gets its id.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def _cause_of_death(self) -> str:
        deadline = time.monotonic() + 1.0
        while not self._exit() and time.monotonic() < deadline:  # the pipe closes shortly before the exit
            time.sleep(0.01)
        status = self._exit()
        if status is None:
            how = "it closed its pipe"
        elif status.si_code == os.CLD_EXITED:
            how = f"exit code {status.si_status}"
        else:
            how = f"signal {signal.Signals(status.si_status).name}"
            how += " (out of memory?)" if status.si_status == signal.SIGKILL else ""
        return "\n".join([f"{how}. It last printed:", *self._log]) if self._log else how


def _read(descriptor: int) -> bytes | None:
    """Reads available data; returns b"" at the end, or None if there is no data after all."""
    try:
        return os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return None


def _reply(line: bytes, *forms: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """Decodes a reply; raises WorkerDied if it has none of these forms, since then the worker did not write it."""
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(line)
        form = next((form for form in forms if isinstance(record, dict) and record.keys() == form.keys()), {})
        is_reply = form and all(type(record[name]) in types for name, types in form.items())
        if is_reply and record.get("reason", "raised") in _REASONS:
            return record  # type: ignore[no-any-return]
    raise WorkerDied(
        f"its reply pipe carried {bytes(line[:200])!r}, which is not a reply. The reward, or a process that it "
        "started, writes to a descriptor that it did not open: print to standard output instead"
    )
