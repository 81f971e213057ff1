"""SplitRows: the rows of a split's sources in one sequence; RowPrompts: their prompts, each made when it is read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from lightrl.data.lazy import LazySequence
from lightrl.data.mixture import DataSource
from lightrl.data.rows import Row, renamed
from lightrl.trajectory import Prompt


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
        prefix = self.split if len(self.sources) == 1 else f"{self.split}-{self.sources[number].label}"
        return f"{prefix}-{place}"

    def _locate(self, index: int) -> tuple[int, int]:
        """The number of its source, and the index there."""
        number = bisect_right(self._starts, index) - 1
        return number, index - self._starts[number]


class RowPrompts(LazySequence["Prompt | None"]):
    """The prompts of rows; None for a row that is dropped by a filter or for its length.

    Args:
        rows: of a split.
        make: the prompt at an index, rendered; raises ValueError if the row is bad.
    """

    def __init__(self, rows: SplitRows, make: Callable[[int], Prompt | None]) -> None:
        self.rows = rows
        self._make = make

    def __len__(self) -> int:
        return len(self.rows)

    def make(self, index: int) -> Prompt | None:
        return self._make(index)
