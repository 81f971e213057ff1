"""Receivers: the weight receivers on the hosts of an engine's servers; see receiver.py."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from lightrl.engines.servers.addresses import RECEIVER_HELP, RECEIVER_VARIABLE, as_url, read_addresses
from lightrl.engines.servers.processes.keeper import STOP_GRACE_S, end_all, start_all
from lightrl.engines.servers.processes.process import ServerProcess
from lightrl.weights.delta_folder import folder_in_memory


class Receivers:
    """Receivers given by address, or one receiver that is started on this machine."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self._process: ServerProcess | None = None
        self._folder: Path | None = None

    def connect(self, urls: Sequence[str], server_urls: Sequence[str]) -> None:
        """Uses the receivers at `urls` or in LIGHTRL_RECEIVER_ADDRS; raises ValueError if a server's host has none."""
        self.urls = [as_url(url) for url in urls] or read_addresses(RECEIVER_VARIABLE)
        for url in server_urls:
            self.of(url)

    def add(self, url: str | None) -> None:
        """Adds the receiver of a server that joins during the run."""
        if url is not None and url not in self.urls:
            self.urls.append(url)

    def start(self, host: str, token: str | None, *, port: int = 0, log_folder: Path | None = None) -> ServerProcess:
        """Starts a receiver that listens on `host`. The folder outlives a restart, and so do the weights."""
        self._folder = folder_in_memory("lightrl-weights-")
        command = [sys.executable, "-m", "lightrl.engines.servers.sync.receiver", "--host", host, "--port", "{port}"]
        self._process = ServerProcess(
            [*command, "--folder", str(self._folder)],
            name="the weight receiver",
            host=host,
            port=port,  # 0 keeps the port chosen at the first start
            token=token,
            log_file=None if log_folder is None else log_folder / "receiver.log",
        )
        start_all([self._process])
        self.urls = [self._process.url]
        return self._process

    def of(self, server_url: str) -> str:
        """Returns the address of the receiver on a server's host."""
        host = urlsplit(server_url).hostname
        for url in self.urls:
            if urlsplit(url).hostname == host:
                return url
        raise ValueError(
            f"transport: delta needs a weight receiver on {host}, the host of {server_url}, but the receivers are "
            f"{', '.join(self.urls) or 'not set'}. {RECEIVER_HELP}"
        )

    def stop(self) -> None:
        """Stops the receiver that was started here, and removes its folder. Safe to call twice."""
        if self._process is not None:
            end_all([self._process], STOP_GRACE_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._process = self._folder = None
