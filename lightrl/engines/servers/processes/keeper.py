"""Starts and stops processes; restarts those that exit or hang, and gives up if they do so too often.

running ── exits, hangs ──► wait ─► start ─► ready ─► running
                             ▲                 │ failed
                             └─ not too often ─┴─ given up
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from lightrl.checks.printable import count_text
from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.servers.processes.process import ServerProcess
from lightrl.errors import EngineError, LightRLError

log = logging.getLogger(__name__)

_TICK_S = 0.25
_PROBE_EVERY_S, _PROBE_TIMEOUT_S = 5.0, 5.0
HANG_S = 60.0
STOP_GRACE_S = 5.0  # for processes that have nothing to save when they exit


def start_all(processes: Sequence[ServerProcess]) -> None:
    """Starts processes concurrently and waits until all are ready; if one fails, stops the others."""
    failed = threading.Event()

    def wait_ready(process: ServerProcess) -> None:
        try:
            process.wait_ready()
        except EngineError:
            if failed.is_set():  # another process failed first, and its error is raised
                return
            failed.set()
            end_all([other for other in processes if other is not process], 0.0)
            raise

    with contextlib.ExitStack() as undo:
        undo.callback(end_all, processes, 0.0)
        for process in processes:
            process.start()
        with ThreadPoolExecutor(len(processes)) as pool:
            list(pool.map(wait_ready, processes))
        undo.pop_all()


def end_all(processes: Sequence[ServerProcess], grace_s: float | None = None) -> None:
    """Stops processes for good, concurrently, and waits until they have exited. Safe to call twice."""
    if processes:
        with ThreadPoolExecutor(len(processes)) as pool:
            list(pool.map(lambda process: process.stop(grace_s, for_good=True), processes))


async def keep(process: ServerProcess, *, hang_s: float = HANG_S) -> str:
    """Restarts a process whenever it exits or hangs; returns the reason when it gives up."""
    while True:
        reason = await _until_lost(process, hang_s)
        log.warning("%s at %s is lost: %s.", process.name, process.url, reason)
        problem = await restart(process, reason)
        if problem is not None:
            return problem


async def restart(
    process: ServerProcess, reason: str, on_ready: Callable[[], Awaitable[None]] | None = None
) -> str | None:
    """Stops a process and starts it again, as often as its policy allows; returns None once it runs, or why it gave up.

    `on_ready` makes the process usable; if it raises, the restart has failed.
    """
    ran_s = process.ran_s
    await in_thread(process.stop, 0.0)
    while (delay_s := process.policy.delay_s(ran_s)) is not None:
        await asyncio.sleep(delay_s)
        try:
            await in_thread(process.start)
            await in_thread(process.wait_ready)
            if on_ready is not None:
                await on_ready()
        except Exception as error:  # noqa: BLE001  # such as a full disk: continue, because nothing else restarts it
            reason = str(error) if isinstance(error, LightRLError) else f"{type(error).__name__}: {error}"
        else:
            log.info("%s is back at %s.", process.name, process.url)
            return None
        ran_s = 0.0
        log.warning("%s could not be restarted: %s", process.name, reason)
        await in_thread(process.stop, 0.0)
    message = (
        f"Giving up on {process.name} after {count_text(process.policy.restarts, 'restart')} in a row. "
        f"Last reason: {reason}. {process.last_output()}"
    )
    log.error("%s", message)
    return message


async def _until_lost(process: ServerProcess, hang_s: float) -> str:
    """Watches a process until it exits or hangs; returns which of the two happened."""
    answered_at = probed_at = time.monotonic()
    while True:
        await asyncio.sleep(_TICK_S)
        if not process.is_alive():
            return f"its process ended ({process.exit_status()})"
        if time.monotonic() - probed_at < min(_PROBE_EVERY_S, hang_s / 4):
            continue
        probed_at = time.monotonic()
        with contextlib.suppress(RuntimeError):  # no thread can start
            if await in_thread(process.answers, min(_PROBE_TIMEOUT_S, hang_s)):
                answered_at = time.monotonic()
            elif time.monotonic() - answered_at > hang_s:
                return f"it has not answered for {time.monotonic() - answered_at:.0f} s"
