"""SGLangProcess: runs an SGLang server as a child process; makes its arguments, command line and environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lightrl.checks.bounds import check_choice
from lightrl.engines.servers.processes.command import flags
from lightrl.engines.servers.processes.model_process import ModelProcess
from lightrl.weights import block_fp8

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_RESERVED_TOKENS = 8


def _fp8_kernels() -> dict[str, Any]:
    """Returns arguments for kernels that do not repack block FP8 weights, so that new weights can be loaded."""
    if not torch.cuda.is_available():
        return {}
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9):  # Marlin would repack them
        raise ValueError(
            "server_args.quantization=fp8 needs GPUs with compute capability 8.9 or higher, like an H100; this GPU has "
            f"{'.'.join(map(str, capability))}. Omit the argument."
        )
    if capability[0] == 10:  # DeepGEMM and TensorRT-LLM would repack them
        return {"fp8_gemm_backend": "triton", "moe_runner_backend": "triton"}
    return {}


class SGLangProcess(ModelProcess):
    """An SGLang server; see ModelProcess for the arguments."""

    title = "SGLang"
    secret_arguments = ("api-key", "admin-api-key")
    info_path = "/model_info"  # servers before 0.5.20 or so have no /ready
    preset: ClassVar[Mapping[str, str]] = {
        "model_path": "the model folder",
        "host": "host=",
        "port": "port=",
        "config": "server_args",
        "api_key": "token=",
        "admin_api_key": "token=",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "sampling_defaults": "openai",  # otherwise the checkpoint's generation_config sets top-p etc. on some routes
        "skip_server_warmup": True,
    }
    cpu_defaults: ClassVar[Mapping[str, Any]] = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "dtype": "float32",
        "lora_backend": "torch_native",
        "mem_fraction_static": 0.1,
        "max_total_tokens": 16384,
        "sleep_on_idle": True,  # otherwise an idle server keeps a core busy
        "enable_deterministic_inference": True,  # otherwise SGLang ignores request seeds; costs nothing on a CPU
    }

    @classmethod
    def served_config(cls, config: PretrainedConfig, args: Mapping[str, Any], tp: int) -> PretrainedConfig:
        named = cls.named(args)
        quantization, ep = named.get("quantization"), int(named.get("ep_size") or 1)
        check_choice(("fp8", None), **{"server_args.quantization": quantization})
        return config if quantization is None else block_fp8.quantized_config(config, tp, ep)

    def args_for(self, config: Mapping[str, Any], tp: int, seed: int) -> dict[str, Any]:
        max_context = config.get("max_position_embeddings")
        kernels = {} if self.is_cpu_build or "quantization_config" not in config else _fp8_kernels()
        # Slightly above the model's context: SGLang reserves up to 6 positions, but rollouts may use the whole context.
        context = {} if max_context is None else {"context_length": max_context + _RESERVED_TOKENS}
        return {"random_seed": seed, **context, **({"tp_size": tp} if tp > 1 else {}), **kernels}

    def command_line(self, secrets_file: str) -> list[str]:
        """Returns the server's program and arguments; no shell parses them, and they contain no secret."""
        module = "lightrl_sglang_cpu.launch" if self.is_cpu_build else "sglang.launch_server"
        return [
            *(self.python, "-m", module, "--model-path", str(self.model_folder)),
            *("--host", self.host, "--port", str(self.port), "--config", secrets_file, *flags(self.args)),
        ]

    def environment(self) -> dict[str, str]:
        variables = super().environment()
        # Otherwise an interrupted request loses up to 49 tokens at its end.
        variables["SGLANG_FORCE_STREAM_INTERVAL"] = "1"
        variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # see `args_for`
        if self.is_cpu_build:
            variables["OMP_NUM_THREADS"] = "1"
        return variables
