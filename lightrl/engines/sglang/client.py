"""SGLangClient: the routes of one SGLang server that lightrl uses, as methods.

Paths and fields are those of SGLang 0.5.21 and later; `begin_weight_update` detects an older server, which has no
bracket around weight updates. A `timeout_s` of 0 means `timeouts.request_s`, for `generate` `timeouts.generate_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from lightrl.engines.sglang.connection import Connection, ServerRefused
from lightrl.errors import EngineError
from lightrl.weights.shared_memory import LOAD_FORMAT

ABORT_TIMEOUT_S = 5.0
_NOT_FOUND = 404
# Not the draft models of speculative decoding: they have what they share with it, and are of other shapes otherwise.
_TARGET = {"selector": "target"}


class SGLangClient(Connection):
    """One SGLang server; see `Connection` for the arguments."""

    async def generate(
        self,
        body: dict[str, Any],
        *,
        num_retries: int | None = None,
        timeout_s: float = 0.0,
        read: Callable[[bytes], Any] = json.loads,
    ) -> Any:
        """The answer of `/generate`: a dict, or a list of them for a batch; or what `read` makes of its bytes.

        A cancellation closes the connection, which the server notices seconds later; `abort` ends it at once.
        """
        return await self.request("POST", "/generate", body, timeout_s=timeout_s, num_retries=num_retries, read=read)

    async def classify(self, rows: Sequence[Sequence[int]], *, timeout_s: float = 0.0) -> list[list[float]]:
        """The numbers of a reward model's head at the last token of each row of token ids, usually one.

        The server needs `--is-embedding` and a `…ForSequenceClassification` model.
        """
        body = {"input_ids": [list(row) for row in rows]}
        answer = await self.request("POST", "/classify", body, timeout_s=timeout_s)
        return [entry["embedding"] for entry in answer]

    async def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """Ends the requests whose id starts with `rid` at the next token; `generate` returns what they have."""
        await self.request("POST", "/abort_request", {"rid": rid, "abort_all": abort_all}, read=None)

    async def model_info(self, *, timeout_s: float = 0.0, num_retries: int | None = None) -> dict[str, Any]:
        """`model_path`, the live `weight_version` and more; also the cheapest sign of life."""
        return await self.request("GET", "/model_info", timeout_s=timeout_s, num_retries=num_retries)  # type: ignore[no-any-return]

    async def server_info(self, *, timeout_s: float = 0.0) -> dict[str, Any]:
        """The arguments it was started with; `weight_version` is the initial one."""
        return await self.request("GET", "/server_info", timeout_s=timeout_s)  # type: ignore[no-any-return]

    async def pause(self, *, timeout_s: float = 0.0) -> None:
        """Stops running requests at a token; after `resume` they continue with recomputed key-values."""
        await self.request("POST", "/pause_generation", {"mode": "retract"}, timeout_s=timeout_s, read=None)

    async def resume(self, *, timeout_s: float = 0.0) -> None:
        """Continues generation; harmless if it was not paused."""
        await self.request("POST", "/continue_generation", {"torch_empty_cache": True}, timeout_s=timeout_s, read=None)

    async def flush_cache(self, *, wait_s: float = 0.0) -> None:
        """Forgets every key-value that no running request holds; refused if requests run `wait_s` later, unless paused.

        A paused server has retracted them.
        """
        timeout_s = wait_s + self.timeouts.request_s if wait_s else 0.0
        await self.request("POST", f"/flush_cache?timeout={wait_s:g}", {}, read=None, timeout_s=timeout_s)

    async def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Releases the memory of `kv_cache`, `weights` or `cuda_graph`; a server that is not idle dies."""
        await self.request("POST", "/release_memory_occupation", {"tags": tags}, num_retries=0)

    async def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Takes the memory again; a tag that was not released kills the server."""
        await self.request("POST", "/resume_memory_occupation", {"tags": tags}, num_retries=0)

    async def begin_weight_update(self) -> bool:
        """Opens the bracket around updates by tensors or a group; False if the server is too old to have one."""
        try:
            await self._update("/begin_weight_update", _TARGET)
        except ServerRefused as error:
            if error.status == _NOT_FOUND:
                return False
            raise
        return True

    async def end_weight_update(self) -> None:
        await self._update("/end_weight_update", {})

    async def update_weights_from_disk(
        self, folder: str, *, weight_version: str | None = None, timeout_s: float = 0.0
    ) -> None:
        """Loads a safetensors folder that the server can read; if that fails it keeps its old weights."""
        # Without a format it takes that of its start: a server of dummy weights would refuse real ones.
        body = {"model_path": folder, "load_format": "auto", "weight_version": weight_version, "flush_cache": True}
        await self._update("/update_weights_from_disk", body, timeout_s)

    async def init_weights_group(
        self,
        name: str,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        backend: str,
        timeout_s: float = 0.0,
    ) -> None:
        """Joins a process group with the trainer, which joins as rank 0 at the same time."""
        body = {"group_name": name, "master_address": master_address, "master_port": master_port, "backend": backend}
        body |= {"rank_offset": rank_offset, "world_size": world_size}
        await self._update("/init_weights_update_group", body, timeout_s)

    async def update_weights_from_distributed(
        self,
        layout: Sequence[tuple[str, torch.dtype, torch.Size]],
        group_name: str,
        weight_version: str | None,
        *,
        timeout_s: float = 0.0,
    ) -> None:
        """Receives these tensors by broadcast from rank 0 of the group, in order; the last call has the version."""
        body = {
            "names": [name for name, _, _ in layout],
            "dtypes": [str(dtype).removeprefix("torch.") for _, dtype, _ in layout],
            "shapes": [list(shape) for _, _, shape in layout],
            "group_name": group_name,
            **_TARGET,
            **_version(weight_version),
        }
        await self._update("/update_weights_from_distributed", body, timeout_s)

    async def destroy_weights_group(self, name: str) -> None:
        await self._update("/destroy_weights_update_group", {"group_name": name})

    async def update_weights_from_tensor(
        self, serialized_named_tensors: Sequence[str], weight_version: str | None = None, *, timeout_s: float = 0.0
    ) -> None:
        """Sends tensors, one base64 string per tp rank, pickled as SGLang demands; the last call has the version."""
        body = {"serialized_named_tensors": list(serialized_named_tensors), "load_format": LOAD_FORMAT}
        await self._update("/update_weights_from_tensor", body | _TARGET | _version(weight_version), timeout_s)

    async def adapters(self) -> list[str]:
        """Names of the LoRA adapters it has."""
        models = await self.request("GET", "/v1/models")
        return [entry["id"] for entry in models["data"] if entry.get("parent") is not None]

    async def load_adapter(
        self,
        name: str,
        config: dict[str, Any],
        serialized_named_tensors: Sequence[str],
        checksums: dict[str, str],
        *,
        timeout_s: float = 0.0,
    ) -> None:
        """Adds a LoRA adapter, by value: one payload per tp rank. A tensor of another SHA-256 kills the server."""
        body = {
            "lora_name": name,
            "config_dict": config,
            "serialized_named_tensors": list(serialized_named_tensors),
            "load_format": LOAD_FORMAT,
            "expected_checksums": checksums,
        }
        await self._update("/load_lora_adapter_from_tensors", body, timeout_s)

    async def unload_adapter(self, name: str, *, timeout_s: float = 0.0) -> None:
        """Removes a LoRA adapter when no request uses it; the server holds other adapter updates back until then."""
        await self._update("/unload_lora_adapter", {"lora_name": name}, timeout_s)

    async def set_weight_version(self, weight_version: str) -> None:
        """Renames the weights without changing them; aborts nothing."""
        body = {"new_version": weight_version, "abort_all_requests": False}
        await self._update("/update_weight_version", body, num_retries=None)

    async def checksum(self, *, timeout_s: float = 0.0) -> dict[str, Any]:
        """Checksums of the weights it holds: `per_engine_checksum`, and those of each rank and parameter."""
        return await self._update("/weights_checker", {"action": "checksum"}, timeout_s, num_retries=None)

    async def _update(
        self, path: str, body: dict[str, Any], timeout_s: float = 0.0, *, num_retries: int | None = 0
    ) -> dict[str, Any]:
        answer = await self.request("POST", path, body, timeout_s=timeout_s, num_retries=num_retries)
        if not isinstance(answer, dict) or answer.get("success") is False:
            raise ServerRefused(f"{self.url} failed {path}: {str(answer)[:300]}. Check the server's log.", status=200)
        return answer


def _version(weight_version: str | None) -> dict[str, Any]:
    return {"weight_version": weight_version, "flush_cache": weight_version is not None}


async def abort_at(clients: Iterable[SGLangClient], rid: str = "", *, abort_all: bool = False) -> None:
    """`SGLangClient.abort` at each of these servers; gives up after `ABORT_TIMEOUT_S`, whatever fails."""

    async def abort(client: SGLangClient) -> None:
        with contextlib.suppress(EngineError, asyncio.TimeoutError):
            await asyncio.wait_for(client.abort(rid, abort_all=abort_all), ABORT_TIMEOUT_S)

    await asyncio.gather(*map(abort, clients))


def is_unknown_adapter(error: EngineError) -> bool:
    """Whether a server refused a request because it does not have the adapter: somebody restarted it."""
    return isinstance(error, ServerRefused) and "LoRA adapter" in str(error)
