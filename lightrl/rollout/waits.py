"""What the main thread waits for: one call for its trajectories, and one batch for its slow groups."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Wait:
    """One call of the main thread that waits for trajectories; written on the event loop, read by the main thread."""

    who: str  # waits, for messages
    total: int  # trajectories it needs
    for_what: str = "the first trajectory"
    done: int = 0
    last_news: float = field(default_factory=time.monotonic)  # seconds, when a trajectory that it waits for was done

    def count(self) -> None:
        self.done += 1
        self.note_news()

    def note_news(self) -> None:
        self.last_news = time.monotonic()


@dataclass
class Stragglers:
    """The slow groups that one batch waits for although enough others are finished."""

    num: int = 0  # now
    waited_s: float = 0.0  # for any of them
    _since_s: float = 0.0  # monotonic clock

    def count(self, num: int) -> None:
        """From now on the batch waits for this many of them."""
        now = time.monotonic()
        if self.num:
            self.waited_s += now - self._since_s
        self.num, self._since_s = num, now
