"""Ranks: a run's processes, and how they exchange sums, rows and messages from rank 0.

`ranks_of(strategy)` returns them; with one process every method is trivial. Data-parallel ranks (dp) have different
rows; ranks with the same `dp_rank` (along the tensor and pipeline axes) have the same rows. A role with its own mesh
has separate Ranks: `ranks.of_role("critic")`.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from lightrl.experience import Reduction
from lightrl.strategies.ranks.watch import RankWatch
from lightrl.trace import span
from lightrl.weights.broadcast import listen

START_TIMEOUT = timedelta(minutes=30)  # time for all ranks to join a group
# Longer than any rollout or save. RankWatch, which needs a group to start, detects ranks that wait too long.
_WATCHED_TIMEOUT = timedelta(days=7)
_SENDS_AT_ONCE = 2  # how many sends may be pending, each with a copy of its rows

# Kinds of messages that rank 0 sends to the waiting ranks.
Kind = Literal["waiting", "data", "error", "stop"]


@dataclass(frozen=True)
class Message:
    """A message from rank 0 to all other ranks."""

    kind: Kind
    done: int = 0  # progress, while waiting
    total: int = 0
    payload: bytes = b""


@dataclass(frozen=True)
class Send:
    """Rows that one rank sends to another rank."""

    source: int
    target: int
    rows: tuple[int, ...]  # ascending


class Ranks:
    """A single process, which has all rows. For several processes, see ProcessRanks."""

    rank = 0  # this process's number among these ranks
    size = 1
    dp_rank = 0
    dp_size = 1
    first_rank = 0  # world rank of rank 0
    dp_members: Sequence[Sequence[int]] = ((0,),)  # world ranks of each dp rank
    is_here = True  # whether this process is one of these ranks
    watch: RankWatch | None = None  # this process's watch; None for a single process

    @property
    def is_main(self) -> bool:
        """Whether this process runs controller, engine and reward workers, writes files and prints."""
        return self.is_here and self.rank == 0

    def of_role(self, role: str) -> Ranks:
        """Returns the ranks that hold this role's model: all ranks, unless the role has a mesh."""
        return self

    def sum_(self, tensor: Tensor) -> Tensor:
        """Returns the sum over dp ranks, the same on each rank; may change `tensor`."""
        return tensor

    def total(self, values: Tensor, operation: Reduction = "sum") -> Tensor:
        """Returns the elementwise sum or maximum of host tensors over all ranks."""
        return values

    def exchange(
        self, sends: Sequence[Send], pack: Callable[[Send], Tensor], num_bytes: Callable[[Send], int]
    ) -> list[tuple[Send, Tensor]]:
        """Executes one round of a plan; returns what this rank received, as uint8. `pack` runs before each send."""
        return []

    def max_each(self, values: list[int]) -> list[int]:
        """Returns the elementwise maximum over all ranks; every rank passes the same number of values."""
        largest: list[int] = self.total(torch.tensor(values, dtype=torch.int64), "max").tolist()
        return largest

    def total_norm(self, gradients: Sequence[Tensor]) -> float:
        """Returns the norm of all gradients, which may be sharded. All ranks get the same norm."""
        if not gradients:
            return 0.0
        norm = torch.nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def average_gradients(self) -> None:
        """Averages gradients of the shared parameters over the dp ranks; collective if any parameters are shared."""

    def send(self, message: Message, source: int = 0) -> None:
        """Sends a message from rank `source` to all other ranks, which must call `receive`."""

    def receive(self, source: int = 0) -> Message:
        """Waits for the next message from rank `source`; called on all other ranks."""
        raise AssertionError("One process receives nothing.")

    def broadcast_json(self, value: Any) -> Any:
        """Returns rank 0's value, which must be plain JSON, on every rank."""
        if self.size == 1:
            return value
        if self.is_main:
            self.send(Message("data", payload=json.dumps(value).encode()))
            return value
        return json.loads(self.receive().payload)

    def gather_json(self, value: Any, *, timeout_s: float) -> list[Any]:
        """Gathers plain JSON on rank 0, in rank order. Raises RuntimeError naming the ranks that miss `timeout_s`."""
        return [value]

    def broadcast_tensors(self, tensors: Mapping[str, Tensor], *, source: int = 0) -> dict[str, Tensor]:
        """Returns the tensors of rank `source` on every rank; other ranks get them in host memory."""
        return dict(tensors)

    @contextlib.contextmanager
    def phase(self, name: str, *, has_own_deadline: bool = False) -> Iterator[None]:
        """Names this rank's current work, for the error about a rank that hangs."""
        if self.watch is not None:
            self.watch.enter(name, has_own_deadline=has_own_deadline)
        yield
        if self.watch is not None:
            self.watch.leave()  # not after an error, because its report names the phase

    @contextlib.contextmanager
    def own_deadline(self, is_on: bool = True) -> Iterator[None]:
        """Inside the context, suspends the watch's timeout, because the work has its own; `is_on=False` keeps it."""
        with contextlib.nullcontext() if self.watch is None else self.watch.own_deadline(is_on):
            yield

    def begin(self) -> None:
        """Marks the end of startup, including the engines' startup."""
        if self.watch is not None:
            self.watch.begin()

    def step(self) -> None:
        """Reports progress within a long phase."""
        if self.watch is not None:
            self.watch.step()

    @property
    def failed_before(self) -> str | None:
        """Describes the other rank that failed or stopped first; None if none did."""
        return None if self.watch is None else self.watch.failed_before

    def fail(self, error: BaseException) -> None:
        """Reports that this rank failed, which ends the other ranks. Does nothing if all ranks raise the same error."""
        if self.watch is not None and not is_on_all_ranks(error):
            self.watch.fail(error)

    def close(self) -> None:
        """Reports that this rank is about to exit."""
        if self.watch is not None:
            self.watch.close()


_ONE_PROCESS = Ranks()


def ranks_of(strategy: Strategy) -> Ranks:
    """Returns the strategy's Ranks, or Ranks of one process if the strategy does not split models."""
    ranks: Ranks = getattr(strategy, "ranks", _ONE_PROCESS)
    return ranks


class ProcessRanks(Ranks):
    """Several processes: all processes in the run, or those that hold one role's model.

    Args:
        dp_group: the ranks with different rows, in the order of `dp_rank`, on the device's backend.
        control_group: all these ranks, on the CPU (gloo), with a timeout longer than any rollout.
        device: device of `dp_group`'s tensors.
        watch: this process's watch, made by `watch_all`.
        dp_members: see Ranks; None gathers them from the ranks.
    """

    def __init__(
        self,
        *,
        dp_group: dist.ProcessGroup,
        control_group: dist.ProcessGroup,
        device: torch.device,
        watch: RankWatch,
        dp_members: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.rank = dist.get_rank(control_group)
        self.size = dist.get_world_size(control_group)
        self.first_rank = dist.get_global_rank(control_group, 0)
        self.dp_rank = dist.get_rank(dp_group)
        self.dp_size = dist.get_world_size(dp_group)
        self.watch: RankWatch = watch
        self.copies: list[Tensor] = []  # parameters of this rank that another rank counts in norms
        self.shared: list[torch.nn.Parameter] = []  # trained parameters that every rank holds whole
        self.roles: dict[str, Ranks] = {}  # ranks of roles that have a mesh
        self._dp_group = dp_group
        self.control_group = control_group
        self._device = device
        self.dp_members = self._gather_members() if dp_members is None else dp_members

    def _gather_members(self) -> list[list[int]]:
        dp_ranks = torch.zeros(self.size, dtype=torch.int64)
        dp_ranks[self.rank] = self.dp_rank
        dist.all_reduce(dp_ranks, group=self.control_group)
        members: list[list[int]] = [[] for _ in range(self.dp_size)]
        for rank, dp_rank in enumerate(dp_ranks.tolist()):
            members[dp_rank].append(self.first_rank + rank)
        return members

    def of_role(self, role: str) -> Ranks:
        return self.roles.get(role, self)

    def sum_(self, tensor: Tensor) -> Tensor:
        if self.dp_size == 1:
            return tensor
        total = tensor.to(self._device)
        with span("all_reduce", "collective"):
            dist.all_reduce(total, group=self._dp_group)
        return total.to(tensor.device)

    def total_norm(self, gradients: Sequence[Tensor]) -> float:
        total = square_norm(gradients, self.copies, self._device)
        with span("all_reduce of gradient norms", "collective"):
            dist.all_reduce(total)
        return float(total.sqrt())

    def share(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Copies rank 0's values of unsharded parameters to all ranks, for `average_gradients`; collective."""
        values = self.broadcast_tensors({name: value.detach() for name, value in parameters.items()})
        for name, parameter in parameters.items():
            parameter.data.copy_(values[name])
        self.shared = [parameter for parameter in parameters.values() if parameter.requires_grad]
        self.copies += [] if self.is_main else self.shared

    def average_gradients(self) -> None:
        # Only one of the ranks with the same rows counts: the last, which has the last stage and so the loss.
        is_counted = self.dp_members[self.dp_rank][-1] == self.rank
        for parameter in self.shared:
            gradient = parameter.grad if is_counted else None
            values = torch.zeros_like(parameter) if gradient is None else gradient
            has_gradient = torch.tensor([gradient is not None]).double()
            total = self.total(torch.cat([has_gradient, values.detach().cpu().double().flatten()]))
            parameter.grad = (total[1:] / self.dp_size).view_as(parameter).to(parameter) if total[0] else None

    def gather_json(self, value: Any, *, timeout_s: float) -> list[Any]:
        dist.monitored_barrier(self.control_group, timedelta(seconds=timeout_s), wait_all_ranks=True)
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(json.dumps(value), values, group=self.control_group, group_dst=0)
        return [json.loads(text) for text in values or []]

    def broadcast_tensors(self, tensors: Mapping[str, Tensor], *, source: int = 0) -> dict[str, Tensor]:
        if self.rank == source:
            payload = save({name: value.cpu().contiguous() for name, value in tensors.items()})
            self.send(Message("data", payload=payload), source)
            return dict(tensors)
        received: dict[str, Tensor] = load(self.receive(source).payload)
        return received

    def total(self, values: Tensor, operation: Reduction = "sum") -> Tensor:
        result = values.detach().cpu().clone()
        reduction = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
        with span("all_reduce", "collective"):
            dist.all_reduce(result, reduction, group=self.control_group)
        return result

    def exchange(
        self, sends: Sequence[Send], pack: Callable[[Send], Tensor], num_bytes: Callable[[Send], int]
    ) -> list[tuple[Send, Tensor]]:
        received, waits = [], []
        for send in sends:
            if send.target == self.rank:
                buffer = torch.empty(num_bytes(send), dtype=torch.uint8)
                received.append((send, buffer))
                waits.append(dist.irecv(buffer, group=self.control_group, group_src=send.source))
        sending: list[tuple[Any, Tensor]] = []  # the data must stay in memory until it is sent
        for send in (send for send in sends if send.source == self.rank):
            data = pack(send)
            sending.append((dist.isend(data, group=self.control_group, group_dst=send.target), data))
            if len(sending) > _SENDS_AT_ONCE:
                sending.pop(0)[0].wait()
        for work in [*waits, *(work for work, _ in sending)]:
            work.wait()
        return received

    def send(self, message: Message, source: int = 0) -> None:
        kinds = get_args(Kind)
        header = torch.tensor([kinds.index(message.kind), message.done, message.total, len(message.payload)])
        dist.broadcast(header, group=self.control_group, group_src=source)
        if message.payload:
            body = torch.frombuffer(bytearray(message.payload), dtype=torch.uint8)
            dist.broadcast(body, group=self.control_group, group_src=source)

    def receive(self, source: int = 0) -> Message:
        header = torch.zeros(4, dtype=torch.int64)
        with span(f"waits for rank {source}'s message", "collective"):
            dist.broadcast(header, group=self.control_group, group_src=source)
        kind, done, total, num_bytes = header.tolist()
        body = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes:
            dist.broadcast(body, group=self.control_group, group_src=source)
        kinds: tuple[Kind, ...] = get_args(Kind)
        return Message(kinds[kind], done, total, body.numpy().tobytes())


class OtherRanks(Ranks):
    """The ranks of a role's model, seen from a process that is not one of them; `first_rank` is a world rank."""

    is_here = False

    def __init__(self, *, first_rank: int, size: int, dp_members: Sequence[Sequence[int]]) -> None:
        self.first_rank, self.size, self.dp_size = first_rank, size, len(dp_members)
        self.dp_members = dp_members


def watch_all(control_group: dist.ProcessGroup, *, main_address: str, hang_timeout_s: float) -> RankWatch:
    """Starts this rank's watch, with a store on rank 0's machine (`main_address`). Collective."""
    rank, size = dist.get_rank(control_group), dist.get_world_size(control_group)
    store = _watch_store(main_address) if rank == 0 else None
    # Keys have a secret prefix, because other users may connect to the port.
    port_and_secret = torch.tensor([0 if store is None else store.port, *secrets.token_bytes(16)])
    dist.broadcast(port_and_secret, group=control_group, group_src=0)
    port, *secret = port_and_secret.tolist()
    store = store or TCPStore(main_address, port, is_master=False)
    return RankWatch(PrefixStore(bytes(secret).hex(), store), rank, size, hang_timeout_s=hang_timeout_s)


def allow_long_waits(group: dist.ProcessGroup) -> None:
    """Lengthens the group's timeout, so that RankWatch, not the timeout, ends waits in this group."""
    getattr(dist, "set_timeout", _set_pg_timeout)(_WATCHED_TIMEOUT, group)  # public from torch 2.14


def _watch_store(main_address: str) -> TCPStore:
    """Opens rank 0's store on this address only, unless other hosts may use a different address of this machine."""
    listener = None
    with contextlib.suppress(OSError):  # the name does not resolve here, or the address is not this machine's
        address = socket.gethostbyname(main_address)
        # Some systems resolve a machine's name to a loopback address, which other machines cannot reach.
        if not address.startswith("127.") or main_address in ("localhost", address):
            listener = listen(address)
    if listener is None:
        return TCPStore(main_address, 0, is_master=True, wait_for_workers=False)
    port = listener.getsockname()[1]
    return TCPStore(main_address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, with gradient; returns other tensors unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def square_norm(gradients: Iterable[Tensor], copies: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of squares of this rank's parts, scaled so that the sum over all ranks counts each number once.

    Gradients are DTensors on any meshes, or whole tensors on only this rank. Other ranks count gradients of `copies`.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        if any(gradient is copy.grad for copy in copies):
            continue
        times = 1  # how many ranks have this part
        if isinstance(gradient, DTensor):
            for axis, placement in enumerate(gradient.placements):
                times *= gradient.device_mesh.size(axis) if placement.is_replicate() else 1
        total += local(gradient).double().square().sum() / times
    return total


def mark_as_on_all_ranks(error: BaseException) -> BaseException:
    """Marks an error that every rank raises at the same place, so that collectives still work afterwards."""
    error.__dict__["is_on_all_ranks"] = True
    return error


def is_on_all_ranks(error: BaseException) -> bool:
    return bool(getattr(error, "is_on_all_ranks", False))


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def nearest_divisors(number: int, target: int) -> list[int]:
    """Returns the nearest divisors of `number` below and above `target`, for errors about sizes that do not fit."""
    below = [size for size in divisors(number) if size <= target]
    above = [size for size in divisors(number) if size >= target]
    return sorted({*below[-1:], *above[:1]})
