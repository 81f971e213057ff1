"""OwnProcesses: the processes that an engine runs on this machine, from its `start` to its `close`."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from lightrl.concurrency.owner import own_prefix
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.processes.keeper import HANG_S, STOP_GRACE_S, end_all, keep, start_all
from lightrl.engines.servers.processes.process import ServerProcess, make_servers, write_model_folder


class OwnProcesses:
    """Servers of a model, helper processes that are restarted when they end, and a folder for them."""

    def __init__(self, home: HomeLoop) -> None:
        self._home = home
        self._processes: list[ServerProcess] = []
        self._scratch = tempfile.TemporaryDirectory(prefix=own_prefix("lightrl-engine-"), ignore_cleanup_errors=True)
        self.folder = Path(self._scratch.name)

    def start_servers(
        self, kind: type[ServerProcess], num: int, config: PretrainedConfig, **settings: Any
    ) -> list[ServerProcess]:
        """Starts servers without weights, and waits until all are ready; a Watch restarts them."""
        self._processes = make_servers(kind, write_model_folder(config, self.folder / "model"), num, **settings)
        start_all(self._processes)
        return self._processes

    def keep(self, process: ServerProcess, hang_s: float = HANG_S) -> None:
        """Restarts a running process whenever it ends or hangs, until `end`."""
        self._processes = [*self._processes, process]
        self._home.keep(functools.partial(keep, process, hang_s=hang_s))

    def end(self) -> None:
        end_all(self._processes, STOP_GRACE_S)

    def remove_folder(self) -> None:
        self._scratch.cleanup()
