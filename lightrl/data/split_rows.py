"""SplitRows: the rows of a split's sources in one sequence; RowPrompts: their prompts, each made when it is read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from lightrl.data.lazy import LazySequence
from lightrl.data.mixture import DataSource
from lightrl.data.rows import LocatedRow, Made, Row, renamed
from lightrl.trajectory import Prompt

ROWS_AT_ONCE = 256  # are rendered with one call of the tokenizer


class SplitRows(LazySequence[Row]):
    """The rows of all sources of a split, with their columns renamed.

    Args:
        split: its name begins the prompts' ids.
        sources: where the rows come from.
        rows: of each source.
        columns: new column names → the data's own, for all sources.
    """

    def __init__(
        self, split: str, sources: Sequence[DataSource], rows: Sequence[Sequence[Row]], columns: Mapping[str, str]
    ) -> None:
        self.split = split
        self.sources = sources
        self.sizes = [len(part) for part in rows]
        self._rows = rows
        self._starts = list(accumulate(self.sizes, initial=0))
        self._columns = [{**columns, **source.columns} for source in sources]

    def __len__(self) -> int:
        return self._starts[-1]

    def make(self, index: int) -> Row:
        number, place = self._locate(index)
        row, columns = self._rows[number][place], self._columns[number]
        return renamed(row, columns, where=self.where(index)) if columns else row

    def located(self, index: int) -> LocatedRow:
        return LocatedRow(self[index], self.source(index), self.where(index), self.prompt_id(index))

    def source(self, index: int) -> DataSource:
        """Which source a row comes from."""
        return self.sources[self._locate(index)[0]]

    def where(self, index: int) -> str:
        """Names a row in messages."""
        number, place = self._locate(index)
        return f"Row {place + 1} of {self.sources[number].source!r}"

    def prompt_id(self, index: int) -> str:
        """Unique in the split: `train-7`, or `train-<label>-7` with several sources."""
        number, place = self._locate(index)
        return f"{id_prefix(self.split, self.sources, number)}-{place}"

    def _locate(self, index: int) -> tuple[int, int]:
        """The number of its source, and the index there."""
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]


def id_prefix(split: str, sources: Sequence[DataSource], number: int) -> str:
    """Begins the ids of one source's prompts."""
    return split if len(sources) == 1 else f"{split}-{sources[number].label}"


class RowPrompts(LazySequence["Prompt | None"]):
    """The prompts of rows, each made when it is read; None for a row that is dropped by a filter or for its length.

    Args:
        rows: of a split.
        make: the rendered prompts of some rows, or what is wrong with them.
    """

    def __init__(self, rows: SplitRows, make: Callable[[Sequence[LocatedRow]], list[Made]]) -> None:
        self.rows = rows
        self._make = make

    def __len__(self) -> int:
        return len(self.rows)

    def make(self, index: int) -> Prompt | None:
        (made,) = self.many([index])
        if isinstance(made, ValueError):
            raise made
        return made

    def many(self, indices: Sequence[int]) -> list[Made]:
        """The prompts at some indices, which is faster than one by one."""
        return made_of(indices, self.rows.located, self._make)

    def one_pass(self) -> Iterator[list[Made]]:
        """All prompts, in the order of the data, some at a time."""
        for start in range(0, len(self), ROWS_AT_ONCE):
            yield self.many(range(start, min(start + ROWS_AT_ONCE, len(self))))


def made_of(
    places: Sequence[Any], locate: Callable[[Any], LocatedRow], make: Callable[[Sequence[LocatedRow]], list[Made]]
) -> list[Made]:
    """The prompts of rows, where `locate` raises ValueError for rows that cannot be read."""
    located: list[LocatedRow | ValueError] = []
    for place in places:
        try:
            located.append(locate(place))
        except ValueError as error:
            located.append(error)
    made = iter(make([item for item in located if not isinstance(item, ValueError)]))
    return [item if isinstance(item, ValueError) else next(made) for item in located]
