"""A runtime for task folders: sandboxes at Modal or another service, through the package SWE-ReX.

    pip install "swe-rex[modal]" aiohttp

    workflow:
      class_path: lightrl.workflows.TaskWorkflow
      init_args: {command: [my-agent, "{task}"], network: allow, endpoint_host: 203.0.113.7}
    data: {train: {source: my-tasks, arguments: {runtime: examples.agent.rex_sandboxes.RexSandboxes}}}

A program in a sandbox reaches the policy at `endpoint_host`, an address of the trainer's machine, through `{base_url}`
and a key. This is not encrypted, so use an address in a virtual private network.

Each run starts a sandbox and stops it; if the trainer is killed, the service stops it after `MAX_S`. The program must
be in the image. The service's limits on memory, disk and processes apply, not the workflow's.
"""

import asyncio
import base64
import importlib.util
import io
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightrl.workflows.task_folders import Runtime, TaskFolder
from lightrl.workflows.task_folders.containers import pack, unpack
from lightrl.workflows.task_folders.runtime import Json, Machine

MAX_S = 3600.0
MAX_COPIED_MIB = 256  # if limits.disk_mib is not set
# Empties the working directory and prints its paths.
EMPTY = 'mkdir -p "$0" && cd "$0" && find . && find . -mindepth 1 -delete'
# Starts a program; its files are in the request's folder. A request to a sandbox must be short, so it does not wait.
START = """cd "$1" || exit
(. "$0/variables.sh"; shift; "$@" <"$0/stdin" >"$0/output" 2>&1; echo $? >"$0/code.new"; mv "$0/code.new" "$0/code") \\
    >/dev/null 2>&1 </dev/null &"""
OVERLAY = """mount -t tmpfs none "$0" && cd "$0" && mkdir new work root
mount -t overlay -o lowerdir=/,upperdir=new,workdir=work none root
mount -t proc none root/proc && mount --rbind /dev root/dev && exec chroot root "$@"
"""


class RexSandboxes(Runtime):
    """Runs tasks in sandboxes at Modal. For another service, override `deployment`."""

    def deployment(self, image: str) -> Any:
        """Returns a sandbox that has not started: a `swerex.deployment.abstract.AbstractDeployment`."""
        from swerex.deployment.modal import ModalDeployment

        return ModalDeployment(image=image, startup_timeout=600.0, runtime_timeout=600.0, deployment_timeout=MAX_S)

    def missing(self) -> str | None:
        is_installed = importlib.util.find_spec("swerex") and importlib.util.find_spec("aiohttp")
        return None if is_installed else 'the package swe-rex is not installed. pip install "swe-rex[modal]" aiohttp'

    def build(self, task: TaskFolder) -> str:
        return task.image or str(task.folder.resolve() / "environment" / "Dockerfile")  # the service builds it once

    async def run(self, machine: Machine, request: Json) -> Json:
        if request["network"] != "allow":
            raise OSError(f"network={request['network']} must be allow: the policy is reached over the network")
        deployment = await asyncio.to_thread(self.deployment, machine.image)
        try:
            await deployment.start()
            return await run_in(deployment.runtime, machine, request)
        except Exception as error:  # of the service or its client; it drops the trajectory
            raise OSError(f"the sandbox fails: {error!r:.300}") from error
        finally:
            await asyncio.shield(asyncio.ensure_future(deployment.stop()))


class OwnSandboxes(RexSandboxes):
    """Tries the above without a service: as root, in SWE-ReX's server on this machine, which protects nothing from it.

    The server sees this machine's files; what it changes stays in memory.
    """

    def deployment(self, image: str) -> Any:
        from swerex.deployment.remote import RemoteDeployment

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        key = secrets.token_hex(16)  # whoever has it runs programs as root
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
        words += ["sh", "-ec", OVERLAY, tempfile.gettempdir(), sys.executable, "-m", "swerex", "--host", "127.0.0.1"]

        class Deployment(RemoteDeployment):
            async def start(self) -> None:
                self.server = subprocess.Popen([*words, "--port", str(port), "--auth-token", key])
                await super().start()
                await self.runtime.wait_until_alive(timeout=600)

            async def stop(self) -> None:
                self.server.kill()
                await asyncio.to_thread(self.server.wait)

        return Deployment(auth_token=key, host="http://127.0.0.1", port=port)


async def run_in(sandbox: Any, machine: Machine, request: Json) -> Json:
    """Runs a program in a `swerex.runtime.abstract.AbstractRuntime`; returns its result."""
    from swerex.runtime.abstract import Command, UploadRequest

    async def shell(script: str, *words: str) -> str:
        done = await sandbox.execute(Command(command=["sh", "-c", script, *words]))
        return str(done.stdout)

    folder, workdir, limits = request["folder"], machine.task.workdir, request["limits"]
    if machine.left is not None:
        paths = await shell(EMPTY, workdir)
        await asyncio.to_thread(machine.clean, {path.removeprefix("./") for path in paths.splitlines()})
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        files = {**request["files"], "stdin": request["stdin"]}
        await asyncio.to_thread(pack, file, machine, {**request, "files": files})
        file.flush()
        await sandbox.upload(UploadRequest(source_path=file.name, target_path=f"{folder}.tar"))
    if await shell('tar -xf "$0.tar" -C / && echo done', folder) != "done\n":
        raise OSError("tar cannot unpack the files: the image needs tar, and the disk must have room")
    program, *arguments = request["command"]
    await shell(START, folder, workdir, Path(program).name, *arguments)
    code, end_s = "", time.monotonic() + limits["wall_s"]
    while not (code := await shell('cat "$0/code" 2>/dev/null', folder)) and time.monotonic() < end_s:
        await asyncio.sleep(1)
    output = await shell(f'tail -c {limits["output_kib"] << 10} "$0/output"', folder)
    parent, max_mib = Path(machine.returned).parent, limits["disk_mib"] or MAX_COPIED_MIB
    copy = f'tar -c -C "$0" "$1" 2>/dev/null | head -c {(max_mib + 1) << 20} | base64'
    archive = base64.b64decode(await shell(copy, str(parent), Path(machine.returned).name))
    target = Path(folder, "work", *parent.parts[1:])
    target.mkdir(parents=True)
    if archive:  # otherwise the program removed the folder
        await asyncio.to_thread(unpack, io.BytesIO(archive), target, max_mib)
    report = {"exit_code": int(code) if code else None, "stopped_by": None if code else "time"}
    return {**report, "stdout": output, "layers": ["container"], "problem": None}
