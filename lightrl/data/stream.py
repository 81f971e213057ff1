"""Rows of a split (SplitRows), their prompts (RowPrompts), those in the run's order (PromptStream), and the loaders.

A position counts prompts over the whole run. Epoch e of the stream is positions e·n to (e + 1)·n - 1 for n prompts,
each prompt once, in an order that follows from (seed, e) alone; so resuming needs one number, with any number of ranks.
An epoch of the loader has n // batch_size iterations; prompts left over at its end come first in the next. If a source
is streamed (streamed.py), n is unknown and the loader never ends: Trainer says how long a run is.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar, overload

from lightrl.checks.bounds import check_bounds
from lightrl.data.mixture import DataSource, MixtureOrder
from lightrl.data.rows import LocatedRow, Made, renamed, without_errors
from lightrl.data.streamed import ROWS_AT_ONCE, StreamedRow, StreamedRows
from lightrl.trajectory import JsonMapping, JsonObject, Prompt

if TYPE_CHECKING:
    import lightning as L

T = TypeVar("T")
RowKey: TypeAlias = "tuple[int, int | StreamedRow]"  # number of a source; index of its row, or its streamed row

FINGERPRINT_PROMPTS = 256  # prompts that a resume compares, if not all rows are checked
_MAX_MADE = 4096  # prompts made ahead of need
_NOT_MADE = "not made"


@dataclass(frozen=True)
class SplitRows:
    """The rows of all sources of a split, with their columns renamed."""

    split: str  # its name begins the prompts' ids
    sources: Sequence[DataSource]
    parts: Sequence[Sequence[Any] | StreamedRows]  # the rows of each source, by index or streamed
    used: Mapping[int, Sequence[int]] = field(default_factory=dict)  # number of a source → its rows; absent: all
    name_row: Callable[[int, Any], str] | None = None  # names a row in messages; None: by its number and source

    @property
    def sizes(self) -> list[int | None]:
        """Rows of each source; None for one that is streamed."""
        return [
            None if isinstance(part, StreamedRows) else len(self.used.get(n, part)) for n, part in enumerate(self.parts)
        ]

    @property
    def num_rows(self) -> int | None:
        """None if a source is streamed."""
        sizes = [size for size in self.sizes if size is not None]
        return sum(sizes) if len(sizes) == len(self.parts) else None

    def read_whole(self) -> SplitRows:
        """Read streamed rows to their end: all rows then have an index."""
        read = [
            [part.row(item) for item in part.one_pass()] if isinstance(part, StreamedRows) else part
            for part in self.parts
        ]
        return replace(self, parts=read)

    def row_keys(self) -> Iterator[RowKey]:
        """The key of every row, in the order of the data."""
        return itertools.chain.from_iterable(
            zip(
                itertools.repeat(n),
                part.one_pass() if isinstance(part, StreamedRows) else self.used.get(n, range(len(part))),
            )
            for n, part in enumerate(self.parts)
        )

    def only(self, keys: Sequence[RowKey]) -> SplitRows:
        """The rows with these keys, which are in the order of the data; the same if these are all."""
        if len(keys) == self.num_rows:
            return self
        used: dict[int, list[int]] = {n: [] for n in range(len(self.parts))}
        for number, index in keys:
            assert isinstance(index, int)
            used[number].append(index)
        return replace(self, used=used)

    def located(self, key: RowKey) -> LocatedRow:
        """The row with this key; raises ValueError if it cannot be read."""
        number, item = key
        source, part = self.sources[number], self.parts[number]
        if isinstance(part, StreamedRows):
            assert isinstance(item, StreamedRow)
            row, where, name = part.row(item), part.where(item), part.id(item)
        else:
            assert isinstance(item, int)
            row, name = part[item], str(item)
            where = f"Row {item + 1} of {source.source!r}" if self.name_row is None else self.name_row(item, row)
        if source.columns:
            row = renamed(row, source.columns, where=where)
        prefix = self.split if len(self.sources) == 1 else f"{self.split}-{source.label}"
        return LocatedRow(row, source, where, f"{prefix}-{name}")


class CheckedRows(NamedTuple):
    """Numbers of the rows that make prompts, in the order of the data; the prompts are not kept."""

    prompt_ids: list[str]
    contents: list[int]  # hashes of the prompts' content
    num_tokens: list[int]
    digest: str  # hash of all prompts


@dataclass(eq=False)
class RowPrompts(Sequence["Prompt | None"]):
    """The prompts of a split's rows, in the order of the data and by position in the run, made when they are read."""

    rows: SplitRows
    prompt_of: Callable[[LocatedRow], Prompt | None]  # None for a row that a filter drops; raises for a bad one
    # prompts with token ids, given them and what names the row of each: None for one that its length drops
    render: Callable[[Sequence[Made], Callable[[int], str]], list[Made]]
    seed: int  # fixes the order
    shuffle: bool
    checked: CheckedRows | None = None  # if all rows were checked at the start

    def __len__(self) -> int:
        """Rows; TypeError if a source is streamed."""
        if self.rows.num_rows is None:
            raise TypeError("How many prompts a streamed source has is not known.")
        return self.rows.num_rows

    @overload
    def __getitem__(self, index: int) -> Prompt | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt | None]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt | None] | None:
        """Prompts in the order of the data; raises ValueError for a bad row."""
        chosen = range(len(self))[index]
        return self.at(chosen) if isinstance(chosen, range) else self.at([chosen])[0]

    def at(self, indices: Iterable[int]) -> list[Prompt | None]:
        """The prompts of these rows, counted over all sources; raises ValueError for a bad row."""
        sizes = [size or 0 for size in self.rows.sizes]
        starts = [0, *itertools.accumulate(sizes)]
        numbers = ((index, bisect_right(starts, index, hi=len(sizes)) - 1) for index in indices)
        return without_errors(self._made(numbers, lambda item: self._row(item[1], item[0] - starts[item[1]])))

    @functools.cached_property
    def order(self) -> MixtureOrder:
        """The source and row at each position."""
        weights = [source.weight for source in self.rows.sources]
        return MixtureOrder(self.rows.sizes, weights, seed=self.seed, shuffle=self.shuffle)

    @property
    def size_by_set(self) -> dict[str | None, int]:
        """Rows of each source, by label; None is the label of a single one."""
        labels = [source.label for source in self.rows.sources] if len(self.rows.sources) > 1 else [None]
        return {label: size or 0 for label, size in zip(labels, self.rows.sizes, strict=False)}

    def many(self, positions: Iterable[int]) -> list[Made]:
        """The prompts at some positions of the run, which is faster than one by one."""
        return self._made(positions, self._at_position)

    def one_pass(self) -> Iterator[list[Made]]:
        """The prompts of all rows, in the order of the data, some at a time."""
        keys = self.rows.row_keys()
        while block := list(itertools.islice(keys, ROWS_AT_ONCE)):
            yield self._made(block, self.rows.located)

    def first(self, num: int) -> list[Prompt | None]:
        """The prompts of the first rows; raises ValueError for a bad row."""
        return without_errors(self._made(itertools.islice(self.rows.row_keys(), num), self.rows.located))

    def check(self) -> RowPrompts:
        """Makes every prompt once, and keeps none; raises ValueError for a bad row.

        Returns:
            The prompts of the rows that none of the limits drops.
        """
        keys: list[RowKey] = []
        checked = CheckedRows([], [], [], "")
        content = hashlib.blake2b(digest_size=6)
        prompts = (prompt for made in self.one_pass() for prompt in without_errors(made))
        for prompt, key in zip(prompts, self.rows.row_keys(), strict=True):
            if prompt is None:
                continue
            keys.append(key)
            checked.prompt_ids.append(prompt.id)
            checked.contents.append(hash(prompt.content))
            checked.num_tokens.append(prompt.num_tokens)
            content.update(f"{prompt.id} {prompt.token_ids or prompt.messages}\n".encode())
        return replace(self, rows=self.rows.only(keys), checked=checked._replace(digest=content.hexdigest()))

    def state_dict(self, position: int) -> JsonObject | None:
        """The mark from which each source gives prompts from this position on; None if no source is streamed."""
        streamed = ((n, part) for n, part in enumerate(self.rows.parts) if isinstance(part, StreamedRows))
        return {str(n): part.state_dict(self.order.num_before(n, position)) for n, part in streamed} or None

    def load_state_dict(self, state: JsonMapping) -> None:
        for number, part in enumerate(self.rows.parts):
            if isinstance(part, StreamedRows) and str(number) in state:
                part.load_state_dict(state[str(number)])

    def _at_position(self, position: int) -> LocatedRow:
        number = self.order.source(position)
        turn, part = self.order.num_before(number, position), self.rows.parts[number]
        if isinstance(part, StreamedRows):
            return self.rows.located((number, part[turn]))
        return self._row(number, self.order.row(number, turn))

    def _row(self, number: int, index: int) -> LocatedRow:
        """The row of a source with this index among those in use."""
        used = self.rows.used.get(number)
        return self.rows.located((number, index if used is None else used[index]))

    def _made(self, items: Iterable[T], locate: Callable[[T], LocatedRow]) -> list[Made]:
        """The prompts of rows, where `locate` raises ValueError for rows that cannot be read."""
        made: list[Made] = []
        names: dict[int, str] = {}
        for index, item in enumerate(items):
            try:
                located = locate(item)
                names[index] = located.where
                made.append(self.prompt_of(located))
            except ValueError as error:
                made.append(error)
        return self.render(made, names.__getitem__)


class PromptStream:
    """An endless sequence of prompts, addressable by position: `stream[position]` for any position from 0.

    A position whose row is dropped, by a filter or for its length, holds None.

    Args:
        prompts: one epoch's, in the order of the data: made when they are read, or there already.
        batch_size: prompts per iteration, which is also groups per iteration.
        seed: determines the order of prompts that are there already, with the epoch.
        shuffle: False keeps their order in every epoch.

    Raises:
        ValueError: if there are fewer prompts than one iteration needs, or two have the same id.
    """

    def __init__(
        self, prompts: Sequence[Prompt | None], *, batch_size: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        check_bounds(1, batch_size=batch_size)
        if isinstance(prompts, RowPrompts):
            # Rows of files that are not read yet have unique ids by construction.
            ids = prompts.checked.prompt_ids if prompts.checked is not None else []
        else:
            ids = [prompt.id for prompt in prompts if prompt is not None]
            rows = SplitRows("train", [DataSource("prompts")], [prompts])
            prompts = RowPrompts(rows, lambda located: located.row, lambda made, _: list(made), seed, shuffle)
        self.num_prompts = prompts.rows.num_rows  # per epoch, if known
        if self.num_prompts is not None and self.num_prompts < batch_size:
            raise ValueError(
                f"batch_size={batch_size} exceeds the {self.num_prompts} train prompts. Lower batch_size or add data."
            )
        if len(set(ids)) < len(ids):
            raise ValueError(
                f"{len(ids) - len(set(ids))} train prompts have duplicate ids. Make them unique: seeds depend on them."
            )
        self.prompts, self.batch_size = prompts, batch_size
        self._made: dict[int, Made] = {}  # ahead of need, by position

    def __len__(self) -> int:
        """Prompts per epoch; TypeError if that is not known."""
        return len(self.prompts)

    def __getitem__(self, position: int) -> Prompt | None:
        if position < 0:
            raise IndexError(f"position must be >= 0, got {position}.")
        made = self._made.get(position, _NOT_MADE)
        return without_errors(self.prompts.many([position]) if isinstance(made, str) else [made])[0]

    def is_prepared(self, position: int) -> bool:
        """Whether reading this position takes no time."""
        return position in self._made

    def prepare(self, first: int, num: int) -> None:
        """Makes the prompts of these positions, for an event loop that must not wait; may be called in a thread.

        What is wrong with a row is raised when it is read.
        """
        missing = [position for position in range(first, first + num) if not self.is_prepared(position)]
        made = self.prompts.many(missing)
        if self.num_prompts is not None:  # ids are unique: a row has one prompt in all its epochs
            by_id = {item.id: item for item in self._made.values() if isinstance(item, Prompt)}
            made = [by_id.setdefault(item.id, item) if isinstance(item, Prompt) else item for item in made]
        self._made |= zip(missing, made, strict=True)
        for position in list(self._made)[:-_MAX_MADE]:  # the oldest
            del self._made[position]

    @property
    def num_iterations(self) -> int | None:
        """Iterations per epoch of the loader; None if that is not known."""
        return None if self.num_prompts is None else self.num_prompts // self.batch_size

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies the prompts and their order: if it differs, a checkpoint's positions mean other prompts."""
        rows, checked = self.prompts.rows, self.prompts.checked
        if self.num_prompts is None:
            parts = ", ".join(str(part) for part in rows.parts if isinstance(part, StreamedRows))
            return f"{parts}; {self.prompts.order}"
        if checked is None:
            sample = itertools.islice(rows.row_keys(), 0, None, -(-self.num_prompts // FINGERPRINT_PROMPTS))
            checked = replace(self.prompts, rows=rows.only(list(sample))).check().checked
        assert checked is not None
        return f"{self.num_prompts} prompts {self.prompts.order}, content {checked.digest}"

    def first(self, num_prompts: int) -> PromptStream:
        """The first prompts of the data, over and over in order; for `overfit_batches`."""
        if self.num_prompts is None:
            prompts = [self[position] for position in range(num_prompts)]
        else:
            prompts = self.prompts.first(num_prompts)
        return PromptStream(prompts, batch_size=self.batch_size, seed=self.prompts.seed, shuffle=False)

    def state_dict(self, position: int) -> JsonObject | None:
        """The marks of streamed sources for the prompts from this position on; None without such sources."""
        return self.prompts.state_dict(position)

    def load_state_dict(self, state: JsonMapping) -> None:
        """Saves reading what comes before; a stream without it gives the same prompts."""
        self.prompts.load_state_dict(state)


class EpochLoader(Generic[T]):
    """A sized loader without state: batch k of epoch e follows from (e, k), and Lightning keeps the count.

    So it resumes at the right batch from anywhere: mid-epoch, after an error within a batch, at a limit. Lightning's
    epoch number would not do: it is already one higher in the checkpoint of a run that `max_steps` stopped mid-epoch.
    It is not a torch DataLoader because workers would have nothing to do.

    Args:
        num_batches: per epoch.
        batch_at: gives batch k of epoch e as `batch_at(e, k)`.
        trainer: whose fit loop this loader feeds; None always starts at batch 0 of epoch 0, as validation does.
    """

    def __init__(
        self, num_batches: int | None, batch_at: Callable[..., T], *, trainer: L.Trainer | None = None
    ) -> None:
        self.num_batches = num_batches
        self.batch_at = batch_at
        self._trainer = trainer

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError("How many batches streamed data has is not known.")
        return self.num_batches

    def __iter__(self) -> Iterator[T]:
        first, num = 0, len(self)
        per_epoch = num
        if self._trainer is not None:
            # Read when the first batch is requested: Lightning creates the iterator before it sets its counters.
            first = self._trainer.fit_loop.epoch_loop.batch_progress.total.completed
            per_epoch = min(num, int(self._trainer.num_training_batches))
        for position in range(first, first + num):  # Lightning stops at the end of its epoch
            yield self.batch_at(*divmod(position, per_epoch))

    def state_dict(self) -> JsonObject:
        """Empty; Lightning resumes mid-epoch only with a loader that has this method."""
        return {}

    def load_state_dict(self, state_dict: JsonObject) -> None:
        """Nothing to restore."""


class PositionLoader(EpochLoader[T]):
    """An EpochLoader with batches by number over the whole run: an epoch continues where the last one ended.

    Without `num_batches` per epoch the loader has no length and does not end.
    """

    def __iter__(self) -> Iterator[T]:
        first = 0
        if self._trainer is not None:
            # Without a length Lightning requests a batch before it has set `completed`, which EpochLoader reads.
            counters: Any = self._trainer.fit_loop.epoch_loop.batch_progress.total
            first = counters.processed
        is_endless = self.num_batches is None
        for number in itertools.count(first) if is_endless else range(first, first + len(self)):
            yield self.batch_at(number)


def check_run_length(stream: PromptStream, trainer: L.Trainer | None) -> None:
    """Raises ValueError if the train rows are streamed and nothing says how long an epoch is."""
    if stream.num_prompts is not None or trainer is None:
        return
    if trainer.max_steps == -1 and trainer.max_epochs != -1 and isinstance(trainer.limit_train_batches, float):
        raise ValueError(
            "How many rows streamed data has is not known, so the Trainer cannot know when an epoch ends. Set "
            "trainer.max_steps, or trainer.limit_train_batches to the number of iterations of an epoch."
        )


class PromptBatch(list[Prompt]):
    """Prompts, which moving to a device leaves unchanged; `set_name` is the validation set's, if there are several.

    Overriding `transfer_batch_to_device` would work too, but Lightning warns about that in a module with a data module.
    """

    def __init__(self, prompts: Iterable[Prompt] = (), set_name: str | None = None) -> None:
        super().__init__(prompts)
        self.set_name = set_name

    def to(self, *args: object, **kwargs: object) -> PromptBatch:
        return self


def iteration_clock(stream: PromptStream, trainer: L.Trainer | None = None) -> EpochLoader[int]:
    """The train loader of an RLModule: the index of each iteration in the epoch. The prompts are in the stream."""
    if stream.num_iterations is None:
        return PositionLoader(None, lambda number: number, trainer=trainer)
    return EpochLoader(stream.num_iterations, lambda epoch, index: index, trainer=trainer)


def prompt_batches(prompts: Sequence[Prompt | None], batch_size: int) -> EpochLoader[PromptBatch]:
    """A validation loader: lists of prompts in the order of the data."""
    return batches_in_order(prompts, batch_size, PromptBatch)


def batches_in_order(
    prompts: Sequence[Prompt | None], batch_size: int, collate: Callable[[list[Any], str | None], T]
) -> EpochLoader[T]:
    """Collated batches of consecutive prompts of one source, which has a name if there are several.

    The last batch of each source may be smaller.
    """
    sizes = prompts.size_by_set if isinstance(prompts, RowPrompts) else {None: len(prompts)}
    batches = [
        (slice(start, min(start + batch_size, end)), name)
        for (name, size), end in zip(sizes.items(), itertools.accumulate(sizes.values()), strict=True)
        for start in range(end - size, end, batch_size)
    ]

    def batch_at(epoch: int, index: int) -> T:
        chosen, name = batches[index]
        return collate([prompt for prompt in prompts[chosen] if prompt is not None], name)

    return EpochLoader(len(batches), batch_at)
