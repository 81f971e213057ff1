"""Registry: a folder shared by all hosts, in which running servers announce their addresses.

    lightrl serve ─► Announcement: HOST-PORT.json, rewritten every 2 s ─────► Registry ─► Watch: join, drain, lose
                          is_leaving: true ───────────────────────────────────► requests move to other servers
                          waits until the file is removed ◄───────────────────  when the server is unused

Runs read a server's model, weight version and identity from the server itself. Hosts' clocks are not compared: an entry
counts as alive while the reader sees its content change. An entry that already exists when the reader starts may belong
to a killed server, so it counts only once it has changed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from lightrl.errors import EngineTimeout

log = logging.getLogger(__name__)

SCHEME = "file://"
BEAT_S = 2.0
READ_EVERY_S = 0.5
EXPIRE_S = 20.0  # after the last beat; network file systems may show new content seconds late


@dataclass(frozen=True)
class ServerEntry:
    """A server's entry, which `lightrl serve` writes."""

    url: str
    receiver: str | None = None  # address of its weight receiver, for the delta transport
    is_leaving: bool = False


class Announcement:
    """A thread that keeps servers' entries in the registry up to date, until `leave`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: Sequence[ServerEntry] = ()
        self._start = secrets.token_hex(4)
        self._num_beats = 0
        self._is_leaving = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightrl-announcement", daemon=True)

    def start(self, servers: Sequence[ServerEntry]) -> None:
        """Announces these servers; raises OSError if the folder cannot be written."""
        self._servers = servers
        self._folder.mkdir(parents=True, exist_ok=True)
        self._beat()
        self._thread.start()

    def leave(self, timeout_s: float = 30.0) -> bool:
        """Waits until no run uses the servers; returns False if that takes longer than `timeout_s` (0: no waiting)."""
        if not self._thread.is_alive() or not timeout_s:
            self.end()
            return True
        self._is_leaving = True
        deadline = time.monotonic() + timeout_s
        while (is_used := any(self._file(server).exists() for server in self._servers)) and time.monotonic() < deadline:
            self._ended.wait(0.1)
        self.end()
        return not is_used

    def end(self) -> None:
        """Removes the entries without waiting for runs."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(BEAT_S * 2)
        for server in self._servers:
            with contextlib.suppress(OSError):
                self._file(server).unlink(missing_ok=True)

    def _run(self) -> None:
        has_warned = False
        while not self._ended.wait(BEAT_S / 4 if self._is_leaving else BEAT_S):
            try:
                self._beat()
                has_warned = False
            except OSError as error:
                if not has_warned:
                    log.warning("The servers' entries in %s cannot be written: %s. Trying again.", self._folder, error)
                has_warned = True

    def _beat(self) -> None:
        self._num_beats += 1
        for server in self._servers:
            file = self._file(server)
            if self._is_leaving and not file.exists():  # a run has released the server
                continue
            content = asdict(server) | {"is_leaving": self._is_leaving, "beat": f"{self._start}-{self._num_beats}"}
            part = file.with_suffix(".part")
            part.write_text(json.dumps(content))
            part.replace(file)

    def _file(self, server: ServerEntry) -> Path:
        return self._folder / _name(server.url)


@dataclass
class Registry:
    """Reads the entries. Its methods may block on the file system, so call them in a thread."""

    folder: Path
    num_expected: int = 1  # how many servers a starting run waits for
    _changes: dict[str, tuple[str, float]] = field(default_factory=dict)  # file → content, time of its last change
    _has_read: bool = False

    def read(self) -> dict[str, ServerEntry]:
        """Returns the registered servers by address; skips entries that no longer change or cannot be read."""
        now = time.monotonic()
        servers = {}
        for file in sorted(self.folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                text = file.read_text()
                if self._changes.get(file.name, ("", 0.0))[0] != text:
                    self._changes[file.name] = (text, now if self._has_read else now - EXPIRE_S)  # initially expired
                if now - self._changes[file.name][1] < EXPIRE_S:
                    content = json.loads(text)
                    receiver = content.get("receiver")
                    servers[str(content["url"])] = ServerEntry(content["url"], receiver, bool(content["is_leaving"]))
        self._has_read = True
        return servers

    def wait_for_servers(self, timeout_s: float) -> list[ServerEntry]:
        """Waits up to `timeout_s` for the expected number of servers; returns those found, or raises EngineTimeout."""
        deadline = time.monotonic() + timeout_s
        while len(entries := [entry for entry in self.read().values() if not entry.is_leaving]) < self.num_expected:
            if time.monotonic() > deadline:
                problem = f"Only {len(entries)} of {self.num_expected} servers announced themselves in {self.folder} "
                problem += f"within engine.timeouts.startup_s={timeout_s:g} s."
                if not entries:
                    raise EngineTimeout(f"{problem} Start one with `lightrl serve --register {self.folder}`.")
                log.warning("%s Starting without the others.", problem)
                break
            time.sleep(READ_EVERY_S)
        return entries

    def release(self, url: str) -> None:
        """Removes a leaving server's entry, which shows that this run no longer uses the server."""
        with contextlib.suppress(OSError):
            (self.folder / _name(url)).unlink(missing_ok=True)


def registry_at(urls: Sequence[str] | None) -> Registry | None:
    """Returns the registry for a URL like `file:///shared/servers` or `file:///shared/servers?servers=4`, else None.

    Raises ValueError if there are also other addresses, or the path is not absolute.
    """
    if not any(url.startswith(SCHEME) for url in urls or ()):
        return None
    assert urls is not None
    path, _, query = urls[0].removeprefix(SCHEME).partition("?")
    number = query.removeprefix("servers=") if query else "1"
    if len(urls) > 1 or not path.startswith("/") or not number.isdecimal():
        raise ValueError(
            f"Set urls to a registry, such as `file:///shared/servers` (or `…?servers=4` to wait for 4 servers at the "
            f"start), or to the servers' addresses, not both; got {', '.join(urls)}."
        )
    return Registry(Path(path), int(number))


def _name(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}-{parts.port}.json"
