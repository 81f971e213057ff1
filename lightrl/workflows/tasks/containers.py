"""Docker, Podman and Apptainer: tasks in containers, through the runtimes' command-line programs.

A run starts a container that sleeps, copies files in, executes the program, kills the container, copies files out, and
removes it. A process that outlives this one waits beside it to remove the container if this process is killed. Without
a network, the agent reaches only the policy's endpoint: a socket made in the container's network namespace leads there.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import resource
import secrets
import shutil
import subprocess
import tarfile
import tempfile
import threading
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

from lightrl.concurrency.owner import may_run, own_mark
from lightrl.rewards.sandbox import RELAY_COMMAND, SYSTEM_PATHS
from lightrl.workflows.tasks.folder import Task
from lightrl.workflows.tasks.runtime import NO_ENDPOINT, Json, Machine, Runtime, cache_folder

_LABEL = "lightrl-owner"
_UNBOUNDED_MIB = 1 << 30
_MANY_PROCESSES = 1 << 16  # of this user, in all containers; each has a limit of its own
_START_S = 120.0
_WAIT = 'read -r _; exec "$@" >/dev/null 2>&1'  # until this process closes the pipe, or dies


class Docker(Runtime):
    """Containers by `docker`."""

    program = "docker"

    def __init__(self) -> None:
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def missing(self) -> str | None:
        if shutil.which(self.program) is None:
            return f"there is no program {self.program}. Install it, or choose another runtime."
        done = self._call("info")
        if done.returncode:
            return f"`{self.program} info` fails: {_end_of(done)}. Start its service, or choose another runtime."
        self._remove_left_behind()
        return None

    def build(self, task: Task) -> str:
        with self._lock:
            lock = self._locks.setdefault(task.digest, threading.Lock())
        with lock:
            return self._build(task)

    def _build(self, task: Task) -> str:
        name = task.image or f"localhost/lightrl-task:{task.digest}"
        if self._call("image", "inspect", name).returncode:
            folder = str(task.folder / "environment")
            done = self._call("pull", name) if task.image else self._call("build", "-t", name, folder)
            if done.returncode:
                raise ValueError(f"{self.program} cannot {'pull' if task.image else 'build'} {name}: {_end_of(done)}")
        return name

    async def run(self, machine: Machine, request: Json) -> Json:
        if not isinstance(request["network"], str):
            raise OSError(f"network={request['network']} must be none or allow in a container")
        async with self._container(machine, request) as name:
            await self._copy_in(name, machine, request)
            with contextlib.ExitStack() as stack:
                if request["network"] == "none" and request["port"] != NO_ENDPOINT:
                    stack.enter_context(await self._relay(name, request["port"]))
                code, output = await self._execute(name, machine, request)
            await self._do(self.end(name))
            Path(request["folder"], "work").mkdir(parents=True)
            for path in machine.returned:
                await self._copy_out(name, path, request)
        stopped_by = "time" if code is None else None
        report = {"exit_code": code, "stdout": output, "stopped_by": stopped_by, "layers": ["container"]}
        return {**report, "problem": None}

    # The commands that differ between programs.

    def start(self, name: str, image: str, request: Json) -> list[str]:
        limits = request["limits"]
        # Podman asks for more than this process may have if these are not set.
        bounds = {"nofile": limits["max_open_files"], "nproc": _MANY_PROCESSES}
        allowed = {"nofile": resource.getrlimit(resource.RLIMIT_NOFILE)[1]}
        allowed["nproc"] = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        words = ["run", "--detach", "--name", name, "--label", f"{_LABEL}={own_mark()}", "--workdir", "/"]
        words += ["--network", "none" if request["network"] == "none" else "host"]
        words += ["--security-opt", "no-new-privileges", "--pids-limit", str(limits["max_processes"])]
        for kind, bound in bounds.items():
            value = bound if allowed[kind] == resource.RLIM_INFINITY else min(bound, allowed[kind])
            words += ["--ulimit", f"{kind}={value}:{value}"]
        if limits["memory_mib"] < _UNBOUNDED_MIB:
            words += ["--memory", f"{limits['memory_mib']}m", "--memory-swap", f"{limits['memory_mib']}m"]
        for path in _mounted(request):
            words += ["--volume", f"{path}:{path}:ro"]
        return [self.program, *words, "--entrypoint", "sleep", image, "infinity"]

    def execute(self, name: str, *words: str, cwd: str = "/", variables: Sequence[str] = ()) -> list[str]:
        settings = [word for variable in variables for word in ("--env", variable)]
        return [self.program, "exec", "--interactive", "--workdir", cwd, *settings, name, *words]

    def copy_in(self, name: str, path: str) -> list[str]:
        return [self.program, "cp", "-", f"{name}:{path}"]

    def copy_out(self, name: str, path: str) -> list[str]:
        return [self.program, "cp", f"{name}:{path}", "-"]

    def end(self, name: str) -> list[str]:
        return [self.program, "kill", name]

    def remove(self, name: str) -> list[str]:
        return [self.program, "rm", "--force", "--volumes", name]

    def passed(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables of the program from which `execute` takes these."""
        return dict(variables)

    def process(self, name: str) -> list[str]:
        return [self.program, "inspect", "--format", "{{.State.Pid}}", name]

    # What is the same.

    def _call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self.program, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL)

    def _remove_left_behind(self) -> None:
        """Removes containers whose owner was killed together with the process that waits to remove them."""
        format_ = f'{{{{.ID}}}} {{{{.Label "{_LABEL}"}}}}'
        lines = self._call("ps", "--all", "--filter", f"label={_LABEL}", "--format", format_).stdout.splitlines()
        for name, _, mark in (line.partition(" ") for line in lines):
            if mark and not may_run(mark):
                self._call(*self.remove(name)[1:])

    @contextlib.asynccontextmanager
    async def _container(self, machine: Machine, request: Json) -> AsyncIterator[str]:
        """Starts a container; removes it at the end, on cancellation, and if this process is killed."""
        name = f"lightrl-{secrets.token_hex(8)}"
        waiting = subprocess.Popen(
            ["/bin/sh", "-c", _WAIT, "sh", *self.remove(name)], stdin=subprocess.PIPE, start_new_session=True
        )
        assert waiting.stdin is not None
        try:
            await self._do(self.start(name, machine.image, request))
            yield name
        finally:
            waiting.stdin.close()
            removed = asyncio.ensure_future(asyncio.to_thread(waiting.wait))
            while not removed.done():  # cancelled, possibly more than once
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(removed)

    async def _do(self, command: Sequence[str], stdin: IO[bytes] | None = None, to: IO[bytes] | None = None) -> bytes:
        """Runs a command of the program; returns its output, or raises OSError with the end of its errors."""
        process = await asyncio.create_subprocess_exec(*command, stdin=stdin or DEVNULL, stdout=to or PIPE, stderr=PIPE)
        try:
            out, errors = await asyncio.wait_for(process.communicate(), _START_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if process.returncode:
            raise OSError(f"`{' '.join(command[:2])}` failed: {errors.decode(errors='replace').strip()[-200:]}")
        return out or b""

    async def _copy_in(self, name: str, machine: Machine, request: Json) -> None:
        if machine.agent_workspace is not None:
            workdir = machine.task.workdir
            paths = (await self._do(self.execute(name, "find", ".", cwd=workdir))).decode(errors="replace")
            before = {path.removeprefix("./") for path in paths.splitlines()}
            await self._do(self.execute(name, "rm", "-rf", workdir))
            with (Path(machine.agent_workspace).parent / "workdir.tar").open("rb") as file:
                await self._do(self.copy_in(name, str(Path(workdir).parent)), file)
            if removed := machine.removed(before):
                await self._do(self.execute(name, "rm", "-rf", *(f"{workdir}/{each}" for each in removed)))
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(_pack, file, machine, request)
            await self._do(self.copy_in(name, "/"), file)

    async def _copy_out(self, name: str, path: str, request: Json) -> None:
        """Copies a path to workdir.tar, for the tests, and to `work`, without links that lead out of it."""
        folder, max_mib = Path(request["folder"]), request["limits"]["disk_mib"] or 1024
        bounded = ["/bin/sh", "-c", f'ulimit -f {max_mib << 11}; exec "$@"', "sh"]  # in units of 512 bytes
        with (folder / "workdir.tar").open("wb") as file:
            try:
                await self._do([*bounded, *self.copy_out(name, path)], to=file)
            except OSError as error:
                if file.tell() < max_mib << 20:
                    raise
                raise OSError(f"{path} has more than limits.disk_mib ({max_mib} MiB)") from error
        await asyncio.to_thread(_unpack, folder / "workdir.tar", folder / "work" / Path(path.strip("/")).parent)

    async def _relay(self, name: str, port: int) -> contextlib.AbstractContextManager[object]:
        """Starts a process that connects a port in the container with this machine's, until the block ends."""
        text = (await self._do(self.process(name))).decode()
        process_id = int(text if text.strip().isdigit() else json.loads(text)["instances"][0]["pid"])
        relay = subprocess.Popen(
            [*RELAY_COMMAND, str(process_id), str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert relay.stdout is not None
        if not await asyncio.to_thread(relay.stdout.readline):
            raise OSError(
                "the container's network namespace cannot be entered. Run as root or with a rootless podman, or set "
                "network: allow"
            )
        return relay

    async def _execute(self, name: str, machine: Machine, request: Json) -> tuple[int | None, str]:
        """Runs the program; returns its exit code, None after the deadline, and the end of its output."""
        variables = {name: value for name, value in request["environment"].items() if not _is_own_path(name, value)}
        command = self.execute(name, *request["command"], cwd=machine.task.workdir, variables=list(variables))
        # The values of variables are not in the arguments, which all users can read.
        with tempfile.TemporaryFile() as stdin, _Tail(request["limits"]["output_kib"] << 10) as output:
            stdin.write(request["stdin"].encode(errors="surrogatepass"))
            stdin.seek(0)
            environment = {**os.environ, **self.passed(variables)}
            process = await asyncio.create_subprocess_exec(
                *command, stdin=stdin, stdout=output.writing, stderr=STDOUT, env=environment
            )
            code: int | None = None
            try:
                code = await asyncio.wait_for(process.wait(), request["limits"]["wall_s"])
            except TimeoutError:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            output.read()
            return code, output.data.decode(errors="replace")


class _Tail:
    """A pipe that keeps the end of what is written; its reader need not wait until all writers have closed it.

    A process that a program leaves behind keeps the program's output open.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.data = bytearray()
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.reading, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.reading, self.read)

    def read(self) -> None:
        """Reads what a pipe holds at most."""
        with contextlib.suppress(BlockingIOError):
            self.data += os.read(self.reading, 1 << 16)
            del self.data[: -self.max_bytes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self.reading)
        os.close(self.reading)
        os.close(self.writing)


class Podman(Docker):
    """Containers by `podman`, also without root."""

    program = "podman"


class Apptainer(Docker):
    """Containers by `apptainer`, for tasks with a ready image: it builds no Dockerfiles."""

    program = "apptainer"

    def missing(self) -> str | None:
        return None if shutil.which(self.program) else f"there is no program {self.program}. Install it."

    def problem(self, task: Task) -> str | None:
        return None if task.image else "apptainer builds no Dockerfiles: set environment.docker_image in task.toml"

    def _build(self, task: Task) -> str:
        target = cache_folder() / f"{task.digest}.sif"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            done = self._call("build", "--force", f"{target}.part", f"docker://{task.image}")
            if done.returncode:
                raise ValueError(f"apptainer cannot pull {task.image}: {_end_of(done)}")
            Path(f"{target}.part").rename(target)
        return str(target)

    def start(self, name: str, image: str, request: Json) -> list[str]:
        words = ["instance", "start", "--containall", "--writable-tmpfs", "--no-home"]
        words += ["--net", "--network", "none"] if request["network"] == "none" else []
        words += ["--pids-limit", str(request["limits"]["max_processes"])]
        if request["limits"]["memory_mib"] < _UNBOUNDED_MIB:
            words += ["--memory", f"{request['limits']['memory_mib']}M"]
        for path in _mounted(request):
            words += ["--bind", f"{path}:{path}:ro"]
        return [self.program, *words, image, name]

    def execute(self, name: str, *words: str, cwd: str = "/", variables: Sequence[str] = ()) -> list[str]:
        return [self.program, "exec", "--pwd", cwd, f"instance://{name}", *words]

    def passed(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {f"APPTAINERENV_{name}": value for name, value in variables.items()}

    def copy_in(self, name: str, path: str) -> list[str]:
        return self.execute(name, "tar", "-xf", "-", "-C", path)

    def end(self, name: str) -> list[str]:
        return ["true"]  # a stopped instance has no files to copy; tests run in another one

    def copy_out(self, name: str, path: str) -> list[str]:
        return self.execute(name, "tar", "-cf", "-", "-C", str(Path(path).parent), Path(path).name)

    def remove(self, name: str) -> list[str]:
        return [self.program, "instance", "stop", name]

    def process(self, name: str) -> list[str]:
        return [self.program, "instance", "list", "--json", name]


def _mounted(request: Json) -> list[str]:
    """Returns the paths of this machine that the container shows read-only: the agent's program and `readable`."""
    paths = {os.path.realpath(path) for path in request["needed"]} | set(request["needed"])
    return sorted(path for path in paths if not f"{path}/".startswith(tuple(f"{each}/" for each in SYSTEM_PATHS)))


def _pack(file: IO[bytes], machine: Machine, request: Json) -> None:
    """Writes an archive of a container's new files: the request's folder, and the machine's copies."""
    folder = request["folder"].strip("/")
    with tarfile.open(fileobj=file, mode="w") as tar:
        for path in (folder, f"{folder}/home", f"{folder}/work", f"{folder}/tmp", "logs/verifier", "logs/agent"):
            entry = tarfile.TarInfo(path)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(entry)
        for name, text in request["files"].items():
            data = text.encode(errors="surrogatepass")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
        for source, path in machine.copies:
            tar.add(
                source, path.strip("/"), filter=lambda each: each.replace(uid=0, gid=0, uname="", gname="", deep=False)
            )
    file.seek(0)


def _unpack(archive: Path, target: Path) -> None:
    """Extracts what lies below the target, and leaves out what leads out of it."""
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            with contextlib.suppress(tarfile.FilterError, OSError, KeyError):
                tar.extract(tarfile.data_filter(member, str(target)), target)


def _is_own_path(name: str, value: str) -> bool:
    """Whether a variable is this machine's PATH, where a container has its own."""
    return name == "PATH" and value == os.environ.get("PATH")


def _end_of(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip() or done.stdout.strip())[-300:]
