"""A Ray cluster for tests, with a folder and ports of its own: one node on this machine, or one on each host of a box.

A raylet aborts if its helpers take more than 15 s to start, as on a busy machine. So nodes start one after the other,
and one that does not come up is tried again.
"""

import importlib.util
import os
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path

from hosts import Hosts

from lightrl.commands.launch.command import free_ports
from lightrl.commands.launch.local import GuardedProcesses

_START_S = 600.0
_ATTEMPTS = 3
_TICK_S = 0.1
# `--block` ends all of a node if one of its processes ends. `ray stop` would end every Ray of this machine.
_NODE = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block", "--num-cpus=8"]
_NODE += ["--object-store-memory=80000000", "--disable-usage-stats", "--labels=kind=box"]
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_prestart_worker_first_driver": "0", "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3", "RAY_health_check_initial_delay_ms": "1000", "OMP_NUM_THREADS": "1",
    "RAY_worker_niceness": "0",  # 15 else: beside pytest's other worker, ranks would have a thirtieth of a core
}  # fmt: skip
# Without it all that reach its ports may run code. A process reads it when it first needs Ray.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def why_not() -> str | None:
    """Why Ray cannot run here; None if it can."""
    return None if importlib.util.find_spec("ray") else "not installed (pip install -e '.[ray]')"


class Ray:
    """Nodes that say they have 8 CPUs each, some GPUs, and the label `kind=box`.

    Args:
        hosts: a node on each; None is one on this machine.
        gpus: of each node.
        paths: on which its workers find modules, before this process's.
    """

    def __init__(self, hosts: Hosts | None = None, *, gpus: int = 0, paths: tuple[str, ...] = ()) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # short, for the names of its sockets
        self.environment = {**_ENVIRONMENT, **TOKEN, "PYTHONPATH": os.pathsep.join([*paths, *sys.path])}
        self._gpus = gpus
        self._hosts = hosts
        self._nodes = GuardedProcesses()
        self.address = ""

    def __enter__(self) -> "Ray":
        try:
            ip, port = "127.0.0.1" if self._hosts is None else self._hosts.address(1), free_ports(2)
            self.address = f"{ip}:{port}"
            self._start(1, ["--head", f"--node-ip-address={ip}", f"--port={port}", f"--temp-dir={self.folder}",
                            f"--ray-client-server-port={port + 1}", "--include-dashboard=false"])  # fmt: skip
            for number in range(2, 1 + (self._hosts.num if self._hosts else 1)):
                self.start(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Everything that a node has started ends with its guard."""
        self._nodes.ask_to_end(self._nodes.codes(), 5.0)
        while None in self._nodes.codes().values():
            time.sleep(_TICK_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, number: int) -> None:
        """A node that joins the first one."""
        self._start(number, [f"--node-ip-address={Hosts.address(number)}", f"--address={self.address}"])

    def kill(self, number: int) -> None:
        """Ends all processes of a node by SIGKILL."""
        name = f"node{number}"
        self._nodes.ask_to_end([name], 0.0)
        while self._nodes.codes()[name] is None:
            time.sleep(_TICK_S)

    def _start(self, number: int, words: list[str]) -> None:
        name, enter = f"node{number}", [] if self._hosts is None else self._hosts.enter(number)
        if number > 1:  # what is there belongs to one node
            mount = self._hosts.popen(number, ["mount", "-t", "tmpfs", "tmpfs", str(self.folder)])
            assert mount.wait(10) == 0
        for attempt in range(_ATTEMPTS):
            log = Path(f"{self.folder}-{name}-{attempt}.log")
            self._nodes.start(
                name, [*enter, *_NODE, f"--num-gpus={self._gpus}", f"--node-name={name}", *words],
                environment=self.environment, secret_files={}, log_file=str(log), grace_s=5.0, folder="/tmp",
            )  # fmt: skip
            deadline = time.monotonic() + _START_S
            while self._nodes.codes()[name] is None and time.monotonic() < deadline:
                if "Ray runtime started" in log.read_text():
                    log.unlink()
                    return
                time.sleep(_TICK_S)
            self.kill(number)
        raise RuntimeError(f"{name} did not start: {log.read_text()[-2000:]}")
