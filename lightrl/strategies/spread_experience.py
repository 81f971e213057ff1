"""SpreadExperience: an iteration's Experience on the host, spread over the ranks, its tokens without padding.

    field                                   on each rank
    rewards, lengths, group_ids … [B]       of all rows
    token_ids, behavior_logprobs … [B, T]   of the rows that this rank works on, end to end, without padding

`row_plan.py` says who sends what to whom. What a model computes on goes to the device microbatch by microbatch. Shapes:
B trajectories, T tokens of the longest, N tokens of the rows that are here, W ranks of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightrl.experience import (
    FIELDS,
    Experience,
    Reduction,
    check_shape,
    check_trajectories,
    token_rewards_of,
)
from lightrl.strategies.ranks import Ranks
from lightrl.trajectory import Trajectory

if TYPE_CHECKING:
    from typing_extensions import Self

ROW_FIELDS = ("rewards", "group_ids", "is_truncated", "lengths")
# The fields per token that the rollout fills in, as they are kept and sent.
TOKEN_DTYPES = {
    "token_ids": torch.int32,
    "loss_mask": torch.bool,
    "behavior_logprobs": torch.float32,
    "weight_versions": torch.int32,
}
# Of each row, derived from its tokens; known on all ranks.
_ROLLOUT_ROWS = (*ROW_FIELDS, "pixel_values", "image_rows")
COUNTS = ("_loss_tokens", "_written_tokens", "_oldest_version", "_newest_version")


@dataclass(frozen=True)
class Ragged:
    """Values per token of some rows, end to end."""

    values: Tensor  # [N, ...]
    starts: Tensor  # int64 [B], where a row's values begin; -1 where they are on other ranks

    @classmethod
    def nowhere(cls, num: int, dtype: torch.dtype, shape: Sequence[int] = ()) -> Ragged:
        return cls(torch.empty(0, *shape, dtype=dtype), torch.full((num,), -1))

    @classmethod
    def packed(cls, values: Tensor, lengths: Tensor, rows: Tensor | None = None) -> Ragged:
        """Of padded values [b, T, ...], which are those of `rows`, or of all."""
        rows = torch.arange(len(lengths)) if rows is None else rows
        here = lengths[rows]
        flat = values.detach().cpu()[torch.arange(values.shape[1]) < here[:, None]]
        return cls.of_rows(flat, lengths, rows)

    @classmethod
    def of_rows(cls, values: Tensor, lengths: Tensor, rows: Tensor) -> Ragged:
        """Of the values of these rows, end to end in their order."""
        starts = torch.full((len(lengths),), -1)
        starts[rows] = lengths[rows].cumsum(0) - lengths[rows]
        return cls(values, starts)

    @property
    def token_bytes(self) -> int:
        return self.values.element_size() * int(np.prod(self.values.shape[1:]))

    def flat(self, lengths: Tensor, rows: Tensor) -> Tensor:
        """The values of these rows, end to end in their order."""
        return self.values[flat_index(self.starts[rows], lengths[rows])]

    def joined(self, more: Tensor, lengths: Tensor, rows: Tensor) -> Ragged:
        """With the values of further rows, end to end."""
        starts = self.starts.clone()
        starts[rows] = len(self.values) + lengths[rows].cumsum(0) - lengths[rows]
        return Ragged(torch.cat([self.values, more]), starts)


@dataclass(frozen=True)
class OnLossTokens:
    """One value of each trajectory, [B], that is read as [B, T]: the same on all its loss tokens, 0 elsewhere."""

    values: Tensor


class SpreadExperience(Experience):
    """An Experience of all trajectories of an iteration, of which this rank has the tokens of some.

    With one rank it has all, and reads as any other Experience. With several, [B] fields are those of all rows;
    reading a field per token of rows that are not here is an error that says what to read instead: `own`.

    The constructor takes an Experience's fields, all rows of them.
    """

    _rows: dict[str, Tensor]  # by name, [B, ...]; those with a leading _ are ours
    tokens: dict[str, Ragged]
    _ranks: Ranks
    _on_loss_tokens: frozenset[str]  # names of rows that are read as [B, T]
    first_pass: list[list[int]]  # the rows of the minibatches of the first epoch

    def __init__(self, **fields: Any) -> None:
        vars(self).update(vars(SpreadExperience.of(Experience(**fields))))

    @classmethod
    def _make(cls, rows: dict[str, Tensor], tokens: dict[str, Ragged], like: SpreadExperience | None = None) -> Self:
        made = object.__new__(cls)
        set_ = vars(made)
        set_.update(_rows=rows, tokens=tokens, _ranks=Ranks(), _on_loss_tokens=frozenset())
        set_["first_pass"] = [list(range(len(rows["lengths"])))]
        if like is not None:
            set_.update({name: vars(like)[name] for name in ("_ranks", "_on_loss_tokens")})
            if len(like) == len(made):
                set_["first_pass"] = like.first_pass
        return made

    # ------------------------------------------------------------------ where it comes from

    @classmethod
    def of(cls, experience: Experience) -> SpreadExperience:
        """The same rows, all here, on the host."""
        if isinstance(experience, SpreadExperience):
            return experience
        host = {name: value.cpu() for name, value in experience.tensors().items()}
        rows = {name: value for name, value in host.items() if not _is_per_token(name, value)}
        lengths = rows["lengths"]
        tokens = {
            name: Ragged.packed(value.to(TOKEN_DTYPES.get(name, value.dtype)), lengths)
            for name, value in host.items()
            if _is_per_token(name, value)
        }
        return cls._make({**rows, **_counts(tokens, lengths)}, tokens)

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory], *, are_judged: bool = True) -> SpreadExperience:
        """As Experience.from_trajectories, on the host and without padding."""
        check_trajectories(trajectories, are_judged=are_judged)
        lengths = torch.tensor([len(item.token_ids) for item in trajectories])
        every = torch.arange(len(lengths))
        tokens = {
            name: Ragged.of_rows(_flat([getattr(item, name) for item in trajectories], dtype), lengths, every)
            for name, dtype in TOKEN_DTYPES.items()
        }
        rows = {
            "rewards": torch.full((len(lengths),), torch.nan),
            "group_ids": torch.tensor([item.group_id for item in trajectories]),
            "is_truncated": torch.tensor([item.is_truncated for item in trajectories]),
            "lengths": lengths,
        }
        made = cls._make({**rows, **_counts(tokens, lengths)}, tokens)
        return made.judged(trajectories) if are_judged else made

    def judged(self, trajectories: Sequence[Trajectory]) -> Self:
        kept = torch.tensor([row for row, item in enumerate(trajectories) if item.reward is not None])
        if not len(kept):
            raise ValueError("No trajectory has a reward. Fix the reward function.")
        items = [trajectories[row] for row in kept.tolist()]
        rows = self if len(kept) == len(self) else self.select(kept)
        tensors: dict[str, Any] = {"rewards": torch.tensor([item.reward for item in items], dtype=torch.float32)}
        if any(item.rewards is not None for item in items):
            check_trajectories(items)
            flat = _flat([token_rewards_of(item) for item in items], torch.float32)
            tensors["token_rewards"] = Ragged.of_rows(flat, rows.lengths, torch.arange(len(rows)))
        return rows.with_tensors(tensors)

    # ------------------------------------------------------------------ as an Experience

    def __len__(self) -> int:
        return len(self._rows["lengths"])

    def __getitem__(self, name: str) -> Tensor:
        value = self.read(name)
        if value is None:
            raise KeyError(f"Experience has no {name!r}; it has {_names(self)}. Add a model call for it.")
        return value

    def read(self, name: str) -> Tensor | None:
        """A field or an extra of all rows, padded; None if it is not set.

        Raises:
            ValueError: if some of its rows are on other ranks.
        """
        if name in self._rows and name not in self._on_loss_tokens:
            return self._rows[name]
        if name not in self.tokens and name not in self._rows:
            return None
        self._check_here(name, self.tokens["loss_mask" if name in self._rows else name].starts)
        return self._padded((name,), torch.device("cpu"))[name]

    def _check_here(self, name: str, starts: Tensor) -> None:
        num = int((starts >= 0).sum())
        if num == len(starts):
            return
        raise ValueError(
            f"{name!r} is per token, and this rank has the tokens of {num} of these {len(starts)} trajectories. Read "
            f"experience.own[{name!r}], of the trajectories that this rank answers for, and sum with experience.total. "
            f"Or have it gathered: for `advantages` add {name!r} to the module's advantage_inputs, for a model call to "
            "its inputs."
        )

    @property
    def loss_token_counts(self) -> Tensor:
        return self._rows["_loss_tokens"]

    @property
    def written_token_counts(self) -> Tensor:
        return self._rows["_written_tokens"]

    @property
    def version_bounds(self) -> tuple[Tensor, Tensor]:
        return self._rows["_oldest_version"], self._rows["_newest_version"]

    @property
    def own(self) -> Experience:
        return self if self._ranks.size == 1 else self.dense(self.own_rows)

    @property
    def own_rows(self) -> Tensor:
        if self._ranks.size == 1:
            return torch.arange(len(self))
        return (self.owners == self._ranks.rank).nonzero()[:, 0]

    @property
    def owners(self) -> Tensor:
        """The rank that answers for each row, int64 [B]."""
        return self._rows["_owner"]

    @property
    def work(self) -> Tensor | None:
        """The rows that each rank works on, bool [W, B]; None if it has all of them."""
        return self._rows["_work"].T if "_work" in self._rows else None

    @property
    def rows_here(self) -> list[int]:
        """Rows whose tokens are on this rank."""
        return (self.tokens["loss_mask"].starts >= 0).nonzero()[:, 0].tolist()

    def without(self, name: str) -> Self:
        tokens = {key: value for key, value in self.tokens.items() if key != name}
        return self._make(self._rows, tokens, self)

    def total(self, values: Tensor, operation: Reduction = "sum") -> Tensor:
        return self._ranks.total(values, operation)

    def with_tensors(self, tensors: Mapping[str, Any]) -> Self:
        """With these fields set: [B], [B, T, ...] of all rows, Ragged or OnLossTokens."""
        rows, tokens = dict(self._rows), dict(self.tokens)
        on_loss_tokens = set(self._on_loss_tokens) - set(tensors)
        for name, value in tensors.items():
            rows.pop(name, None)
            tokens.pop(name, None)
            if isinstance(value, OnLossTokens):
                on_loss_tokens.add(name)
                value = value.values
            if isinstance(value, Ragged):
                tokens[name] = value
                continue
            if not name.startswith("_"):
                check_shape(name, value, len(self), self.width)
            if _is_per_token(name, value):
                dtype = TOKEN_DTYPES.get(name, value.dtype)
                tokens[name] = Ragged.packed(value.to(dtype), self.lengths)
            else:
                rows[name] = value.detach().cpu()
        changed = self._make(rows, tokens, self)
        vars(changed)["_on_loss_tokens"] = frozenset(on_loss_tokens)
        if any(isinstance(tensors.get(name), Tensor) for name in ("loss_mask", "weight_versions")):
            changed._rows.update(_counts(tokens, rows["lengths"]))
        return changed

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """The trajectories at these rows, in this order; their tokens stay where they are."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        starts: dict[int, Tensor] = {}
        tokens = {}
        for name, ragged in self.tokens.items():
            key = id(ragged.starts)
            starts[key] = starts[key] if key in starts else ragged.starts[index]
            tokens[name] = Ragged(ragged.values, starts[key])
        picked = {name: value if name == "pixel_values" else value[index] for name, value in self._rows.items()}
        return self._make(picked, tokens, self)

    def to(self, device: torch.device | str) -> Any:
        return self.dense(device=torch.device(device))

    # ------------------------------------------------------------------ what is computed on

    @property
    def width(self) -> int:
        """T."""
        return int(self.lengths.max()) if len(self) else 0

    def dense(self, rows: Tensor | Sequence[int] | None = None, device: torch.device | None = None) -> Experience:
        """These rows, whose tokens must be here, as an Experience of tensors on the device.

        Tokens go there without their padding, from pinned memory, while the device works on something else.
        """
        part = self if rows is None else self.select(rows)
        device = device or torch.device("cpu")
        names = [*part.tokens, *part._on_loss_tokens]
        for name in part.tokens:
            part._check_here(name, part.tokens[name].starts)
        tensors = part._padded(names, device)
        for name, value in _shown(part._rows).items():
            tensors[name] = _sent(value, device)
        for name, value in part._rows.items():
            if name not in tensors and not name.startswith("_") and name not in ("pixel_values", "image_rows"):
                tensors[name] = _sent(value, device)
        own = {name: value for name, value in tensors.items() if name in FIELDS}
        return Experience(**own, extras={name: value for name, value in tensors.items() if name not in FIELDS})

    def _padded(self, names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
        """Fields as tensors [B, T, ...] on the device."""
        lengths, width = self.lengths, max(1, self.width)
        is_there = device.type == "cpu"
        masks = not self._on_loss_tokens.isdisjoint(names)
        read = dict.fromkeys([name for name in names if name in self.tokens] + ["loss_mask"] * masks)
        places: dict[int, Tensor] = {}
        columns = torch.arange(width, device=device)
        is_token = columns < _sent(lengths, device)[:, None]
        padded: dict[str, Tensor] = {}
        for name in read:
            ragged = self.tokens[name]
            if is_there:
                values, starts = ragged.values, ragged.starts
            else:  # only what is computed on is sent
                values = _sent(ragged.values[flat_index(ragged.starts, lengths)], device)
                starts = _sent(lengths.cumsum(0) - lengths, device)
            key = id(ragged.starts)
            if key not in places:
                places[key] = (starts[:, None] + columns).clamp_(max=max(0, len(values) - 1))
            if not len(values):
                values = values.new_zeros(1, *values.shape[1:])
            value = values[places[key]]
            if value.dtype == torch.int32 and TOKEN_DTYPES.get(name) == torch.int32:
                value = value.long()
            outside = ~is_token[(...,) + (None,) * (value.dim() - 2)]
            padded[name] = value.masked_fill_(outside, -1 if name == "weight_versions" else 0)
        for name in self._on_loss_tokens.intersection(names):
            padded[name] = torch.where(padded["loss_mask"], _sent(self._rows[name], device)[:, None], 0.0)
        return {name: padded[name] for name in names}


class _Extras(Mapping[str, Tensor]):
    """An Experience's extras, padded when they are read."""

    def __init__(self, experience: SpreadExperience) -> None:
        self._experience = experience

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        return self._experience[name]

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def __iter__(self) -> Iterator[str]:
        return (name for name in _names(self._experience) if name not in FIELDS)

    def __len__(self) -> int:
        return len(list(iter(self)))


def _field(name: str) -> property:
    return property(lambda self: self.read(name))


for _name in FIELDS:
    setattr(SpreadExperience, _name, _field(_name))
SpreadExperience.extras = property(_Extras)  # type: ignore[assignment]


def table_of(experience: SpreadExperience) -> dict[str, Tensor]:
    """What all ranks need of each row, [B]: the fields without tokens, and what is derived from its tokens."""
    return {name: experience._rows[name] for name in (*ROW_FIELDS, *COUNTS)}


def elsewhere(table: Mapping[str, Tensor], *, has_token_rewards: bool) -> SpreadExperience:
    """An Experience whose tokens are all on other ranks."""
    num = len(table["lengths"])
    dtypes = {**TOKEN_DTYPES, **({"token_rewards": torch.float32} if has_token_rewards else {})}
    return SpreadExperience._make(dict(table), {name: Ragged.nowhere(num, dtype) for name, dtype in dtypes.items()})


def rollout_part(experience: SpreadExperience) -> SpreadExperience:
    """With what the rollout gave and nothing else: all that a model infers from."""
    rows = {name: value for name, value in experience._rows.items() if name.startswith("_") or name in _ROLLOUT_ROWS}
    return SpreadExperience._make(rows, {name: experience.tokens[name] for name in TOKEN_DTYPES})


def blank_row(experience: SpreadExperience, device: torch.device) -> Experience:
    """One row of two tokens without loss tokens, for a rank that must take part in a forward and has no row for it."""
    rows = {name: value.new_zeros(1, *value.shape[1:]) for name, value in experience._rows.items()}
    rows["lengths"] = torch.tensor([2])
    if "pixel_values" in rows:
        rows["pixel_values"], rows["image_rows"] = experience._rows["pixel_values"][:0], rows["image_rows"] - 1
    starts = torch.zeros(1, dtype=torch.int64)
    tokens = {
        name: Ragged(ragged.values.new_zeros(2, *ragged.values.shape[1:]), starts)
        for name, ragged in experience.tokens.items()
    }
    return SpreadExperience._make(rows, tokens, experience).dense(device=device)


def flat_index(starts: Tensor, lengths: Tensor) -> Tensor:
    """The places of these rows' values, end to end, int64 [n]."""
    first = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - first).repeat_interleave(lengths)


def _names(experience: SpreadExperience) -> list[str]:
    return sorted(name for name in (*experience._rows, *experience.tokens) if not name.startswith("_"))


def _is_per_token(name: str, value: Tensor) -> bool:
    return value.dim() >= 2 and name not in ("pixel_values", "image_rows", "_work")


def _flat(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """Values per token of several rows, end to end."""
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    return torch.from_numpy(np.concatenate([np.asarray(item, dtype=kind) for item in values]))


def _counts(tokens: Mapping[str, Ragged], lengths: Tensor) -> dict[str, Tensor]:
    """COUNTS, of rows that are all here."""
    mask, versions = tokens["loss_mask"], tokens["weight_versions"]
    num, every = len(lengths), torch.arange(len(lengths))
    row_of_token = every.repeat_interleave(lengths)

    def summed(flags: Tensor) -> Tensor:
        return torch.zeros(num, dtype=torch.int64).index_add_(0, row_of_token, flags.long())

    trains, version = mask.flat(lengths, every), versions.flat(lengths, every).long()
    written = summed(version >= 0)
    highest = torch.iinfo(torch.int64).max
    oldest = torch.full((num,), highest).scatter_reduce_(0, row_of_token, version.where(version >= 0, highest), "amin")
    newest = torch.full((num,), -1).scatter_reduce_(0, row_of_token, version, "amax")
    return dict(zip(COUNTS, (summed(trains), written, oldest.where(written > 0, -1), newest), strict=True))


def _shown(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The pictures that these rows show, each once."""
    if "pixel_values" not in rows:
        return {}
    image_rows = rows["image_rows"]
    used = torch.unique(image_rows[image_rows >= 0])
    if len(used) == len(rows["pixel_values"]):
        return {name: rows[name] for name in ("pixel_values", "image_rows")}
    places = torch.searchsorted(used, image_rows.clamp(min=0)).clamp(max=max(0, len(used) - 1))
    return {"pixel_values": rows["pixel_values"][used], "image_rows": torch.where(image_rows >= 0, places, -1)}


def _sent(value: Tensor, device: torch.device) -> Tensor:
    """On the device; a copy from pinned memory that the host does not wait for."""
    if device.type == "cuda":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)
