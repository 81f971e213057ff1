"""The program that `lightrl doctor launch` starts on each node; it writes its report to the launch's folder.

    python -m lightrl doctor node FOLDER HOST0 HOST1 … [--node NUMBER]     with --node: a host that has only servers

A node updates its report `node-N.json` after each of these steps, so the report shows where a node hangs or dies:

    started   versions, GPUs and network interfaces; listens on the ports that the run will use here
    folders   waits for the files from the other nodes in each shared folder; looks for the models
    network   connects to the ports of the other nodes; each node answers with its number and its clock
    done      sums a tensor over all nodes, with gloo and, on GPUs, with NCCL

Nodes wait only for each other's reports, up to a deadline per step, so a failed node cannot keep others from reporting.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

import lightrl
from lightrl.callbacks.run_files import write_whole

SPEC_FILE = "check.json"
STEPS = ("started", "folders", "network", "done")
_TICK_S = 0.1
_CONNECT_S = 10.0
_SLACK_S = 30.0
_GLOO_BYTES, _NCCL_BYTES, _ROUNDS = 2**23, 2**28, 3
_PACKAGES = ("torch", "transformers", "lightning")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class NodeSpec:
    """Instructions for checking a launch's nodes."""

    folder: str  # the check's folder, to which nodes write their reports
    port: int  # where the first node's store listens
    ports: list[list[int]]  # node → ports of its servers and its weight receiver
    num_gpus: list[int]  # node → GPUs that the launch uses; 0 on CPUs
    folders: dict[str, str]  # setting → folder that all nodes must share
    models: dict[str, str]  # role → path or hub name
    deadline_s: float  # per step
    servers_wait: bool  # the launcher ends the processes on hosts with only servers; they must not exit earlier

    def probe(self, path: str, node: int) -> Path:
        """Returns the file that a node writes to a shared folder."""
        return Path(path) / f".{Path(self.folder).name}-{node}"

    def read(self, node: int) -> Report | None:
        """Returns a node's report; None if there is none yet."""
        file = Path(self.folder) / f"node-{node}.json"
        try:
            list(file.parent.iterdir())  # makes a network file system ask its server for new names
            return Report(**json.loads(file.read_text()))
        except FileNotFoundError:
            return None


@dataclass
class Report:
    """Results of a node's checks so far."""

    step: str = STEPS[0]  # the last complete step
    host: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    driver: str = ""  # version of NVIDIA's driver
    gpus: list[tuple[str, float, float]] = field(default_factory=list)  # name, free and total bytes
    ports: list[int] = field(default_factory=list)  # opened by this node
    models: dict[str, str] = field(default_factory=dict)  # role → fingerprint; empty if this node lacks the model
    unseen: dict[str, list[int]] = field(default_factory=dict)  # setting → nodes whose files this node does not see
    reached: list[int] = field(default_factory=list)  # nodes that this node could connect to
    clock_s: tuple[float, float] | None = None  # this node's clock minus node 0's, and the uncertainty
    bytes_per_s: dict[str, float] = field(default_factory=dict)  # backend → bandwidth of an all_reduce
    problems: list[tuple[str, str, str]] = field(default_factory=list)  # area, text, fix


def main(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("lightrl doctor node")
    parser.add_argument("folder")
    parser.add_argument("hosts", nargs="+")
    parser.add_argument("--node", type=int, default=None)
    given = parser.parse_args(args)
    spec = NodeSpec(**json.loads((Path(given.folder) / SPEC_FILE).read_text()))
    is_server = given.node is not None
    # torchrun and our launchers set RANK; Slurm sets SLURM_PROCID
    node = given.node if is_server else int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
    # a collective that ignores its timeout must not keep the node's process alive; the report shows the step
    killer = threading.Timer(len(STEPS) * spec.deadline_s + _SLACK_S, os._exit, (0,))
    killer.daemon = True
    killer.start()
    NodeCheck(spec, node, given.hosts, is_server=is_server).run()
    return 0


class NodeCheck:
    """Runs one node's checks and reports the results."""

    def __init__(self, spec: NodeSpec, node: int, hosts: Sequence[str], *, is_server: bool) -> None:
        self.is_server = is_server  # this node has servers, but no ranks
        self.spec, self.node, self.hosts = spec, node, hosts
        self.report = Report(host=socket.gethostname())

    def run(self) -> None:
        spec, report = self.spec, self.report
        report.versions = {"lightrl": lightrl.__version__} | {name: metadata.version(name) for name in _PACKAGES}
        report.versions["Python"] = ".".join(map(str, sys.version_info[:3]))
        self._look_at_gpus()
        self._check_interfaces()
        self._listen()
        self._write_probes()
        self._finish("started")
        present = self._wait_for("started")
        self._look_for_probes(present)
        report.models = {role: fingerprint(path) for role, path in spec.models.items()}
        self._finish("folders")
        self._connect(present)
        self._finish("network")
        present = self._wait_for("network")
        if all(self._can_reduce(one) for one in present.values()) and len(present) == len(self.hosts) > 1:
            self._reduce()
        self._finish("done")
        for path in spec.folders.values():
            spec.probe(path, self.node).unlink(missing_ok=True)
        self._wait_for("done")  # node 0 has the store for the other nodes' process groups
        if self.is_server and spec.servers_wait:
            time.sleep(spec.deadline_s)

    def _finish(self, step: str) -> None:
        self.report.step = step
        write_whole(Path(self.spec.folder) / f"node-{self.node}.json", json.dumps(asdict(self.report)))

    def _problem(self, area: str, text: str, fix: str) -> None:
        self.report.problems.append((area, f"{self.hosts[self.node]}: {text}", fix))

    def _wait_for(self, step: str) -> dict[int, Report]:
        """Returns the reports from all nodes that complete the step before the deadline."""
        found: dict[int, Report] = {}

        def are_all_there() -> bool:
            for node in range(len(self.hosts)):
                report = None if node in found else self.spec.read(node)
                if report is not None and STEPS.index(report.step) >= STEPS.index(step):
                    found[node] = report
            return len(found) == len(self.hosts) or not Path(self.spec.folder).is_dir()  # the check has ended

        wait_until(are_all_there, self.spec.deadline_s)
        return found

    def _look_at_gpus(self) -> None:
        needed = self.spec.num_gpus[self.node]
        num = torch.cuda.device_count() if needed else 0
        if num < needed:
            fix = "Check nvidia-smi, the container's GPU option and the job's request; or lower launch.gpus_per_node."
            self._problem("GPUs", f"torch sees {num} GPUs, but the launch uses {needed}.", fix)
        for index in range(num):
            free, total = torch.cuda.mem_get_info(index)
            self.report.gpus.append((torch.cuda.get_device_name(index), free, total))
        match = re.search(r"Kernel Module\D*([\d.]+)", _DRIVER_FILE.read_text()) if _DRIVER_FILE.exists() else None
        self.report.driver = match[1] if match else ""

    def _check_interfaces(self) -> None:
        present = [name for _, name in socket.if_nameindex()]
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            text = os.environ.get(variable, "")
            if missing := missing_interfaces(variable, text, present):
                what = f"{variable}={text}, but its network interfaces are {', '.join(present)}; {missing} is missing."
                self._problem("interfaces", what, "Set launch.environment to an interface that all nodes have.")

    def _listen(self) -> None:
        for port in self.spec.ports[self.node]:
            try:
                listener = socket.create_server(("", port), backlog=1024)
            except OSError as error:
                fix = "Another program uses it: `ss -tlnp` shows which. Stop it, or set launch.port."
                self._problem("ports", f"port {port} cannot be opened: {error.strerror}.", fix)
                continue
            self.report.ports.append(port)
            threading.Thread(target=self.answer, args=(listener,), daemon=True).start()

    def answer(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError), connection:  # the other end may have reset it
                connection.sendall(f"{self.node} {time.time()!r}\n".encode())

    def _write_probes(self) -> None:
        for setting, path in self.spec.folders.items():
            probe = self.spec.probe(path, self.node)
            try:
                probe.parent.mkdir(parents=True, exist_ok=True)
                probe.write_text(self.report.host)
            except OSError as error:
                fix = f"Make it writable on all nodes, or set {setting} to a shared folder that is."
                self._problem("folders", f"{setting}={path} is not writable: {error.strerror}.", fix)

    def _look_for_probes(self, present: dict[int, Report]) -> None:
        def unseen() -> dict[str, list[int]]:
            missing = {}
            for setting, path in self.spec.folders.items():
                names = {one.name for one in Path(path).iterdir()} if Path(path).is_dir() else set()
                missing[setting] = [node for node in present if self.spec.probe(path, node).name not in names]
            return {setting: nodes for setting, nodes in missing.items() if nodes}

        wait_until(lambda: not unseen(), self.spec.deadline_s)
        self.report.unseen = unseen()

    def _connect(self, present: dict[int, Report]) -> None:
        for other, report in present.items():
            is_reached = other != self.node and bool(report.ports)
            for port in report.ports if is_reached else ():
                place = f"{self.hosts[other]}:{port}"
                try:
                    number, clock_s = self._ask(other, port)
                except (OSError, ValueError) as error:
                    is_reached = False
                    fix = "Open ports launch.port to launch.port + 64 between the nodes (firewall, security group). "
                    fix += f"Check that other nodes can reach it as {self.hosts[other]}."
                    self._problem("network", f"cannot reach {place}: {error or type(error).__name__}.", fix)
                    break
                if number != other:
                    is_reached = False
                    fix = "Check the names and addresses of the hosts (DNS, /etc/hosts)."
                    self._problem("network", f"{place} is answered by node {number}, not node {other}.", fix)
                    break
                if other == 0 and (self.report.clock_s is None or clock_s[1] < self.report.clock_s[1]):
                    self.report.clock_s = clock_s
            if is_reached:
                self.report.reached.append(other)

    def _ask(self, other: int, port: int) -> tuple[int, tuple[float, float]]:
        """Returns the answering node's number, and how many seconds this clock is ahead, with the uncertainty."""
        start_s = time.time()
        with socket.create_connection((self.hosts[other], port), min(_CONNECT_S, self.spec.deadline_s)) as connection:
            number, clock = connection.makefile().readline(100).split()  # other programs may send more
        end_s = time.time()
        return int(number), ((start_s + end_s) / 2 - float(clock), (end_s - start_s) / 2)

    @staticmethod
    def _can_reduce(report: Report) -> bool:
        return all(area not in ("interfaces", "network") for area, *_ in report.problems)

    def _reduce(self) -> None:
        """Sums tensors over the nodes, with one process on each; measures the bytes per second that each sends."""
        timeout = timedelta(seconds=self.spec.deadline_s)
        name, world = "the store", len(self.hosts)
        try:
            store = TCPStore(self.hosts[0], self.spec.port, world, self.node == 0, timeout)
            for name, device, size in self._backends():
                own = PrefixStore(name, store)
                dist.init_process_group(name, timeout=timeout, store=own, rank=self.node, world_size=world)
                self.report.bytes_per_s[name] = all_reduce_speed(torch.device(device), size)
                dist.destroy_process_group()
        except RuntimeError as error:  # includes torch's DistError
            text = f"{name} at {self.hosts[0]}:{self.spec.port} failed: {str(error).strip().splitlines()[0]}"
            variable = "NCCL" if name == "nccl" else "GLOO"
            fix = "Open this port, or set launch.port if it is in use; open the dynamic ports between the nodes. "
            fix += f"Set {variable}_SOCKET_IFNAME in launch.environment to the interface; NCCL_DEBUG: INFO shows more."
            self._problem("all_reduce", text, fix)

    def _backends(self) -> Iterator[tuple[str, str, int]]:
        yield "gloo", "cpu", _GLOO_BYTES
        if all(self.spec.num_gpus):
            yield "nccl", "cuda", _NCCL_BYTES


def all_reduce_speed(device: torch.device, size: int) -> float:
    """Returns the bytes per second that each rank sends in a ring; raises RuntimeError if the sum is wrong."""
    world = dist.get_world_size()
    values = torch.ones(size // 4, device=device)
    best_s = float("inf")
    for _ in range(_ROUNDS):
        values.fill_(dist.get_rank() + 1)
        dist.barrier()
        start_s = time.perf_counter()
        dist.all_reduce(values)
        total = values[::4096].cpu()  # waits for the GPU
        best_s = min(best_s, time.perf_counter() - start_s)
        if not torch.equal(total, torch.full_like(total, world * (world + 1) / 2)):
            raise RuntimeError("the sum of a tensor over the nodes is wrong")
    return 2 * (world - 1) / world * size / best_s


def missing_interfaces(variable: str, text: str, present: Sequence[str]) -> str:
    """Returns the names in a variable of gloo (exact) or NCCL (prefixes, exact after `=`) that match no interface."""
    if not text or text.startswith("^"):
        return ""
    is_exact = variable.startswith("GLOO") or text.startswith("=")
    names = text.lstrip("=").split(",")
    matches: Callable[[str, str], bool] = str.__eq__ if is_exact else str.startswith
    missing = [name for name in names if not any(matches(one, name) for one in present)]
    return ", ".join(missing) if is_exact or len(missing) == len(names) else ""


def fingerprint(path: str) -> str:
    """Identifies a model folder by file names, sizes and config, or a hub model by its commit; "" if there is none."""
    from huggingface_hub import try_to_load_from_cache

    folder = Path(path).expanduser()
    if folder.is_dir():
        sizes = sorted((file.name, file.stat().st_size) for file in folder.iterdir() if file.is_file())
        config = folder / "config.json"
        content = config.read_bytes() if config.is_file() else b""
        return f"{len(sizes)} files {hashlib.sha256(repr(sizes).encode() + content).hexdigest()[:12]}"
    cached: Any = try_to_load_from_cache(path, "config.json") if path.count("/") <= 1 else None
    return f"commit {Path(cached).parent.name[:12]}" if isinstance(cached, str) else ""


def wait_until(is_true: Callable[[], bool], deadline_s: float) -> None:
    end_s = time.monotonic() + deadline_s
    while not is_true() and time.monotonic() < end_s:
        time.sleep(_TICK_S)
