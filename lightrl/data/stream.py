"""SourceRows: the rows of one source. RowPrompts: the prompts from a split's rows. PromptStream: the train prompts in
the run's order. IndexedRows reads a source by index; StreamedRows (streamed.py) reads it in order.

A position counts prompts over the whole run. With n prompts, epoch e of the stream is positions e·n to (e + 1)·n - 1:
each prompt once, in an order that depends only on (seed, e). A resume therefore needs only one number, for any number
of ranks. If a source is streamed (streamed.py), n is unknown.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from lightrl.checks.bounds import check_bounds
from lightrl.data.mixture import DataSource, MixtureOrder
from lightrl.data.rows import rename_columns
from lightrl.trajectory import JsonMapping, JsonObject, Prompt

logger = logging.getLogger(__name__)

T = TypeVar("T")

ROWS_AT_ONCE = 256  # how many rows are read at once, or rendered with one call to the tokenizer
FINGERPRINT_PROMPTS = 256  # how many prompts a resume compares if not all rows are checked
_ASSUMED_ROWS = 1000  # number of rows that a streamed source is assumed to have
_MAX_MADE = 4096  # how many prepared prompts are kept

# The result for a row: its prompt, None if it is dropped, or an error if it is bad.
Made: TypeAlias = "Prompt | ValueError | None"
# Makes a row's prompt: None if a filter drops the row; raises ValueError if it is bad.
PromptOf: TypeAlias = "Callable[[LocatedRow], Prompt | None]"


class LocatedRow(NamedTuple):
    """A row in a split, with its origin."""

    row: Any  # a dict of columns, or an item from a user's dataset
    source: DataSource
    where: str  # names the row in messages
    prompt_id: str  # unique in the split


@dataclass(eq=False)
class SourceRows(ABC):
    """The rows of one source, each identified by a key.

    A run reads the source repeatedly, in passes. Row numbers continue from one pass to the next.
    """

    source: DataSource
    prefix: str  # start of the ids of the source's prompts

    @property
    @abstractmethod
    def num_rows(self) -> int | None:
        """The number of rows in one pass; None if unknown."""

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
        keys = self.row_keys()
        return keys[number % len(keys)]

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


def without_errors(made: Iterable[T | ValueError]) -> list[T]:
    """Returns the items; raises the first ValueError among them."""
    items: list[T] = []
    for item in made:
        if isinstance(item, ValueError):
            raise item
        items.append(item)
    return items


@dataclass
class BadRows:
    """Drops a split's bad rows if they are few: at most a fraction of its rows, or of 1,000 if the total is unknown.

    Rows that are read again in later epochs count again, good or bad.
    """

    num_rows: int | None
    max_fraction: float  # 0 makes every bad row an error
    num_read: int = 0
    num_bad: int = 0

    def allowed(self, made: Made) -> Made:
        """Returns the result for a row: None for a bad one that is dropped."""
        self.num_read += 1
        if not isinstance(made, ValueError):
            return made
        self.num_bad += 1
        if not self.max_fraction:
            return ValueError(f"{made} (`lightrl doctor data` lists all bad rows; `data.bad_rows: drop` drops them.)")
        if self.num_bad > self.max_fraction * max(self.num_read, self.num_rows or _ASSUMED_ROWS):
            return ValueError(
                f"Bad rows: {self.num_bad} of the first {self.num_read}, more than max_bad_fraction="
                f"{self.max_fraction:g} of all. Run `lightrl doctor data`, and fix the rows. The last one: {made}"
            )
        if self.num_bad == 1:
            logger.warning("Dropping bad rows (bad_rows: drop). The first one: %s", made)
        return None


class CheckedRows(NamedTuple):
    """Hashes and lengths of the prompts in the order of the data, without the prompts themselves."""

    contents: list[int]  # hash of each prompt's content
    num_tokens: list[int]
    digest: str  # hash of all prompts


@dataclass(eq=False)
class RowPrompts(Sequence["Prompt | None"]):
    """The prompts from a split's rows, in data order or by position in the run. Each is made when it is read."""

    parts: Sequence[SourceRows]  # one for each source
    prompt_of: PromptOf
    render: Callable[[Sequence[Made], Callable[[int], str]], list[Made]]  # as ChatRenderer.rendered
    seed: int  # determines the order
    shuffle: bool
    ids: Sequence[str] = ()  # ids of all prompts if known; otherwise ids are made from the rows and are unique
    checked: CheckedRows | None = None  # None unless all rows were checked at the start
    bad: BadRows | None = None  # drops bad rows; None makes each an error

    @classmethod
    def of(cls, prompts: Sequence[Prompt | None], *, seed: int = 0, shuffle: bool = True) -> RowPrompts:
        """Wraps existing prompts."""
        rows = IndexedRows(DataSource("prompts"), "train", prompts)
        ids = [prompt.id for prompt in prompts if prompt is not None]
        return cls([rows], lambda located: located.row, lambda made, _: list(made), seed, shuffle, ids)

    @property
    def num_rows(self) -> int | None:
        """The number of rows in all sources; None if one is streamed."""
        sizes = [part.num_rows for part in self.parts]
        return None if None in sizes else sum(size or 0 for size in sizes)

    def __len__(self) -> int:
        """Returns the number of rows; raises TypeError if a source is streamed."""
        if self.num_rows is None:
            raise TypeError("The number of prompts in a streamed source is unknown.")
        return self.num_rows

    def __getitem__(self, index: Any) -> Any:
        """Returns a prompt, or a list for a slice, in the order of the data; raises ValueError for a bad row."""
        selected = range(len(self))[index]
        return self.at(selected) if isinstance(selected, range) else self.at([selected])[0]

    def at(self, indices: Iterable[int]) -> list[Prompt | None]:
        """Returns the prompts from these rows, numbered across all sources; raises ValueError for a bad row."""
        sizes = [part.num_rows or 0 for part in self.parts]
        starts = [0, *itertools.accumulate(sizes)]

        def locate(index: int) -> LocatedRow:
            number = bisect_right(starts, index, hi=len(sizes)) - 1
            part = self.parts[number]
            return part.locate(part.key_at(index - starts[number]))

        return without_errors(self._make(indices, locate))

    @functools.cached_property
    def order(self) -> MixtureOrder:
        """The row at each position."""
        weights = [part.source.weight for part in self.parts]
        sizes = [part.num_rows for part in self.parts]
        return MixtureOrder(sizes, weights, seed=self.seed, shuffle=self.shuffle)

    def many(self, positions: Iterable[int]) -> list[Made]:
        """Makes the prompts at these positions in the run together, which is faster than one by one."""

        def locate(position: int) -> LocatedRow:
            source, row = self.order.turn(position)
            part = self.parts[source]
            return part.locate(part.key_at(row))

        return self._make(positions, locate)

    def one_pass(self) -> Iterator[list[Made]]:
        """Yields the prompts from all rows in blocks, in the order of the data."""
        keys = self.row_keys()
        while block := list(itertools.islice(keys, ROWS_AT_ONCE)):
            yield self._make(block, lambda key: self.parts[key[0]].locate(key[1]))

    def first(self, num: int) -> list[Prompt | None]:
        """Returns the prompts from the first rows; raises ValueError for a bad row."""
        keys = itertools.islice(self.row_keys(), num)
        return without_errors(self._make(keys, lambda key: self.parts[key[0]].locate(key[1])))

    def check(self) -> RowPrompts:
        """Makes every prompt once; raises ValueError for a bad row. Returns the rows that are not dropped."""
        keys: list[tuple[int, Any]] = []
        ids: list[str] = []
        checked = CheckedRows([], [], "")
        content = hashlib.blake2b(digest_size=6)
        prompts = (prompt for made in self.one_pass() for prompt in without_errors(made))
        for prompt, key in zip(prompts, self.row_keys(), strict=True):
            if prompt is None:
                continue
            keys.append(key)
            ids.append(prompt.id)
            checked.contents.append(hash(prompt.content))
            checked.num_tokens.append(prompt.num_tokens)
            content.update(f"{prompt.id} {prompt.token_ids or prompt.messages}\n".encode())
        return replace(self.only(keys), ids=ids, checked=checked._replace(digest=content.hexdigest()))

    def only(self, keys: Sequence[tuple[int, Any]]) -> RowPrompts:
        """Returns the prompts from these rows, given as (source number, key) in the order of the data."""
        parts = [
            part.read_whole().only([key for source, key in keys if source == number])
            for number, part in enumerate(self.parts)
        ]
        return replace(self, parts=parts)

    def state_dict(self, position: int) -> JsonObject | None:
        """Returns each streamed source's state for reading from this position on; None without streamed sources."""
        states = {
            str(number): part.state_dict(self.order.num_before(number, position))
            for number, part in enumerate(self.parts)
        }
        return {number: state for number, state in states.items() if state is not None} or None

    def load_state_dict(self, state: JsonMapping) -> None:
        for number, part in enumerate(self.parts):
            if str(number) in state:
                part.load_state_dict(state[str(number)])

    def row_keys(self) -> Iterator[tuple[int, Any]]:
        """Yields (source number, key) for every row, in the order of the data."""
        return ((number, key) for number, part in enumerate(self.parts) for key in part.row_keys())

    def _make(self, items: Iterable[T], locate: Callable[[T], LocatedRow]) -> list[Made]:
        """Makes and renders the prompts of the rows that `locate` finds; a bad row's result is its error."""
        made: list[Made] = []
        names: dict[int, str] = {}
        for index, item in enumerate(items):
            try:
                located = locate(item)
                names[index] = located.where
                made.append(self.prompt_of(located))
            except ValueError as error:
                made.append(error)
        made = self.render(made, names.__getitem__)
        return made if self.bad is None else [self.bad.allowed(item) for item in made]


class PromptStream:
    """An endless sequence of prompts: `stream[position]` for any position from 0.

    An item is None if a filter or a length limit drops the row.

    Args:
        prompts: the prompts for one epoch, in the order of the data.
        batch_size: prompts, and therefore groups, per iteration.

    Raises:
        ValueError: if there are fewer prompts than one iteration needs, or two have the same id.
    """

    def __init__(self, prompts: RowPrompts, *, batch_size: int) -> None:
        check_bounds(1, batch_size=batch_size)
        self.num_prompts = prompts.num_rows  # per epoch; None if unknown
        if self.num_prompts is not None and self.num_prompts < batch_size:
            raise ValueError(f"{batch_size=} exceeds the {self.num_prompts} train prompts. Lower it or add data.")
        if num_repeated := len(prompts.ids) - len(set(prompts.ids)):
            raise ValueError(f"{num_repeated} train prompts have duplicate ids. Make ids unique: seeds depend on them.")
        self.prompts, self.batch_size = prompts, batch_size
        self._made: dict[int, Made] = {}  # position → prepared prompt

    def __len__(self) -> int:
        """Returns the number of prompts per epoch; raises TypeError if it is unknown."""
        return len(self.prompts)

    def __getitem__(self, position: int) -> Prompt | None:
        if position < 0:
            raise IndexError(f"position must be >= 0, got {position}.")
        made = self._made.get(position, self)  # `self` if not prepared; atomic, as `prepare` runs in a thread
        made = self.prompts.many([position])[0] if isinstance(made, PromptStream) else made
        if isinstance(made, ValueError):
            raise made
        return made

    def is_prepared(self, position: int) -> bool:
        return position in self._made

    def prepare(self, first: int, num: int) -> None:
        """Makes the prompts at these positions in advance; may be called in a thread.

        The error of a bad row is raised when its position is read.
        """
        missing = [position for position in range(first, first + num) if not self.is_prepared(position)]
        made = self.prompts.many(missing)
        if self.num_prompts is not None:  # ids are unique, so all epochs can share a row's prompt
            by_id = {item.id: item for item in self._made.values() if isinstance(item, Prompt)}
            made = [by_id.setdefault(item.id, item) if isinstance(item, Prompt) else item for item in made]
        self._made |= zip(missing, made, strict=True)
        for position in list(self._made)[:-_MAX_MADE]:  # the oldest
            del self._made[position]

    @property
    def num_iterations(self) -> int | None:
        """The loader's number of iterations per epoch; None if unknown."""
        return None if self.num_prompts is None else self.num_prompts // self.batch_size

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies the prompts and their order; if it has changed, a checkpoint's positions are no longer valid."""
        prompts = self.prompts
        if self.num_prompts is None:
            parts = ", ".join(str(part) for part in prompts.parts if part.num_rows is None)
            return f"{parts}; {prompts.order}"
        checked = prompts.checked
        if checked is None:
            step = -(-self.num_prompts // FINGERPRINT_PROMPTS)
            checked = prompts.only(list(itertools.islice(prompts.row_keys(), 0, None, step))).check().checked
        assert checked is not None
        return f"{self.num_prompts} prompts {prompts.order}, content {checked.digest}"

    def first(self, num_prompts: int) -> PromptStream:
        """Returns a stream that repeats the first prompts in order, for `overfit_batches`."""
        if self.num_prompts is None:
            prompts = [self[position] for position in range(num_prompts)]
        else:
            prompts = self.prompts.first(num_prompts)
        in_order = RowPrompts.of(prompts, seed=self.prompts.seed, shuffle=False)
        return PromptStream(in_order, batch_size=self.batch_size)

    def state_dict(self, position: int) -> JsonObject | None:
        """Returns the streamed sources' state for reading from this position on; None if no source is streamed."""
        return self.prompts.state_dict(position)

    def load_state_dict(self, state: JsonMapping) -> None:
        """Restores the streamed sources. Without it, the prompts are the same, but earlier rows are read again."""
        self.prompts.load_state_dict(state)
