"""Faults of the fake server: what goes wrong, with which requests, how often."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

OF_ANSWERS = ("slow", "drop", "error", "garbage", "hang", "die")
OF_LOADS = (
    "ignore_update", "keep", "drop_file", "zero", "swap", "swap_halves", "transpose", "other_tie", "old_version",
    "delta_twice", "delta_on_wrong_base", "torn_file", "old_rank", "flip_bit", "truncate", "round", "through_float16",
)  # fmt: skip
OF_SERVED_WEIGHTS = ("revert", "restart")
OF_UPDATES = ("lose_update", "wrong_version", "keep_cache", "old_adapter")
KINDS = (*OF_ANSWERS, *OF_UPDATES, *OF_LOADS, *OF_SERVED_WEIGHTS)


@dataclass
class Fault:
    """What goes wrong with `count` requests whose path starts with `path`, after `skip` healthy ones; -1 means all.

    Kinds that a client sees: `slow` (`seconds` before the answer), `drop` (the connection, at once or after `seconds`),
    `error` (HTTP `status`), `garbage` (not JSON), `hang` (no answer), `die` (the process, `seconds` into the request),
    `lose_update` (a weight update is acknowledged, not done), `wrong_version` (done, as another version).

    Silent kinds answer success, and the version is as requested. `keep_cache`: an update, or a flush, leaves the
    key-values of the old weights in the prefix cache. `old_adapter`: an adapter has the values of the one before it.
    Those of wrong_loads.py load other weights than were sent. At any path, `revert` brings back the weights
    of `versions_back` versions ago, and `restart` does so with an empty cache and a new start time.
    """

    kind: str
    path: str = "/generate"
    count: int = 1
    seconds: float = 0.0
    skip: int = 0
    names: str = ""  # a regular expression of the parameters that are wrong; empty for all
    versions_back: int = 1
    status: int = 500
    retry_after: str = ""
    num_fired: int = 0
    num_wrong_values: int = 0  # that the server then held and was not sent; of `keep_cache` stale answers

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"A fault must be one of {', '.join(KINDS)}, got {self.kind!r}.")


class Faults(list[Fault]):
    """The faults of a server, in the order in which they apply."""

    def next(self, path: str, kinds: Sequence[str] = OF_ANSWERS) -> Fault | None:
        """The fault of the next request of this path, which is counted; None if it has none."""
        for fault in self:
            if fault.count != 0 and fault.kind in kinds and path.startswith(fault.path):
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.count -= fault.count > 0
                fault.num_fired += 1
                return fault
        return None


async def faulty_answer(
    fault: Fault, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]
) -> web.StreamResponse:
    """Answers a request, or fails to, as the fault says."""
    if fault.kind == "die":
        sys.stdout.write("the fake server dies, as requested\n")
        sys.stdout.flush()
        asyncio.get_running_loop().call_later(fault.seconds, os._exit, 1)
        return await handler(request)  # type: ignore[no-any-return]
    if fault.kind == "drop" and fault.seconds > 0:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(handler(request), fault.seconds)
    elif fault.seconds > 0:
        await asyncio.sleep(fault.seconds)
    if fault.kind == "slow":
        return await handler(request)  # type: ignore[no-any-return]
    if fault.kind == "error":
        problem, headers = {"message": "the fake server fails, as requested"}, {"Retry-After": fault.retry_after}
        return web.json_response({"error": problem}, status=fault.status, headers=headers)
    if fault.kind == "garbage":
        return web.Response(text="<html>this is not JSON</html>")
    if fault.kind == "hang":
        await asyncio.sleep(1e6)
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
