"""AdapterFolders: each weight version's adapters in a folder, from which vLLM servers load them under the same name.

vLLM evicts adapters (`max_cpu_loras`) and reads their folder again for the next request, so a folder stays while a
request may name it, and never changes. Unloading an adapter removes its name only, and does not wait for requests.

Source: vLLM 0.32.0, entrypoints/openai/models/serving.py, lora/worker_manager.py, config/lora.py.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save
from transformers import PreTrainedModel

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.source import ServerSource
from lightrl.engines.servers.sync.adapter_versions import Adapter, AdapterVersions
from lightrl.engines.servers.sync.served_adapters import AdapterDelivery
from lightrl.engines.vllm.client import VLLMClient
from lightrl.errors import EngineError, WeightSyncError
from lightrl.models.images import vision_kind

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM accepts for max_lora_rank


@dataclass
class AdapterFolders(AdapterVersions):
    """Writes adapters to `root`, and checks that a server was started with room for them."""

    root: Path = Path()

    async def pack(self, adapter: Adapter) -> str:
        return str(await in_thread(self._write, adapter, self.names()))

    async def give(self, server: Server, adapter: Adapter, payload: str) -> None:
        assert isinstance(server.client, VLLMClient)
        if problem := unfit(await server.client.lora_config(), self.form.server_args):
            raise EngineError(f"{server.url} was started with {problem} for this policy's adapters.")
        await super().give(server, adapter, payload)

    def _write(self, adapter: Adapter, names: Collection[str]) -> Path:
        """Writes an adapter's folder, completely or not at all, and removes folders that no request can name."""
        folder, unfinished = self.root / adapter.name, self.root / ".unfinished"
        try:
            unfinished.mkdir(parents=True, exist_ok=True)
            for other in self.root.iterdir():
                if other.name not in {*names, folder.name, unfinished.name}:
                    shutil.rmtree(other, ignore_errors=True)
            content = save(dict(adapter.tensors), metadata={"format": "pt"})
            files = {"adapter_config.json": json.dumps(self.form.config).encode(), "adapter_model.safetensors": content}
            if not all((folder / name).is_file() and (folder / name).read_bytes() == files[name] for name in files):
                shutil.rmtree(folder, ignore_errors=True)  # cut off when its host lost power
                for name in files:
                    (unfinished / name).write_bytes(files[name])
                unfinished.rename(folder)
        except OSError as error:
            raise WeightSyncError(f"The adapters could not be written to {folder}: {error}.") from error
        return folder


class FolderDelivery(AdapterDelivery):
    """Sends the base once, and then only the adapters of each version, in folders."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transport != "disk":
            raise ValueError(
                f"adapters='served' needs transport='disk' for VLLMEngine, got {self.transport!r}, because vLLM reads "
                "adapters from a folder. Set disk, and a weight_folder if servers run on other hosts."
            )

    def expect_policy(self, policy: PreTrainedModel, num_versions: int) -> None:
        super().expect_policy(policy, num_versions)
        assert self.form is not None
        targets = self.form.config["target_modules"]
        if vision_kind(policy.config) is not None or "lm_head" in targets:  # vLLM crashes on prompts' logprobs
            raise ValueError("On vLLM, adapters='served' excludes image models and lm_head. Set adapters to merged.")
        rank = max(self.form.config["r"], *(self.form.config.get("rank_pattern") or {"": 1}).values())
        if rank > RANKS[-1]:
            raise ValueError(f"lora.rank must be at most {RANKS[-1]} on vLLM with adapters='served', got {rank}.")
        max_rank = min(allowed for allowed in RANKS if allowed >= rank)
        max_loras = num_versions + 1  # a version is loaded before the oldest one is unloaded
        args = {"enable_lora": True, "max_lora_rank": max_rank, "max_loras": max_loras, "lora_target_modules": targets}
        how_to_start = (
            f"Start the servers with --enable-lora --max-lora-rank {max_rank} --max-loras {max_loras} "
            f"--lora-target-modules {' '.join(targets)} and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or set merged."
        )
        self.form = dataclasses.replace(self.form, server_args=args, how_to_start=how_to_start)

    def versions(self, fleet: ServerFleet, source: ServerSource) -> AdapterFolders:
        assert self.form is not None
        root = Path(self.weight_folder or source.folder).absolute() / "adapters"
        return AdapterFolders(fleet, self.form, timeout_s=source.timeouts.sync_s, root=root)


def unfit(started: Mapping[str, Any] | None, needed: Mapping[str, Any]) -> str:
    """Describes the first argument of `started` with which vLLM cannot serve the adapters; "" if there is none."""
    if started is None:
        return "enable_lora=False instead of True"
    for name, value in needed.items():
        given = started.get(name, value)
        if isinstance(value, list):  # vLLM ignores adapters of other layers, and wraps all layers without a list
            if not isinstance(given, list) or set(value) - set(given) or "lm_head" in given:
                return f"{name}={given} instead of {value}"
        elif given is None or int(given) < value:
            return f"{name}={given} instead of {'' if value is True else 'at least '}{value}"
    return ""
