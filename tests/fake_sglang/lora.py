"""The fake server's routes of LoRA adapters: load, unload, and the list of what it has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fake_sglang.faults import Faults
from fake_sglang.script import Refused, ScriptedModel


class LoraRoutes:
    """As SGLang 0.5.23: adapters by name; a second of a name is refused; an unload waits for requests that use it.

    Args:
        arguments: of the server, with SGLang's `enable_lora`, `max_lora_rank` and `lora_target_modules`.
        in_use: names of the adapters of running requests.
        die: ends the process, as the real server ends when a checksum differs.
    """

    def __init__(
        self,
        model: ScriptedModel,
        *,
        arguments: dict[str, Any],
        faults: Faults,
        in_use: Callable[[], set[str | None]],
        die: Callable[[str], Any],
    ) -> None:
        self.names: dict[str, bool] = {}  # loaded; False while it is being unloaded
        self._model = model
        self._arguments = arguments
        self._faults = faults
        self._in_use = in_use
        self._die = die
        self._updating = asyncio.Lock()

    def routes(self) -> dict[str, Any]:
        return {"/load_lora_adapter_from_tensors": self._load, "/unload_lora_adapter": self._unload}

    def check(self, name: str | None) -> None:
        """Refuses a request for an adapter that the server does not have."""
        if name is None:
            return
        if not self._arguments.get("enable_lora"):
            raise Refused(f"LoRA adapter {name} was requested, but LoRA is not enabled.")
        if not self.names.get(name):
            raise Refused(f"Got LoRA adapter that has never been loaded: {name}. All loaded: {list(self.names)}")

    async def _load(self, body: dict[str, Any]) -> Any:
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
                await asyncio.to_thread(
                    self._model.load_adapter, name, config, payload, body.get("expected_checksums"), self._die
                )
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
            while name in self._in_use():
                await asyncio.sleep(0.01)
            del self.names[name]
            await asyncio.to_thread(self._model.unload_adapter, name)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        return {"success": True, "error_message": "", "loaded_adapters": dict.fromkeys(self.names, "__tensor__")}
