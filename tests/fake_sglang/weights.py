"""The fake server's routes that change its weights and adapters, and the prefix cache that an update clears."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from fake_sglang.faults import OF_LOADS, Fault
from fake_sglang.script import Refused

if TYPE_CHECKING:
    from fake_sglang.server import FakeServer

Route = Callable[[dict[str, Any]], Awaitable[Any]]
MAX_PROMPTS = 10_000  # in the cache


class PromptCache:
    """Whole prompts only, where SGLang has all prefixes: what a test of caching needs, at the cost of one hash."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, tuple[int, ...]], int] = OrderedDict()

    def look_up(self, prompt: Sequence[int], extra_key: str | None, load: int) -> tuple[int, int]:
        """How many of the prompt's tokens are cached, and the number of the load that computed them; adds the prompt.

        As in SGLang, the last token is always computed anew.

        Args:
            load: number of the present load.
        """
        key = (extra_key or "", tuple(prompt))
        if key in self._seen:
            self._seen.move_to_end(key)
            return len(prompt) - 1, self._seen[key]
        self._seen[key] = load
        if len(self._seen) > MAX_PROMPTS:
            self._seen.popitem(last=False)
        return 0, load

    def clear(self) -> None:
        self._seen.clear()


class WeightRoutes:
    """Routes and their state; an update waits while the server is busy."""

    def __init__(self, server: FakeServer) -> None:
        self.model_path: str | None = server.arguments.get("model_path")
        self.is_bracketed = False
        self.is_idle = asyncio.Event()  # no update is waiting or running
        self.is_idle.set()
        self._server = server
        self._model = server.model
        self._faults = server.faults
        self._updating = asyncio.Lock()
        self._groups: dict[str, Any] = {}  # of broadcasts, by name

    def flush_cache(self) -> None:
        self._server.cache.clear()
        self._model.forget_stale()

    def routes(self) -> dict[str, Route]:
        return {
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_distributed": self._from_distributed,
            "/update_weights_from_tensor": self._from_tensor,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/update_weight_version": self._set_version,
            "/weights_checker": self._checksum,
        }

    @contextlib.asynccontextmanager
    async def _update(self, body: dict[str, Any]) -> AsyncIterator[None]:
        """A paused server updates at once; else the update waits for running requests and holds new ones."""
        async with self._updating:
            if body.get("abort_all_requests"):
                self._server.abort_all()
            self.is_idle.clear()
            try:
                while self._server.is_busy():
                    await asyncio.sleep(0.01)
                yield
            except KeyError as error:
                raise Refused(str(error)) from error
            finally:
                self.is_idle.set()

    async def _load(
        self, path: str, body: dict[str, Any], load: Callable[[str | None, Fault | None], Awaitable[None]]
    ) -> Any:
        version = body.get("weight_version")
        async with self._update(body):
            if self._faults.next(path, ("lose_update",)) is None:
                is_wrong = version is not None and self._faults.next(path, ("wrong_version",)) is not None
                if self._faults.next(path, ("keep_cache",)) is not None:
                    self._model.keep_stale()
                elif body.get("flush_cache", True):
                    self.flush_cache()
                await load(f"not-{version}" if is_wrong else version, self._faults.next(path, OF_LOADS))
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    async def _from_disk(self, body: dict[str, Any]) -> Any:
        async def load(version: str | None, fault: Fault | None) -> None:
            await self._model.load_folder(body["model_path"], version, fault)
            self.model_path = body["model_path"]

        return await self._load("/update_weights_from_disk", body, load)

    async def _from_distributed(self, body: dict[str, Any]) -> Any:
        self._check_bracket("distributed")
        if body["group_name"] not in self._groups:
            raise Refused(f"Group {body['group_name']} is not initialized")
        from fake_sglang.model import received

        tensors = await asyncio.to_thread(received, self._groups[body["group_name"]], body)
        return await self._load(
            "/update_weights_from_distributed", body, lambda *how: self._model.load_tensors(tensors, *how)
        )

    async def _from_tensor(self, body: dict[str, Any]) -> Any:
        self._check_bracket("tensor")
        from fake_sglang.model import unpacked

        tensors = await asyncio.to_thread(unpacked, body["serialized_named_tensors"][0])
        return await self._load(
            "/update_weights_from_tensor", body, lambda *how: self._model.load_tensors(tensors, *how)
        )

    async def _init_group(self, body: dict[str, Any]) -> Any:
        if not self._model.takes_tensors:
            raise Refused("A fake server with a script takes no tensors. Start it with --model-path.")
        from fake_sglang.model import joined_group

        self._groups[body["group_name"]] = await asyncio.to_thread(joined_group, body)
        return {"success": True, "message": "Succeeded to initialize the process group."}

    async def _destroy_group(self, body: dict[str, Any]) -> Any:
        if body["group_name"] not in self._groups:
            raise Refused("The group to be destroyed does not exist.")
        await asyncio.to_thread(self._groups.pop(body["group_name"]).close)
        return {"success": True, "message": "Succeeded to destroy the process group."}

    def _check_bracket(self, kind: str) -> None:
        if not self.is_bracketed:
            raise Refused(f"update_weights_from_{kind} must run between begin_weight_update() and end_weight_update()")

    async def _begin(self, body: dict[str, Any]) -> Any:
        if self.is_bracketed:
            raise Refused("begin_weight_update() was called twice")
        self.is_bracketed = True
        return {"success": True, "message": ""}

    async def _end(self, body: dict[str, Any]) -> Any:
        if not self.is_bracketed:
            raise Refused("end_weight_update() without begin_weight_update()")
        self.is_bracketed = False
        return {"success": True, "message": ""}

    async def _set_version(self, body: dict[str, Any]) -> Any:
        if body.get("abort_all_requests", True):
            self._server.abort_all()
        self._model.rename(body["new_version"])
        return {"success": True, "message": "", "new_version": body["new_version"]}

    async def _checksum(self, body: dict[str, Any]) -> Any:
        if body.get("action") != "checksum":
            raise Refused(f"the fake server does not know the action {body.get('action')!r}")
        sums = await asyncio.to_thread(self._model.checksums)
        digests = [hashlib.blake2b(json.dumps(one, sort_keys=True).encode(), digest_size=16) for one in sums]
        has_draft = any(name.startswith("draft.") for name in sums[0])
        ranks = [
            {"checksums": one, "per_gpu_checksum": digest.hexdigest(), "parallelism_info": [
                {"role": role, "tp_rank": rank, "tp_size": len(sums), "pp_rank": 0, "pp_size": 1}
                for role in ["target", "draft"][: 1 + has_draft]]}
            for rank, (one, digest) in enumerate(zip(sums, digests, strict=True))
        ]  # fmt: skip
        whole = hashlib.blake2b(b"".join(digest.digest() for digest in digests), digest_size=16).hexdigest()
        return {"success": True, "message": "", "ranks": ranks, "per_engine_checksum": whole}


class LoraRoutes:
    """As SGLang 0.5.23: adapters by name; a second of a name is refused; an unload waits for requests that use it.

    The server has SGLang's arguments `enable_lora`, `max_lora_rank` and `lora_target_modules`.
    """

    def __init__(self, server: FakeServer) -> None:
        self.names: dict[str, bool] = {}  # loaded; False while it is being unloaded
        self._server = server
        self._model: Any = server.model  # an EmbeddedModel; a script takes no adapters
        self._arguments = server.arguments
        self._faults = server.faults
        self._updating = asyncio.Lock()

    def routes(self) -> dict[str, Any]:
        return {"/load_lora_adapter_from_tensors": self.load, "/unload_lora_adapter": self._unload}

    def check(self, name: str | None) -> None:
        """Refuses a request for an adapter that the server does not have."""
        if name is None:
            return
        if not self._arguments.get("enable_lora"):
            raise Refused(f"LoRA adapter {name} was requested, but LoRA is not enabled.")
        if not self.names.get(name):
            raise Refused(f"Got LoRA adapter that has never been loaded: {name}. All loaded: {list(self.names)}")

    async def load(self, body: dict[str, Any]) -> Any:
        name, config = body["lora_name"], body["config_dict"]
        async with self._updating:
            if not self._arguments.get("enable_lora"):
                raise Refused("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
            if name in self.names:
                raise Refused(f"Failed to load LoRA adapter {name} because it is already loaded")
            targets = set(self._arguments.get("lora_target_modules") or ())
            if (
                config["r"] > int(self._arguments.get("max_lora_rank") or 0)
                or not set(config["target_modules"]) <= targets
            ):
                raise Refused(
                    f"LoRA adapter {name} with rank {config['r']} is incompatible with the current LoRA memory pool "
                    "configuration."
                )
            if self._faults.next("/load_lora_adapter_from_tensors", ("lose_update",)) is None:
                payload = body["serialized_named_tensors"][0]
                await asyncio.to_thread(self._model.load_adapter, name, config, payload, body.get("expected_checksums"))
                if (fault := self._faults.next("/load_lora_adapter_from_tensors", ("old_adapter",))) is not None:
                    fault.num_wrong_values += self._model.copy_adapter(list(self.names)[-1], name)
                self.names[name] = True
        return self._answer()

    async def _unload(self, body: dict[str, Any]) -> Any:
        name = body["lora_name"]
        async with self._updating:
            if name not in self.names:
                raise Refused(f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self.names)}")
            self.names[name] = False
            while name in {run.lora for run in self._server.runs.values()}:
                await asyncio.sleep(0.01)
            del self.names[name]
            await asyncio.to_thread(self._model.unload_adapter, name)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        return {"success": True, "error_message": "", "loaded_adapters": dict.fromkeys(self.names, "__tensor__")}
