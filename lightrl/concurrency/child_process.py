"""ChildProcess: a command that exits with this process, or a module that serves this process over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from lightrl.concurrency import parent_guard

KILL_WAIT_S = 10.0  # time after the grace period for a guard to kill the remaining processes
_TICK_S = 0.05

# Several processes with one thread per core would slow each other down.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ChildProcess:
    """A command with a guard (parent_guard.py), which ends it and its descendants when this process exits.

    The constructor starts the command. Methods may be called from any thread, even after the command has exited.

    Args:
        environment: all environment variables for the command.
        grace_s: time from SIGTERM to SIGKILL if `ask_to_end` is never called.
        log: file descriptor of the output; `subprocess.PIPE` to read from `output`; None shares this process's output.
        remove: a file that the guard deletes at the end.
        folder: the working directory; None uses this process's.
        pass_fds: file descriptors that the command inherits under the same numbers.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        grace_s: float,
        log: int | None = None,
        remove: Path | None = None,
        folder: str | None = None,
        pass_fds: Collection[int] = (),
    ) -> None:
        guard = [sys.executable, "-I", parent_guard.__file__, str(os.getpid()), str(grace_s), str(remove or "")]
        self._process = subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
            cwd=folder,
            env=environment,
            pass_fds=pass_fds,
        )

    @classmethod
    def of_module(cls, module: str, paths: Sequence[str], **settings: Any) -> tuple[ChildProcess, socket.socket]:
        """Runs a module's `main` with this import path; returns the child and a socket to it (see `connect_to_parent`).

        The child's math libraries use one thread unless our environment says otherwise. SIGKILL ends the child.
        """
        parent_end, child_end = socket.socketpair()
        code = f"import sys; sys.path[:] = sys.argv[2:]; from {module} import main; main()"
        command = [sys.executable, "-c", code, str(child_end.fileno()), *paths]
        with contextlib.ExitStack() as undo, child_end:
            undo.callback(parent_end.close)
            environment = {**_ONE_THREAD, **os.environ}
            child = cls(command, environment=environment, grace_s=0.0, pass_fds=[child_end.fileno()], **settings)
            undo.pop_all()
        return child, parent_end

    @property
    def output(self) -> IO[bytes]:
        """The read end of the pipe with the command's output; `end` closes it."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def pid(self) -> int:
        """Process id of the guard, which exits with the command."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The command's exit code, 128 + n for signal n; below 0 if the guard was killed; None while it runs."""
        return self._process.poll()

    def ask_to_end(self, grace_s: float) -> None:
        """Sends SIGTERM, and SIGKILL after the grace period; returns immediately. Only the first call counts."""
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError):  # the guard has exited, or was asked before
            pipe.write(f"{grace_s}".encode())
        with contextlib.suppress(OSError):
            pipe.close()

    def show_stack(self) -> None:
        """Makes a module that called `connect_to_parent` write the stack of its main thread to its stderr."""
        self._process.send_signal(signal.SIGUSR1)  # the guard passes it on

    def kill(self) -> None:
        """Kills a guard that does not respond (it may have been stopped); Linux then kills the command."""
        self._process.kill()

    def end(self, grace_s: float) -> int:
        """Asks the command to exit and waits until it has; kills it if necessary. Returns its `code`."""
        self.ask_to_end(grace_s)
        if not self.wait(grace_s + KILL_WAIT_S):
            self.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return self._process.returncode

    def wait(self, within_s: float) -> bool:
        """Waits up to `within_s`; returns whether the command has exited."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self.code is not None

    async def ended(self, within_s: float) -> bool:
        """Waits up to `within_s`; returns whether the command has exited."""
        for _ in range(round(within_s / _TICK_S)):
            if self.code is None:
                await asyncio.sleep(_TICK_S)
        return self.code is not None


def ending_of(code: int) -> str:
    """Describes an exit code for messages, as `exit code 1` or `signal SIGKILL`."""
    with contextlib.suppress(ValueError):  # no such signal
        return f"signal {signal.Signals(code - 128 if code > 0 else -code).name}"
    return f"exit code {code}"


def connect_to_parent() -> socket.socket:
    """Returns the socket to the parent; a `main` that `of_module` started must call this first."""
    parent = socket.socket(fileno=int(sys.argv[1]))
    parent.set_inheritable(False)
    del sys.argv[1:]
    faulthandler.enable()  # shows where C code crashed
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    return parent


def import_path(*first: str) -> list[str]:
    """Returns the `first` folders, then the folders of this process's import path."""
    return [str(Path(entry).absolute()) for entry in (*first, *sys.path)]  # "" is the working directory
