"""BroadcastTransport: broadcasts weights over a process group of the trainer and the servers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.servers.addresses import interface_of, trainer_address
from lightrl.engines.servers.client import GroupPlace
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.sync.report import SyncServers
from lightrl.engines.servers.sync.transports.transport import Streaming, num_ranks
from lightrl.errors import EngineError, WeightSyncError
from lightrl.weights import BroadcastGroup, Bucket, ServerForm
from lightrl.weights.broadcast import listen

_T = TypeVar("_T")
_SERVER_GRACE_S = 10.0  # how long after the group's deadline a server may still answer


class BroadcastTransport(Streaming):
    """Broadcasts in a process group of this process and all servers: over NCCL between GPUs, over gloo on the CPU.

    The group is formed at the first sync, and again when the set of servers changes. If a server dies during a
    transfer, or hangs for `transfer_timeout_s`, the group breaks; the other servers then get all weights from the copy,
    in a new group. The deadline applies to each bucket, and to forming the group.

    The group's store listens only at `trainer_host`, by default this machine's address on the route to the servers. The
    group's name is a secret.
    """

    def __init__(
        self,
        form: ServerForm | None = None,
        *,
        device: str = "cpu",
        transfer_timeout_s: float = 120.0,
        trainer_host: str | None = None,
    ) -> None:
        super().__init__(form)
        self.trainer_host = trainer_host
        self.device = device
        self.transfer_timeout_s = transfer_timeout_s
        self._group: BroadcastGroup | None = None
        self._members: list[str] = []  # addresses

    async def close(self) -> None:
        group, self._group, self._members = self._group, None, []
        if group is not None:
            with contextlib.suppress(asyncio.TimeoutError):  # NCCL may wait for a member that has died
                await asyncio.wait_for(in_thread(group.close), _SERVER_GRACE_S)

    async def _connect(self, servers: SyncServers) -> None:
        if self._group is not None and self._members == [server.url for server in servers.left]:
            return
        for attempt in range(2):
            await self._leave(servers)
            try:
                self._group = await self._join(servers)
                break
            except WeightSyncError:
                if attempt:
                    raise
        self._members = [server.url for server in servers.left]

    async def _join(self, servers: SyncServers) -> BroadcastGroup:
        sizes = await servers.ask(num_ranks)  # also removes dead servers: a group waits for all its members
        servers.check_some_left()
        offsets = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=1), strict=False))
        world_size = 1 + sum(sizes.values())
        try:
            host = trainer_address([server.url for server in sizes], self.trainer_host)
        except (ValueError, EngineError) as error:  # the network has changed since the start
            raise WeightSyncError(str(error)) from error
        name, listener = self._new_name(), listen(host)
        place = GroupPlace(host, listener.getsockname()[1], 0, world_size, "gloo" if self.device == "cpu" else "nccl")
        joining = asyncio.ensure_future(
            _within(
                in_thread(self._make_group, name, place, listener),
                2 * self.transfer_timeout_s + _SERVER_GRACE_S,  # the store and the group each have a deadline
            )
        )
        trying = SyncServers(servers.left, servers.timeout_s)  # if one server does not join, all fail
        await trying.ask(
            lambda server: server.client.init_weights_group(
                name, replace(place, rank_offset=offsets[server]), timeout_s=self.transfer_timeout_s + _SERVER_GRACE_S
            )
        )
        group = await joining
        if trying.lost:
            await in_thread(group.close)
            raise WeightSyncError("; ".join(f"{url}: {reason}" for url, reason in trying.lost.items()))
        return group

    def _new_name(self) -> str:
        return f"lightrl-{secrets.token_hex(16)}"

    def _make_group(self, name: str, place: GroupPlace, listener: socket.socket) -> BroadcastGroup:
        return BroadcastGroup(
            place.master_address, place.master_port, rank=0, world_size=place.world_size, name=name,
            backend=place.backend, timeout_s=self.transfer_timeout_s, listener=listener,
            interface=interface_of(place.master_address),
        )  # fmt: skip

    async def _leave(self, servers: SyncServers) -> None:
        group, members = self._group, self._members
        await self.close()
        if group is None:
            return
        for server in servers.left:
            if server.url in members:
                with contextlib.suppress(EngineError):  # it may have been restarted
                    await server.client.destroy_weights_group(group.name)

    async def _send(self, servers: SyncServers, bucket: Bucket, version: str | None) -> None:
        group = self._group
        assert group is not None
        layout = self.form.layout(bucket)

        def send() -> None:
            try:
                group.broadcast(tensor.to(self.device) for _, tensor in self.form.tensors(bucket))
            except WeightSyncError:
                group.close()  # so that servers waiting for a dead one fail before their deadline
                raise

        failed: list[Server] = []  # in order of failure

        async def receive(server: Server) -> None:
            try:
                timeout_s = self.transfer_timeout_s + _SERVER_GRACE_S
                await server.client.update_weights_from_distributed(layout, group.name, version, timeout_s=timeout_s)
            except EngineError:
                failed.append(server)
                raise

        sending = asyncio.ensure_future(_within(in_thread(send), self.transfer_timeout_s + _SERVER_GRACE_S))
        receiving = SyncServers(servers.left, servers.timeout_s)
        await receiving.ask(receive)
        with contextlib.suppress(WeightSyncError):
            await sending
        if not failed and sending.exception() is None:
            return
        # Silent servers are lost. If there are none, the first one that failed is lost: it made the others fail.
        for server in receiving.silent or failed[:1]:
            servers.lose(server, receiving.lost[server.url])
        servers.silent |= receiving.silent
        await self._leave(servers)
        problem = "; ".join(receiving.lost.values()) or sending.exception()
        raise WeightSyncError(f"the group broke: {problem}") from sending.exception()


async def _within(step: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
    """Limits the time of a step that may miss its own deadline, such as NCCL on a device that hangs."""
    try:
        return await asyncio.wait_for(step, timeout_s)
    except TimeoutError as error:
        raise WeightSyncError(
            f"This process could not send within {timeout_s:g} s. Check the trainer's GPU and network."
        ) from error
