"""Hosts in a box: network namespaces with addresses of their own, for tests of what happens between machines.

    with Hosts(3) as hosts:                      # 10.77.0.1, 10.77.0.2, 10.77.0.3, on a switch of their own
        process = hosts.popen(1, ["python", …])
        hosts.cut(2)                             # the link goes down; nobody is told
        hosts.kill(2)                            # every process gets SIGKILL; the kernel closes their connections

A host has its own network and process ids, and shares the files of this machine; with `are_named` it has a name
(`node1`, `node2` …) that all know, and a /run of its own, as daemons need. No interface of the real machine is touched;
all ends with the process that made it. Needs Linux, root, util-linux and iproute2.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PROGRAMS = ("unshare", "nsenter", "setpriv", "ip")
# Ends with the process that started it, even by SIGKILL, and everything inside ends with it.
_APART = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]


def why_not() -> str | None:
    """Why this machine cannot have hosts in a box; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"{', '.join(missing)} not installed"
    done = subprocess.run(["unshare", "--net", "ip", "link", "add", "type", "veth"], capture_output=True, text=True)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else None


class Hosts:
    """`num` hosts, numbered from 1."""

    def __init__(self, num: int, *, are_named: bool = False) -> None:
        self.num = num
        self.are_named = are_named
        self._names = tempfile.TemporaryDirectory(prefix="hosts-")
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # 0 is the switch
        self._pids: dict[int, int] = {}
        self._commands: list[subprocess.Popen[Any]] = []

    @staticmethod
    def address(number: int) -> str:
        return f"10.77.0.{number}"

    def popen(self, number: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on a host, without the real machine's proxies."""
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", **options.pop("env", {})}
        self._commands.append(subprocess.Popen([*self.enter(number), *command], env=environment, **options))
        return self._commands[-1]

    def enter(self, number: int) -> list[str]:
        """The words that a command starts with to run on a host."""
        return ["nsenter", "-t", str(self._pids[number]), "-n", "-p", "-m", *(["-u"] if self.are_named else [])]

    def cut(self, number: int) -> None:
        self._on_switch(f"ip link set port{number} down")

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].wait()

    def __enter__(self) -> "Hosts":
        folder = Path(self._names.name)
        names = (f"{self.address(number)} node{number}\n" for number in range(1, self.num + 1))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{''.join(names)}")
        (folder / "nsswitch.conf").write_text("hosts: files\n")  # no name server: a look-up fails at once
        self._start(0)
        self._on_switch("ip link add br0 type bridge; ip link set br0 up")
        for number in range(1, self.num + 1):
            self._start(number)
            self._on_switch(
                f"ip link add port{number} type veth peer name eth0 netns {self._pids[number]};"
                f"ip link set port{number} master br0 up"
            )
            inside = f"ip link set lo up; ip addr add {self.address(number)}/24 dev eth0; ip link set eth0 up"
            self._shell(number, inside)
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self._processes.values(), *self._commands]:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._names.cleanup()

    def _start(self, number: int) -> None:
        begin = ["echo"]
        if self.are_named and number:
            begin = [f"hostname node{number}", "mount -t tmpfs tmpfs /run", "mkdir -p /run/lock"]
            begin += [f"mount --bind {self._names.name}/{name} /etc/{name}" for name in ("hosts", "nsswitch.conf")]
            begin += ["echo"]
        begin += ["sleep infinity & while :; do wait -n; done"]  # bash reaps what daemons leave
        apart = [*_APART, *(["--uts"] if self.are_named else []), "bash", "-ec", "\n".join(begin)]
        process = subprocess.Popen(apart, stdout=subprocess.PIPE)
        self._processes[number] = process
        process.stdout.readline()  # the namespaces are there
        process.stdout.close()
        (pid,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self._pids[number] = int(pid)

    def _on_switch(self, commands: str) -> None:
        self._shell(0, commands)

    def _shell(self, number: int, commands: str) -> None:
        enter = ["nsenter", "-t", str(self._pids[number]), "-n", "sh", "-ec", commands]
        done = subprocess.run(enter, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{commands!r} failed: {done.stderr.strip()}")
