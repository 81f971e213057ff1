"""GuardedProcesses: commands on this host, by name, each under a guard of its own (parent_guard.py).

No method waits, so that a launcher can also call them on another host. All commands end with this process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from lightrl.concurrency import parent_guard


class GuardedProcesses:
    """The commands that were started here."""

    def __init__(self) -> None:
        self.guards: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        secret_files: Mapping[str, str],
        log_file: str | None,
        grace_s: float,
        folder: str,
        pass_fds: Collection[int] = (),
    ) -> None:
        """Starts a command, in place of the one that had this name and has ended.

        Args:
            environment: variables to add to this process's.
            secret_files: variable → the file that holds its value.
            log_file: its output is appended there; None leaves it where this process's goes.
            grace_s: from SIGTERM to SIGKILL, if `ask_to_end` never comes.
            folder: to start it in.
            pass_fds: descriptors that it gets under the same numbers.
        """
        if log_file is not None:
            Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, "-I", parent_guard.__file__, str(os.getpid()), str(grace_s), f"{log_file}.none"]
        secrets = {variable: Path(file).read_text().strip() for variable, file in secret_files.items()}
        with contextlib.nullcontext() if log_file is None else Path(log_file).open("ab") as log:
            self.guards[name] = subprocess.Popen(
                [*guard, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=folder,
                env={**os.environ, **environment, **secrets},
                pass_fds=pass_fds,
            )

    def codes(self) -> dict[str, int | None]:
        """The exit code of each command, 128 + n for signal n; None while it runs."""
        return {name: guard.poll() for name, guard in self.guards.items()}

    def ask_to_end(self, names: Collection[str], grace_s: float) -> None:
        """SIGTERM for those of these commands that are here, and after the grace SIGKILL."""
        for guard in (self.guards[name] for name in names if name in self.guards):
            assert guard.stdin is not None
            with contextlib.suppress(OSError, ValueError):  # it has ended, or was asked before
                guard.stdin.write(f"{grace_s}".encode())
                guard.stdin.flush()
            with contextlib.suppress(OSError):
                guard.stdin.close()

    def kill(self, name: str) -> None:
        """Kills a guard that does not answer, as one that was stopped; Linux then kills its command."""
        if name in self.guards:
            self.guards[name].kill()


# Several processes with a thread for each core would slow each other down.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def import_path(*first: str) -> list[str]:
    """The folders of this process's import path, after those that come first."""
    return [str(Path(entry).absolute()) for entry in (*first, *sys.path)]  # "" is the working folder


def command(module: str, argument: str, paths: Sequence[str]) -> list[str]:
    """Runs the `main` of a module, with `sys.argv[1]` this argument, and these paths to import from."""
    code = f"import sys; sys.path[:] = sys.argv[2:]; from {module} import main; main()"
    return [sys.executable, "-c", code, argument, *paths]
