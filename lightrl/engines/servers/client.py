"""ServerClient: what the engine asks of a server; each kind of server has a subclass with its own paths.

A `timeout_s` of 0 means `timeouts.request_s`, for `generate` `timeouts.generate_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from lightrl.engines.servers.connection import Connection, ServerRefused
from lightrl.engines.servers.request import Answer, CompletionDraft
from lightrl.engines.servers.server_info import ServerInfo
from lightrl.errors import EngineError
from lightrl.weights.digests import RankDigests

ABORT_TIMEOUT_S = 5.0
Reader = Callable[[bytes], Any]
TensorLayout = Sequence[tuple[str, torch.dtype, torch.Size]]  # name, dtype and shape of each tensor
MemoryPart = Literal["weights", "cuda_graph", "kv_cache"]
MEMORY_PARTS: tuple[MemoryPart, ...] = ("weights", "cuda_graph", "kv_cache")  # order to resume: the cache is last


@dataclass(frozen=True)
class GroupPlace:
    """A server's place in a process group with the trainer, which is rank 0."""

    master_address: str
    master_port: int
    rank_offset: int  # rank of its first tp rank
    world_size: int
    backend: str


class ServerClient(Connection, ABC):
    """One server; see `Connection` for the arguments.

    A kind overrides the abstract methods. It overrides the others, which raise NotImplementedError, if it offers the
    transports or the placement that need them.
    """

    version: str  # program and version whose answers it reads, for messages
    column_help: ClassVar[Mapping[str, str]]  # name of a column -> how to make the server return it

    @staticmethod
    @abstractmethod
    def request_of(draft: CompletionDraft, rid: str, cache_key: str) -> dict[str, Any]:
        """The body of the next request, for the tokens that are missing; shares key-values under `cache_key`."""

    @staticmethod
    @abstractmethod
    def read_answer(content: bytes) -> Answer:
        """Reads the answer to it; raises ValueError if it is not JSON."""

    async def generate(
        self, body: dict[str, Any], *, num_retries: int | None = None, timeout_s: float = 0.0, read: Reader = json.loads
    ) -> Any:
        """The answer to a generation: a dict, or a list of them for a batch; or what `read` makes of its bytes.

        A cancellation closes the connection, which the server notices seconds later; `abort` ends it at once.
        """
        path = self.generate_path
        return await self.request("POST", path, body, timeout_s=timeout_s, num_retries=num_retries, read=read)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Raises EngineError if what is read inside, an answer of `path`, has another form."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise EngineError(f"{self.name} sent {path} in an unknown form ({error!r}). Use {self.version}.") from error

    async def has_path(self, path: str, timeout_s: float) -> bool:
        """Whether it answers a GET of this path, which shows its kind."""
        try:
            await self.request("GET", path, timeout_s=timeout_s, num_retries=0, read=None)
        except EngineError:
            return False
        return True

    @abstractmethod
    async def logprobs(self, token_ids: list[int], *, weights: str | None = None) -> list[float]:
        """Logprobs of these tokens at temperature 1, 0 for the first; empty if it gives none.

        Args:
            weights: name of those to compute with, as in `NamedVersion`; None: the server's only ones.
        """

    @abstractmethod
    async def num_cached(self, token_ids: list[int], rid: str, cache_key: str, *, timeout_s: float) -> int:
        """Generates one token after these; returns how many of them the prefix cache had under this key."""

    @abstractmethod
    async def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """Ends the requests whose id starts with `rid` at the next token; `generate` returns what they have."""

    @abstractmethod
    async def model_info(self, *, timeout_s: float = 0.0, num_retries: int | None = None) -> Mapping[str, Any]:
        """The live `weight_version` and what `other_model` compares; also the cheapest sign of life."""

    @abstractmethod
    async def server_info(self, *, timeout_s: float = 0.0) -> ServerInfo: ...

    @abstractmethod
    async def pause(self, *, timeout_s: float = 0.0) -> None:
        """Stops running requests at a token; after `resume` they continue with recomputed key-values."""

    @abstractmethod
    async def resume(self, *, timeout_s: float = 0.0) -> None:
        """Continues generation; harmless if it was not paused."""

    @abstractmethod
    async def flush_cache(self, *, wait_s: float = 0.0) -> None:
        """Forgets every key-value that no running request holds; refused if requests run `wait_s` later, unless paused.

        A paused server has retracted them.
        """

    @abstractmethod
    async def begin_weight_update(self) -> bool:
        """Opens the bracket around updates by tensors or a group; False if this server has none."""

    @abstractmethod
    async def end_weight_update(self) -> None: ...

    @abstractmethod
    async def update_weights_from_disk(self, folder: str, weight_version: str | None, *, timeout_s: float) -> None:
        """Loads a safetensors folder that the server can read; if that fails it keeps its old weights."""

    @abstractmethod
    async def set_weight_version(self, weight_version: str) -> None:
        """Renames the weights without changing them; aborts nothing."""

    @abstractmethod
    async def digests(self, *, timeout_s: float = 0.0) -> RankDigests | None:
        """Digests of the weights that it holds; None if it cannot compute them."""

    async def release_memory(self, tags: Sequence[MemoryPart]) -> None:
        """Releases these parts of the memory; a server that is not idle dies."""
        raise NotImplementedError

    async def resume_memory(self, tags: Sequence[MemoryPart]) -> None:
        """Takes the memory again; a part that was not released kills the server."""
        raise NotImplementedError

    async def init_weights_group(self, name: str, place: GroupPlace, *, timeout_s: float) -> None:
        """Joins a process group with the trainer, which joins as rank 0 at the same time."""
        raise NotImplementedError

    async def update_weights_from_distributed(
        self, layout: TensorLayout, group_name: str, weight_version: str | None, *, timeout_s: float
    ) -> None:
        """Receives these tensors by broadcast from rank 0 of the group, in order; the last call has the version."""
        raise NotImplementedError

    async def destroy_weights_group(self, name: str) -> None:
        raise NotImplementedError

    async def update_weights_from_tensor(
        self, payloads: Sequence[str], weight_version: str | None, *, timeout_s: float
    ) -> None:
        """Sends tensors, one payload per tp rank (see weights/shared_memory.py); the last call has the version."""
        raise NotImplementedError

    async def _update(
        self, path: str, body: dict[str, Any], timeout_s: float = 0.0, *, num_retries: int | None = 0
    ) -> dict[str, Any]:
        answer = await self.request("POST", path, body, timeout_s=timeout_s, num_retries=num_retries)
        if not isinstance(answer, dict) or answer.get("success") is False:
            raise ServerRefused(f"{self.url} failed {path}: {str(answer)[:300]}. Check the server's log.", status=200)
        return answer


async def abort_at(clients: Iterable[ServerClient], rid: str = "", *, abort_all: bool = False) -> None:
    """`ServerClient.abort` at each of these servers; gives up after `ABORT_TIMEOUT_S`, whatever fails."""

    async def abort(client: ServerClient) -> None:
        with contextlib.suppress(EngineError, asyncio.TimeoutError):
            await asyncio.wait_for(client.abort(rid, abort_all=abort_all), ABORT_TIMEOUT_S)

    await asyncio.gather(*map(abort, clients))
