"""ServerClient: the engine's requests to one server; each kind of server has a subclass with its HTTP paths.

A `timeout_s` of 0 means `timeouts.request_s`, or `timeouts.generate_s` for `generate`.
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
from transformers import PretrainedConfig

from lightrl.engines.servers.connection import Connection, ServerRefused
from lightrl.engines.servers.request import Answer, CompletionDraft
from lightrl.errors import EngineError
from lightrl.weights import block_fp8
from lightrl.weights.digests import RankDigests
from lightrl.weights.server_layout import DTYPES, ServerLayout

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "tie_word_embeddings")  # fmt: skip


@dataclass(frozen=True)
class ServerInfo:
    """A running server's description of its process, its model, and how it stores weights."""

    identity: str | None = None  # changes with a restart; None if the server does not report when it started
    num_ranks: int = 1  # number of tensor-parallel ranks
    dtype: torch.dtype | None = None  # dtype of the weights; None if the server reports only `auto`
    is_cpu: bool = True  # whether the weights are on a CPU
    layout_problem: str | None = None  # why its digests cannot be compared with the trainer's; None if they can
    model_path: str = ""  # the model that the server was started with
    overrides: str = "{}"  # JSON of values that override the model's config
    page_tokens: int = 1  # number of tokens per page of the KV cache
    is_auto: bool = False  # whether the dtype comes from the config that the server was started with
    computes_in: str = "auto"  # torch's name for the least precise dtype used in computation, or `auto`
    world_size: int = 1  # number of ranks: tensor-parallel times pipeline-parallel
    is_vllm: bool = False  # whether weights are stored as in vLLM; see ServerLayout
    returned_columns: frozenset[str] = frozenset()  # columns (lightrl/columns) that it was started to return
    ep: int = 1  # number of expert-parallel groups; see ServerLayout

    def layouts(self, dtype: torch.dtype | None = None) -> list[ServerLayout]:
        """Returns the possible layouts of the server's weights; `dtype` is the dtype that an earlier load found."""
        dtypes = [self.dtype or dtype] if self.dtype or dtype else list(DTYPES)
        return [ServerLayout(item, self.num_ranks, self.is_cpu, self.is_vllm, self.ep) for item in dtypes if item]


def other_model(
    config: PretrainedConfig, model_info: Mapping[str, Any], info: ServerInfo, names: Iterable[str]
) -> str | None:
    """Describes how a server's model differs from the trainer's; None if they seem to be the same.

    A running server does not report its model's sizes. They are compared only if this machine can read the config that
    the server was started with.

    Args:
        model_info: the server's `model_type` and `architectures`, if it reports them.
        names: names of the server's parameters.
    """
    model_type = model_info.get("model_type")
    if model_type is not None and model_type != config.model_type:
        return f"it serves a model of type {model_type!r} ({info.model_path}); the trainer's is {config.model_type!r}"
    architectures, expected = model_info.get("architectures"), config.architectures
    if architectures and expected and set(architectures) != set(expected):
        return f"it serves {', '.join(architectures)} ({info.model_path}); the trainer has {', '.join(expected)}"
    numbers = {int(piece) for name in names if (piece := name.partition("model.layers.")[2].split(".")[0]).isdigit()}
    num_layers = config.get_text_config().num_hidden_layers
    if numbers and len(numbers) != num_layers and info.layout_problem is None:
        return f"its model ({info.model_path}) has {len(numbers)} layers; the trainer's has {num_layers}"
    served = _readable_config(info)
    if served is None:
        return None
    text, served_text = config.get_text_config(), served.get_text_config()
    differing = [
        f"{name}={getattr(served_text, name, None)} instead of {getattr(text, name, None)}"
        for name in _SIZES
        if None not in (getattr(text, name, None), getattr(served_text, name, None))
        and getattr(text, name) != getattr(served_text, name)
    ]
    if differing:
        return f"its model ({info.model_path}, {served.model_type}) has {', '.join(differing)} (the trainer's)"
    if block_fp8.is_block_fp8(served) and not block_fp8.is_block_fp8(config) and not info.is_vllm:
        return f"its weights ({info.model_path}) are in block FP8; set trainer.engine.server_args.quantization to fp8"
    if block_fp8.is_block_fp8(config) and not block_fp8.is_block_fp8(served):
        return (
            f"its weights ({info.model_path}) are not block FP8; use lightrl serve or start it from an FP8 checkpoint"
        )
    return None


def _readable_config(info: ServerInfo) -> PretrainedConfig | None:
    from transformers import AutoConfig

    if not info.model_path:
        return None
    with contextlib.suppress(OSError, ValueError):  # the path exists only on the server's host, or is unreadable
        served: PretrainedConfig = AutoConfig.from_pretrained(info.model_path, local_files_only=True)
        for name, value in json.loads(info.overrides).items():
            setattr(served, name, value)
        return served
    return None


ABORT_TIMEOUT_S = 5.0
Reader = Callable[[bytes], Any]
TensorLayout = Sequence[tuple[str, torch.dtype, torch.Size]]  # name, dtype and shape of each tensor
MemoryPart = Literal["weights", "cuda_graph", "kv_cache"]
MEMORY_PARTS: tuple[MemoryPart, ...] = ("weights", "cuda_graph", "kv_cache")  # resumed in this order


@dataclass(frozen=True)
class GroupPlace:
    """A server's ranks in a process group whose rank 0 is the trainer."""

    master_address: str
    master_port: int
    rank_offset: int  # group rank of the server's first tp rank
    world_size: int
    backend: str


class ServerClient(Connection, ABC):
    """A client for one server; see `Connection` for the arguments.

    A subclass implements the abstract methods. It also overrides the methods that raise NotImplementedError, if its
    kind of server supports the transport or placement that needs them.
    """

    version: str  # the program and version that the class was tested with, for messages
    column_help: ClassVar[Mapping[str, str]]  # column name → how to make the server return it

    @staticmethod
    @abstractmethod
    def request_of(draft: CompletionDraft, rid: str, cache_key: str) -> dict[str, Any]:
        """Returns the request body for the missing tokens; requests with the same `cache_key` share cached prefixes."""

    @staticmethod
    @abstractmethod
    def read_answer(content: bytes) -> Answer:
        """Parses the answer to a request made by `request_of`; raises ValueError if it is not JSON."""

    async def generate(
        self, body: dict[str, Any], *, num_retries: int | None = None, timeout_s: float = 0.0, read: Reader = json.loads
    ) -> Any:
        """Sends a generation request; returns the answer parsed by `read`: by default a dict, or a list for a batch.

        Cancelling this call closes the connection, which the server notices seconds later; `abort` is immediate.
        """
        path = self.generate_path
        return await self.request("POST", path, body, timeout_s=timeout_s, num_retries=num_retries, read=read)

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Context manager for reading an answer from `path`; raises EngineError if the format is unexpected."""
        try:
            yield
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            problem = f"{self.name} answered {path} in an unknown format ({error!r}). Use {self.version}."
            raise EngineError(problem) from error

    async def has_path(self, path: str, timeout_s: float) -> bool:
        """Whether the server answers a GET of this path, which shows what kind of server it is."""
        try:
            await self.request("GET", path, timeout_s=timeout_s, num_retries=0, read=None)
        except EngineError:
            return False
        return True

    @abstractmethod
    async def logprobs(self, token_ids: list[int], *, weights: str | None = None) -> list[float]:
        """Returns the tokens' logprobs at temperature 1 (the first is 0), or [] if the server cannot compute them.

        `weights` is the name of a `NamedVersion`; None means the server's only weights.
        """

    @abstractmethod
    async def num_cached(self, token_ids: list[int], rid: str, cache_key: str, *, timeout_s: float) -> int:
        """Generates one token after these tokens; returns how many of them the prefix cache had under `cache_key`."""

    @abstractmethod
    async def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """Stops requests whose id starts with `rid` at the next token; `generate` then returns the tokens so far."""

    @abstractmethod
    async def model_info(self, *, timeout_s: float = 0.0, num_retries: int | None = None) -> Mapping[str, Any]:
        """Returns `weight_version` and the fields that `other_model` reads; also used as the cheapest health check."""

    @abstractmethod
    async def server_info(self, *, timeout_s: float = 0.0) -> ServerInfo: ...

    @abstractmethod
    async def pause(self, *, timeout_s: float = 0.0) -> None:
        """Stops running requests between tokens; after `resume` they recompute their KV cache and continue."""

    @abstractmethod
    async def resume(self, *, timeout_s: float = 0.0) -> None:
        """Continues generation; has no effect if the server was not paused."""

    @abstractmethod
    async def flush_cache(self, *, wait_s: float = 0.0) -> None:
        """Empties the prefix cache. Unless paused, the server refuses if requests are still running after `wait_s`."""

    @abstractmethod
    async def begin_weight_update(self) -> bool:
        """Announces weight updates until `end_weight_update`; returns False if the server has no route for this."""

    @abstractmethod
    async def end_weight_update(self) -> None: ...

    @abstractmethod
    async def update_weights_from_disk(self, folder: str, weight_version: str | None, *, timeout_s: float) -> None:
        """Loads a safetensors folder that the server can read; if that fails, the server keeps its old weights."""

    @abstractmethod
    async def set_weight_version(self, weight_version: str) -> None:
        """Sets the version of the current weights without aborting requests."""

    @abstractmethod
    async def digests(self, *, timeout_s: float = 0.0) -> RankDigests | None:
        """Returns digests of the server's weights; None if it cannot compute them."""

    async def release_memory(self, tags: Sequence[MemoryPart]) -> None:
        """Releases these parts of the server's memory. The server must be idle, or it crashes."""
        raise NotImplementedError

    async def resume_memory(self, tags: Sequence[MemoryPart]) -> None:
        """Allocates these parts again. The server crashes if one of them was not released."""
        raise NotImplementedError

    async def init_weights_group(self, name: str, place: GroupPlace, *, timeout_s: float) -> None:
        """Makes the server join a process group while the trainer joins as rank 0."""
        raise NotImplementedError

    async def update_weights_from_distributed(
        self, layout: TensorLayout, group_name: str, weight_version: str | None, *, timeout_s: float
    ) -> None:
        """Makes the server receive these tensors from the group's rank 0; only the last call passes a version."""
        raise NotImplementedError

    async def destroy_weights_group(self, name: str) -> None:
        raise NotImplementedError

    async def update_weights_from_tensor(
        self, payloads: Sequence[str], weight_version: str | None, *, timeout_s: float
    ) -> None:
        """Sends tensors, one payload per tp rank (weights/shared_memory.py); only the last call passes a version."""
        raise NotImplementedError

    async def _update(
        self, path: str, body: dict[str, Any], timeout_s: float = 0.0, *, num_retries: int | None = 0
    ) -> dict[str, Any]:
        answer = await self.request("POST", path, body, timeout_s=timeout_s, num_retries=num_retries)
        if not isinstance(answer, dict) or answer.get("success") is False:
            raise ServerRefused(f"{self.url} failed {path}: {str(answer)[:300]}. Check the server's log.", status=200)
        return answer


async def abort_at(clients: Iterable[ServerClient], rid: str = "", *, abort_all: bool = False) -> None:
    """Aborts the requests on each server; ignores failures and waits at most `ABORT_TIMEOUT_S`."""

    async def abort(client: ServerClient) -> None:
        with contextlib.suppress(EngineError, asyncio.TimeoutError):
            await asyncio.wait_for(client.abort(rid, abort_all=abort_all), ABORT_TIMEOUT_S)

    await asyncio.gather(*map(abort, clients))
