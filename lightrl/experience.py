"""Experience: the trajectories from one iteration as tensors, ready for model calls, advantages and the loss.

Shapes: B trajectories, T tokens in the longest trajectory (the rest are padded on the right). Every [B, T] tensor is
aligned to the token it describes; logprobs are 0 at position 0. Logprobs are in nats.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, cast, get_args

import numpy as np
import torch
from torch import Tensor

from lightrl.checks.bounds import check_choice
from lightrl.columns import REWARDS, TOKENS, column_named, column_of, registered, reserve
from lightrl.functional.branches import row_lengths
from lightrl.functional.device_copy import on_host, to_device
from lightrl.functional.packing import microbatch_bins
from lightrl.trajectory import Trajectory

# The unit of rows that a loss reads together; minibatches and microbatches never split a unit.
LossUnit = Literal["trajectory", "group", "pair"]

Reduction = Literal["sum", "max"]  # how values are reduced over ranks


@dataclass(frozen=True)
class Experience:
    """Trajectories as tensors. Frozen: each phase adds fields with `with_tensors`.

    Columns (data that travels with tokens) and extras (outputs of the user's model calls) are read as
    `experience["key"]`, and copies keep both. Rows keep the rollout's (prompt, sample) order. Images are stored once
    and shared by all selections; `image_rows` lists each row's images.
    """

    token_ids: Tensor  # int64 [B, T], 0 in padding
    loss_mask: Tensor  # bool [B, T], True where a token trains
    behavior_logprobs: Tensor  # float32 [B, T], from the policy that sampled the token
    weight_versions: Tensor  # int64 [B, T], -1 where the policy did not generate
    rewards: Tensor  # float32 [B]
    group_ids: Tensor  # int64 [B]
    is_truncated: Tensor  # bool [B]
    lengths: Tensor  # int64 [B], number of tokens, prompt included
    proximal_logprobs: Tensor | None = None  # float32 [B, T], from the policy at the start of the update
    reference_logprobs: Tensor | None = None  # float32 [B, T], from the reference policy
    teacher_logprobs: Tensor | None = None  # float32 [B, T], from the teacher in distillation
    values: Tensor | None = None  # float32 [B, T], the critic's value of the state before the token was sampled
    bootstrap_values: Tensor | None = None  # float32 [B], the critic's value after a truncated trajectory; else 0
    returns: Tensor | None = None  # float32 [B, T]
    advantages: Tensor | None = None  # float32 [B, T]
    pixel_values: Tensor | None = None  # float32 [P, ...], the entries of all images, see models/images.py
    image_grids: Tensor | None = None  # int64 [M, 3], grid of each image; its product is the image's number of entries
    image_rows: Tensor | None = None  # int64 [B, I], indices of each row's images in order; -1 for none
    # Columns (lightrl/columns) that at least one trajectory has: [B, T, ...], or codes in host memory.
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # [B], [B, T] or [B, T, ...], from a user's model calls

    def __post_init__(self) -> None:
        num, width = self.token_ids.shape
        reserved = sorted(name for name in self.extras if name in FIELDS or column_of(name) is not None)
        if reserved:
            raise ValueError(f"extras has the key {reserved[0]!r}, which is a field of Experience. Rename the key.")
        if len({value is None for value in (self.pixel_values, self.image_grids, self.image_rows)}) > 1:
            raise ValueError("pixel_values, image_grids and image_rows must be set together, got only some of them.")
        for name, tensor in self.tensors().items():
            check_shape(name, tensor, num, width)

    @classmethod
    def from_trajectories(cls, trajectories: Sequence[Trajectory]) -> Experience:
        """Builds an Experience, padded on the right to the longest trajectory, with rows in the given order.

        Raises:
            ValueError: if there is no trajectory, or if a trajectory has no reward, has per-token lists of unequal
                length, or trains on its first token, which nothing predicts.
        """
        tensors, rows = fields_of(trajectories)
        for name, values in rows.items():
            tensors |= row_tensors(name, values)
        return cls.of_tensors(tensors)

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @property
    def gaps(self) -> Tensor | None:
        """Number of tokens between a token and its predecessor in its conversation, int64 [B, T]; None if all are 0.

        Nonzero gaps make a tree of conversations; see functional/branches.py.
        """
        return self.columns.get("gaps")

    @property
    def token_rewards(self) -> Tensor | None:
        """Rewards per token, float32 [B, T]; None if no trajectory has rewards per token or turn."""
        return self.columns.get("token_rewards")

    @property
    def supports(self) -> Tensor | None:
        """The codes of all supports (functional/supports.py), uint8 [S], in host memory; see `row_codes`."""
        return self.columns.get("supports")

    @property
    def routes(self) -> Tensor | None:
        """The experts that computed each token when it was sampled (models/routes.py), uint8 [B, T, w]."""
        return self.columns.get("routes")

    def row_codes(self, field: str) -> list[Tensor]:
        """Returns the codes of each row's tokens in a coded column, uint8, in host memory."""
        codes, starts, sizes = (self.columns[f"{field}{part}"] for part in ("", "_starts", "_sizes"))
        return [codes[start : start + size] for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]

    @property
    def loss_token_counts(self) -> Tensor:
        """Number of loss tokens in each trajectory, int64 [B], including trajectories on other ranks."""
        return self.loss_mask.sum(1)

    @property
    def generated_token_counts(self) -> Tensor:
        """Number of tokens that the policy generated, int64 [B]."""
        return (self.weight_versions >= 0).sum(1)

    @property
    def forward_tokens(self) -> Tensor:
        """Number of tokens that a model reads, int64 [B]. A token in several conversations counts once in each."""
        return to_device(torch.tensor([*map(sum, self.row_lengths())], dtype=torch.int64), self.lengths.device)

    def row_lengths(self) -> list[list[int]]:
        """Returns, for each trajectory, the lengths of the rows that a model reads; each conversation is a row."""
        lengths = on_host(self.lengths).tolist()
        if self.gaps is None:
            return [[length] for length in lengths]
        return [row_lengths(gaps[:size]) for gaps, size in zip(on_host(self.gaps).numpy(), lengths, strict=True)]

    @property
    def version_bounds(self) -> tuple[Tensor, Tensor]:
        """The oldest and newest weight version of each trajectory's tokens, int64 [B]; -1 without generated tokens."""
        versions = self.weight_versions
        oldest = versions.where(versions >= 0, torch.iinfo(versions.dtype).max).amin(1)
        newest = versions.amax(1)
        return torch.where(newest < 0, -1, oldest), newest

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_token_counts.sum())

    @property
    def local(self) -> Experience:
        """The trajectories assigned to this rank, with their tokens; each is assigned to exactly one rank."""
        return self

    @property
    def local_rows(self) -> Tensor:
        """The rows of `local`, int64 [b]."""
        return torch.arange(len(self))

    def total(self, values: Tensor, operation: Reduction = "sum") -> Tensor:
        """Returns the sum or maximum over all ranks of values that each rank computed from its `local`."""
        return values

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors that are set, by name: fields, columns and extras."""
        fields_set = {name: value for name in _FIELD_ORDER if (value := getattr(self, name)) is not None}
        return {**fields_set, **self.columns, **self.extras}

    def __getitem__(self, name: str) -> Tensor:
        """Returns a field, column or extra by name; raises KeyError if it is not set."""
        value = getattr(self, name) if name in FIELDS else self.columns.get(name, self.extras.get(name))
        if value is None:
            raise KeyError(f"Experience has no {name!r}; it has {sorted(self.tensors())}. Add a model call for it.")
        return cast(Tensor, value)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Returns a copy with these tensors set; names that are neither fields nor columns become extras."""
        return self.of_tensors({**self.tensors(), **tensors})

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Makes an Experience from fields, columns and extras by name."""
        fields_set: dict[str, Tensor] = {}
        columns: dict[str, Tensor] = {}
        extras: dict[str, Tensor] = {}
        for name, value in tensors.items():
            kind = fields_set if name in FIELDS else columns if column_of(name) is not None else extras
            kind[name] = value
        return cls(**fields_set, columns=columns, extras=extras)

    def without(self, names: Collection[str]) -> Self:
        """Returns a copy without these fields; names that are not set are ignored."""
        return self.of_tensors({name: value for name, value in self.tensors().items() if name not in names})

    def select(self, rows: Tensor | Sequence[int]) -> Self:
        """Returns the trajectories at these rows, in this order, padded only to the longest of them."""
        index = torch.as_tensor(rows, dtype=torch.int64, device=self.token_ids.device)
        width = int(self.lengths[index].max()) if len(index) else 0
        index_on_host = index.cpu() if any(map(is_on_host, self.columns)) else index
        picked = {
            name: value[index_on_host if is_on_host(name) else index]
            for name, value in self.tensors().items()
            if not is_table(name)
        }
        cut = {name: value[:, :width] for name, value in picked.items() if value.dim() >= 2 and not is_index(name)}
        return self.with_tensors({**picked, **cut})

    def to(self, device: torch.device | str) -> Self:
        """Returns a copy on this device, without waiting; `on_host` still returns the original field."""
        target = torch.device(device)
        moved = {name: to_device(value, target) for name, value in self.tensors().items() if not is_on_host(name)}
        return self.with_tensors(moved)

    def microbatch_rows(self, max_tokens: int, *, unit: LossUnit = "trajectory") -> tuple[list[list[int]], list[Self]]:
        """Returns the rows of each microbatch, and the microbatches, each of at most `max_tokens` tokens or one unit.

        Padding does not count. Units of similar length share a microbatch, longest first, to reduce padding.
        """
        rows = microbatch_bins(self.forward_tokens.tolist(), self.units(unit), max_tokens)
        return rows, [self if len(part) == len(self) else self.select(part) for part in rows]

    def units(self, unit: LossUnit) -> list[list[int]]:
        """Returns the rows of each unit (trajectory, group or pair), which a loss reads together, ordered by first row.

        A group is all rows with the same group id; a pair is two consecutive rows of a group.

        Raises:
            ValueError: if the unit is unknown, or a group cannot be cut into pairs.
        """
        return units_of(self.group_ids.tolist(), unit)

    def to_tensordict(self) -> Any:
        """Returns a `tensordict.TensorDict`, batch size [B], with all set fields except images and coded columns.

        Raises:
            ImportError: if tensordict is not installed.
        """
        try:
            from tensordict import TensorDict
        except ImportError as error:
            raise ImportError("to_tensordict needs tensordict: pip install tensordict.") from error
        tensors = {name: value for name, value in self.tensors().items() if not (is_table(name) or is_on_host(name))}
        return TensorDict(tensors, batch_size=[len(self)])


_FIELD_ORDER = tuple(item.name for item in fields(Experience) if item.name not in ("columns", "extras"))
FIELDS = frozenset(_FIELD_ORDER)  # without columns and extras
reserve((FIELDS | {"extras"}) - {"rewards"})  # a trajectory's the `rewards` column becomes the `token_rewards` field
_ROLLOUT_FIELDS = _FIELD_ORDER[: _FIELD_ORDER.index("proximal_logprobs")]


def rollout_fields() -> frozenset[str]:
    """Returns the fields that the rollout fills in, which model calls may read."""
    return frozenset(_ROLLOUT_FIELDS).union(*(column.fields for column in registered() if not column.is_hidden))


def is_table(name: str) -> bool:
    """Whether the field is a table that all rows share; another field assigns its entries to rows."""
    return name in ("pixel_values", "image_grids") or (is_on_host(name) and not name.endswith(("_starts", "_sizes")))


def is_index(name: str) -> bool:
    """Whether the field holds each row's indices into a table, [B, I], padded with -1."""
    return name == "image_rows"


def is_on_host(name: str) -> bool:
    """Whether the field stays in host memory, where strategies decode it."""
    column = column_of(name)
    return column is not None and column.is_coded


def units_of(group_ids: Sequence[int], unit: LossUnit) -> list[list[int]]:
    """Returns `Experience.units` for these group ids."""
    check_choice(get_args(LossUnit), loss_unit=unit)
    if unit == "trajectory":
        return [[row] for row in range(len(group_ids))]
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids):
        groups.setdefault(group, []).append(row)
    if unit == "group":
        return list(groups.values())
    odd = next((group for group, rows in groups.items() if len(rows) % 2), None)
    if odd is not None:
        raise ValueError(
            f"loss_unit='pair' needs an even number of trajectories per group, but group {odd} has "
            f"{len(groups[odd])}. Drop one of them, or set a different group_size."
        )
    return sorted(rows[start : start + 2] for rows in groups.values() for start in range(0, len(rows), 2))


def check_shape(name: str, tensor: Tensor, num: int, width: int) -> None:
    """Raises ValueError unless the field is [B] or [B, T, ...], or [B, I] for an index."""
    if is_table(name):
        return
    expected = (num, width) if tensor.dim() >= 2 and not is_index(name) else (num,)
    if tuple(tensor.shape[: len(expected) if is_index(name) else 2]) != expected:
        raise ValueError(
            f"{name} must have shape {expected}, since token_ids has {(num, width)}, got {tuple(tensor.shape)}. "
            "Align it to the tokens it describes."
        )


def fields_of(
    trajectories: Sequence[Trajectory], *, has_rewards: bool = True
) -> tuple[dict[str, Tensor], dict[str, list[Any]]]:
    """Returns an Experience's fields [B], and each per-token field as one numpy array per trajectory.

    Without `has_rewards`, all rewards are NaN, since they may still be pending.

    Raises:
        ValueError: as in `Experience.from_trajectories`, or if a column has different widths in two trajectories.
    """
    check_trajectories(trajectories, has_rewards=has_rewards)
    rows: dict[str, list[Any]] = {}
    for name, column in TOKENS.items():
        rows[name] = [column.array(getattr(item, name)).numpy() for item in trajectories]
    for column in registered():
        arrays = None if column.comes_with_reward else column.rows(trajectories)
        rows |= {} if arrays is None else {column.fields[0]: arrays}
    fields = {
        "rewards": torch.full((len(trajectories),), torch.nan, dtype=torch.float32),
        "group_ids": torch.tensor([item.group_id for item in trajectories], dtype=torch.int64),
        "is_truncated": torch.tensor([item.is_truncated for item in trajectories], dtype=torch.bool),
        "lengths": torch.tensor([len(item.token_ids) for item in trajectories], dtype=torch.int64),
    }
    if has_rewards:
        fields["rewards"], per_token = reward_fields(trajectories)
        rows |= per_token
    return fields, rows


def reward_fields(trajectories: Sequence[Trajectory]) -> tuple[Tensor, dict[str, list[Any]]]:
    """Returns the rewards, float32 [B], and, if any row has rewards per token, the rows of `token_rewards`."""
    rewards = torch.tensor([item.reward for item in trajectories], dtype=torch.float32)
    if all(item.rewards is None for item in trajectories):  # also on ranks other than 0, which have no tokens to check
        return rewards, {}
    check_trajectories(trajectories)
    return rewards, {"token_rewards": REWARDS.rows(trajectories) or []}


def row_tensors(field: str, rows: Sequence[Any]) -> dict[str, Tensor]:
    """Builds a column's fields of an Experience: a tensor [B, T, ...], where int32 becomes int64.

    A coded column has three fields: all rows' codes, concatenated, and each row's start and size in bytes, [B].
    """
    column = column_of(field)
    assert column is not None
    if column.is_coded:
        sizes = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        codes = torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *rows]))
        return dict(zip(column.fields, (codes, sizes.cumsum(0) - sizes, sizes), strict=True))
    dtype = np.int64 if column.dtype == "int32" else column.dtype
    padded: Any = np.full((len(rows), max(map(len, rows)), *rows[0].shape[1:]), column.fill, dtype)
    for target, values in zip(padded, rows, strict=True):
        target[: len(values)] = values
    return {field: torch.from_numpy(padded)}


def check_trajectories(trajectories: Sequence[Trajectory], *, has_rewards: bool = True) -> None:
    """Raises ValueError if the trajectories cannot make an Experience; see `Experience.from_trajectories`."""
    if not trajectories:
        raise ValueError("This iteration has no trajectories, because every group was dropped.")
    without = [item.prompt.id for item in trajectories if item.reward is None]
    if without and has_rewards:
        raise ValueError(f"A trajectory for prompt {without[0]!r} has no reward. Compute it first.")
    for item in trajectories:
        name, num = f"A trajectory for prompt {item.prompt.id!r}", len(item.token_ids)
        problems = [TOKENS[token_field].problem(getattr(item, token_field), num) for token_field in TOKENS]
        problems += [column_named(column).problem(values, num) for column, values in item.columns.items()]
        if problem := next(filter(None, problems), None):
            raise ValueError(f"{name} {problem}")
        row_starts = [0] if num else []
        if item.gaps is not None:
            gaps, num_before = np.asarray(item.gaps, np.int64), np.arange(num)
            if ((gaps < 0) | (gaps > num_before)).any() or item.prompt.images or item.images:
                raise ValueError(
                    f"{name} has invalid gaps. Each must be from 0 to the number of tokens before its token, and the "
                    "trajectory must have no images. Fix the workflow."
                )
            row_starts = np.flatnonzero(gaps == num_before).tolist()
        if any(item.loss_mask[start] for start in row_starts):
            raise ValueError(
                f"{name} trains on its first token, which nothing predicts. Its prompt needs at least one token, for "
                "example a start token."
            )
