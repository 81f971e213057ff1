"""Router: the engine's setting of this name: no gateway, the one at an address, or one that is started here."""

from __future__ import annotations

import importlib.util
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lightrl.engines.sglang.addresses import TOKEN_VARIABLE, as_url
from lightrl.engines.sglang.gateway import Gateway
from lightrl.engines.sglang.servers.command import SGLangPython
from lightrl.engines.sglang.servers.fleet import ServerFleet
from lightrl.engines.sglang.servers.server import SGLangServer

if TYPE_CHECKING:
    from lightrl.engines.sglang.members import Members
    from lightrl.engines.sglang.timeouts import Timeouts

# Every user of the machine can see a command line, but not the environment.
_PROGRAM = f"""
import os, sys
from smg.launch_router import main
sys.argv.append("--api-key=" + os.environ.pop({TOKEN_VARIABLE!r}))
main()
"""
# lightrl itself sends requests again, and knows which servers are alive: one paused for a sync is not overloaded.
_ARGUMENTS = [
    "--disable-retries", "--disable-circuit-breaker", "--disable-health-check", "--disable-worker-overload-protection",
    "--worker-stall-secs=1000000", "--worker-wedge-secs=1000000", "--request-timeout-secs=1000000",
    "--worker-startup-check-interval=1", "--max-concurrent-requests=0", "--idle-connection-timeout-secs=0",
    "--disable-tokenizer-autoload", "--log-level=warn", "--host=127.0.0.1", "--port={port}",
]  # fmt: skip


class _Process(SGLangServer):
    def is_ready(self) -> bool:
        return self.answers()

    def _server_environment(self) -> dict[str, str]:
        return SGLangPython(sys.executable).environment() | {TOKEN_VARIABLE: self.token}


class Router:
    """One that is started here is restarted when it dies, and ends with the engine.

    Raises ValueError if `setting` is neither `smg`, nor an address, nor None; or if `adapters` are served.
    """

    def __init__(self, setting: str | None, *, adapters: str) -> None:
        if setting not in (None, "smg") and ":" not in setting:
            raise ValueError(f"router must be smg, or a gateway's address such as http://host:30000, got {setting!r}.")
        if setting is not None and adapters == "served":
            raise ValueError(f"router={setting!r} needs adapters='merged'. Set that, or omit router.")
        self._setting = setting
        self._fleet: ServerFleet | None = None

    def check(self) -> None:
        """Raises ValueError if smg is to be started and not installed."""
        if self._setting == "smg" and importlib.util.find_spec("smg") is None:
            raise ValueError(
                "router: smg needs SGLang's gateway: pip install smg. Or set router to a gateway's address."
            )

    def start(self, members: Members, folder: Path, token: str | None, timeouts: Timeouts) -> None:
        """Sets the members' gateway, which gets the servers' token."""
        if self._setting is None:
            return
        if self._setting != "smg":
            members.gateway = Gateway(as_url(self._setting), token, members.pool, timeouts=timeouts)
            return
        with socket.create_server(("127.0.0.1", 0)) as free:
            metrics_port = free.getsockname()[1]
        command = [sys.executable, "-c", _PROGRAM, *_ARGUMENTS, f"--prometheus-port={metrics_port}"]
        process = _Process(folder, name="the gateway", port=0, token=token, command=command)
        self._fleet = ServerFleet(
            [process], on_lost=lambda *_: None, on_started=lambda *_: None, hang_timeout_s=timeouts.hang_s
        )
        (url,) = self._fleet.start()
        members.gateway = Gateway(url, process.token, members.pool, timeouts=timeouts)

    def stop(self) -> None:
        """Ends the one that was started here. May be called twice."""
        if self._fleet is not None:
            self._fleet.stop(0.0)
