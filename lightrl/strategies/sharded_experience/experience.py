"""ShardedExperience: an iteration's trajectories on the host; each rank has only the tokens that it works on.

TokenRows holds one per-token field, without padding, for the rows that are on this rank.

Shapes: B trajectories, T tokens in the longest trajectory, N tokens in the rows on this rank, W ranks in the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrl.columns import TOKENS, column_of, registered
from lightrl.experience import (
    FIELDS,
    Experience,
    LossUnit,
    Reduction,
    fields_of,
    is_index,
    is_on_host,
    is_table,
    reward_fields,
    row_tensors,
    units_of,
)
from lightrl.functional import row_lengths, to_device
from lightrl.functional.device_copy import remember
from lightrl.models import keep_shown
from lightrl.strategies.ranks.processes import Ranks
from lightrl.trajectory import Trajectory

_CPU = torch.device("cpu")

ROW_FIELDS = ("rewards", "group_ids", "is_truncated", "lengths")
TOKEN_BYTES = sum(np.dtype(column.dtype).itemsize for column in TOKENS.values())  # per token
# Row values that are computed from tokens; all ranks have them.
COUNTS = ("_loss_tokens", "_generated_tokens", "_oldest_version", "_newest_version")
_REPEATED = "_repeated_tokens"  # a row value as well, set only if rows have gaps

Values = np.ndarray[Any, np.dtype[Any]]


@dataclass(eq=False)
class TokenRows:
    """A per-token field on the host: for each row, an array [tokens of the row, ...]; None for rows on other ranks."""

    rows: Sequence[Any]
    empty: Values  # an array [0, ...], which gives the dtype and shape of one token's value

    @classmethod
    def of_rows(cls, rows: Sequence[Values]) -> TokenRows:
        """Makes a field from the values of all rows; there must be at least one row."""
        return cls(rows, rows[0][:0])

    @classmethod
    def of_flat(cls, values: Values, lengths: Tensor, rows: Sequence[int] | None = None) -> TokenRows:
        """Splits an array [N, ...], the concatenated values of `rows` (None for all); `lengths` [B] covers all rows."""
        rows = range(len(lengths)) if rows is None else rows
        split: list[Values | None] = [None] * len(lengths)
        start = 0
        for row, length in zip(rows, lengths[list(rows)].tolist(), strict=True):
            split[row] = values[start : start + length]
            start += length
        return cls(split, values[:0])

    @classmethod
    def of_padded(
        cls, values: Tensor, lengths: Tensor, rows: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> TokenRows:
        """Removes the padding of a tensor [b, T, ...] with only `rows` (None for all); `lengths` covers all rows."""
        sizes = lengths if rows is None else lengths[list(rows)]
        flat = values.detach().cpu()[torch.arange(values.shape[1]) < sizes[:, None]]
        return cls.of_flat(flat.to(dtype or flat.dtype).numpy(), lengths, rows)

    @property
    def here(self) -> list[int]:
        return [row for row, values in enumerate(self.rows) if values is not None]

    @property
    def is_whole(self) -> bool:
        """Whether all rows are here."""
        return all(values is not None for values in self.rows)

    @property
    def token_bytes(self) -> int:
        return int(self.empty.itemsize * np.prod(self.empty.shape[1:]))

    def flat(self, rows: Iterable[int] | None = None) -> Values:
        """Returns the concatenated values of these rows, in this order, or of all rows: an array [N, ...]."""
        return np.concatenate([self.empty, *(self.rows if rows is None else [self.rows[row] for row in rows])])

    def select(self, rows: Iterable[int]) -> TokenRows:
        return TokenRows([self.rows[row] for row in rows], self.empty)

    def only(self, rows: Collection[int]) -> TokenRows:
        """Returns a copy that keeps the values of only these rows."""
        return TokenRows([values if row in rows else None for row, values in enumerate(self.rows)], self.empty)

    def with_flat(self, values: Values, lengths: Tensor, rows: Sequence[int]) -> TokenRows:
        """Returns a copy that also has the values of these rows, which are passed concatenated."""
        added = TokenRows.of_flat(values, lengths, rows).rows
        return TokenRows([old if new is None else new for old, new in zip(self.rows, added, strict=True)], self.empty)

    def times(self, values: Tensor) -> TokenRows:
        """Returns a field with each row's number in `values` [B] where this field, a mask, is True, and 0 elsewhere."""
        numbers = values.numpy()
        zero = numbers.dtype.type(0)
        pairs = zip(self.rows, numbers, strict=True)
        return TokenRows([None if mask is None else np.where(mask, value, zero) for mask, value in pairs], numbers[:0])

    def with_end(self, rows: Collection[int], value: float) -> TokenRows:
        """Returns a copy with `value` appended to each of these rows that is here."""
        end = np.full((1, *self.empty.shape[1:]), value, self.empty.dtype)
        longer = [
            np.concatenate([values, end]) if row in rows and values is not None else values
            for row, values in enumerate(self.rows)
        ]
        return TokenRows(longer, self.empty)


@dataclass(frozen=True)
class OnLossTokens:
    """A per-token field that has one value per trajectory, [B], on all its loss tokens, and 0 elsewhere."""

    values: Tensor


@dataclass(frozen=True)
class ShardedExperience:
    """All trajectories in an iteration; this rank has the tokens of only some of them.

    It can be read like an Experience: `sharded.rewards` is [B] for all rows. A per-token field can be read if all its
    tokens are here, as with one rank; `local` contains the rows that are assigned to this rank.

    Args:
        rows: values of all rows, [B, ...], by name. Names with a leading _ are not fields; they hold each row's token
            counts, minibatch and ranks (placement.py).
        tokens: per-token fields, by name.
    """

    rows: Mapping[str, Tensor]
    tokens: Mapping[str, TokenRows]
    ranks: Ranks = field(default_factory=Ranks)  # all ranks of the run

    @classmethod
    def of(cls, experience: Experience) -> ShardedExperience:
        """Converts an Experience. All its rows are then on this rank, on the host."""
        rows: dict[str, Tensor] = {}
        tokens: dict[str, TokenRows] = {}
        for name, value in experience.tensors().items():
            if is_on_host(name):
                if is_table(name):
                    tokens[name] = TokenRows.of_rows([codes.numpy() for codes in experience.row_codes(name)])
            elif value.dim() >= 2 and not (is_table(name) or is_index(name)):
                column = column_of(name)
                dtype = None if column is None else getattr(torch, column.dtype)  # None keeps the dtype
                tokens[name] = TokenRows.of_padded(value, experience.lengths.cpu(), dtype=dtype)
            else:
                rows[name] = value
        return cls(_counts(tokens), {}).with_tensors({**rows, **tokens})

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory], *, has_rewards: bool = True) -> ShardedExperience:
        """Builds a ShardedExperience on the host, without padding or copying the trajectories' arrays.

        Without `has_rewards`, rewards may still be pending, and all are NaN until `with_rewards` sets them.
        """
        fields, rows = fields_of(trajectories, has_rewards=has_rewards)
        tokens = {name: TokenRows.of_rows(values) for name, values in rows.items()}
        return cls({**fields, **_counts(tokens)}, {}).with_tensors(tokens)

    @classmethod
    def elsewhere(cls, table: Mapping[str, Tensor], dtypes: Mapping[str, str]) -> ShardedExperience:
        """Builds a ShardedExperience whose tokens are all on other ranks, from their `table` and `token_dtypes`."""
        num = len(table["lengths"])
        return cls(dict(table), {name: TokenRows([None] * num, np.empty(0, dtype)) for name, dtype in dtypes.items()})

    def with_rewards(self, trajectories: Sequence[Trajectory]) -> ShardedExperience:
        """Returns a copy with the rewards of these trajectories, one for each row, in order."""
        rewards, rows = reward_fields(trajectories)
        return self.with_tensors({"rewards": rewards, **{name: TokenRows.of_rows(rows[name]) for name in rows}})

    def __len__(self) -> int:
        return len(self.rows["lengths"])

    def __getattr__(self, name: str) -> Any:
        if name in FIELDS or column_of(name) is not None:
            return self.read(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.")

    def __getitem__(self, name: str) -> Tensor:
        value = self.read(name)
        if value is None:
            raise KeyError(f"Experience has no {name!r}; it has {self.names()}. Add a model call for it.")
        return value

    def names(self) -> list[str]:
        """Returns the names of the fields and extras that are set."""
        return sorted(name for name in (*self.rows, *self.tokens) if not name.startswith("_"))

    def read(self, name: str) -> Tensor | None:
        """Returns a field or an extra for all rows, padded; None if it is not set. All rows must be here."""
        column = column_of(name)
        field = name if column is None else column.fields[0]
        if field not in self.tokens:
            return self.rows.get(name)
        return self._padded([field], _CPU)[name]

    @property
    def extras(self) -> dict[str, Tensor]:
        """The extras of all rows, without per-token extras that have rows on other ranks."""
        names = (name for name in self.names() if name not in FIELDS and column_of(name) is None)
        return {name: self[name] for name in names if name not in self.tokens or self.tokens[name].is_whole}

    @property
    def loss_token_counts(self) -> Tensor:
        return self.rows["_loss_tokens"]

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_token_counts.sum())

    @property
    def generated_token_counts(self) -> Tensor:
        return self.rows["_generated_tokens"]

    @property
    def forward_tokens(self) -> Tensor:
        lengths = self.rows["lengths"]
        return lengths + self.rows[_REPEATED] if _REPEATED in self.rows else lengths

    @property
    def version_bounds(self) -> tuple[Tensor, Tensor]:
        return self.rows["_oldest_version"], self.rows["_newest_version"]

    @property
    def local(self) -> Experience:
        return self.dense() if self.ranks.size == 1 else self.dense(self.local_rows)

    @property
    def shown(self) -> Any:
        """The object that hooks get: `local` with one rank, otherwise `self`, which can be read like an Experience."""
        return self.local if self.ranks.size == 1 else self

    @property
    def local_rows(self) -> Tensor:
        if self.ranks.size == 1:
            return torch.arange(len(self))
        return (self.rows["_owner"] == self.ranks.rank).nonzero()[:, 0]

    def units(self, unit: LossUnit) -> list[list[int]]:
        return units_of(self.rows["group_ids"].tolist(), unit)

    def total(self, values: Tensor, operation: Reduction = "sum") -> Tensor:
        return self.ranks.total(values, operation)

    def with_tensors(self, tensors: Mapping[str, Tensor | TokenRows | OnLossTokens]) -> ShardedExperience:
        """Returns a copy with these fields set; a Tensor has a value for each row, [B, ...]."""
        rows, tokens = dict(self.rows), dict(self.tokens)
        for name, value in tensors.items():
            if isinstance(value, Tensor):
                rows[name] = value.detach().cpu()
                continue
            tokens[name] = self.tokens["loss_mask"].times(value.values) if isinstance(value, OnLossTokens) else value
            if is_on_host(name) and tokens[name].is_whole:
                rows[sizes_name(name)] = torch.tensor([len(codes) for codes in tokens[name].rows])
        if "gaps" in tensors and tokens["gaps"].is_whole:
            rows[_REPEATED] = torch.tensor([sum(row_lengths(gaps)) - len(gaps) for gaps in tokens["gaps"].rows])
        return replace(self, rows=rows, tokens=tokens)

    def select(self, index: Tensor | Sequence[int]) -> ShardedExperience:
        """Returns the trajectories at these rows, in this order; their tokens stay where they are."""
        index = torch.as_tensor(index, dtype=torch.int64)
        tokens = {name: values.select(index.tolist()) for name, values in self.tokens.items()}
        rows = {name: value if is_table(name) else value[index] for name, value in self.rows.items()}
        return replace(self, rows=rows, tokens=tokens)

    def rollout_part(self, needs_end: Tensor | None = None, *, is_sampler: bool = True) -> ShardedExperience:
        """Returns a copy with only the rollout's fields that models read.

        Args:
            needs_end: bool [B], rows to extend by one loss token, for the model's output after the trajectory.
            is_sampler: whether the model sampled the tokens; False omits columns that only the sampler reads.
        """
        rows = {  # names of token counts and of the placement start with _
            name: value
            for name, value in self.rows.items()
            if name.startswith("_") or name in ROW_FIELDS or is_table(name) or is_index(name)
        }
        inputs = [
            column for column in registered() if column.is_model_input and (is_sampler or not column.is_of_sampler)
        ]
        token_names = (*TOKENS, *(column.fields[0] for column in inputs))
        tokens = {name: self.tokens[name] for name in token_names if name in self.tokens}
        if needs_end is not None:
            rows["lengths"] = self.lengths + needs_end
            longer = set(needs_end.nonzero()[:, 0].tolist())
            ends = {name: True if name == "loss_mask" else _fill(name) for name in tokens}
            tokens = {name: values.with_end(longer, ends[name]) for name, values in tokens.items()}
        return replace(self, rows=rows, tokens=tokens)

    def dense(self, rows: Tensor | Sequence[int] | None = None, device: torch.device = _CPU) -> Experience:
        """Returns these rows, whose tokens must be here, as an Experience of tensors on the device.

        Tokens are copied from pinned memory, without padding, while the device computes. `on_host` later returns values
        that the host needs without copying them back.
        """
        part = self if rows is None else self.select(rows)
        tensors = part._padded(part.tokens, device)
        if device != _CPU:
            read_on_host = [name for name in ("token_ids", "loss_mask", "gaps") if name in tensors]
            for name, value in part._padded(read_on_host, _CPU).items():
                remember(tensors[name], value)
        for name, value in {**part.rows, **keep_shown(part.rows)}.items():
            if not name.startswith("_"):
                tensors[name] = to_device(value, device)
        return Experience.of_tensors(tensors)

    def blank_row(self, device: torch.device) -> Experience:
        """Returns a row of two tokens without loss tokens, for a rank without rows that must run a forward pass."""
        rows = {  # without entries of tables, which `dense` then omits
            name: value.new_full((1, *value.shape[1:]), -1 if is_index(name) else 0)
            for name, value in self.rows.items()
        }
        rows["lengths"] = torch.tensor([2])
        tokens = {
            name: TokenRows([np.full((2, *values.empty.shape[1:]), _fill(name), values.empty.dtype)], values.empty)
            for name, values in self.tokens.items()
        }
        return replace(self, rows=rows, tokens=tokens).dense(device=device)

    def _padded(self, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
        """Returns fields as tensors [B, T, ...] on the device; fields of coded columns stay on the host.

        Raises:
            ValueError: if the tokens of any row are on a different rank.
        """
        lengths = self.rows["lengths"]
        width = max([1, *lengths.tolist()])  # T
        is_token = torch.arange(width, device=device) < to_device(lengths, device)[:, None]
        padded: dict[str, Tensor] = {}
        for name in names:
            tokens, column = self.tokens[name], column_of(name)
            if not tokens.is_whole:
                raise ValueError(
                    f"{name!r} is per token, and this rank has the tokens of {len(tokens.here)} of these {len(self)} "
                    f"trajectories. Read experience.local[{name!r}] for the trajectories assigned to this rank, and "
                    f"sum with experience.total. Or have it gathered: add {name!r} to the module's advantage_inputs "
                    "(for `advantages`) or to the inputs of the model call."
                )
            if column is not None and column.is_coded:
                padded |= row_tensors(name, tokens.rows)
                continue
            flat = to_device(torch.from_numpy(tokens.flat()), device)
            flat = flat.long() if column is not None and column.dtype == "int32" else flat
            filled = flat.new_full((*is_token.shape, *flat.shape[1:]), 0 if column is None else column.fill)
            padded[name] = filled.masked_scatter_(is_token[(...,) + (None,) * (flat.dim() - 1)], flat)
        return padded

    @property
    def table(self) -> dict[str, Tensor]:
        """Values per row that all ranks need, [B]: fields that are not per token, and token counts."""
        sizes = [sizes_name(name) for name in filter(is_on_host, self.tokens)]
        return {name: self.rows[name] for name in (*ROW_FIELDS, *COUNTS, *sizes, _REPEATED) if name in self.rows}

    @property
    def token_dtypes(self) -> dict[str, str]:
        """The dtype of each per-token field, like `<f4`, or `(16,)|u1` for 16 numbers per token."""
        kinds = {name: (values.empty.shape[1:], values.empty.dtype.str) for name, values in self.tokens.items()}
        return {name: f"{shape}{dtype}" if shape else dtype for name, (shape, dtype) in kinds.items()}


def sizes_name(field: str) -> str:
    """Returns the name of the row value that holds a coded field's number of bytes."""
    return f"_{field}_bytes"


def _fill(field: str) -> float:
    """Returns the field's value on padding and on other tokens without a value."""
    column = column_of(field)
    return 0 if column is None else column.fill


def _counts(tokens: Mapping[str, TokenRows]) -> dict[str, Tensor]:
    """Computes the row values named in COUNTS; all rows must be here."""
    mask, versions = tokens["loss_mask"], tokens["weight_versions"]
    filled = [row for row, values in enumerate(mask.rows) if len(values)]
    ends = np.cumsum([len(mask.rows[row]) for row in filled])
    version = versions.flat()
    is_generated = version >= 0
    highest = np.iinfo(version.dtype).max

    def of_rows(reduce: np.ufunc, values: Values, default: int) -> Tensor:
        result = torch.full((len(mask.rows),), default)  # rows without tokens keep the default
        if filled:
            result[filled] = torch.from_numpy(reduce.reduceat(values, np.append(0, ends[:-1]), dtype=np.int64))
        return result

    oldest = of_rows(np.minimum, np.where(is_generated, version, highest), highest)
    counts = of_rows(np.add, mask.flat(), 0), of_rows(np.add, is_generated, 0)
    bounds = torch.where(oldest == highest, -1, oldest), of_rows(np.maximum, version, -1)
    return dict(zip(COUNTS, (*counts, *bounds), strict=True))
