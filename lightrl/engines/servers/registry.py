"""Registry: a folder visible to all hosts where running servers announce their addresses until they leave or go silent.

    lightrl serve ─► Announcement: HOST-PORT.json, written again every 2 s ─► Registry ─► Watch: join, drain, lose
                          leaving: true ──────────────────────────────────────► requests move to other servers
                          waits until the file is gone ◄───────────────────────  removed once the server is unused

A run asks the server itself for anything else it needs (model, weight version, identity). Hosts' clocks are not
compared: an entry is alive while its content changes, by the reader's clock. An entry older than the reader may belong
to a server that was killed, so it counts only once it changes.
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
EXPIRE_S = 20.0  # without a beat; network file systems may show new content seconds late


@dataclass(frozen=True)
class ServerEntry:
    """A server's entry, written by the server."""

    url: str
    receiver: str | None = None  # weight receiver, for the delta transport
    is_leaving: bool = False


class Announcement:
    """Keeps servers' entries in the registry, from a thread, until `leave`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: Sequence[ServerEntry] = ()
        self._start = secrets.token_hex(4)
        self._num_beats = 0
        self._is_leaving = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightrl-announcement", daemon=True)

    def start(self, servers: Sequence[ServerEntry]) -> None:
        """Raises OSError if the folder cannot be written."""
        self._servers = servers
        self._folder.mkdir(parents=True, exist_ok=True)
        self._beat()
        self._thread.start()

    def leave(self, timeout_s: float = 30.0) -> bool:
        """Asks runs to move their requests elsewhere; returns True once they have, False after `timeout_s`.

        With a timeout of 0 no run is asked.
        """
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
        """Removes the entries without asking runs."""
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
            if self._is_leaving and not file.exists():  # the run has released the server
                continue
            content = asdict(server) | {"is_leaving": self._is_leaving, "beat": f"{self._start}-{self._num_beats}"}
            part = file.with_suffix(".part")
            part.write_text(json.dumps(content))
            part.replace(file)

    def _file(self, server: ServerEntry) -> Path:
        return self._folder / _name(server.url)


@dataclass
class Registry:
    """Reads the entries; any call may block on the file system, so call it in a thread."""

    folder: Path
    num_expected: int = 1  # servers that a run waits for when it starts
    _changes: dict[str, tuple[str, float]] = field(default_factory=dict)  # file to its content and when it changed
    _has_read: bool = False

    def read(self) -> dict[str, ServerEntry]:
        """Returns the registered servers by address; an entry that cannot be read counts as silent."""
        now = time.monotonic()
        servers = {}
        for file in sorted(self.folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                text = file.read_text()
                if self._changes.get(file.name, ("", 0.0))[0] != text:
                    self._changes[file.name] = (text, now if self._has_read else now - EXPIRE_S)
                if now - self._changes[file.name][1] < EXPIRE_S:
                    content = json.loads(text)
                    receiver = content.get("receiver")
                    servers[str(content["url"])] = ServerEntry(content["url"], receiver, bool(content["is_leaving"]))
        self._has_read = True
        return servers

    def wait_for_servers(self, timeout_s: float) -> list[ServerEntry]:
        """Returns the registered servers once there are as many as expected, or after `timeout_s`.

        Raises:
            EngineTimeout: if there are none by then.
        """
        deadline = time.monotonic() + timeout_s
        while len(entries := [one for one in self.read().values() if not one.is_leaving]) < self.num_expected:
            if time.monotonic() > deadline:
                few = f"{len(entries)} of {self.num_expected} servers announced themselves in {self.folder} within "
                few += f"engine.timeouts.startup_s={timeout_s:g} s."
                if not entries:
                    raise EngineTimeout(f"{few} Start one with `lightrl serve --register {self.folder}`.")
                log.warning("%s Starting with these.", few)
                break
            time.sleep(READ_EVERY_S)
        return entries

    def release(self, url: str) -> None:
        """Tells a leaving server that this run has no more requests on it."""
        with contextlib.suppress(OSError):
            (self.folder / _name(url)).unlink(missing_ok=True)


def registry_at(urls: Sequence[str] | None) -> Registry | None:
    """Returns the registry if the address is one, as in `file:///shared/servers` or with `?servers=4`; otherwise None.

    Raises:
        ValueError: if it is given together with addresses, or its path is not absolute.
    """
    if not any(url.startswith(SCHEME) for url in urls or ()):
        return None
    assert urls is not None
    path, _, query = urls[0].removeprefix(SCHEME).partition("?")
    number = query.removeprefix("servers=") if query else "1"
    if len(urls) > 1 or not path.startswith("/") or not number.isdecimal():
        raise ValueError(
            f"Give servers by a registry, such as `file:///shared/servers` (or `…?servers=4` to wait for "
            f"4 at the start), or by their addresses, not both; got {', '.join(urls)}."
        )
    return Registry(Path(path), int(number))


def _name(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}-{parts.port}.json"
