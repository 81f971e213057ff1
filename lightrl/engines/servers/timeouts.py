"""Timeouts: the deadlines for a server engine."""

from __future__ import annotations

from dataclasses import dataclass

from lightrl.checks.bounds import check_positive


@dataclass(frozen=True)
class Timeouts:
    """Deadlines for a server engine, in seconds. In YAML: `timeouts: {startup_s: 1800}`.

    Args:
        request_s: limit for opening a connection, and for the answer to a request that should be quick. A server that
            is silent for half this time counts as lost.
        sync_s: limit for each step of a weight sync.
        startup_s: limit from a server's start to its first answer. Requests and weight syncs also wait this long while
            all servers are starting, syncing or lost.
    """

    request_s: float = 60.0
    sync_s: float = 600.0
    startup_s: float = 900.0

    def __post_init__(self) -> None:
        check_positive(**{f"engine.timeouts.{name}": value for name, value in vars(self).items()})

    @property
    def hang_s(self) -> float:
        """How long a server may be silent before it counts as lost."""
        return self.request_s / 2

    @property
    def probe_interval_s(self) -> float:
        """The interval between health checks of a server."""
        return self.hang_s / 15

    @property
    def server_wait_s(self) -> float:
        """How long to wait for a server while all are starting, syncing or lost."""
        return self.startup_s

    @property
    def generate_s(self) -> float:
        """The deadline for one generation; the server then returns its tokens so far, and a new request continues.

        It is shorter than StalenessControl's rollout_timeout_s: if a server loses a request, the engine must repeat it
        before the run stops.
        """
        return 900.0
