"""Timeouts: how long SGLangEngine waits, and for what."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Timeouts:
    """How long an `SGLangEngine` waits for its servers, in seconds. In YAML: `timeouts: {generate_s: 600}`.

    Args:
        generate_s: for one generation; then the server is told to return what it has written, and the rest is requested
            again. Below StalenessControl's rollout_timeout_s, so that a request that got lost in a server is repeated
            before the run ends.
        request_s: for the answer to any other request that should be quick.
        connect_s: for a connection; a stopped server accepts none.
        sync_s: for each step of a weight sync.
        startup_s: from a server's start to its first answer.
        server_wait_s: how long requests and weight syncs wait for a server if all are starting, syncing or lost.
        hang_s: a server that answers nothing for this long is lost.
    """

    generate_s: float = 900.0
    request_s: float = 60.0
    connect_s: float = 60.0
    sync_s: float = 600.0
    startup_s: float = 900.0
    server_wait_s: float = 900.0
    hang_s: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"engine.timeouts.{field.name} must be > 0 seconds, got {getattr(self, field.name)}.")
