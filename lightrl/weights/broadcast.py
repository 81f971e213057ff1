"""BroadcastGroup: one sender and some receivers in a process group of their own, outside torch's default one.

    rank 0          the trainer's rank 0: sends
    rank 1, 2, …    servers, each as many ranks as it has tensor-parallel parts: receive

The group is made as SGLang makes its side (`init_weights_update_group`): a store at tcp://host:port under the group's
name, then torch's own helper. A group cannot lose a member: when one dies, close it and make another under a new name.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from lightrl.errors import WeightSyncError


class BroadcastGroup:
    """Makes the group and broadcasts tensors from rank 0; every call blocks and has the group's deadline.

    Args:
        host, port: where rank 0 keeps the store.
        rank, world_size: of this process, and of all members together.
        name: of the group; each group of a process needs another.
        backend: `nccl` between GPUs, `gloo` for the CPU.
        timeout_s: for the others to come, and for each transfer.
        listener: rank 0's, at this port; see `listen`. It is the store's from here on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        rank: int,
        world_size: int,
        name: str,
        backend: str = "gloo",
        timeout_s: float = 120.0,
        listener: socket.socket | None = None,
    ) -> None:
        self.name = name
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._where = f"Weight group {name!r} at {host}:{port} with {world_size} members"
        group_name: Any = name  # torch's GroupName, a str
        timeout = timedelta(seconds=timeout_s)
        with self._translated("did not come together"):
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, world_size, is_master=rank == 0, timeout=timeout, multi_tenant=True,
                master_listen_fd=None if listener is None else listener.detach(),
            )  # fmt: skip
            self._group: Any
            self._group, _ = c10d._new_process_group_helper(
                world_size, rank, [], backend, c10d.PrefixStore(name, store), group_name=group_name, timeout=timeout
            )
        c10d._world.pg_group_ranks[self._group] = {member: member for member in range(world_size)}

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Sends (rank 0) or fills (others) the tensors, in this order, contiguous ones; returns when all are there.

        Raises:
            WeightSyncError: if a member is gone, or at the deadline. The group is of no more use then.
        """
        with self._translated("broke off"):
            works = [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for tensor in tensors]
            try:
                while works:
                    works.pop(0).wait()
            finally:
                works.clear()  # they hold the connections, and an exception holds this frame

    def close(self) -> None:
        """Leaves the group, which ends its connections. May be called twice."""
        group, self._group = self._group, None  # what holds the group holds its connections
        if group in c10d._world.pg_map:
            with contextlib.suppress(RuntimeError):  # members that are gone
                dist.destroy_process_group(group)

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch's DistError family
            raise WeightSyncError(
                f"{self._where} {what} within {self.timeout_s:g} s: {str(error).splitlines()[0]}. Expected every "
                "server to take part. See what the servers say, and whether they reach this host and port."
            ) from error


def flattened(tensors: Iterable[Tensor]) -> Tensor:
    """The bytes of all tensors one after the other, [bytes] uint8: SGLang's `flattened_bucket`; one copy of them."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def listen(host: str = "127.0.0.1") -> socket.socket:
    """A socket of rank 0 that listens at a free port: whoever joins finds it, and the port is nobody else's.

    On the loopback where `host` is there, else on all of this machine's addresses, since `host` may be one that only
    others know it by.
    """
    if host in ("127.0.0.1", "localhost"):
        return socket.create_server((host, 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
