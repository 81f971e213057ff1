"""ServerFleet: keeps servers running. One that dies or hangs is replaced, and gets weights before it gets requests.

Each server has a thread here, which waits for its end:

    running ── exited, hangs, or reported ──► on_lost(url) ─► wait ─► start ─► ready ─► on_started(new url) ─► running
                                                               ▲                 │ failed       │ raised
                                                               └─── not too often┴──────────────┘
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lightrl.checks.printable import count_text
from lightrl.engines.sglang.servers.server import SGLangServer
from lightrl.errors import EngineError, LightRLError

log = logging.getLogger(__name__)

_TICK_S = 0.25
_PROBE_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 60.0


@dataclass
class RestartPolicy:
    """When to restart a lost server, and when to give it up."""

    max_restarts: int = 3  # in a row
    backoff_s: float = 1.0  # before the first; doubled for each further one, up to a minute
    stable_s: float = 600.0  # of running, after which the count starts over
    restarts: int = 0  # in a row

    def delay_s(self, ran_s: float) -> float | None:
        """Seconds to wait before the next start, after a run of `ran_s` seconds; None gives the server up."""
        if ran_s >= self.stable_s:
            self.restarts = 0
        if self.restarts >= self.max_restarts:
            return None
        self.restarts += 1
        return min(self.backoff_s * 2.0 ** (self.restarts - 1), 60.0)


class ServerFleet:
    """Servers of one model, started together and restarted one by one.

    This class's threads call the callbacks, in order for each server, concurrently for several.

    Args:
        on_lost: (url, reason) of a server that is gone and must get no more requests.
        on_started: url of a server that is ready again, but without the run's weights: loads the current ones, and only
            then admits requests. If it raises a LightRLError, the server counts as lost again.
        on_given_up: (url, message) of a server that will not be restarted.
        silent_s: returns the seconds since the server at an address last answered another part of the engine.
        hang_timeout_s: a server that answers nothing for this long is killed and replaced.
    """

    def __init__(
        self,
        servers: Sequence[SGLangServer],
        *,
        on_lost: Callable[[str, str], None],
        on_started: Callable[[str], None],
        on_given_up: Callable[[str, str], None] | None = None,
        silent_s: Callable[[str], float] | None = None,
        max_restarts: int = 3,
        restart_backoff_s: float = 1.0,
        hang_timeout_s: float = 60.0,
        probe_interval_s: float = 5.0,
    ) -> None:
        if not servers:
            raise ValueError("ServerFleet needs at least 1 server.")
        self.servers = list(servers)
        self._on_lost = on_lost
        self._on_started = on_started
        self._on_given_up = on_given_up or (lambda url, message: None)
        self._silent_s = silent_s or (lambda url: float("inf"))
        self._policies = [RestartPolicy(max_restarts, restart_backoff_s) for _ in self.servers]
        self._hang_timeout_s = hang_timeout_s
        self._probe_interval_s = probe_interval_s
        self._stopping = threading.Event()
        self._start_lock = threading.Lock()  # no server starts once `stop` has begun
        self._reports: dict[str, str] = {}  # why a server must be replaced, by url
        self._threads: list[threading.Thread] = []

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def start(self) -> list[str]:
        """Starts all servers at once, waits until all are ready, and watches them from then on; returns their urls."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.stop, grace_s=0)
            for server in self.servers:
                self._start_one(server)
            with ThreadPoolExecutor(len(self.servers)) as pool:
                # the first failure ends the others' wait: their processes are gone
                list(pool.map(self._wait_ready_or_stop, self.servers))
            undo.pop_all()
        for server, policy in zip(self.servers, self._policies, strict=True):
            self._threads.append(threading.Thread(target=self._watch, args=(server, policy), daemon=True))
            self._threads[-1].start()
        return self.urls

    def report(self, url: str, reason: str) -> None:
        """Has the server at `url` killed and replaced. Ignores unknown urls."""
        self._reports[url] = reason

    def stop(self, grace_s: float | None = None) -> None:
        """Stops all servers at the same time; returns when they are gone. May be called twice."""
        self._stopping.set()
        with self._start_lock, ThreadPoolExecutor(len(self.servers)) as pool:
            list(pool.map(lambda server: server.stop(grace_s), self.servers))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_TIMEOUT_S)

    def _start_one(self, server: SGLangServer) -> None:
        with self._start_lock:
            if self._stopping.is_set():
                raise EngineError(f"{server.name} was not started: the servers are being stopped.")
            server.start()

    def _wait_ready_or_stop(self, server: SGLangServer) -> None:
        try:
            server.wait_ready()
        except EngineError:
            if not self._stopping.is_set():
                self._stopping.set()
                for other in self.servers:
                    if other is not server:
                        other.stop(grace_s=0)
                raise
        # else another server failed first, and its message matters

    def _watch(self, server: SGLangServer, policy: RestartPolicy) -> None:
        while True:
            since = time.monotonic()
            reason = self._wait_until_lost(server)
            if reason is None:
                return
            log.warning("%s at %s is lost: %s.", server.name, server.url, reason)
            self._on_lost(lost_url := server.url, reason)
            server.stop(grace_s=0)
            if not self._restarted(server, policy, time.monotonic() - since, reason):
                return
            self._reports.pop(lost_url, None)  # of the process that is gone

    def _wait_until_lost(self, server: SGLangServer) -> str | None:
        """Why the server must be replaced; None when the fleet stops."""
        answered_at = probed_at = time.monotonic()
        while not self._stopping.wait(_TICK_S):
            if not server.is_alive():
                return f"its process ended ({server.exit_status()})" if not self._stopping.is_set() else None
            report = self._reports.pop(server.url, None)
            if report is not None:
                return report
            now = time.monotonic()
            if now - probed_at < self._probe_interval_s:
                continue
            probed_at = now
            if server.answers(min(_PROBE_TIMEOUT_S, self._hang_timeout_s)):
                answered_at = time.monotonic()
            elif min(time.monotonic() - answered_at, self._silent_s(server.url)) > self._hang_timeout_s:
                return f"it has not answered for {time.monotonic() - answered_at:.0f} s"
        return None

    def _restarted(self, server: SGLangServer, policy: RestartPolicy, ran_s: float, reason: str) -> bool:
        """Restarts it as often as the policy allows; False if it is given up or the fleet stops."""
        while (delay_s := policy.delay_s(ran_s)) is not None:
            if self._stopping.wait(delay_s):
                return False
            problem = self._try_to_start(server)
            if problem is None:
                log.info("%s is back at %s.", server.name, server.url)
                return True
            if self._stopping.is_set():
                return False
            reason, ran_s = problem, 0.0
            log.warning("%s could not be restarted: %s", server.name, reason)
            server.stop(grace_s=0)
        message = (
            f"{server.name} is given up after {count_text(policy.restarts, 'restart')} in a row. Last reason: "
            f"{reason}. {server.last_output()}"
        )
        log.error("%s", message)
        self._on_given_up(server.url, message)
        return False

    def _try_to_start(self, server: SGLangServer) -> str | None:
        """Why it did not start or got no weights; None if it did."""
        try:
            self._start_one(server)
            server.wait_ready()
            self._on_started(server.url)
        except LightRLError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001  # a full disk, no more processes, threads or memory: nobody else watches this server
            return f"{type(error).__name__}: {error}"
        return None
