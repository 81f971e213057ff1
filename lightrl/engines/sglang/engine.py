"""SGLangEngine: rollouts by SGLang servers, given by address or started here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightrl.engines.servers.engine import ServerEngine
from lightrl.engines.servers.processes.process import ServerProcess, make_servers
from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.command import SGLangProcess, check_server_args, dtype_of_auto, find_python

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class SGLangEngine(ServerEngine):
    """A rollout engine of one or many SGLang servers: token ids in, token ids out, a weight version on each.

    Logprobs are SGLang's `output_token_logprobs`, with top-p or top-k those within the token's support, as `Completion`
    defines them. The seed of a request determines its tokens only if the servers run with
    `enable_deterministic_inference`. A colocated server needs `enable_memory_saver: true`.

    Args:
        sglang_python: Python of the environment that has SGLang; for None see docs/serve-with-sglang.md.
        settings: of `ServerEngine`; `server_args` such as `{mem_fraction_static: 0.8}`.
    """

    client_type = SGLangClient

    def __init__(self, *, sglang_python: str | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.sglang_python = sglang_python

    def check_start(self) -> None:
        find_python(self.sglang_python)
        check_server_args(self.server_args)

    def make_processes(self, model_folder: Path, num_servers: int, **settings: Any) -> list[ServerProcess]:
        args: dict[str, Any] = {"load_format": "dummy"}
        if self.placement == "colocated" and torch.cuda.is_available():
            args["enable_memory_saver"] = True
        if self.adapters == "served" and self.expected_adapters is not None:
            shape, num_versions = self.expected_adapters
            args |= shape.server_args(num_versions)
        settings |= {"args": args | self.server_args, "python": self.sglang_python}
        return make_servers(SGLangProcess, model_folder, num_servers, **settings)

    def dtype_of_auto(self, config: PretrainedConfig | None) -> torch.dtype:
        return dtype_of_auto(config)
