"""BroadcastGroup: a process group, separate from torch's default one, in which the trainer sends weights to servers.

Rank 0 is the trainer; the other ranks are the servers' tensor-parallel ranks. The group is built like SGLang's side
(`init_weights_update_group`): a store at tcp://host:port, then torch's helper function. A group cannot lose a member.
If a member dies, close the group and build a new one under a new name.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from lightrl.errors import WeightSyncError

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


class BroadcastGroup:
    """Forms the group and broadcasts tensors from rank 0; each call blocks for at most `timeout_s`.

    Args:
        host, port: address of rank 0's store.
        rank, world_size: this process's rank, and the number of members.
        name: the group's name, unique in this process.
        backend: `nccl` between GPUs, `gloo` on the CPU.
        timeout_s: time limit for all members to join, and for each transfer.
        listener: rank 0's socket at this port, see `listen`; the store takes ownership of it.
        interface: network interface for gloo, unless GLOO_SOCKET_IFNAME is set; NCCL reads NCCL_SOCKET_IFNAME.
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
        interface: str | None = None,
    ) -> None:
        self.name = name
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._where = f"The weight group at {host}:{port} with {world_size} members"  # the name is secret
        group_name: Any = name  # torch's GroupName, a str
        timeout = timedelta(seconds=timeout_s)
        with self._translated("did not form"), _gloo_interface(interface):
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
        """Sends the contiguous tensors in this order from rank 0, or receives into them; returns when all have arrived.

        Raises:
            WeightSyncError: if a member has died or the deadline passes. The group is then unusable.
        """
        with self._translated("failed a transfer"):
            works = [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for tensor in tensors]
            try:
                while works:
                    works.pop(0).wait()
            finally:
                works.clear()  # otherwise an exception that refers to this frame keeps the connections open

    def close(self) -> None:
        """Leaves the group, which closes its connections. Safe to call twice."""
        group, self._group = self._group, None  # a reference would keep the connections open
        if group in c10d._world.pg_map:
            with contextlib.suppress(RuntimeError):  # a member has died
                dist.destroy_process_group(group)

    @contextlib.contextmanager
    def _translated(self, failure: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the base class of torch's DistError
            raise WeightSyncError(
                f"{self._where} {failure} within {self.timeout_s:g} s: {str(error).splitlines()[0]}. Check the "
                "servers' logs, and that they can reach this host and port."
            ) from error


def listen(host: str = "127.0.0.1") -> socket.socket:
    """Opens rank 0's listening socket on a free port of `host`, an address of this machine.

    The socket listens before the port is announced, so no other program can take the port.
    """
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


@contextlib.contextmanager
def _gloo_interface(name: str | None) -> Iterator[None]:
    """Context manager in which new gloo groups use this network interface instead of the host name's."""
    if name is None or _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = name
    try:
        yield
    finally:
        os.environ.pop(_GLOO_INTERFACE, None)
