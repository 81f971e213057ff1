"""Windows: batches of completed prompts that are rendered when they are read, window by window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from lightrl.concurrency.daemon_future import result_of, submit
from lightrl.data.mixture import epoch_order
from lightrl.data.streamed import ROWS_AT_ONCE

Item = TypeVar("Item")

BATCHES = 16  # in a window: sorted by length, it loses most padding and keeps most randomness
READ_TIMEOUT_S = 1800.0  # of a window
_KEPT = 4  # starts of windows
_MAX_DROPPED = 100_000  # rows in a row


class Windows(Generic[Item]):
    """Batch after batch of the rows that are kept, over one epoch of the data after another.

    A window is the next `BATCHES * batch_size` kept rows. Where it begins shows when the window before it is read, so
    the checkpoint holds that. A thread reads the next window while the present one is trained on.

    Args:
        read: the items at some positions of the data; None for a dropped row, ValueError for a bad one.
        batch_size: items per batch.
        seed: of the order of a window's batches.
        length: sort the items of a window by it and shuffle the batches; None keeps the order of the positions.
    """

    def __init__(
        self,
        read: Callable[[Sequence[int]], Sequence[Item | ValueError | None]],
        batch_size: int,
        *,
        seed: int,
        length: Callable[[Item], int] | None,
    ) -> None:
        self.batch_size = batch_size
        self.seed = seed
        self._read = read
        self._length = length
        self._starts: dict[int, int] = {0: 0}  # of the last windows, the position of their first row
        self._present: tuple[int, list[list[Item]]] = (-1, [])  # a window's number and batches
        self._next: tuple[int, Future[list[list[Item]]]] | None = None

    def __getitem__(self, number: int) -> list[Item]:
        """The rows of a batch.

        Raises:
            ValueError: if a row is bad.
        """
        window, index = divmod(number, BATCHES)
        if self._present[0] != window:
            if self._next is None or self._next[0] != window:
                self._begin(window)
            assert self._next is not None
            what = f"The data of batches {window * BATCHES} to {(window + 1) * BATCHES - 1}"
            self._present = (window, result_of(self._next[1], what, timeout_s=READ_TIMEOUT_S))
            self._begin(window + 1)
        return self._present[1][index]

    def wait(self, timeout_s: float = 10.0) -> bool:
        """Whether the thread that reads ahead is done; waits for it at most this long."""
        return self._next is None or bool(wait([self._next[1]], timeout_s).done)

    def state_dict(self) -> dict[str, Any]:
        return {"starts": sorted(self._starts.items())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Saves reading what comes before; without it the batches are the same."""
        self._starts = dict(state["starts"])

    @property
    def first_position(self) -> int:
        """Of the rows that may be read again."""
        return min(self._starts.values())

    def _begin(self, window: int) -> None:
        if not self.wait(READ_TIMEOUT_S):  # of another window: its rows would be counted twice
            raise TimeoutError(f"Reading ahead has not ended within {READ_TIMEOUT_S:g} s. The data's disk may hang.")
        self._next = (window, submit(lambda: self._batches(window), name="lightrl-data"))

    def _batches(self, window: int) -> list[list[Item]]:
        if window < min(self._starts):
            self._starts = {0: 0}
        for known in range(max(number for number in self._starts if number <= window), window):
            self._rows(known)
        rows, size = self._rows(window), self.batch_size
        if self._length is not None:
            rows = sorted(rows, key=self._length)
        batches = [rows[start : start + size] for start in range(0, len(rows), size)]
        if self._length is not None:
            order = epoch_order(BATCHES, f"{self.seed}/batches", window)
            batches = [batches[index] for index in order.tolist()]
        return batches

    def _rows(self, window: int) -> list[Item]:
        """The kept rows of a window; notes where the next one begins."""
        position, num = self._starts[window], BATCHES * self.batch_size
        rows: list[Item] = []
        num_dropped = 0
        while len(rows) < num:
            for item in self._read(range(position, position + min(ROWS_AT_ONCE, num - len(rows)))):
                if isinstance(item, ValueError):
                    raise item
                position += 1
                num_dropped = num_dropped + 1 if item is None else 0
                if item is not None:
                    rows.append(item)
            if num_dropped > _MAX_DROPPED:
                raise ValueError(
                    f"No row is left among {num_dropped} in a row: row_filter or the limits of length drop them. "
                    "Loosen these, or fix the data."
                )
        starts = {**self._starts, window + 1: position}
        self._starts = {number: starts[number] for number in sorted(starts)[-_KEPT:]}
        return rows
