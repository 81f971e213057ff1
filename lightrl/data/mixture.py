"""DataSource: one of several sources of rows, with its weight; MixtureOrder: whose turn it is at each position.

    train:                                        # in YAML, of any data module
      - {source: openai/gsm8k, name: main, weight: 3}
      - {source: math.parquet, columns: {question: problem, answer: solution}}

A position's source follows from the weights alone, and a source's rows come in an order of its own, each once before
any comes again. So one number says where a run is, whatever the sources, and however many ranks there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd
from typing import Any, TypeAlias

from lightrl.data.stream import epoch_order

_CYCLE = 1000  # shares are kept to a thousandth


@dataclass(frozen=True)
class DataSource:
    """Where rows come from.

    Args:
        source: a local .jsonl, .json, .parquet or .csv file, a hub name or a local dataset folder, or the dotted path
            of a function that makes rows: it gets `split` and `arguments` and gives an iterable of dicts.
        weight: this source's share among several, in proportion; the first weight is as good as any other unit.
        name: configuration of a hub dataset; None takes the data module's.
        split: of a hub dataset or a function; None takes the data module's.
        columns: new column names → the source's own, such as `{question: problem}`.
        arguments: of a function.
        label: names the source in prompt ids; its number among the sources if None.
    """

    source: str
    weight: float = 1.0
    name: str | None = None
    split: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    label: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(
                f"weight={self.weight} of {self.source!r}, expected a number above 0. Leave out a source that is not "
                "wanted."
            )


Source: TypeAlias = "str | DataSource | list[DataSource]"


def sources_of(source: Source | None) -> list[DataSource]:
    """The sources, with labels that differ.

    Raises:
        ValueError: if two share a label.
    """
    if source is None:
        return []
    if isinstance(source, str):
        return [DataSource(source)]
    sources = [source] if isinstance(source, DataSource) else list(source)
    labels = [label_of(item, index) for index, item in enumerate(sources)]
    if len(set(labels)) < len(labels):
        raise ValueError(f"The data's sources have the labels {labels}, expected each once. Give each its own label.")
    return sources


def label_of(source: DataSource, index: int) -> str:
    return str(index) if source.label is None else source.label


class MixtureOrder:
    """The row at each position: an index into the rows of all sources, one source after the other.

    Shares hold in every stretch of positions, to about one row: turns are spread evenly. With one source this is
    `epoch_order` after `epoch_order`.

    Args:
        sizes: rows of each source.
        weights: of each source.
        seed: of the orders.
        shuffle: False keeps the order of each source's rows.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], *, seed: int, shuffle: bool = True) -> None:
        if len(sizes) != len(weights) or not sizes or min(sizes) < 1:
            raise ValueError(
                f"The sources have {list(sizes)} rows and the weights {list(weights)}, expected at least one row and a "
                "weight for each source. Leave out a source without rows."
            )
        self.sizes, self.weights = list(sizes), list(weights)
        self.seed, self.shuffle = seed, shuffle
        shares = _shares(weights)
        # the k-th of n turns of a source stands at (k + 1/2)/n of the cycle
        turns = sorted(((k + 0.5) / num, source) for source, num in enumerate(shares) for k in range(num))
        self._cycle = [source for _, source in turns]
        self._places = [
            [place for place, turn in enumerate(self._cycle) if turn == source] for source in range(len(sizes))
        ]
        self._order = lru_cache(maxsize=3 * len(sizes))(self._epoch_of_source)

    def __getitem__(self, position: int) -> int:
        cycle, place = divmod(position, len(self._cycle))
        source = self._cycle[place]
        places = self._places[source]
        epoch, index = divmod(cycle * len(places) + bisect_left(places, place), self.sizes[source])
        row = self._order(source, epoch)[index] if self.shuffle else index
        return sum(self.sizes[:source]) + row

    def __str__(self) -> str:
        """What the order follows from, beside the rows."""
        order = f"shuffled by seed {self.seed}" if self.shuffle else "in order"
        shares = ", ".join(
            f"{size} rows of weight {weight:g}" for size, weight in zip(self.sizes, self.weights, strict=True)
        )
        return f"{order}, {shares}"

    def source_at(self, position: int) -> int:
        """Which source has its turn."""
        return self._cycle[position % len(self._cycle)]

    def _epoch_of_source(self, source: int, epoch: int) -> list[int]:
        seed = self.seed if len(self.sizes) == 1 else f"{self.seed}/{source}"
        return epoch_order(self.sizes[source], seed, epoch)


def _shares(weights: Sequence[float]) -> list[int]:
    """Turns of each source in a cycle, in lowest terms, by largest remainders; at least one each."""
    total = sum(weights)
    exact = [weight / total * _CYCLE for weight in weights]
    shares = [max(1, int(share + 1e-9)) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda index: shares[index] - exact[index])
    for index in by_remainder[: max(0, _CYCLE - sum(shares))]:
        shares[index] += 1
    divisor = gcd(*shares)
    return [share // divisor for share in shares]
