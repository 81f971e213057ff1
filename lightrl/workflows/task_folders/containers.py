"""Docker and Podman: run tasks in containers, using the command-line programs.

A run starts an idle container, copies files in, executes the program, kills the container, copies files out, and
removes it. A helper process, which outlives this one, starts the container and removes it when this process closes a
pipe or dies. Without a network, the agent reaches only the policy's endpoint, through a relay in its namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import re
import resource
import secrets
import shlex
import shutil
import subprocess
import tarfile
import tempfile
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from lightrl.concurrency.owner import may_run, own_mark
from lightrl.rewards.sandbox import RELAY_COMMAND, SYSTEM_PATHS
from lightrl.workflows.task_folders.folder import TaskFolder
from lightrl.workflows.task_folders.runtime import NO_ENDPOINT, Json, Machine, Runtime, variables_of

T = TypeVar("T")
log = logging.getLogger(__name__)

_LABEL = "lightrl-owner"
_UNBOUNDED_MIB = 1 << 30
_MANY_PROCESSES = 1 << 15  # per user in all containers, Podman's maximum; --pids-limit bounds each container
_CALL_S = 120.0
_SIZE = ("inspect", "--type", "container", "--size", "--format", "{{.SizeRw}}")
_SIZE_EVERY_S = 2.0  # between measurements of a container's files, if its disk is limited
_MAX_COPIED_MIB = 1024  # maximum size of an agent's files if limits.disk_mib is not set
_MAX_DEPTH = 100  # checking a path takes time in proportion to its depth, so deeper files are not copied
# Starts and later removes a container. Ignores SIGPIPE, so that it continues after its reader has died.
_LIFE = 'trap \'\' PIPE; if eval "$1" >&2; then echo started; else echo; fi; read -r _; eval "$2" >/dev/null 2>&1'
_EMPTY = 'mkdir -p "$0" && cd "$0" && find . && rm -rf ./* ./.[!.]* ./..?*'
_IS_MISSING = re.compile("could not find|could not be found|no such file", re.IGNORECASE)
_ROOTLESS = re.compile(r"^ *rootless(: true)?$", re.MULTILINE)  # in the output of `info`, of podman and docker
_NO_LIMITS = re.compile(r"cgroup ?(version: v?1|driver: none)$", re.MULTILINE | re.IGNORECASE)  # none without systemd
_WITH_VARIABLES = '. "$0"; exec "$@"'


class Docker(Runtime):
    """Runs containers with `docker`."""

    program = "docker"

    def __init__(self) -> None:
        self._built: dict[str, str] = {}  # a task's digest → the name of its image

    def missing(self) -> str | None:
        if shutil.which(self.program) is None:
            return f"{self.program} is not installed. Install it, or choose another runtime."
        if shutil.which("timeout") is None:
            return "the `timeout` program is not installed. Install GNU coreutils."
        done = self._call("info")
        if done.returncode:
            return f"`{self.program} info` failed: {_end_of(done.stderr)}. Start its service or choose another runtime."
        if _ROOTLESS.search(done.stdout) and _NO_LIMITS.search(done.stdout):
            log.warning("Without root, %s limits memory and processes only with cgroups v2 and systemd.", self.program)
        self._remove_left_behind()
        return None

    def build(self, task: TaskFolder) -> str:
        if task.digest not in self._built:
            name = task.image or f"localhost/lightrl-task:{task.digest}"
            if self._call("image", "inspect", name).returncode:
                words = ["pull", name] if task.image else ["build", "-t", name, str(task.folder / "environment")]
                done = self._call(*words, timeout_s=task.timeout_s("environment"))
                if done.returncode:
                    raise ValueError(f"{self.program} {words[0]} of {name} failed: {_end_of(done.stderr)}")
            self._built[task.digest] = name
        return self._built[task.digest]

    async def run(self, machine: Machine, request: Json) -> Json:
        if not isinstance(request["network"], str):
            raise OSError(f"network={request['network']} must be none or allow in a container")
        if hidden := [path for path in _mounted(request) if f"{path}/".startswith(f"{machine.task.workdir}/")]:
            raise OSError(f"{hidden[0]} of this machine would be mounted in the task's working directory. Move it")
        async with self._container(machine, request) as name:
            await self._copy_in(name, machine, request)
            async with self._relay(name, request):
                code, stopped_by, output = await self._execute(name, machine, request)
            await self._do("kill", name)
            Path(request["folder"]).mkdir(mode=0o700)
            if stopped_by is None:
                await self._copy_out(name, machine.returned, request)
        return {"exit_code": code, "stdout": output, "stopped_by": stopped_by, "layers": ["container"], "problem": None}

    def _call(self, *words: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        command = [self.program, *words]
        try:
            return subprocess.run(
                command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout_s, errors="replace"
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"it did not end within {timeout_s:g} s")

    def _remove_left_behind(self) -> None:
        """Removes containers whose owner was killed together with the process that waits to remove them."""
        containers = self._call("ps", "--all", "--filter", f"label={_LABEL}", "--format", "{{.ID}} {{.Labels}}").stdout
        for name, mark in re.findall(rf"^(\w+) .*{_LABEL}[=:]([\w-]+)", containers, re.MULTILINE):
            if not may_run(mark):
                self._call("rm", "--force", "--volumes", name)

    @contextlib.asynccontextmanager
    async def _container(self, machine: Machine, request: Json) -> AsyncIterator[str]:
        """Starts a container; removes it at the end, on cancellation, and if this process is killed."""
        name = f"lightrl-{secrets.token_hex(8)}"
        start, remove = self._start(name, machine, request), [self.program, "rm", "--force", "--volumes", name]
        words = [shlex.join(["timeout", f"{_CALL_S:g}", *each]) for each in (start, remove)]
        command = ["/bin/sh", "-c", _LIFE, "sh", *words]
        cwd = Path(request["folder"]).parent  # Podman's monitor may leave an `oom` file here
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=errors, cwd=cwd, start_new_session=True) as life,
        ):
            assert life.stdin is not None
            assert life.stdout is not None
            try:
                if await _finished(life.stdout.readline, life.stdin.close) != b"started\n":
                    errors.seek(0)
                    text = _end_of(errors.read().decode(errors="replace"))
                    raise OSError(f"{self.program} cannot start a container: {text}")
                yield name
            finally:
                life.stdin.close()
                await _finished(life.wait)

    def _start(self, name: str, machine: Machine, request: Json) -> list[str]:
        limits = request["limits"]
        words = ["run", "--detach", "--name", name, "--label", f"{_LABEL}={own_mark()}"]
        words += ["--user", "0", "--workdir", "/", "--network", "none" if request["network"] == "none" else "host"]
        words += ["--security-opt", "no-new-privileges", "--pids-limit", str(limits["max_processes"])]
        words += ["--log-driver", "none"]  # an agent can write to the output of the container's first process
        # Without these, Podman asks for higher limits than this process may have.
        bounds = {"nofile": limits["max_open_files"], "nproc": _MANY_PROCESSES, "fsize": limits["file_mib"] << 20}
        for kind, bound in bounds.items():
            allowed = resource.getrlimit(getattr(resource, f"RLIMIT_{kind.upper()}"))[1]
            value = bound if allowed == resource.RLIM_INFINITY else min(bound, allowed)
            words += ["--ulimit", f"{kind}={value}:{value}"]
        if limits["memory_mib"] < _UNBOUNDED_MIB:
            words += ["--memory", f"{limits['memory_mib']}m", "--memory-swap", f"{limits['memory_mib']}m"]
        for path in _mounted(request):
            words += ["--volume", f"{path}:{path}:ro"]
        return [self.program, *words, "--entrypoint", "sleep", machine.image, "infinity"]

    async def _do(self, *words: str, stdin: IO[bytes] | None = None) -> str:
        """Runs a subcommand; returns its output, or raises OSError with the end of its error output."""
        process = await asyncio.create_subprocess_exec(
            self.program, *words, stdin=stdin or subprocess.DEVNULL, stdout=PIPE, stderr=PIPE
        )
        try:
            out, errors = await asyncio.wait_for(process.communicate(), _CALL_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process.returncode:
            raise OSError(f"`{self.program} {words[0]}` failed: {_end_of(errors.decode(errors='replace'))}")
        return out.decode(errors="replace")

    async def _copy_in(self, name: str, machine: Machine, request: Json) -> None:
        if machine.left is not None:
            paths = await self._do("exec", name, "sh", "-c", _EMPTY, machine.task.workdir)
            await asyncio.to_thread(machine.clean, {path.removeprefix("./") for path in paths.splitlines()})
        with tempfile.TemporaryFile() as file:
            await asyncio.to_thread(pack, file, machine, request)
            await self._do("cp", "-", f"{name}:/", stdin=file)

    async def _copy_out(self, name: str, path: str, request: Json) -> None:
        target = Path(request["folder"], "work", *Path(path).parent.parts[1:])
        max_mib = request["limits"]["disk_mib"] or _MAX_COPIED_MIB
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen([self.program, "cp", f"{name}:{path}", "-"], stdout=PIPE, stderr=errors) as process,
        ):
            assert process.stdout is not None
            try:
                await _finished(partial(unpack, process.stdout, target, max_mib), process.kill)
            except (OSError, ValueError, tarfile.TarError) as error:  # OSError: a name is too long, or the disk is full
                text, is_missing = f"{error!s:.300}", False
                if text == "empty file":
                    await _finished(process.wait, process.kill)
                    errors.seek(0)
                    text = _end_of(errors.read().decode(errors="replace"))
                    is_missing = _IS_MISSING.search(text) is not None  # `error` may quote a path that the agent chose
                if not is_missing:  # if it is missing, the agent removed it
                    raise OSError(f"{path} cannot be copied: {text}") from error
            finally:
                process.kill()

    @contextlib.asynccontextmanager
    async def _relay(self, name: str, request: Json) -> AsyncIterator[None]:
        """If the container has no network, forwards the endpoint's port from inside it to this machine."""
        if request["network"] != "none" or request["port"] == NO_ENDPOINT:
            yield
            return
        words = [*RELAY_COMMAND, (await self._do("inspect", "--format", "{{.State.Pid}}", name)).strip()]
        with subprocess.Popen([*words, str(request["port"])], stdin=PIPE, stdout=PIPE) as relay:  # ends with its input
            assert relay.stdout is not None
            if not await _finished(relay.stdout.readline, relay.kill):
                raise OSError("cannot enter the container's network. Use root or a rootless podman, or network: allow")
            yield

    async def _fill(self, name: str, max_mib: int | None) -> str:
        """Returns the name of the limit on disk as soon as a container's new files exceed it."""
        start_s = time.monotonic()
        while max_mib is None or int(await self._do(*_SIZE, name)) <= max_mib << 20:
            await asyncio.sleep(max(_SIZE_EVERY_S, 10 * (time.monotonic() - start_s)))  # a walk over all files
            start_s = time.monotonic()
        return "disk"

    async def _execute(self, name: str, machine: Machine, request: Json) -> tuple[int | None, str | None, str]:
        """Runs the program; returns its exit code, the limit that ended it, and the end of its output."""
        words = ["exec", "--interactive", "--workdir", machine.task.workdir, name, "sh", "-c", _WITH_VARIABLES]
        program, *arguments = request["command"]
        program = Path(program).name if _is_of_image(program) else program
        words += [f"{request['folder']}/variables.sh", program, *arguments]
        process = await asyncio.create_subprocess_exec(
            self.program, *words, stdin=PIPE, stdout=PIPE, stderr=STDOUT, cwd=Path(request["folder"]).parent
        )
        assert process.stdin is not None
        assert process.stdout is not None
        output, limits = bytearray(), request["limits"]

        async def talk(stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader) -> int:
            stdin.write(request["stdin"].encode(errors="surrogatepass"))
            stdin.close()
            while chunk := await stdout.read(1 << 16):
                output.extend(chunk)
                del output[: -(limits["output_kib"] << 10)]
            return await process.wait()

        running = asyncio.ensure_future(talk(process.stdin, process.stdout))
        filling = asyncio.ensure_future(self._fill(name, limits["disk_mib"]))
        try:
            await asyncio.wait([running, filling], timeout=limits["wall_s"], return_when=asyncio.FIRST_COMPLETED)
            stopped_by = None if running.done() else await filling if filling.done() else "time"
            return running.result() if stopped_by is None else None, stopped_by, output.decode(errors="replace")
        finally:
            running.cancel()
            filling.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            await asyncio.gather(running, filling, return_exceptions=True)


class Podman(Docker):
    """Runs containers with `podman`, which works without root."""

    program = "podman"


def _mounted(request: Json) -> list[str]:
    """Returns this machine's paths to mount read-only in the container: the agent's program and `readable`."""
    needed = request["own_readable"] if _is_of_image(request["command"][0]) else request["needed"]
    paths = {os.path.realpath(path) for path in needed} | set(needed)
    return sorted(path for path in paths if not _is_of_image(path))


def _is_of_image(path: str) -> bool:
    return f"{path}/".startswith(tuple(f"{each}/" for each in SYSTEM_PATHS))


def pack(file: IO[bytes], machine: Machine, request: Json) -> None:
    """Writes an archive to copy into a container: the request's folder, the machine's copies, and the agent's work."""
    folder, workdir = request["folder"].strip("/"), machine.task.workdir.strip("/")
    script = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables_of(request).items())
    files = {**request["files"], "variables.sh": script}
    copies = list(machine.copies)
    if machine.left is not None:
        copies.append((f"{machine.left}/{workdir}", workdir))
    with tarfile.open(fileobj=file, mode="w") as tar:
        for path in (workdir, folder, *(f"{folder}/{name}" for name in ("home", "work", "tmp")), "logs/verifier"):
            entry = tarfile.TarInfo(path)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(entry)
        for name, text in files.items():
            data = text.encode(errors="surrogatepass")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
        for source, target in copies:
            for at, folders, names in os.walk(source):  # `tar.add` recurses, and an agent's folders may be deep
                for path in [Path(at, name) for name in (*folders, *names)]:
                    tar.add(path, f"{target.strip('/')}/{path.relative_to(source)}", recursive=False, filter=_of_root)
    file.seek(0)


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    return entry.replace(uid=0, gid=0, uname="", gname="", deep=False)


def unpack(stream: IO[bytes], target: Path, max_mib: int) -> None:
    """Extracts an untrusted archive's files, then its links within the target; raises ValueError above `max_mib`."""
    target.mkdir(parents=True, exist_ok=True)
    num_bytes, num_skipped, links = 0, 0, []

    def extract(entry: tarfile.TarInfo) -> None:
        with contextlib.suppress(tarfile.FilterError, tarfile.StreamError, KeyError):
            entry = tarfile.data_filter(entry, str(target))
            linked = target / entry.linkname
            if not entry.islnk() or (linked.is_file() and not linked.is_symlink()):  # else tarfile skips the filter
                tar.extract(entry, target)

    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for entry in tar:
            num_bytes += entry.size + tarfile.BLOCKSIZE
            if num_bytes > max_mib << 20:
                raise ValueError(f"it has more than limits.disk_mib ({max_mib} MiB)")
            if entry.name.count("/") > _MAX_DEPTH:
                num_skipped += 1
                continue
            if entry.issym():
                links.append(entry)  # extracted last, so that no file is written through a link
            elif entry.isreg() or entry.isdir() or entry.islnk():
                extract(entry)
        for entry in links:
            extract(entry)
    if num_skipped:
        log.warning("Did not copy %d paths in more than %d nested folders out of a container.", num_skipped, _MAX_DEPTH)


async def _finished(work: Callable[[], T], stop: Callable[[], None] = lambda: None) -> T:
    """Runs a blocking function in a thread and waits until it ends; on cancellation, calls `stop` first."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    is_cancelled = False
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            is_cancelled = True
            stop()
    if is_cancelled:
        running.exception()
        raise asyncio.CancelledError
    return running.result()


def _end_of(text: str) -> str:
    return text.strip()[-300:] or "it printed no error"
