"""The fake server's prefix cache: which prompts it has seen, under which `extra_key` and which weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_PROMPTS = 10_000


class PromptCache:
    """Whole prompts only, where SGLang has all prefixes: what a test of caching needs, at the cost of one hash."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, tuple[int, ...]], int] = OrderedDict()

    def look_up(self, prompt: Sequence[int], extra_key: str | None, load: int) -> tuple[int, int]:
        """How many of the prompt's tokens are cached, and the number of the load that computed them; adds the prompt.

        As in SGLang, the last token is always computed anew.

        Args:
            load: number of the present load.
        """
        key = (extra_key or "", tuple(prompt))
        if key in self._seen:
            self._seen.move_to_end(key)
            return len(prompt) - 1, self._seen[key]
        self._seen[key] = load
        if len(self._seen) > MAX_PROMPTS:
            self._seen.popitem(last=False)
        return 0, load

    def clear(self) -> None:
        self._seen.clear()
