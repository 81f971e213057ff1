"""RewardPool: a reward function, named by its dotted path, in processes that can be killed.

A path and a JSON trajectory travel, never a pickled callable. A function that hangs or crashes costs its own trajectory
and one process; `worker.py` is the other end of the pipes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from lightrl.errors import RewardError
from lightrl.rewards.judgment import Judgment, Outcome
from lightrl.rewards.parts import Reward, parts_of
from lightrl.rewards.supervisor import Supervisor, WorkerDied
from lightrl.trajectory import Prompt, Trajectory

_READ_BYTES = 1 << 16
_STACK_WAIT_S = 0.5
_END_TIMEOUT_S = 5.0
_MAX_LOG_LINES = 30  # of what a worker printed last, shown when it dies
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_START = "import sys; sys.path[:] = sys.argv[2:]; from lightrl.rewards.worker import main; main()"


class RewardPool:
    """Judges trajectories in warm child processes, with a deadline for each call.

    Invariants: a call has one outcome, a Judgment or a RewardError, never a reward of 0 for a failure; a process that
    hung or died is replaced; no process outlives this one, not even after `kill -9`. What the function prints appears
    on this process's stderr with a prefix.

    Args:
        reward: `package.module.function`, a RewardPart, or several of them, which are added up; a function takes a
            Trajectory, may be async, and returns a number, or a dict with `reward` and further named numbers, or with
            `rewards`, one number for each token.
        workers: number of processes; an async function needs one only.
        timeout_s: deadline of one call in seconds; then its process is killed.
        startup_timeout_s: deadline of the import of the function's module in seconds.
        search_paths: folders that come first on the workers' import path; the rest is as in this process.
        memory_limit_mib: bound on the data of each process and of each that it starts; a call that wants more fails
            with reason `killed` and its process is replaced. None for no bound. Not enforced on macOS.
        recycle_after: calls after which a process is replaced by a fresh one, which is started before the old one
            ends; for functions that leak. None for never.

    Example:
        pool = RewardPool("lightrl.rewards.math_answer", workers=2)
        pool.start()
        judgment = await pool.score(trajectory)
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
        parts = parts_of(reward)
        self.path = " + ".join(part.path for part in parts)
        for name, value in (("memory_limit_mib", memory_limit_mib), ("recycle_after", recycle_after)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}, expected at least 1, or None for no bound. Raise it.")
        settings = {
            "parts": [vars(part) for part in parts],
            "timeout_s": timeout_s,
            "memory_limit_mib": memory_limit_mib,
        }
        import_path = [str(Path(entry).absolute()) for entry in (*search_paths, *sys.path)]  # "" is the working folder

        def make_worker() -> _WorkerProcess:
            return _WorkerProcess(settings, import_path=import_path)

        self._supervisor: Supervisor[bytes] = Supervisor(
            self.path,
            make_worker,
            workers=workers,
            timeout_s=timeout_s,
            startup_timeout_s=startup_timeout_s,
            recycle_after=recycle_after,
        )

    def start(self) -> None:
        """Starts the processes and returns when one has imported the function; a second call changes nothing.

        Raises:
            ValueError: if there is no such function, or its module does not import within `startup_timeout_s`.
        """
        self._supervisor.start()

    async def score(self, trajectory: Trajectory) -> Judgment:
        """What the function says about a copy of this trajectory; waits for a free process and for the function.

        Raises:
            RewardError: reason `raised` (also when the prompt's fields hold what JSON cannot), `not_finite`, `timeout`
                or `killed` (also when the pool was closed).
        """
        request = encoded(trajectory)
        return await self._supervisor.score(trajectory, request, len(request))

    def close(self) -> None:
        """Kills the processes and all that they started; calls on their way raise RewardError. May be called twice."""
        self._supervisor.close()


def encoded(trajectory: Trajectory) -> bytes:
    """`trajectory.to_json()` as JSON text, without its deep copies: a list of 30k tokens is walked once."""
    try:
        return json.dumps(vars(trajectory), default=_plain, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"Prompt {trajectory.prompt.id!r} or its trajectory cannot be written as JSON: {error}. Expected it to be, "
            "as reward functions run in other processes. Turn the field into numbers, strings, lists or dicts."
        ) from error


def _plain(value: object) -> Any:
    if isinstance(value, Prompt):
        return value.to_json()
    if is_dataclass(value) and not isinstance(value, type):
        return vars(value)
    if hasattr(value, "tolist"):  # a number or array of numpy or torch
        return value.tolist()
    raise TypeError(f"it holds {value!r:.100} ({type(value).__name__})")


class _WorkerProcess:
    """One child (a guardian with its worker, see worker.py) and the three pipes to and from it."""

    def __init__(self, settings: Mapping[str, Any], *, import_path: Sequence[str]) -> None:
        self.runs_together = False
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(os.getpid()), *import_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            # Several workers with a thread per core each would slow one another down.
            env={**_ONE_THREAD, **os.environ},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._requests, self._replies, self._errors = (pipe.fileno() for pipe in self._pipes)
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        self._poller = select.poll()
        self._poller.register(self._replies, select.POLLIN)
        self._poller.register(self._errors, select.POLLIN)
        self._outgoing = memoryview(b"")
        self._reply_bytes = bytearray()
        self._error_bytes = bytearray()
        self._log: deque[str] = deque(maxlen=_MAX_LOG_LINES)
        self._is_ready = False
        self._is_ended = False  # nothing more comes from it
        self._send_bytes(json.dumps(settings).encode() + b"\n")

    def is_ready(self, wait_s: float) -> bool:
        if self._is_ready:
            return True
        for line in self._receive_lines(wait_s):
            record = json.loads(line)
            if "problem" in record:
                raise ValueError(record["problem"])
            self.runs_together = record["runs_together"]
            self._is_ready = True
            return True
        return False

    def is_alive(self) -> bool:
        self._exchange(0.0)
        return not self._is_ended and not self._has_exited()

    def send(self, requests: Sequence[bytes]) -> None:
        self._log.clear()
        self._send_bytes(b"[" + b",".join(requests) + b"]\n")

    def receive(self, wait_s: float) -> list[tuple[int, Outcome]]:
        return [_outcome(json.loads(line)) for line in self._receive_lines(wait_s)]

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
            self._exchange(0.0)  # what it printed last
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
        if b"\n" not in self._reply_bytes and (self._is_ended or self._has_exited()):
            while self._exchange(0.0):  # its last words
                pass
            if b"\n" not in self._reply_bytes:
                raise WorkerDied(self._obituary())
        *lines, self._reply_bytes = self._reply_bytes.split(b"\n")
        return [bytes(line) for line in lines]

    def _exchange(self, wait_s: float, *, forward: bool = True) -> bool:
        """Moves what the pipes take and give, after `wait_s` at most; False if that was nothing."""
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
                self._error_bytes += data or b""
                self._log_lines(forward)
        return bool(ready)

    def _write(self) -> None:
        try:
            self._outgoing = self._outgoing[os.write(self._requests, self._outgoing) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it ended: reading says so, after its last words
            self._outgoing = memoryview(b"")
        if not self._outgoing:
            self._poller.unregister(self._requests)

    def _log_lines(self, forward: bool) -> None:
        *lines, self._error_bytes = self._error_bytes.split(b"\n")
        for line in lines:
            text = line.decode(errors="replace")
            self._log.append(text)
            if forward:
                sys.stderr.write(f"[reward worker {self._process.pid}] {text}\n")

    def _has_exited(self) -> bool:
        # WNOWAIT: `end` waits for it, and its process id is nobody else's until then.
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, flags) is not None

    def _obituary(self) -> str:
        deadline = time.monotonic() + 1.0
        while not self._has_exited() and time.monotonic() < deadline:  # its pipe closes a moment earlier
            time.sleep(0.01)
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            how = "it closed its pipe"
        elif status.si_code == os.CLD_EXITED:
            how = f"exit code {status.si_status}"
        else:
            how = f"signal {signal.Signals(status.si_status).name}"
            how += " (out of memory?)" if status.si_status == signal.SIGKILL else ""
        said = "\n".join(self._log)
        return f"{how}, after it printed\n{said}\n" if said else how


def _read(descriptor: int) -> bytes | None:
    """What is there; b"" at the end, None if there is nothing after all."""
    try:
        return os.read(descriptor, _READ_BYTES)
    except BlockingIOError:
        return None


def _outcome(record: dict[str, Any]) -> tuple[int, Outcome]:
    if "error" in record:
        return record["index"], RewardError(record["error"], reason=record["reason"])
    return record.pop("index"), Judgment(**record)
