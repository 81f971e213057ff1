"""DataSource: a weighted source of rows; MixtureOrder: decides which source's row is at each position.

    train:                                        # in YAML, for any data module
      - {source: openai/gsm8k, name: main, weight: 3}
      - {source: math.parquet, columns: {question: problem, answer: solution}}

The source at a position depends only on the weights. Each source shuffles its rows, and no row repeats before all rows
have been used. One number therefore describes a run's progress, for any number of sources and ranks.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import lru_cache
from math import gcd
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightrl.checks.bounds import check_bounds, check_effect
from lightrl.data.tasks import Task, Tasks, by_source
from lightrl.trajectory import JsonObject

__all__ = ["DataSource", "MixtureOrder", "Source", "by_source", "epoch_order", "sources_of", "tasks_of"]

_CYCLE = 1000  # shares are rounded to thousandths


@dataclass(frozen=True)
class DataSource:
    """A source of rows.

    Args:
        source: a local .jsonl, .json, .parquet, .arrow or .csv file, a hub name, a local dataset folder, a folder of
            tasks, or the dotted path to a function that accepts `split` and `arguments` and returns dicts.
        weight: this source's share of the rows if there are several sources; only the ratios of weights matter.
        name: configuration of a hub dataset, for example `main`.
        split: the split of a hub dataset or a function; None means `train` for training and `test` otherwise.
        columns: new column names → the source's column names, for example `{question: problem, answer: solution}`.
        arguments: keyword arguments for a function or a folder of tasks.
        max_rows: use only the first rows; None uses all.
        label: names the source in prompt ids and, if set, in metrics like `rollout/reward/LABEL`; None uses its index.
        task: the source's own workflow, reward, group size and length limit; applies to this label in all splits.
        streaming: read the rows in order as they are needed.
        shuffle_buffer: number of streamed rows that are shuffled together; the shards are also shuffled.
    """

    source: str
    weight: float = 1.0
    name: str | None = None
    split: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    arguments: JsonObject = field(default_factory=dict)
    max_rows: int | None = None
    label: str | None = None
    task: Task | None = None
    streaming: bool = False
    shuffle_buffer: int = 10_000

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ValueError(f"The source of data must be a file, a hub name or a function, got {self.source!r}.")
        check_bounds(1, max_rows=self.max_rows, shuffle_buffer=self.shuffle_buffer)
        if self.task is not None and (not self.label or self.label.isdecimal()):  # a number is a source's index
            raise ValueError(
                f"The data source {self.source!r} has a task, so it needs a label, which appears in metric names and "
                f"must not be a number, got {self.label!r}."
            )
        if not self.streaming:
            check_effect("without streaming", shuffle_buffer=(self.shuffle_buffer, 10_000))
        if not 0 < self.weight < float("inf"):
            raise ValueError(
                f"The weight of {self.source!r} must be above 0 and finite, got {self.weight}. Remove unused sources."
            )


# The command line parses a mapping as the first type that fits, so DataSource is first. Without Path, it would read a
# file named here as settings.
Source: TypeAlias = DataSource | list[DataSource] | str | Path


def sources_of(source: Source | None) -> list[DataSource]:
    """Returns the sources as a list, each with a label; raises ValueError if two labels are the same."""
    given: Sequence[Any] = source if isinstance(source, list | tuple) else [source]
    sources = [DataSource(str(item)) if isinstance(item, str | Path) else item for item in given if source is not None]
    if wrong := [item for item in sources if not isinstance(item, DataSource)]:
        raise TypeError(
            "Data must be a file, a hub name, the dotted path to a function, or a DataSource, or a list of these, got "
            f"a {type(wrong[0]).__name__}. Write other data to a .jsonl file, or override make_prompts."
        )
    sources = [replace(item, label=str(n)) if item.label is None else item for n, item in enumerate(sources)]
    labels = [item.label for item in sources]
    if len(set(labels)) < len(labels):
        raise ValueError(f"The labels of the data's sources must be unique, got {labels}. Change the duplicates.")
    return sources


def tasks_of(sources: Iterable[DataSource]) -> Tasks:
    """Returns the tasks for a data module's sources by label; raises ValueError if a label has two different tasks."""
    tasks = Tasks()
    for source in sources:
        if source.task is None:
            continue
        assert source.label is not None
        if tasks.setdefault(source.label, source.task) != source.task:
            raise ValueError(f"Two data sources labeled {source.label!r} have different tasks. Change one label.")
    return tasks


@dataclass(eq=False)
class MixtureOrder:
    """Maps each position to a row, an index into the concatenated rows of all sources.

    The sources' turns are spread evenly, so in any range of positions the shares are correct to within about one row. A
    single source yields one `epoch_order` after another.
    """

    sizes: Sequence[int | None]  # rows of each source; None for a streamed source, which orders its rows itself
    weights: Sequence[float]  # one for each source
    _: KW_ONLY
    seed: int  # determines the orders
    shuffle: bool = True  # False keeps each source's rows in order

    def __post_init__(self) -> None:
        sizes, weights = list(self.sizes), list(self.weights)
        if len(sizes) != len(weights) or not sizes or 0 in sizes:
            raise ValueError(
                f"Each source needs a weight and at least one row, got {sizes} rows and weights {weights}. "
                "Remove sources without rows."
            )
        shares = _shares(weights)
        # Turn k of a source's n turns is at (k + 1/2)/n of the cycle.
        turns = sorted(((k + 0.5) / num, source) for source, num in enumerate(shares) for k in range(num))
        self._cycle = [source for _, source in turns]
        self._turns = [
            [turn for turn, other in enumerate(self._cycle) if other == source] for source in range(len(sizes))
        ]
        self._order = lru_cache(maxsize=3 * len(sizes))(epoch_order)

    def __getitem__(self, position: int) -> int:
        source, row = self.turn(position)
        return sum(size or 0 for size in self.sizes[:source]) + row

    def num_before(self, source: int, position: int) -> int:
        """Returns how many turns this source has before a position."""
        cycle, turn = divmod(position, len(self._cycle))
        turns = self._turns[source]
        return cycle * len(turns) + bisect_left(turns, turn)

    def turn(self, position: int) -> tuple[int, int]:
        """Returns the source at a position, and its row: the index, or the row's number if the source is streamed."""
        source = self._cycle[position % len(self._cycle)]
        size, num_before = self.sizes[source], self.num_before(source, position)
        if size is None:
            return source, num_before
        epoch, index = divmod(num_before, size)
        seed = self.seed if len(self.sizes) == 1 else f"{self.seed}/{source}"
        return source, int(self._order(size, seed, epoch)[index]) if self.shuffle else index

    def __str__(self) -> str:
        """Describes the settings that determine the order of the rows."""
        order = f"shuffled by seed {self.seed}" if self.shuffle else "in order"
        shares = ", ".join(
            f"{size or 'unknown'} rows of weight {weight:g}"
            for size, weight in zip(self.sizes, self.weights, strict=True)
        )
        return f"{order}, {shares}"


def _shares(weights: Sequence[float]) -> list[int]:
    """Returns each source's turns per cycle, at least 1, rounded by largest remainders and divided by their gcd."""
    total = sum(weights)
    exact = [weight / total * _CYCLE for weight in weights]
    shares = [max(1, int(share + 1e-9)) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda index: shares[index] - exact[index])
    for index in by_remainder[: max(0, _CYCLE - sum(shares))]:
        shares[index] += 1
    divisor = gcd(*shares)
    return [share // divisor for share in shares]


def epoch_order(num_rows: int, seed: int | str, epoch: int) -> Tensor:
    """Returns a permutation, int64 [num_rows], that depends only on (seed, epoch)."""
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randperm(num_rows, generator=generator)
