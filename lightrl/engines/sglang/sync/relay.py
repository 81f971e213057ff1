"""spread: one request to many weight receivers, through a tree of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlencode

from lightrl.engines.sglang.connection import Connection
from lightrl.errors import EngineError

PROTOCOL = 3  # of the requests; trainer and receiver must agree
FAN_OUT = 2  # receivers that one process sends to
_HOP = 0.9  # of the deadline is left to the next receivers of the tree, so that the one that failed is named

Answers = dict[str, dict[str, Any]]  # by address; with `error`, and `is_behind` if it is another receiver that failed


async def spread(
    connect: Callable[[str], Connection],
    urls: Sequence[str],
    path: str,
    body: dict[str, Any] | bytes,
    fields: dict[str, Any] | None = None,
    *,
    timeout_s: float = 600.0,
) -> Answers:
    """Sends one request to all receivers, through a tree of them: each passes it on to two others.

    So nobody sends the same bytes more than twice. If one fails, those that it should have passed it to fail too.
    """

    async def ask(first: str, rest: Sequence[str]) -> Answers:
        query = urlencode({**(fields or {}), "relay": ",".join(rest), "timeout_s": timeout_s * _HOP})
        try:
            answers: Answers = await connect(first).request(
                "POST", f"{path}?{query}", body, timeout_s=timeout_s, num_retries=0
            )
            own = answers.pop("")
        except (EngineError, KeyError, AttributeError) as error:  # the latter two: it is not a receiver
            through = f"the receiver {first}, which should have passed it on, failed"
            behind = {url: {"error": through, "is_behind": True} for url in rest}
            return {first: {"error": str(error)}, **behind}
        return {first: own, **answers}

    halves = [urls[start::FAN_OUT] for start in range(min(FAN_OUT, len(urls)))]
    found = await asyncio.gather(*(ask(half[0], half[1:]) for half in halves))
    return {url: answer for answers in found for url, answer in answers.items()}
