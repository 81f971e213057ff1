"""Prompts by position: of rows (SplitRows, RowPrompts) or from a list (PromptStream); the loaders of Lightning.

A position counts prompts over the whole run. Epoch e of the stream is positions e·n to (e + 1)·n - 1 for n prompts,
each prompt once, in an order that follows from (seed, e) alone; so resuming needs one number, with any number of ranks.
An epoch of the loader has n // batch_size iterations; prompts left over at its end come first in the next. If a source
is streamed (streamed.py), n is unknown and the loader never ends: Trainer says how long a run is.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from lightrl.checks.bounds import check_bounds
from lightrl.data.mixture import DataSource, MixtureOrder
from lightrl.data.rows import LocatedRow, Made, Row, renamed, without_errors
from lightrl.data.streamed import ROWS_AT_ONCE, StreamedRow, StreamedRows
from lightrl.trajectory import JsonMapping, JsonObject, Prompt

if TYPE_CHECKING:
    import lightning as L

T = TypeVar("T")
Item = TypeVar("Item")
RowKey: TypeAlias = "tuple[int, int | StreamedRow]"  # number of a source; index of its row, or its streamed row

_FINGERPRINT_PROMPTS = 256  # are compared, if prompts are made when they are read
_MAX_MADE = 4096  # prompts made ahead of need
_NOT_MADE = "not made"


@dataclass(frozen=True)
class SplitRows:
    """The rows of all sources of a split, with their columns renamed."""

    split: str  # its name begins the prompts' ids
    sources: Sequence[DataSource]
    parts: Sequence[Sequence[Row] | StreamedRows]  # the rows of each source, by index or streamed

    @property
    def sizes(self) -> list[int | None]:
        """Rows of each source; None for one that is streamed."""
        return [None if isinstance(part, StreamedRows) else len(part) for part in self.parts]

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

    def keys(self) -> Iterator[RowKey]:
        """The key of every row, in the order of the data."""
        return itertools.chain.from_iterable(
            zip(itertools.repeat(n), part.one_pass() if isinstance(part, StreamedRows) else range(len(part)))
            for n, part in enumerate(self.parts)
        )

    def located(self, key: RowKey) -> LocatedRow:
        """The row with this key; raises ValueError if it cannot be read."""
        number, item = key
        source, part = self.sources[number], self.parts[number]
        if isinstance(part, StreamedRows):
            assert isinstance(item, StreamedRow)
            row, where, name = part.row(item), part.where(item), part.id(item)
        else:
            assert isinstance(item, int)
            row, where, name = part[item], f"Row {item + 1} of {source.source!r}", str(item)
        if source.columns:
            row = renamed(row, source.columns, where=where)
        prefix = self.split if len(self.sources) == 1 else f"{self.split}-{source.label}"
        return LocatedRow(row, source, where, f"{prefix}-{name}")


@dataclass(eq=False)
class RowPrompts:
    """The prompts of a split's rows by position in the run, each made when it is read."""

    rows: SplitRows
    # the rendered prompts of some rows: None for one that a filter or its length drops, ValueError for a bad one
    make: Callable[[Sequence[LocatedRow]], list[Made]]
    seed: int  # fixes the order
    shuffle: bool

    @functools.cached_property
    def order(self) -> MixtureOrder:
        """The source and row at each position."""
        weights = [source.weight for source in self.rows.sources]
        return MixtureOrder(self.rows.sizes, weights, seed=self.seed, shuffle=self.shuffle)

    def many(self, positions: Iterable[int]) -> list[Made]:
        """The prompts at some positions, which is faster than one by one."""
        return self._made(positions, lambda position: self.rows.located(self._key_at(position)))

    def one_pass(self, step: int = 1) -> Iterator[list[Made]]:
        """The prompts of all rows, or of every `step`-th, in the order of the data, some at a time."""
        keys = itertools.islice(self.rows.keys(), 0, None, step)
        while block := list(itertools.islice(keys, ROWS_AT_ONCE)):
            yield self._made(block, self.rows.located)

    def first(self, num: int) -> list[Made]:
        """The prompts of the first rows."""
        return self._made(itertools.islice(self.rows.keys(), num), self.rows.located)

    def state_dict(self, position: int) -> JsonObject | None:
        """The mark from which each source gives prompts from this position on; None if no source is streamed."""
        streamed = ((n, part) for n, part in enumerate(self.rows.parts) if isinstance(part, StreamedRows))
        return {str(n): part.state_dict(self.order.num_before(n, position)) for n, part in streamed} or None

    def load_state_dict(self, state: JsonMapping) -> None:
        for number, part in enumerate(self.rows.parts):
            if isinstance(part, StreamedRows) and str(number) in state:
                part.load_state_dict(state[str(number)])

    def _key_at(self, position: int) -> RowKey:
        number = self.order.source(position)
        turn, part = self.order.num_before(number, position), self.rows.parts[number]
        return number, part[turn] if isinstance(part, StreamedRows) else self.order.row(number, turn)

    def _made(self, items: Iterable[T], locate: Callable[[T], LocatedRow]) -> list[Made]:
        """The prompts of rows, where `locate` raises ValueError for rows that cannot be read."""
        located: list[LocatedRow | ValueError] = []
        for item in items:
            try:
                located.append(locate(item))
            except ValueError as error:
                located.append(error)
        made = iter(self.make([row for row in located if not isinstance(row, ValueError)]))
        return [row if isinstance(row, ValueError) else next(made) for row in located]


class PromptStream:
    """An endless sequence of prompts, addressable by position: `stream[position]` for any position from 0.

    A position whose row is dropped, by a filter or for its length, holds None.

    Args:
        prompts: one epoch's, in the order of the data; or those of rows, made when they are read.
        batch_size: prompts per iteration, which is also groups per iteration.
        seed: determines the order, with the epoch.
        shuffle: False keeps the order of the data in every epoch.
        order: the index in a list of prompts at each position; None for one source with this `seed` and `shuffle`.

    Raises:
        ValueError: if there are fewer prompts than one iteration needs, or two have the same id.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt | None] | RowPrompts,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        order: MixtureOrder | None = None,
    ) -> None:
        check_bounds(1, batch_size=batch_size)
        # per epoch, if known
        self.num_prompts = prompts.rows.num_rows if isinstance(prompts, RowPrompts) else len(prompts)
        if self.num_prompts is not None and self.num_prompts < batch_size:
            raise ValueError(
                f"batch_size={batch_size} exceeds the {self.num_prompts} train prompts. Lower batch_size or add data."
            )
        # Rows that are not read yet have unique ids by construction.
        ids = [] if isinstance(prompts, RowPrompts) else [prompt.id for prompt in prompts if prompt is not None]
        if len(set(ids)) < len(ids):
            raise ValueError(
                f"{len(ids) - len(set(ids))} train prompts have duplicate ids. Make them unique: seeds depend on them."
            )
        self.prompts, self.batch_size = prompts, batch_size
        self.seed, self.shuffle = seed, shuffle
        if isinstance(prompts, RowPrompts):
            self.order = prompts.order
        else:
            self.order = order or MixtureOrder([len(prompts)], [1.0], seed=seed, shuffle=shuffle)
        self._made: dict[int, Made] = {}  # ahead of need, by position

    def __len__(self) -> int:
        """Prompts per epoch; TypeError if that is not known."""
        if self.num_prompts is None:
            raise TypeError("How many prompts a streamed source has is not known.")
        return self.num_prompts

    def __getitem__(self, position: int) -> Prompt | None:
        if position < 0:
            raise IndexError(f"position must be >= 0, got {position}.")
        made = self._made.get(position, _NOT_MADE)
        return without_errors(self.many([position]) if isinstance(made, str) else [made])[0]

    @property
    def is_made_on_reading(self) -> bool:
        """Whether reading a position takes time, unless it is prepared."""
        return isinstance(self.prompts, RowPrompts)

    def is_prepared(self, position: int) -> bool:
        """Whether reading this position takes no time."""
        return position in self._made or not self.is_made_on_reading

    def prepare(self, first: int, num: int) -> None:
        """Makes the prompts of these positions, for an event loop that must not wait; may be called in a thread.

        What is wrong with a row is raised when it is read.
        """
        missing = [position for position in range(first, first + num) if not self.is_prepared(position)]
        self._made |= zip(missing, self.many(missing), strict=True)
        for position in sorted(self._made)[:-_MAX_MADE]:
            self._made.pop(position, None)

    def many(self, positions: Sequence[int]) -> Sequence[Made]:
        """The prompts at some positions, made now; ValueError where a row is bad."""
        if isinstance(self.prompts, RowPrompts):
            return self.prompts.many(positions)
        return [self.prompts[self.order[position]] for position in positions]

    @property
    def num_iterations(self) -> int | None:
        """Iterations per epoch of the loader; None if that is not known."""
        return None if self.num_prompts is None else self.num_prompts // self.batch_size

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies the prompts and their order: if it differs, a checkpoint's positions mean other prompts."""
        if self.num_prompts is None:
            assert isinstance(self.prompts, RowPrompts)
            parts = ", ".join(str(part) for part in self.prompts.rows.parts if isinstance(part, StreamedRows))
            return f"{parts}; {self.order}"
        content = hashlib.blake2b(digest_size=6)
        sample: Iterable[Prompt | None]
        if isinstance(self.prompts, RowPrompts):
            blocks = self.prompts.one_pass(step=-(-self.num_prompts // _FINGERPRINT_PROMPTS))
            sample = without_errors(itertools.chain.from_iterable(blocks))
        else:
            sample = self.prompts
        for prompt in sample:
            if prompt is not None:
                content.update(f"{prompt.id} {prompt.token_ids or prompt.messages}\n".encode())
        return f"{self.num_prompts} prompts {self.order}, content {content.hexdigest()}"

    def first(self, num_prompts: int) -> PromptStream:
        """The first prompts of the data, over and over in order; for `overfit_batches`."""
        if not isinstance(self.prompts, RowPrompts):
            prompts = list(self.prompts[:num_prompts])
        elif self.num_prompts is None:
            prompts = [self[position] for position in range(num_prompts)]
        else:
            prompts = without_errors(self.prompts.first(num_prompts))
        return PromptStream(prompts, batch_size=self.batch_size, seed=self.seed, shuffle=False)

    def state_dict(self, position: int) -> JsonObject | None:
        """The marks of streamed sources for the prompts from this position on; None without such sources."""
        return self.prompts.state_dict(position) if isinstance(self.prompts, RowPrompts) else None

    def load_state_dict(self, state: JsonMapping) -> None:
        """Saves reading what comes before; a stream without it gives the same prompts."""
        if isinstance(self.prompts, RowPrompts):
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


def prompt_batches(
    prompts: Sequence[Prompt], batch_size: int, set_names: Mapping[str, str] = MappingProxyType({})
) -> EpochLoader[PromptBatch]:
    """A validation loader: lists of prompts in the order of the data; `set_names` are of several sets, by prompt id."""
    return batches_in_order(prompts, batch_size, PromptBatch, lambda prompt: set_names.get(prompt.id))


def batches_in_order(
    items: Sequence[Item],
    batch_size: int,
    collate: Callable[[Sequence[Item], str | None], T],
    set_of: Callable[[Item], str | None],
) -> EpochLoader[T]:
    """Collated batches of consecutive items of one set, which `set_of` names; the last of each set may be smaller."""
    batches = [
        (part[start : start + batch_size], name)
        for name, part in ((name, list(part)) for name, part in itertools.groupby(items, set_of))
        for start in range(0, len(part), batch_size)
    ]
    return EpochLoader(len(batches), lambda epoch, index: collate(*batches[index]))
