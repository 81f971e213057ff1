"""SGLangEngine: rollouts on SGLang servers that are given by address or started by the engine."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from transformers import PretrainedConfig

from lightrl.checks.annotations import Unpack
from lightrl.engines.servers.engine import ServerEngine, ServerSettings
from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.command import SGLangProcess
from lightrl.engines.sglang.generation import RETURNED


class SGLangEngine(ServerEngine):
    """A rollout engine on SGLang servers. It exchanges token ids and records the weight version of every token.

    Logprobs are SGLang's `output_token_logprobs`; with top-p or top-k, they are over the token's support, as in
    `Completion`. A request's seed determines the tokens only if servers run with `enable_deterministic_inference`.
    A colocated server needs `enable_memory_saver: true`.

    Args:
        sglang_python: Python in the environment that has SGLang; None searches for it (docs/serve-with-sglang.md).
        settings: settings for `ServerEngine`. `server_args` are SGLang's, such as `{mem_fraction_static: 0.8}`. With
            `{quantization: fp8}`, linear weights are sent in block FP8 (weights/block_fp8.py), as servers with an FP8
            checkpoint require. This has not been tested on a GPU yet.
    """

    client_type = SGLangClient
    process_type = SGLangProcess

    def __init__(self, *, sglang_python: str | None = None, **settings: Unpack[ServerSettings]) -> None:
        super().__init__(**settings)
        self.source.python = sglang_python

    @property
    def is_quantized(self) -> bool:  # type: ignore[override]
        return self.process_type.named(self.source.args).get("quantization") is not None

    def check(self) -> None:
        super().check()
        if not self.is_quantized:
            return
        self.delivery.check_loads_whole("server_args.quantization")
        if self.delivery.transport == "distributed" and not torch.cuda.is_available():
            raise ValueError("transport='distributed' cannot send float8 over gloo. Set disk, tensor or delta.")

    def take_memory(self, key_value_bytes: float, fraction: float) -> str:
        if not self.source.num:
            return ""
        fraction = self.source.args.setdefault("mem_fraction_static", fraction)
        return f"trainer.engine's mem_fraction_static is {fraction}"

    def start_args(self, columns: Collection[str]) -> dict[str, Any]:
        args: dict[str, Any] = {}
        if self.is_colocated and torch.cuda.is_available():
            args["enable_memory_saver"] = True
        return args | {RETURNED[name][0]: True for name in columns} | self.delivery.start_args()

    def dtype_of_auto(self, config: PretrainedConfig) -> torch.dtype:
        """Returns SGLang 0.5.23's `auto`: the config's dtype or, if that is float32, float16 (for Gemma, bfloat16)."""
        dtype = super().dtype_of_auto(config)
        if dtype != torch.float32:
            return dtype
        return torch.bfloat16 if getattr(config, "model_type", "").startswith("gemma") else torch.float16
