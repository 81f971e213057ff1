"""Sources that can only be read in order, for example a hub dataset that is not downloaded.

Rows are read in blocks of `block_rows` consecutive rows; the last block in a pass over the source may be shorter. With
`shuffle`, the shards are shuffled in each pass, and the rows in each block. A row's number, counted over all passes,
determines the row, so a resumed run reads the same rows as an uninterrupted one. A Mark is the start of a block. The
checkpoint stores the mark from which all rows in flight can be read again, so a resume need not read earlier rows.
"""

from __future__ import annotations

import copy
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from lightrl.data.mixture import epoch_order
from lightrl.data.rows import (
    FILE_SUFFIXES,
    TEXT_READERS,
    Rows,
    file_suffix,
    function_of_rows,
    load_dataset,
    refuse_pointer,
    without_padding,
)
from lightrl.data.stream import ROWS_AT_ONCE, IndexedRows, LocatedRow, SourceRows
from lightrl.trajectory import JsonMapping, JsonObject

OpenShard = Callable[[], Iterable[Any]]  # opens a shard at its first row

_KEPT_BLOCKS = 2  # how many blocks stay in memory
_MAX_MARKS = 10_000


class Mark(NamedTuple):
    """The start of a block."""

    number: int = 0  # number of the first row, counted over all passes
    epoch: int = 0  # the pass
    num_read: int = 0  # how many rows of the pass come before this block
    turn: int = 0  # how many shards in the pass come before the current one
    row: int = 0  # how many rows of the shard come before this block
    state: object = None  # the shard's `state_dict` after `row` rows; if None, reading skips these rows


class StreamedRow(NamedTuple):
    item: object  # unchanged from the source
    shard: int
    place: int  # index in the shard, from 0
    name: str = ""  # name for error messages, from a reader of text files


@dataclass(eq=False)
class StreamedRows(SourceRows):
    """Rows that are read in order. The number of rows in a pass is unknown, and a row's key is the row itself."""

    shards: Sequence[OpenShard]  # each is read from its start to its end in every pass
    _: KW_ONLY
    seed: int | str  # determines the order, together with the pass or the block
    shuffle: bool  # False reads shards and rows in order
    # Makes a row from a shard's item and its name for error messages; raises ValueError for a bad item.
    row_of: Callable[[object, str], Any] = lambda item, where: item

    def __post_init__(self) -> None:
        buffer_rows = self.source.shuffle_buffer
        self.block_rows = buffer_rows if self.shuffle else min(buffer_rows, ROWS_AT_ONCE)
        self._marks = [Mark()]  # marks of the blocks that were read, and of the next block
        self._blocks: dict[int, list[StreamedRow]] = {}  # number of the first row → block, in the order of training
        self._reader: Iterator[tuple[list[StreamedRow], Mark]] | None = None  # continues at the last mark
        self._lock = threading.Lock()

    def __str__(self) -> str:
        order = f"shuffled by {self.block_rows}" if self.shuffle else "in order"
        return f"{self.source.source!r} streamed from {len(self.shards)} shards, {order}"

    @property
    def num_rows(self) -> None:
        """None: the number of rows in a pass is unknown."""
        return None

    def key_at(self, number: int) -> StreamedRow:
        """Reads up to the end of the row's block; waits for the source."""
        with self._lock:
            if number < self._marks[0].number:
                self._go_to(Mark())  # the row's mark was deleted, so start over
            while self._marks[-1].number <= number:
                self._read_next_block()
            mark = self._marks[bisect_right(self._marks, number, key=lambda item: item.number) - 1]
            if mark.number not in self._blocks:
                self._shuffle_and_store(mark.number, next(self._blocks_from(mark))[0])
            return self._blocks[mark.number][number - mark.number]

    def locate(self, key: StreamedRow) -> LocatedRow:
        where = self.where(key)
        row_id = f"{key.shard}-{key.place}" if len(self.shards) > 1 else str(key.place)
        return self._with_columns(self.row_of(key.item, where), where, row_id)

    def where(self, key: StreamedRow) -> str:
        """Returns a row's name for error messages."""
        if key.name:
            return key.name
        shard = f" of shard {key.shard + 1}" if len(self.shards) > 1 else ""
        return f"Row {key.place + 1}{shard} of {self.source.source!r}"

    def read_whole(self) -> IndexedRows:
        keys = list(self.row_keys())
        rows = Rows(len(keys), lambda index: self.row_of(keys[index].item, self.where(keys[index])))
        return IndexedRows(self.source, self.prefix, rows, name_row=lambda index: self.where(keys[index]))

    def row_keys(self) -> Iterator[StreamedRow]:
        in_order = StreamedRows(self.source, self.prefix, self.shards, seed=0, shuffle=False)
        for rows, following in in_order._blocks_from(Mark()):
            yield from rows
            if following.epoch:
                return

    def state_dict(self, number: int) -> JsonObject:
        """Returns the mark from which this row can be read again. Does not wait for the source."""
        marks = self._marks
        return marks[max(0, bisect_right(marks, number, key=lambda item: item.number) - 1)]._asdict()

    def load_state_dict(self, state: JsonMapping) -> None:
        with self._lock:
            self._go_to(Mark(**state))

    def _go_to(self, mark: Mark) -> None:
        self._marks, self._blocks, self._reader = [mark], {}, None

    def _read_next_block(self) -> None:
        last = self._marks[-1]
        reader, self._reader = self._reader or self._blocks_from(last), None  # the reader is not kept if it fails
        rows, following = next(reader)
        self._reader = reader
        self._shuffle_and_store(last.number, rows)
        marks = [*self._marks, following] if rows else [*self._marks[:-1], following]
        self._marks = marks[len(marks) // 2 :] if len(marks) > _MAX_MARKS else marks

    def _shuffle_and_store(self, number: int, rows: list[StreamedRow]) -> None:
        if not rows:
            return
        if self.shuffle:
            rows = [rows[index] for index in epoch_order(len(rows), f"{self.seed}/rows", number).tolist()]
        self._blocks[number] = rows
        for oldest in sorted(self._blocks)[:-_KEPT_BLOCKS]:
            if oldest != number:
                del self._blocks[oldest]

    def _blocks_from(self, mark: Mark) -> Iterator[tuple[list[StreamedRow], Mark]]:
        """Yields blocks in source order, each with the next block's mark; the last block of a pass may be empty."""
        max_rows = self.source.max_rows
        while True:
            num_left = None if max_rows is None else max_rows - mark.num_read
            items, epoch = islice(self._rest_of_pass(mark), num_left), mark.epoch
            while mark.epoch == epoch:
                block = list(islice(items, self.block_rows))
                if not block and mark.num_read == 0:
                    raise ValueError(f"Data {self.source.source!r} has no rows.")
                number = mark.number + len(block)
                if len(block) < self.block_rows:
                    mark = Mark(number, epoch + 1)
                else:
                    row, turn, shard = block[-1]  # `turn` counts the pass's earlier shards
                    has_state = hasattr(shard, "state_dict") and hasattr(shard, "load_state_dict")
                    state = copy.deepcopy(shard.state_dict()) if has_state else None
                    mark = Mark(number, epoch, mark.num_read + len(block), turn, row.place + 1, state)
                yield [row for row, _, _ in block], mark

    def _rest_of_pass(self, mark: Mark) -> Iterator[tuple[StreamedRow, int, Any]]:
        """Yields the rows from a mark to the end of its pass, each with its shard's turn and the opened shard."""
        import datasets

        order = list(range(len(self.shards)))
        if self.shuffle:
            order = epoch_order(len(order), f"{self.seed}/shards", mark.epoch).tolist()
        for turn in range(mark.turn, len(order)):
            number = order[turn]
            place, state = (mark.row, mark.state) if turn == mark.turn else (0, None)
            opened = self.shards[number]
            names_rows = isinstance(opened, partial) and opened.func in TEXT_READERS.values()
            try:
                shard: Any = opened()
                if state is not None:
                    shard.load_state_dict(copy.deepcopy(state))
                for item in islice(iter(shard), 0 if state is not None else place, None):
                    if isinstance(shard, datasets.IterableDataset):
                        item = without_padding(item)
                    name, item = item if names_rows else ("", item)
                    yield StreamedRow(item, number, place, name), turn, shard
                    place += 1
            except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
                if names_rows:  # the error names the line
                    raise
                where = self.where(StreamedRow(None, number, place))
                raise ValueError(f"{where} cannot be read: {error.__cause__ or error}.") from error


def open_stream(source: str, *, name: str | None, split: str, arguments: JsonMapping) -> list[OpenShard]:
    """Returns a source's shards, to be read in order; raises ValueError if the source is missing or unreadable.

    Args:
        source, name, split, arguments: as in `read_rows`. A file's name may be a pattern like `shards/*.jsonl`; each
            matching file is a shard. A function is called again for each pass.
    """
    path = Path(source).expanduser()
    if (function := function_of_rows(source)) is not None:
        return shards_of(lambda: function(split=split, **arguments))
    suffix = file_suffix(path)
    if suffix in TEXT_READERS and "://" not in source:
        files = sorted(path.parent.glob(path.name)) if not path.is_file() else [path]
        if not files:
            raise ValueError(f"Data file '{path}' does not exist, and no file matches this pattern. Fix the name.")
        return [partial(TEXT_READERS[suffix], file) for file in files]
    if path.is_file():
        refuse_pointer(path)
    if suffix in FILE_SUFFIXES:
        kind = "json" if suffix == ".jsonl" else suffix[1:]
        file = source if "://" in source else str(path)
        dataset = load_dataset(kind, None, "train", data_files=file, streaming=True)
    else:
        dataset = load_dataset(source, name, split, streaming=True)
    return shards_of(lambda: dataset)


def shards_of(make: Callable[[], Iterable[Any]]) -> list[OpenShard]:
    """Returns the shards of `make()`, an iterable; only an IterableDataset from `datasets` has more than one."""
    import datasets

    dataset = make()
    if not isinstance(dataset, datasets.IterableDataset):
        return [make]
    num = dataset.num_shards  # each shard is a new object, which begins at its first row
    return [partial(dataset.shard, num, index) for index in range(num)]
