"""Measures the delta rows of benchmarks/weight_sync.py: real optimizer steps, real processes, a link of 100 MB/s.

    python -m benchmarks.weight_sync --transports delta [--quick] [--models 27M,120M] [--lrs 1e-6,1e-5,1e-4]

A model with random float32 weights takes Adam steps on random tokens. After each, a sync sends its bfloat16 weights to
a server, a process that only loads the folder into its own tensors. Receiver and server are in a network namespace
behind a veth of 800 Mbit/s (`tc tbf`). Full and delta syncs take turns on this link, and are measured from the first
bucket until the server resumes. Without root or `tc`, the loopback is used, and `speedup_over_full` is null.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors import safe_open
from transformers import PreTrainedModel

from benchmarks.local_engine import make_model
from benchmarks.report import Report
from lightrl.engines.servers.connection import Connection
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.processes.process import HeldPort
from lightrl.engines.servers.server import Server as EngineServer
from lightrl.engines.servers.sync.report import SyncReport
from lightrl.engines.servers.sync.server_sync import ServerSync
from lightrl.engines.servers.sync.transports import DeltaTransport
from lightrl.engines.sglang.client import SGLangClient
from lightrl.weights import Bucket, Digests, ServerForm, ServerLayout, bucketed
from lightrl.weights.delta_folder import NOTHING

MIB = 2**20
LINK_MB_PER_S = 100
TOKEN = "benchmark"
_ENDS_WITH_US = ["setpriv", "--pdeathsig", "TERM"]  # a command that the kernel ends when its parent ends
_PORTS = {"receiver": 41000, "server": 41001}  # within the namespace, which has no other program


class Link:
    """A network namespace behind a veth with a limited rate; without root or iproute2 only the loopback.

    The namespace belongs to a process that the kernel ends with this one, however this one ends; so does the link.
    """

    def __init__(self) -> None:
        self.host = "127.0.0.1"
        self.prefix: list[str] = []  # of a command, to run it there until this process ends
        self._holder: subprocess.Popen[bytes] | None = None
        self._own_end = f"lr{os.getpid() % 10**6}"

    def __enter__(self) -> Link:
        here, there = self._own_end, "eth0"
        third, fourth = divmod(os.getpid() % 2**14, 64)  # a network of its own: two runs may take place at a time
        network = f"10.213.{third}"
        own, other = f"{network}.{4 * fourth + 1}", f"{network}.{4 * fourth + 2}"
        shape = ["root", "tbf", "rate", f"{8 * LINK_MB_PER_S}mbit", "burst", "256kb", "latency", "200ms"]
        try:
            inside = self._hold()
            for command in [
                ["ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", inside[-1]],
                ["ip", "addr", "add", f"{own}/30", "dev", here],
                ["ip", "link", "set", here, "up"],
                [*inside, "ip", "addr", "add", f"{other}/30", "dev", there],
                [*inside, "ip", "link", "set", there, "up"],
                [*inside, "ip", "link", "set", "lo", "up"],
                ["tc", "qdisc", "add", "dev", here, *shape],
                [*inside, "tc", "qdisc", "add", "dev", there, *shape],
            ]:
                subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or error
            print(f"No link of {LINK_MB_PER_S} MB/s, so no speedup: {reason}", file=sys.stderr)
            self.__exit__()
            return self
        self.host, self.prefix = other, [*inside, *_ENDS_WITH_US]
        return self

    def _hold(self) -> list[str]:
        """Starts the namespace's process; returns the prefix of commands in the namespace, which ends with its id."""
        self._holder = subprocess.Popen([*_ENDS_WITH_US, "unshare", "--net", "sleep", "infinity"])
        namespace, deadline = Path(f"/proc/{self._holder.pid}/ns/net"), time.monotonic() + 10
        while namespace.readlink() == Path("/proc/self/ns/net").readlink():
            if self._holder.poll() is not None or time.monotonic() > deadline:
                raise OSError("unshare made no network namespace")
            time.sleep(0.01)
        return ["nsenter", "--net", "--target", str(self._holder.pid)]

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # the link first: that of a namespace goes later, in the background
            subprocess.run(["ip", "link", "del", self._own_end], check=False, capture_output=True)
        if self._holder is not None:
            self._holder.kill()
            self._holder.wait()


class Side:
    """A receiver and a server beyond the link."""

    def __init__(self, link: Link) -> None:
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self._held = [] if link.prefix else [HeldPort(link.host), HeldPort(link.host)]
        ports = [port.number for port in self._held] or list(_PORTS.values())
        self.receiver, self.server = (f"http://{link.host}:{port}" for port in ports)
        receiver = ["lightrl.engines.servers.sync.receiver", "--host", link.host, "--port", str(ports[0])]
        commands = [[*receiver, "--folder", str(self.folder)], ["benchmarks.delta_sync", link.host, str(ports[1])]]
        environment = {**os.environ, "LIGHTRL_SERVER_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen([*link.prefix, sys.executable, "-m", *command], env=environment) for command in commands
        ]

        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for url in (self.receiver, self.server):
                _wait_for(f"{url}/ready")
            undo.pop_all()

    def digests(self) -> dict[str, str]:
        """Returns the digests of the server's tensors."""
        return json.loads(_read(f"{self.server}/digests"))  # type: ignore[no-any-return]

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait()
        for port in self._held:
            port.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Trainer:
    """A model, and its syncs to one side."""

    def __init__(self, name: str, side: Side, bucket_mib: int) -> None:
        torch.manual_seed(0)
        self.model: PreTrainedModel = make_model(name)
        self.side, self.bucket_mib = side, bucket_mib
        self.num_syncs = 0
        self._home = HomeLoop(lambda: name)
        self._server = EngineServer(SGLangClient(side.server))
        self.optimizer: torch.optim.Optimizer

    def start(self, lr: float, warm_up: int) -> DeltaTransport:
        """Makes a new optimizer, whose first steps are not measured, and a transport without a base."""
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr, betas=(0.9, 0.95))
        for _ in range(warm_up):
            self.step()
        return DeltaTransport(
            ServerForm.of(self.model.config, torch.bfloat16),
            self.model.config,
            connect=lambda url: Connection(url, token=TOKEN),
            receiver_of=lambda url: self.side.receiver,
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        tokens = torch.randint(0, self.model.config.vocab_size, (4, 32))
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()

    def sync(self, transport: DeltaTransport, *, has_digests: bool = False) -> tuple[float, SyncReport]:
        """Returns seconds and report of a sync, and the digests of a CPU server, computed concurrently as in a run."""
        self.num_syncs += 1
        named = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        layouts = [ServerLayout(torch.bfloat16)] if has_digests else []
        start = time.perf_counter()
        digests = Digests(self.model.config, transport.form, layouts)
        report = ServerSync(transport, verify=False).load_from_thread(
            self._home,
            [self._server],
            _hashed(bucketed(named.items(), self.bucket_mib * MIB), digests),
            weight_version=self.num_syncs,
        )
        digests.finish()
        return time.perf_counter() - start, report

    def digests(self) -> dict[str, str]:
        return {name: _digest(parameter.detach().bfloat16()) for name, parameter in self.model.named_parameters()}

    def close(self) -> None:
        self._home.call(self._server.client.close(), 10)
        self._home.close(self._home.end_tasks)


def _hashed(buckets: Iterator[Bucket], digests: Digests) -> Iterator[Bucket]:
    for bucket in buckets:
        digests.add(bucket)
        yield bucket


def measure_delta(report: Report, options: argparse.Namespace) -> None:
    for name in options.models.split(","):
        with Link() as link, contextlib.closing(Side(link)) as side:
            with contextlib.closing(Trainer(name, side, options.bucket_mib)) as trainer:
                for lr in map(float, options.lrs.split(",")):
                    report.add("delta", **_delta_row(trainer, name, lr, options.repeats, has_link=bool(link.prefix)))


def _delta_row(trainer: Trainer, name: str, lr: float, repeats: int, *, has_link: bool) -> dict[str, Any]:
    transport = trainer.start(lr, warm_up=2)
    trainer.sync(transport)  # allocates
    num_bytes = sum(2 * parameter.numel() for parameter in trainer.model.parameters())
    full, delta, reports = [], [], []
    with_digests: dict[str, list[float]] = {"full": [], "delta": []}
    is_equal = True
    for _ in range(repeats):
        transport._version = NOTHING  # so that the next sync is a full one
        full.append(trainer.sync(transport)[0])
        trainer.step()
        seconds, one = trainer.sync(transport)
        delta.append(seconds)
        reports.append(one)
        is_equal = is_equal and trainer.side.digests() == trainer.digests()
        trainer.step()
        with_digests["delta"].append(trainer.sync(transport, has_digests=True)[0])
        transport._version = NOTHING
        with_digests["full"].append(trainer.sync(transport, has_digests=True)[0])
    parts = {key: statistics.median(one.seconds[key] for one in reports) for key in reports[0].seconds}
    paused = [sum(one.seconds[key] for key in ("pause", "load", "verify", "resume")) for one in reports]
    longer = {kind: statistics.median(times) for kind, times in with_digests.items()}
    return {
        "model": name,
        "lr": lr,
        "bytes_fraction": round(statistics.median(one.num_bytes for one in reports) / num_bytes, 5),
        "pause_fraction": round(statistics.median(a / b for a, b in zip(paused, delta, strict=True)), 3),
        "speedup_over_full": round(statistics.median(full) / statistics.median(delta), 2) if has_link else None,
        "bit_equal": is_equal,
        "full_s": round(statistics.median(full), 3),
        "delta_s": round(statistics.median(delta), 3),
        "pause_s": round(statistics.median(paused), 3),
        "digests_add_to_full_fraction": round(longer["full"] / statistics.median(full) - 1, 3),
        "digests_add_to_delta_fraction": round(longer["delta"] / statistics.median(delta) - 1, 3),
        **{f"{key}_s": round(value, 3) for key, value in parts.items() if key in ("stage", "load")},
        "link_mb_per_s": LINK_MB_PER_S if has_link else None,
    }


class Server:
    """Loads a folder into its own tensors, with the SGLang routes that a sync uses."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.version = ""

    def app(self) -> web.Application:
        app = web.Application()
        for path in ("/ready", "/model_info", "/digests"):
            app.router.add_get(path, self._get)
        for path in ("/pause_generation", "/continue_generation"):
            app.router.add_post(path, self._get)
        app.router.add_post("/update_weights_from_disk", self._load)
        return app

    async def _get(self, request: web.Request) -> web.Response:
        if request.path == "/digests":
            return web.json_response({name: _digest(tensor) for name, tensor in self.held.items()})
        return web.json_response({"weight_version": self.version})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        with ThreadPoolExecutor(os.cpu_count()) as threads:  # as SGLang does by default
            list(threads.map(self._load_file, sorted(Path(body["model_path"]).glob("*.safetensors"))))
        self.version = body["weight_version"]
        return web.json_response({"success": True})

    def _load_file(self, path: Path) -> None:
        with safe_open(path, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor = tensors.get_tensor(name)
                if name not in self.held:
                    self.held[name] = torch.empty_like(tensor)
                self.held[name].copy_(tensor)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()


def _read(url: str) -> bytes:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=120) as answer:
        return answer.read()  # type: ignore[no-any-return]


def _wait_for(url: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            _read(url)
            return
        time.sleep(0.2)
    raise SystemExit(f"{url} did not answer within {seconds:g} s.")


if __name__ == "__main__":
    torch.set_num_threads(1)
    web.run_app(
        Server().app(), host=sys.argv[1], port=int(sys.argv[2]), reuse_address=True, print=None, access_log=None
    )
