"""SourceRows: the rows of one source. IndexedRows reads them by index, and StreamedRows (streamed.py) in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lightrl.data.mixture import DataSource
from lightrl.data.rows import rename_columns
from lightrl.trajectory import JsonMapping, JsonObject

if TYPE_CHECKING:
    from lightrl.trajectory import Prompt

# What becomes of a row: its prompt, None if it is dropped, or an error if it is bad.
Made: TypeAlias = "Prompt | ValueError | None"
# Makes a row's prompt: None if a filter drops the row; raises ValueError if it is bad.
PromptOf: TypeAlias = "Callable[[LocatedRow], Prompt | None]"


class LocatedRow(NamedTuple):
    """A row of a split, with its origin."""

    row: Any  # a dict of columns, or an item of a user's dataset
    source: DataSource
    where: str  # names the row in messages
    prompt_id: str  # unique in the split


@dataclass(eq=False)
class SourceRows(ABC):
    """The rows of one source, each identified by a key.

    A run reads the source repeatedly, in passes. A row's number counts over all passes.
    """

    source: DataSource
    prefix: str  # begins the ids of the source's prompts

    @property
    @abstractmethod
    def num_rows(self) -> int | None:
        """The number of rows of a pass; None if unknown."""

    @abstractmethod
    def row_keys(self) -> Iterable[Any]:
        """Returns the key of every row, in the order of the data."""

    @abstractmethod
    def key_at(self, number: int) -> Any:
        """Returns the key of the row with this number. May wait for the source; raises ValueError if reading fails."""

    @abstractmethod
    def locate(self, key: Any) -> LocatedRow:
        """Returns the row with this key, with renamed columns; raises ValueError if it cannot be read."""

    @abstractmethod
    def read_whole(self) -> IndexedRows:
        """Returns the same rows by index; reads a streamed source to its end."""

    def _with_columns(self, row: Any, where: str, row_id: str) -> LocatedRow:
        if self.source.columns:
            row = rename_columns(row, self.source.columns, where=where)
        return LocatedRow(row, self.source, where, f"{self.prefix}-{row_id}")

    @abstractmethod
    def state_dict(self, number: int) -> JsonObject | None:
        """Returns the state for reading from this row on; None if rows are read by index."""

    @abstractmethod
    def load_state_dict(self, state: JsonMapping) -> None:
        """Continues from this state without reading earlier rows."""


@dataclass(eq=False)
class IndexedRows(SourceRows):
    """Rows by index: the key is the index in `rows`."""

    rows: Sequence[Any]
    _: KW_ONLY
    used: Sequence[int] | None = None  # indices of the rows in use; None uses all
    name_row: Callable[[int], str] | None = None  # names a row in messages; None uses its number and source

    @property
    def num_rows(self) -> int:
        return len(self.row_keys())

    def row_keys(self) -> Sequence[int]:
        return range(len(self.rows)) if self.used is None else self.used

    def key_at(self, number: int) -> int:
        return self.row_keys()[number % self.num_rows]

    def locate(self, key: int) -> LocatedRow:
        where = f"Row {key + 1} of {self.source.source!r}" if self.name_row is None else self.name_row(key)
        return self._with_columns(self.rows[key], where, str(key))

    def read_whole(self) -> IndexedRows:
        return self

    def state_dict(self, number: int) -> None:
        return None

    def load_state_dict(self, state: JsonMapping) -> None:
        """Does nothing, because there is no state."""

    def only(self, keys: Sequence[int]) -> IndexedRows:
        """Returns the rows with these keys, which must be in the order of the data."""
        return self if len(keys) == self.num_rows else replace(self, used=keys)
