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
    ON_HOST,
    Experience,
    Reduction,
    check_shape,
    row_codes,
)
from lightrl.functional import EVERY_TOKEN, to_device
from lightrl.functional.device_copy import remember
from lightrl.functional.rows import (
    check_trajectories,
    judged_rows,
    row_fields,
    support_codes,
    support_fields,
    token_rewards_of,
)
from lightrl.strategies.ranks import Ranks
from lightrl.strategies.token_rows import TokenRows
from lightrl.trajectory import Trajectory, token_array

if TYPE_CHECKING:
    from typing_extensions import Self

_CPU = torch.device("cpu")
_NO_CODES = np.zeros(0, np.uint8)

ROW_FIELDS = ("rewards", "group_ids", "is_truncated", "lengths")
# The fields per token that the rollout fills in, as they are kept and sent.
TOKEN_DTYPES = {
    "token_ids": torch.int32,
    "loss_mask": torch.bool,
    "behavior_logprobs": torch.float32,
    "weight_versions": torch.int32,
}
# Of each row, derived from its tokens; known on all ranks.
COUNTS = ("_loss_tokens", "_written_tokens", "_oldest_version", "_newest_version")


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
    tokens: dict[str, TokenRows]
    _ranks: Ranks
    _on_loss_tokens: frozenset[str]  # names of rows that are read as [B, T]
    first_pass: list[list[int]]  # the rows of the minibatches of the first epoch

    def __init__(self, **fields: Any) -> None:
        vars(self).update(vars(SpreadExperience.of(Experience(**fields))))

    @classmethod
    def _make(cls, rows: dict[str, Tensor], tokens: dict[str, TokenRows], like: SpreadExperience | None = None) -> Self:
        made = object.__new__(cls)
        every = list(range(len(rows["lengths"])))
        kept: dict[str, Any] = {"_ranks": Ranks(), "_on_loss_tokens": frozenset(), "first_pass": [every]}
        if like is not None:
            is_whole = len(like) == len(every)
            kept |= {name: vars(like)[name] for name in kept if name != "first_pass" or is_whole}
        vars(made).update(kept, _rows=rows, tokens=tokens)
        return made

    # ------------------------------------------------------------------ where it comes from

    @classmethod
    def of(cls, experience: Experience) -> SpreadExperience:
        """The same rows, all here, on the host."""
        if isinstance(experience, SpreadExperience):
            return experience
        lengths = experience.lengths.cpu()
        tensors: dict[str, Any] = {**experience.tensors()}
        if experience.supports is not None:
            tensors = {name: value for name, value in tensors.items() if name not in ON_HOST}
            codes = TokenRows([item.numpy() for item in row_codes(experience)], _NO_CODES)
            tensors |= {"supports": codes, "_support_bytes": _row_sizes(codes)}
        return cls._make({"lengths": lengths}, {}).with_tensors(tensors)

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory], *, are_judged: bool = True) -> SpreadExperience:
        """As Experience.from_trajectories, on the host and without padding: numbers that are stored are not copied."""
        check_trajectories(trajectories, are_judged=are_judged)
        rows = row_fields(trajectories)
        tokens = {
            name: TokenRows(
                [token_array(name, getattr(item, name)).numpy() for item in trajectories],
                torch.empty(0, dtype=dtype).numpy(),
            )
            for name, dtype in TOKEN_DTYPES.items()
        }
        if any(item.supports is not None for item in trajectories):
            tokens["supports"] = TokenRows([support_codes(item).numpy() for item in trajectories], _NO_CODES)
            rows["_support_bytes"] = _row_sizes(tokens["supports"])
        made = cls._make({**rows, **_counts(tokens)}, tokens)
        return made.judged(trajectories) if are_judged else made

    def judged(self, trajectories: Sequence[Trajectory]) -> Self:
        """As Experience.judged."""
        kept, items, rewards = judged_rows(trajectories)
        rows = self if len(kept) == len(self) else self.select(kept)
        tensors: dict[str, Any] = {"rewards": rewards}
        if any(item.rewards is not None for item in items):
            rewards_of = [np.asarray(token_rewards_of(item), np.float32) for item in items]
            tensors["token_rewards"] = TokenRows(rewards_of, np.empty(0, np.float32))
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
        if name in ON_HOST:
            return _supports(self).get(name)
        if name in self._rows and name not in self._on_loss_tokens:
            return self._rows[name]
        if name not in self.tokens and name not in self._rows:
            return None
        _check_here(name, self.tokens["loss_mask" if name in self._rows else name])
        return self._padded([name], _CPU)[name]

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
        return self.tokens["loss_mask"].here

    def without(self, name: str) -> Self:
        tokens = {key: value for key, value in self.tokens.items() if key != name}
        return self._make(self._rows, tokens, self)

    def total(self, values: Tensor, operation: Reduction = "sum") -> Tensor:
        return self._ranks.total(values, operation)

    def with_tensors(self, tensors: Mapping[str, Any]) -> Self:
        """With these fields set: [B], [B, T, ...] of all rows, TokenRows or OnLossTokens."""
        rows, tokens = dict(self._rows), dict(self.tokens)
        on_loss_tokens = set(self._on_loss_tokens) - set(tensors)
        for name, value in tensors.items():
            rows.pop(name, None)
            tokens.pop(name, None)
            if isinstance(value, TokenRows):
                tokens[name] = value
                continue
            if isinstance(value, OnLossTokens):
                on_loss_tokens.add(name)
                value = value.values
            if not name.startswith("_"):
                check_shape(name, value, len(self), self.width)
            if _is_per_token(name, value):
                tokens[name] = TokenRows.of_padded(value, self.lengths, dtype=TOKEN_DTYPES.get(name))
            else:
                rows[name] = value.detach().cpu()
        if any(isinstance(tensors.get(name), Tensor) for name in ("loss_mask", "weight_versions")):
            rows.update(_counts(tokens))
        changed = self._make(rows, tokens, self)
        vars(changed)["_on_loss_tokens"] = frozenset(on_loss_tokens)
        return changed

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """The trajectories at these rows, in this order; their tokens stay where they are."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        tokens = {name: values.select(index.tolist()) for name, values in self.tokens.items()}
        picked = {name: value if name == "pixel_values" else value[index] for name, value in self._rows.items()}
        return self._make(picked, tokens, self)

    def to(self, device: torch.device | str) -> Any:
        return self.dense(device=torch.device(device))

    # ------------------------------------------------------------------ what is computed on

    @property
    def width(self) -> int:
        """T."""
        return int(self.lengths.max()) if len(self) else 0

    def dense(self, rows: Tensor | Sequence[int] | None = None, device: torch.device = _CPU) -> Experience:
        """These rows, whose tokens must be here, as an Experience of tensors on the device.

        Tokens go there without their padding, from pinned memory, while the device works on something else; `on_host`
        finds what the host must know of them.
        """
        part = self if rows is None else self.select(rows)
        for name, values in part.tokens.items():
            _check_here(name, values)
        names = [*part.tokens, *part._on_loss_tokens]
        tensors = {**part._padded([name for name in names if name != "supports"], device), **_supports(part)}
        if device != _CPU:
            for name, value in part._padded(["token_ids", "loss_mask"], _CPU).items():
                remember(tensors[name], value)
        for name, value in _shown(part._rows).items():
            if name not in tensors and not name.startswith("_"):
                tensors[name] = to_device(value, device)
        return Experience._of(tensors)

    def _padded(self, names: Sequence[str], device: torch.device) -> dict[str, Tensor]:
        """Fields as tensors [B, T, ...] on the device."""
        spread = self._on_loss_tokens.intersection(names)
        is_token = torch.arange(max(1, self.width), device=device) < to_device(self.lengths, device)[:, None]
        padded: dict[str, Tensor] = {}
        for name in dict.fromkeys([*names, "loss_mask"] if spread else names):
            if name in spread:
                continue
            flat = to_device(torch.from_numpy(self.tokens[name].flat()), device)
            flat = flat.long() if TOKEN_DTYPES.get(name) == torch.int32 else flat
            fill = flat.new_full((*is_token.shape, *flat.shape[1:]), -1 if name == "weight_versions" else 0)
            padded[name] = fill.masked_scatter_(is_token[(...,) + (None,) * (flat.dim() - 1)], flat)
        for name in spread:
            padded[name] = torch.where(padded["loss_mask"], to_device(self._rows[name], device)[:, None], 0.0)
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
    names = (*ROW_FIELDS, *COUNTS, "_support_bytes")
    return {name: experience._rows[name] for name in names if name in experience._rows}


def elsewhere(table: Mapping[str, Tensor], *, has_token_rewards: bool) -> SpreadExperience:
    """An Experience whose tokens are all on other ranks."""
    num = len(table["lengths"])
    dtypes = {**TOKEN_DTYPES, **({"token_rewards": torch.float32} if has_token_rewards else {})}
    if "_support_bytes" in table:
        dtypes["supports"] = torch.uint8
    return SpreadExperience._make(dict(table), {name: TokenRows.nowhere(num, dtype) for name, dtype in dtypes.items()})


def rollout_part(experience: SpreadExperience, has_end: Tensor | None = None) -> SpreadExperience:
    """With what the rollout gave and nothing else: all that a model infers from.

    Args:
        experience: the iteration's.
        has_end: bool [B], rows that get one more token, a loss token: the state before it is that after the trajectory.
    """
    kept = (*ROW_FIELDS, "pixel_values", "image_rows")
    rows = {name: value for name, value in experience._rows.items() if name.startswith("_") or name in kept}
    tokens = {name: experience.tokens[name] for name in (*TOKEN_DTYPES, "supports") if name in experience.tokens}
    if has_end is not None:
        rows["lengths"] = experience.lengths + has_end
        longer = {int(row) for row in has_end.nonzero()[:, 0]}
        for name, values in tokens.items():
            ends = {"loss_mask": True, "weight_versions": -1, "supports": EVERY_TOKEN[0]}
            end = np.full(1, ends.get(name, 0), values.empty.dtype)
            ended = [
                np.concatenate([item, end]) if row in longer and item is not None else item
                for row, item in enumerate(values.rows)
            ]
            tokens[name] = TokenRows(ended, values.empty)
    return SpreadExperience._make(rows, tokens, experience)


def blank_row(experience: SpreadExperience, device: torch.device) -> Experience:
    """One row of two tokens without loss tokens, for a rank that must take part in a forward and has no row for it."""
    rows = {name: value.new_zeros(1, *value.shape[1:]) for name, value in experience._rows.items()}
    rows["lengths"] = torch.tensor([2])
    if "pixel_values" in rows:
        rows["pixel_values"], rows["image_rows"] = experience._rows["pixel_values"][:0], rows["image_rows"] - 1
    tokens = {
        name: TokenRows([np.zeros((2, *values.empty.shape[1:]), values.empty.dtype)], values.empty)
        for name, values in experience.tokens.items()
    }
    return SpreadExperience._make(rows, tokens, experience).dense(device=device)


def _names(experience: SpreadExperience) -> list[str]:
    return sorted(name for name in (*experience._rows, *experience.tokens) if not name.startswith("_"))


def _is_per_token(name: str, value: Tensor) -> bool:
    return value.dim() >= 2 and name not in ("pixel_values", "image_rows", "_work")


def _supports(experience: SpreadExperience) -> dict[str, Tensor]:
    """The fields of the supports, whose rows must be here."""
    if "supports" not in experience.tokens:
        return {}
    _check_here("supports", experience.tokens["supports"])
    return support_fields([torch.from_numpy(codes) for codes in experience.tokens["supports"].rows])


def support_bytes(experience: SpreadExperience) -> Tensor | None:
    """Of each row, on whichever rank its tokens are, [B]; None without supports."""
    return experience._rows.get("_support_bytes")


def _row_sizes(codes: TokenRows) -> Tensor:
    return torch.tensor([len(values) for values in codes.rows])


def _counts(tokens: Mapping[str, TokenRows]) -> dict[str, Tensor]:
    """COUNTS, of rows that are all here."""
    mask, versions = tokens["loss_mask"], tokens["weight_versions"]
    filled = [row for row, values in enumerate(mask.rows) if len(values)]
    ends = np.cumsum([len(mask.rows[row]) for row in filled])
    version = versions.flat()
    is_written = version >= 0
    highest = np.iinfo(version.dtype).max
    oldest = np.where(is_written, version, highest)

    def of_rows(reduce: Any, values: Any, without: int) -> Tensor:
        result = torch.full((len(mask),), without)
        if filled:
            result[filled] = torch.from_numpy(reduce.reduceat(values, np.append(0, ends[:-1]), dtype=np.int64))
        return result

    found = of_rows(np.minimum, oldest, highest)
    counts = of_rows(np.add, mask.flat(), 0), of_rows(np.add, is_written, 0)
    bounds = torch.where(found == highest, -1, found), of_rows(np.maximum, version, -1)
    return dict(zip(COUNTS, (*counts, *bounds), strict=True))


def _shown(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keeps of the images those that these rows show, each once."""
    if "pixel_values" not in rows:
        return dict(rows)
    image_rows = rows["image_rows"]
    used = torch.unique(image_rows[image_rows >= 0])
    places = torch.searchsorted(used, image_rows.clamp(min=0)).clamp(max=max(0, len(used) - 1))
    image_rows = torch.where(image_rows >= 0, places, -1)
    return {**rows, "pixel_values": rows["pixel_values"][used], "image_rows": image_rows}


def _check_here(name: str, tokens: TokenRows) -> None:
    num = len(tokens.here)
    if num == len(tokens):
        return
    raise ValueError(
        f"{name!r} is per token, and this rank has the tokens of {num} of these {len(tokens)} trajectories. Read "
        f"experience.own[{name!r}], of the trajectories that this rank answers for, and sum with experience.total. "
        f"Or have it gathered: for `advantages` add {name!r} to the module's advantage_inputs, for a model call to "
        "its inputs."
    )
