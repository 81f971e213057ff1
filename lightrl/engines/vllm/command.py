"""VLLMProcess: runs a vLLM server as a child process; makes its arguments, command line and environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lightrl.engines.servers.processes.command import flags
from lightrl.engines.servers.processes.model_process import ModelProcess
from lightrl.engines.vllm.client import LOGPROBS_MODE
from lightrl.engines.vllm.generation import MAX_LOGPROBS


class VLLMProcess(ModelProcess):
    """A vLLM server; see ModelProcess for the arguments. Only generation and `/v1` require the token."""

    title = "vLLM"
    info_path = "/health"
    preset: ClassVar[Mapping[str, str]] = {"model": "the model", "host": "host=", "port": "port=", "api_key": "token="}
    defaults: ClassVar[Mapping[str, Any]] = {
        "enable_scale_out": True,  # token ids in and out
        "logprobs_mode": LOGPROBS_MODE,
        "enable_prompt_tokens_details": True,  # the number of cached tokens shows whether a load emptied the cache
        "max_logprobs": MAX_LOGPROBS,
        "generation_config": "vllm",  # otherwise the checkpoint's generation_config sets top-p etc. on some routes
        "disable_uvicorn_access_log": True,
        "api_server_count": 1,  # with data parallelism, vLLM's default is more
    }
    cpu_defaults: ClassVar[Mapping[str, Any]] = {"dtype": "float32", "enforce_eager": True}

    @classmethod
    def named(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        named = super().named(args)
        if (count := named.get("api_server_count", 1)) not in (1, "1"):
            problem = "because an abort reaches only the requests of one API process"
            raise ValueError(f"server_args.api_server_count must be 1, {problem}, got {count!r}. Remove it.")
        return named

    def args_for(self, config: Mapping[str, Any], tp: int, seed: int) -> dict[str, Any]:
        max_context = config.get("max_position_embeddings")
        # One position more than the model's context, because a request for logprobs also generates a token.
        context = {} if max_context is None else {"max_model_len": max_context + 1}
        return {"seed": seed, "tensor_parallel_size": tp, **context}

    def command_line(self, secrets_file: str) -> list[str]:
        """Returns the server's program and arguments; no shell parses them, and they contain no secret."""
        program = [self.python, "-m", "vllm.entrypoints.cli.main", "serve", str(self.model_folder)]
        return [*program, "--host", self.host, "--port", str(self.port), *flags(self.args)]

    def environment(self) -> dict[str, str]:
        variables = super().environment()
        variables["VLLM_API_KEY"] = self.token  # all users on the machine can see a command line
        variables["VLLM_SERVER_DEV_MODE"] = "1"  # enables the routes that pause, load and check
        variables["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # see `args_for`
        variables["VLLM_NO_USAGE_STATS"] = "1"
        if self.args.get("enable_lora"):
            variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # enables the routes that load adapters
        if self.is_cpu_build:
            variables |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            variables.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
        return variables
