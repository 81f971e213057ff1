"""ServerSource: finds an engine's servers at given addresses or in a registry, or starts them here."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from lightrl.checks.bounds import check_bounds, check_choice
from lightrl.checks.printable import count_text
from lightrl.concurrency.in_thread import call_all
from lightrl.concurrency.owner import own_prefix
from lightrl.engines.servers.addresses import TOKEN_VARIABLE, addresses_from_environment, as_url
from lightrl.engines.servers.client import ServerClient
from lightrl.engines.servers.connection import MAX_CONNECTIONS, connections_to_each
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.processes.command import gpus_of_servers, visible
from lightrl.engines.servers.processes.keeper import HANG_S, STOP_GRACE_S, end_all, keep, start_all
from lightrl.engines.servers.processes.model_process import ModelProcess
from lightrl.engines.servers.processes.process import ServerProcess, make_servers, usable_token, write_model_folder
from lightrl.engines.servers.registry import Registry, registry_at
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.sync.receivers import Receivers
from lightrl.engines.servers.timeouts import Timeouts


@dataclass(eq=False, kw_only=True)
class ServerSource:
    """The settings that determine the servers and, between `open` and `end`, their processes, folder and token."""

    client_type: type[ServerClient]
    process_type: type[ModelProcess]
    urls: list[str] | None
    num: int | None  # number to start here; if this and `urls` are None, addresses come from the environment
    tp: int
    args: dict[str, Any]  # for servers started here; keys are the server's argument names
    placement: Literal["separate", "colocated"]
    timeouts: Timeouts
    python: str | None = None  # the Python interpreter of the servers' environment
    trainer_devices: Sequence[torch.device] = ()  # set before `open`
    receivers: Receivers = field(default_factory=Receivers)
    registry: Registry | None = None  # set by `open`, like the following fields
    token: str | None = None
    num_connections: int = MAX_CONNECTIONS  # connections to each server, within the limit on open files
    folder: Path = field(default_factory=Path)  # a temporary folder on this machine, until `remove_folder`
    _processes: list[ServerProcess] = field(default_factory=list)  # servers, and helpers that `keep` restarts
    _home: HomeLoop | None = None
    _scratch: tempfile.TemporaryDirectory[str] | None = None

    def __post_init__(self) -> None:
        if self.urls is not None and self.num is not None:
            raise ValueError(f"Set urls or servers, not both (urls={self.urls}, servers={self.num}).")
        check_bounds(1, servers=self.num, tp=self.tp)
        check_choice(("separate", "colocated"), placement=self.placement)

    def gpus(self) -> list[int] | None:
        """Returns the torch indices of the GPUs for servers started here; see `gpus_of_servers`."""
        num, available = (self.num or 0) * self.tp, torch.cuda.device_count()
        trainer = [device.index or 0 for device in self.trainer_devices if device.type == "cuda"]
        return gpus_of_servers(num, available=available, trainer=trainer, placement=self.placement)

    def describe(self) -> str:
        """Describes where the servers run."""
        if not self.num:
            return "on servers that run elsewhere"
        gpus = self.gpus()
        if gpus is None:  # a plan may be for another machine
            is_for_gpus = any(device.type == "cuda" for device in self.trainer_devices)
            devices = "GPUs (this machine has none)" if is_for_gpus else "the CPU"
        else:
            devices = ", ".join(f"cuda:{gpu}" for gpu in gpus)
        return f"{count_text(self.num, 'server')} with tp={self.tp} on {devices}, {self.placement}"

    def addresses(self) -> list[str] | None:
        """Returns the addresses of the servers or of their registry; None if the servers are started here."""
        if self.urls is None and self.num is None:
            return addresses_from_environment()
        return None if self.urls is None else [as_url(url) for url in self.urls]

    def check(self, check_reach: Callable[[Sequence[str]], None]) -> None:
        """Raises ValueError if servers cannot be started; `check_reach` raises it for unreachable URLs."""
        urls = self.addresses()
        if urls is None:
            self.process_type.find_python(self.python)
            self.process_type.named(self.args)
            usable_token(os.environ.get(TOKEN_VARIABLE))
        elif registry_at(urls) is None:
            check_reach(urls)

    def open(
        self,
        fleet: ServerFleet,
        home: HomeLoop,
        config: PretrainedConfig,
        *,
        start_args: dict[str, Any],
        needs_receivers: bool,  # True for the delta transport, which sends weights to receivers
        check_reach: Callable[[Sequence[str]], None],
    ) -> None:
        """Starts the servers, or waits until the registry has some; adds all servers to the fleet."""
        self._processes, self._home = [], home
        self._scratch = tempfile.TemporaryDirectory(prefix=own_prefix("lightrl-engine-"), ignore_cleanup_errors=True)
        self.folder = Path(self._scratch.name)
        self.token = os.environ.get(TOKEN_VARIABLE)
        urls, receiver_urls = self.addresses(), list[str]()
        self.registry = registry_at(urls)
        if self.registry is not None:
            fleet.may_grow = True
            entries = self.registry.wait_for_servers(self.timeouts.startup_s)
            urls = [as_url(entry.url) for entry in entries]
            receiver_urls = [entry.receiver for entry in entries if entry.receiver]
            check_reach(urls)
        self.num_connections = connections_to_each(self.num or 1 if urls is None else len(urls))
        if urls is None:
            self._processes = self._start_servers(config, start_args)
            for process in self._processes:
                fleet.join(Server(self.client(process.url), process))
            if needs_receivers:
                home.keep(functools.partial(keep, self.receivers.start(self._processes[0].host, self.token)))
            return
        for url in urls:
            fleet.join(Server(self.client(url)))
        if needs_receivers:
            self.receivers.connect(receiver_urls, urls)

    def _start_servers(self, config: PretrainedConfig, start_args: dict[str, Any]) -> list[ServerProcess]:
        """Starts servers with random weights and waits until all are ready. The engine's Watch restarts servers."""
        assert self.num is not None
        self.token = usable_token(self.token)
        gpus = self.gpus()
        processes = make_servers(
            self.process_type,
            write_model_folder(config, self.folder / "model"),
            self.num,
            args={"load_format": "dummy", **start_args, **self.args},
            python=self.python,
            tp=self.tp,
            devices=None if gpus is None else visible(gpus),
            token=self.token,
            startup_timeout_s=self.timeouts.startup_s,
        )
        start_all(processes)
        return processes

    def keep(self, process: ServerProcess, hang_s: float = HANG_S) -> None:
        """Restarts a running helper process whenever it exits or hangs, until `end`."""
        assert self._home is not None
        self._processes.append(process)
        self._home.keep(functools.partial(keep, process, hang_s=hang_s))

    def client(self, url: str) -> ServerClient:
        return self.client_type(url, token=self.token, timeouts=self.timeouts, max_connections=self.num_connections)

    def end(self) -> None:
        """Stops the processes that were started here."""
        call_all(lambda: end_all(self._processes, STOP_GRACE_S), self.receivers.stop)

    def remove_folder(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()
