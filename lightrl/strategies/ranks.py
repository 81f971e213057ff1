"""Ranks: who works beside this process, and what passes between them: sums, shares of the rows, bytes from rank 0.

The loops ask for it with `ranks_of(strategy)`; with one process every answer is the trivial one. Data-parallel ranks
(dp) have different rows; ranks with the same `dp_rank` (the tensor and pipeline axes) have the same. A role with a mesh
of its own has its own Ranks, those of the mesh: `ranks.of_role("critic")`. B trajectories, T tokens.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.tensor import DTensor

from lightrl.experience import Experience, LossUnit
from lightrl.strategies.balance import balanced_shares, token_imbalance
from lightrl.strategies.rank_watch import RankWatch

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

# What rank 0 tells the others while they wait for it.
Kind = Literal["waiting", "data", "error", "stop"]


@dataclass(frozen=True)
class Message:
    """From rank 0 to all others."""

    kind: Kind
    done: int = 0  # progress, while waiting
    total: int = 0
    payload: bytes = b""


class Ranks:
    """One process: it has all the rows, sums are its own, and there is nobody to tell anything."""

    rank = 0  # among these, as are all that follow
    size = 1
    dp_rank = 0
    dp_size = 1
    first_rank = 0  # of the world, the one with rank 0 here
    is_here = True  # whether this process is one of them

    @property
    def is_main(self) -> bool:
        """Whether this process owns the controller, the engine and the judge, writes files and prints."""
        return self.is_here and self.rank == 0

    def of_role(self, role: str) -> Ranks:
        """Those that hold this role's model: all, unless it has a mesh of its own."""
        return self

    # ------------------------------------------------------------------ numbers

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over dp ranks, the same on each; `tensor` may be changed."""
        return tensor

    def max(self, value: int) -> int:
        """The largest of all ranks' values."""
        return value

    def max_each(self, values: list[int]) -> list[int]:
        """The largest of all ranks' values, place by place; every rank gives as many."""
        return values

    def total_norm(self, gradients: Sequence[Tensor]) -> float:
        """The norm over all gradients, which may be sharded; the same on each rank."""
        if not gradients:
            return 0.0
        norm: Any = torch.nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    # ------------------------------------------------------------------ rows

    def shares(self, experience: Experience, unit: LossUnit = "trajectory") -> list[list[int]]:
        """The rows of each dp rank, balanced by tokens; what the loss reads as a whole stays together."""
        lengths = experience.lengths.tolist()
        if self.dp_size == 1:
            return [list(range(len(lengths)))]
        units = experience.units(unit)
        parts = balanced_shares([sum(lengths[row] for row in rows) for rows in units], self.dp_size)
        return [sorted(row for index in part for row in units[index]) for part in parts]

    def microbatch_rows(
        self, experience: Experience, max_tokens: int, *, unit: LossUnit = "trajectory"
    ) -> tuple[list[list[int]], list[Experience]]:
        """This rank's microbatches of `experience`, which all ranks have whole, and the rows that each of them holds.

        Every rank gets the same number of them, for a model that is spread over ranks runs on all at once. Where that
        takes a further one it holds no rows: one trajectory without a loss token stands there.
        """
        if self.dp_size == 1:
            return experience.microbatch_rows(max_tokens, unit=unit)
        shares = self.shares(experience, unit)
        counts = [
            len(experience.select(share).microbatch_rows(max_tokens, unit=unit)[0]) if share else 0 for share in shares
        ]
        share = shares[self.dp_rank]
        rows, parts = experience.select(share).microbatch_rows(max_tokens, unit=unit) if share else ([], [])
        rows = [[share[index] for index in part] for part in rows]
        parts = list(parts)
        while len(parts) < max(counts):
            rows.append([])
            parts.append(masked_row(experience))
        return rows, parts

    def gather_rows(self, values: Tensor, experience: Experience, unit: LossUnit = "trajectory") -> Tensor:
        """[B, T, ...] with every row, from tensors in which each dp rank has filled in the rows of its share."""
        return values

    def token_imbalance(self, experience: Experience, unit: LossUnit = "trajectory") -> float:
        """Tokens of the rank that has most over the mean; 1 is balanced."""
        return token_imbalance(experience.lengths.tolist(), self.shares(experience, unit))

    # ------------------------------------------------------------------ messages of rank 0

    def send(self, message: Message) -> None:
        """On rank 0: to all others, which `receive` it."""

    def receive(self) -> Message:
        """On the others: the next message; waits for rank 0."""
        raise AssertionError("One process receives nothing.")

    def broadcast_json(self, value: Any) -> Any:
        """What rank 0 has, on every rank: plain JSON."""
        if self.size == 1:
            return value
        if self.is_main:
            self.send(Message("data", payload=json.dumps(value).encode()))
            return value
        return json.loads(self.receive().payload)

    def broadcast_tensors(self, tensors: Mapping[str, Tensor], *, source: int = 0) -> dict[str, Tensor]:
        """What rank `source` has, on every rank, on the device of its rank."""
        return dict(tensors)

    @contextlib.contextmanager
    def phase(self, name: str, *, has_own_deadline: bool = False) -> Iterator[None]:
        """Names what this rank does inside, for the message about a rank that hangs."""
        yield

    def begin(self) -> None:
        """The start, of engines too, is over."""

    def step(self) -> None:
        """Says that this rank goes on, inside a phase that is long."""

    @property
    def failed_before(self) -> str | None:
        """Which other rank raised something before this one did, if this one does, and what."""
        return None

    def fail(self, error: BaseException) -> None:
        """This rank has failed: ends the others, unless they have the same error."""

    def close(self) -> None:
        """This rank is about to end."""


class ProcessRanks(Ranks):
    """Several processes: all of the run, or those that hold one role's model.

    Args:
        dp_group: the ranks with which this one shares the rows out, in the order of `dp_rank`; its backend is that of
            the device.
        control_group: all these ranks, on the CPU (gloo), without a deadline that a long rollout would meet.
        device: where `dp_group` takes its tensors.
        watch: who looks after this process; made by `watch_all`.
    """

    def __init__(self, *, dp_group: Any, control_group: Any, device: torch.device, watch: RankWatch) -> None:
        self.rank = dist.get_rank(control_group)
        self.size = dist.get_world_size(control_group)
        self.first_rank = dist.get_global_rank(control_group, 0)
        self.dp_rank = dist.get_rank(dp_group)
        self.dp_size = dist.get_world_size(dp_group)
        self.watch = watch
        self.copies: list[Tensor] = []  # parameters of this rank that another rank counts in norms
        self.roles: dict[str, Ranks] = {}  # those with a mesh of their own
        self._dp_group = dp_group
        self._control_group = control_group
        self._device = device

    def of_role(self, role: str) -> Ranks:
        return self.roles.get(role, self)

    @contextlib.contextmanager
    def phase(self, name: str, *, has_own_deadline: bool = False) -> Iterator[None]:
        self.watch.enter(name, has_own_deadline=has_own_deadline)
        yield
        self.watch.leave()  # not where an error passes: who looks then wants to know the phase

    def begin(self) -> None:
        self.watch.begin()

    def step(self) -> None:
        self.watch.step()

    @property
    def failed_before(self) -> str | None:
        return self.watch.failed_before

    def fail(self, error: BaseException) -> None:
        if not is_on_all_ranks(error):
            self.watch.fail(error)

    def close(self) -> None:
        self.watch.close()

    def sum_(self, tensor: Tensor) -> Tensor:
        if self.dp_size == 1:
            return tensor
        there = tensor.to(self._device)
        dist.all_reduce(there, group=self._dp_group)
        return there.to(tensor.device)

    def max(self, value: int) -> int:
        return self.max_each([value])[0]

    def max_each(self, values: list[int]) -> list[int]:
        there = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(there, dist.ReduceOp.MAX, group=self._control_group)
        return there.tolist()

    def total_norm(self, gradients: Sequence[Tensor]) -> float:
        total = square_norm(gradients, self.copies, self._device)
        dist.all_reduce(total)
        return float(total.sqrt())

    def gather_rows(self, values: Tensor, experience: Experience, unit: LossUnit = "trajectory") -> Tensor:
        if self.dp_size == 1:
            return values
        shares = [torch.tensor(share, dtype=torch.int64) for share in self.shares(experience, unit)]
        lengths = experience.lengths.cpu()
        is_token = torch.arange(values.shape[1]) < lengths[:, None]
        sizes = [int(lengths[share].sum()) for share in shares]
        sent = torch.zeros(max(1, *sizes), *values.shape[2:], dtype=values.dtype, device=self._device)
        own = shares[self.dp_rank]
        sent[: sizes[self.dp_rank]] = values.cpu()[own][is_token[own]].to(self._device)
        received = [torch.empty_like(sent) for _ in shares]
        dist.all_gather(received, sent, group=self._dp_group)
        whole = torch.zeros(values.shape, dtype=values.dtype)
        for share, size, flat in zip(shares, sizes, received, strict=True):
            rows = torch.zeros(len(share), *values.shape[1:], dtype=values.dtype)
            rows[is_token[share]] = flat[:size].cpu()
            whole[share] = rows
        return whole.to(values.device)

    def broadcast_tensors(self, tensors: Mapping[str, Tensor], *, source: int = 0) -> dict[str, Tensor]:
        if self.rank == source:
            payload = save({name: value.cpu().contiguous() for name, value in tensors.items()})
            self._send(Message("data", payload=payload), source)
            return dict(tensors)
        return {name: value.to(self._device) for name, value in load(self._receive(source).payload).items()}

    def send(self, message: Message) -> None:
        self._send(message, 0)

    def receive(self) -> Message:
        return self._receive(0)

    def _send(self, message: Message, source: int) -> None:
        kinds = get_args(Kind)
        header = torch.tensor([kinds.index(message.kind), message.done, message.total, len(message.payload)])
        dist.broadcast(header, group=self._control_group, group_src=source)
        if message.payload:
            body = torch.frombuffer(bytearray(message.payload), dtype=torch.uint8)
            dist.broadcast(body, group=self._control_group, group_src=source)

    def _receive(self, source: int) -> Message:
        header = torch.zeros(4, dtype=torch.int64)
        dist.broadcast(header, group=self._control_group, group_src=source)
        kind, done, total, num_bytes = header.tolist()
        body = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes:
            dist.broadcast(body, group=self._control_group, group_src=source)
        kinds: tuple[Kind, ...] = get_args(Kind)
        return Message(kinds[kind], done, total, body.numpy().tobytes())


class OtherRanks(Ranks):
    """Ranks that hold a role's model without this process.

    Args:
        first_rank: of the world, the first of them.
        size: how many they are.
        dp_size: how many of them have different rows.
    """

    is_here = False

    def __init__(self, *, first_rank: int, size: int, dp_size: int) -> None:
        self.first_rank, self.size, self.dp_size = first_rank, size, dp_size


def watch_all(control_group: Any, *, main_address: str, hang_timeout_s: float) -> RankWatch:
    """Starts to watch this rank, through a store that rank 0 keeps on its machine; collective.

    Args:
        control_group: all ranks, on the CPU.
        main_address: of rank 0's machine.
        hang_timeout_s: the run ends if a rank makes no step for so long.
    """
    rank, size = dist.get_rank(control_group), dist.get_world_size(control_group)
    store = TCPStore(main_address, 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = torch.tensor([0 if store is None else store.port])
    dist.broadcast(port, group=control_group, group_src=0)
    store = store or TCPStore(main_address, int(port), is_master=False)
    return RankWatch(store, rank, size, hang_timeout_s=hang_timeout_s)


def square_norm(gradients: Iterable[Tensor], copies: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of this rank's parts, such that the sum over all ranks counts each number once.

    Args:
        gradients: split, each over a mesh of its own if need be, or whole on this rank alone.
        copies: parameters whose gradients another rank counts.
        device: of the result.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        if any(gradient is copy.grad for copy in copies):
            continue
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        times = 1  # that this part is on some rank
        if isinstance(gradient, DTensor):
            for axis, placement in enumerate(gradient.placements):
                times *= gradient.device_mesh.size(axis) if placement.is_replicate() else 1
        total += part.double().square().sum() / times
    return total


def ranks_of(strategy: Strategy) -> Ranks:
    """The Ranks of this strategy; those of one process where it has none."""
    ranks: Ranks = getattr(strategy, "ranks", None) or _ALONE
    return ranks


def mark_as_on_all_ranks(error: BaseException) -> BaseException:
    """Every rank raises this error at the same place, so they can still act together."""
    error.__dict__["is_on_all_ranks"] = True
    return error


def is_on_all_ranks(error: BaseException) -> bool:
    return bool(getattr(error, "is_on_all_ranks", False))


def masked_row(experience: Experience) -> Experience:
    """The shortest trajectory without a loss token: it costs a forward and adds nothing."""
    row = experience.select([int(experience.lengths.argmin())])
    return replace(row, loss_mask=torch.zeros_like(row.loss_mask))


def nearest_divisors(number: int, wanted: int) -> list[int]:
    """The divisors of `number` next to `wanted`, below and above, for messages about sizes that do not fit."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    below = [size for size in divisors if size <= wanted]
    above = [size for size in divisors if size >= wanted]
    return sorted({*below[-1:], *above[:1]}) if number and math.isfinite(wanted) else []


_ALONE = Ranks()
