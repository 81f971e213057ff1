"""body_of: what an HTTP server answers, as much of it as may be in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp


async def body_of(response: aiohttp.ClientResponse, max_bytes: int) -> bytes | None:
    """The whole body; None if it is larger, as soon as that is known. The request has the deadline."""
    if response.content_length is not None and response.content_length <= max_bytes:
        return await response.read()
    parts, num_bytes = [], response.content_length or 0
    while num_bytes <= max_bytes and (part := await response.content.readany()):
        parts.append(part)
        num_bytes += len(part)
    return b"".join(parts) if num_bytes <= max_bytes else None
