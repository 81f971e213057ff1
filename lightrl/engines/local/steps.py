"""StepLog and StepPlan: what LocalEngine decoded together, in order, to write down and to repeat.

The logits of a row differ in their last bits with the number of rows beside it (float32 products: 1e-8 to 3e-7), and
so, now and then, does a token. A run repeats bit for bit only if each step has the rows that it had.

    12a3f,9c 340v7 5x3f      12 steps, then rows 3f and 9c enter; 340 steps, then version 7; 5 steps, then 3f leaves

A row is named by the seed of its completion, in hexadecimal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

from lightrl.errors import EngineError

# admit, continue (rows that were begun before), the version of recomputed key-values, remove cancelled rows, mark
Kind = Literal["a", "c", "v", "x", "k"]


class StepLog:
    """Written by the decode thread at token boundaries; read by others."""

    def __init__(self) -> None:
        self._num_steps = 0  # since the last event
        self._events: deque[str] = deque()

    def step(self) -> None:
        self._num_steps += 1

    def note(self, kind: Kind, names: Iterable[int]) -> None:
        """An event, after the steps so far."""
        self._events.append(f"{self._num_steps}{kind}{','.join(f'{name:x}' for name in names)}")
        self._num_steps = 0

    def drain(self) -> str:
        """The events since the last call."""
        return " ".join(self._events.popleft() for _ in range(len(self._events)))


class StepPlan:
    """The steps of an earlier run, to repeat; after its last event the engine decides by itself again."""

    def __init__(self, steps: str) -> None:
        self._events: deque[tuple[int, Kind, list[int]]] = deque(map(_read_event, steps.split()))
        self._steps_left = self._events[0][0] if self._events else 0

    @property
    def is_over(self) -> bool:
        return not self._events

    @property
    def due(self) -> tuple[Kind, list[int]] | None:
        """The event that comes next; None if a step comes before it."""
        return None if self._steps_left else self._events[0][1:]

    def step(self) -> None:
        """A step was made."""
        self._steps_left -= 1

    def advance(self) -> None:
        """The event that was due has happened."""
        self._events.popleft()
        self._steps_left = self._events[0][0] if self._events else 0

    def go_to_mark(self, number: int, names: list[int]) -> None:
        """Leaves out everything up to a mark, counted from 0; the rows of these names are continued first.

        Raises:
            EngineError: if there is no such mark.
        """
        places = [place for place, event in enumerate(self._events) if event[1] == "k"]
        if number >= len(places):
            raise EngineError(f"The schedule has {len(places)} checkpoints, not number {number + 1}, of this resume.")
        for _ in range(places[number] + 1):
            self._events.popleft()
        if names:
            self._events.appendleft((0, "c", names))
        self._steps_left = self._events[0][0] if self._events else 0

    def admits_load(self, weight_version: int) -> bool:
        """Whether these weights may be loaded now: their first tokens come next."""
        if self.is_over:
            return True
        return self._steps_left == 0 and self._events[0][1] == "v" and weight_version <= self._events[0][2][0]

    def describe(self) -> str:
        if self.is_over:
            return "The schedule's steps are over"
        num_steps, kind, names = self._steps_left, *self._events[0][1:]
        what = {"a": "admits", "c": "continues", "v": "loads version", "x": "removes", "k": "marks"}[kind]
        shown = ", ".join(f"{name:x}" for name in names[:4])
        return f"In {num_steps} steps the schedule {what} {shown} ({len(self._events)} events are left)"


def _read_event(text: str) -> tuple[int, Kind, list[int]]:
    place = next(index for index, letter in enumerate(text) if letter in "acvxk")
    kind: Kind = text[place]  # type: ignore[assignment]
    return int(text[:place]), kind, [int(name, 16) for name in text[place + 1 :].split(",") if name]
