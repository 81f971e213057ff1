"""VLLMClient: a method for each HTTP path of a vLLM server that lightrl uses.

    purpose                path in vLLM 0.32
    generate, logprobs     POST /inference/v1/generate                   needs --enable-scale-out
    health check           GET  /weight_info                             this and all below need VLLM_SERVER_DEV_MODE=1
    arguments              GET  /server_info?config_format=json
    pause, resume, abort   POST /pause?mode=keep, /resume, /abort_requests
    load a folder          POST /collective_rpc with reload_weights
    set the version        POST /update_weight_version
    flush the cache        POST /reset_prefix_cache?reset_running_requests=true
    digests                POST /weight_checker
    adapters               GET  /v1/models, POST /v1/load_lora_adapter, /v1/unload_lora_adapter
    broadcast              POST /init_weight_transfer_engine, /start_weight_update, /update_weights,
                                /finish_weight_update, /shutdown_weight_transfer_engine

vLLM requires its API key only on the first path and on /v1, so anyone who can reach the port can load weights.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, ClassVar

from lightrl.columns import ROUTES
from lightrl.engines.servers.client import GroupPlace, ServerClient, ServerInfo, TensorLayout
from lightrl.engines.servers.connection import ServerRefused
from lightrl.engines.servers.request import CompletionDraft, check_answers
from lightrl.engines.vllm import generation
from lightrl.errors import EngineError
from lightrl.weights.digests import RankDigests
from lightrl.weights.server_layout import DTYPES

LOGPROBS_MODE = "processed_logprobs"
_SERVER_INFO = "/server_info?config_format=json"
_BAD_REQUEST, _UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 400, 401, 403, 404
# Arguments that change which rank holds a parameter; see `layout_problem`.
_OTHER_LAYOUTS = ("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size")
_RESTART_HELP = "Restart it with them, or start a server with `lightrl serve --engine vllm`."
_ROUTES_FLAG = "enable_return_routed_experts"
_EMPTY_DIGEST = "e3b0c44298fc1c14"  # SHA-256 of an empty tensor; on a CPU vLLM stores the packed values elsewhere


class VLLMClient(ServerClient):
    """One vLLM server; see `ServerClient` for the methods and `Connection` for the arguments."""

    generate_path = "/inference/v1/generate"
    program = "a vLLM server"
    version = "vLLM 0.32"
    column_help: ClassVar = dict.fromkeys(
        ("supports", "behavior_topk_ids"),
        f"With top_p, top_k or topk_logprobs, vLLM needs --max-logprobs {generation.MAX_LOGPROBS}.",
    ) | {ROUTES.name: f"vLLM needs --{_ROUTES_FLAG.replace('_', '-')}; or set record_routes to false."}
    hints: ClassVar = {(_BAD_REQUEST, generate_path): f"Fix the request. {column_help['supports']}"}
    read_answer = staticmethod(generation.read_answer)
    _checked_identity = ""  # identity of the server process whose arguments were checked

    @staticmethod
    def request_of(draft: CompletionDraft, rid: str, cache_key: str) -> dict[str, Any]:
        body, named = generation.request_of(draft, rid, cache_key), draft.named_version
        return body if named is None else body | {"model": named.name}

    async def logprobs(self, token_ids: list[int], *, weights: str | None = None) -> list[float]:
        params = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        body = {"request_id": secrets.token_hex(16), "token_ids": token_ids, "sampling_params": params}
        answer = await self._ask(body if weights is None else body | {"model": weights})
        self._num_cached_of(answer)  # at the run's first answer, rejects a server that does not report cached tokens
        with self.reading(self.generate_path):
            candidates = zip(token_ids[1:], answer["prompt_logprobs"][1:], strict=True)
            return [0.0, *(float(by_token[str(token)]["logprob"]) for token, by_token in candidates)]

    async def num_cached(self, token_ids: list[int], rid: str, cache_key: str, *, timeout_s: float) -> int:
        params = {"max_tokens": 1, "detokenize": False}
        body = {"request_id": rid, "token_ids": token_ids, "sampling_params": params, "cache_salt": cache_key}
        return self._num_cached_of(await self._ask(body, timeout_s))

    async def _ask(self, body: dict[str, Any], timeout_s: float = 0.0) -> dict[str, Any]:
        answer: dict[str, Any] = await self.generate(body, num_retries=0, timeout_s=timeout_s)
        with self.reading(self.generate_path):
            rid, num_read = answer["request_id"].removeprefix(generation.PREFIX), answer["usage"]["prompt_tokens"]
        check_answers(body["request_id"], len(body["token_ids"]), rid, num_read, self.name)
        return answer

    async def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        body = {} if abort_all else {"request_ids": [generation.PREFIX + rid]}
        await self.request("POST", "/abort_requests", body, read=None)

    async def model_info(self, *, timeout_s: float = 0.0, num_retries: int | None = None) -> dict[str, Any]:
        try:
            with self.reading("/weight_info"):
                return {**await self.request("GET", "/weight_info", timeout_s=timeout_s, num_retries=num_retries)}
        except ServerRefused as error:
            if error.status != _NOT_FOUND:
                raise
            raise ServerRefused(await self._explain_absence(timeout_s), status=_NOT_FOUND) from error

    async def server_info(self, *, timeout_s: float = 0.0) -> ServerInfo:
        """Raises EngineError if the server was started without an argument that rollouts need."""
        with self.reading("/server_info"):
            config = (await self.request("GET", _SERVER_INFO, timeout_s=timeout_s))["vllm_config"]
            info, logprobs_mode = read_server_info(config), config["model_config"]["logprobs_mode"]
        if info.identity != self._checked_identity:
            missing = await self._missing_arguments(timeout_s)
            if logprobs_mode != LOGPROBS_MODE:
                missing.append(f"--logprobs-mode {LOGPROBS_MODE}")
            if config["parallel_config"].get("_api_process_count", 1) != 1:  # an abort reaches one
                missing.append("--api-server-count 1")
            if missing:
                raise EngineError(_describe_missing(self.name, missing))
            self._checked_identity = str(info.identity)
        return info

    async def pause(self, *, timeout_s: float = 0.0) -> None:
        await self.request("POST", "/pause?mode=keep", {}, timeout_s=timeout_s, read=None)

    async def resume(self, *, timeout_s: float = 0.0) -> None:
        await self.request("POST", "/resume", {}, timeout_s=timeout_s, read=None)

    async def flush_cache(self, *, wait_s: float = 0.0) -> None:
        """Empties the prefix cache; running requests recompute their KV cache."""
        await self._update("/reset_prefix_cache?reset_running_requests=true", {})

    async def begin_weight_update(self) -> bool:
        await self._update("/start_weight_update", {})
        return True

    async def end_weight_update(self) -> None:
        await self._update("/finish_weight_update", {})

    async def update_weights_from_disk(self, folder: str, weight_version: str | None, *, timeout_s: float) -> None:
        """Loads a folder, even after a start with dummy weights; the server crashes if the folder is unreadable."""
        real_weights = {"overrides": {"load_config": {"load_format": "auto"}}}
        for method, arguments in (("update_config", real_weights), ("reload_weights", {"weights_path": folder})):
            await self._update("/collective_rpc", {"method": method, "kwargs": arguments}, timeout_s)
        await self._take_version(weight_version)

    async def set_weight_version(self, weight_version: str) -> None:
        await self._update("/update_weight_version", {"new_version": weight_version}, num_retries=None)

    async def digests(self, *, timeout_s: float = 0.0) -> RankDigests | None:
        with self.reading("/weight_checker"):
            answer = await self._update("/weight_checker", {"action": "checksum"}, timeout_s, num_retries=None)
            return rank_digests(answer["checksums"])

    async def init_weights_group(self, name: str, place: GroupPlace, *, timeout_s: float) -> None:
        """Makes the server join the group with NCCL's unique id, which is the group's name."""
        ranks = {"rank_offset": place.rank_offset, "world_size": place.world_size, "packed": False}
        body = {"init_info": {"nccl_unique_id_b64": name, **ranks}}
        await self._update("/init_weight_transfer_engine", body, timeout_s)

    async def update_weights_from_distributed(
        self, layout: TensorLayout, group_name: str, weight_version: str | None, *, timeout_s: float
    ) -> None:
        body = {
            "names": [name for name, _, _ in layout],
            "dtype_names": [str(dtype).removeprefix("torch.") for _, dtype, _ in layout],
            "shapes": [list(shape) for _, _, shape in layout],
        }
        await self._update("/update_weights", {"update_info": body}, timeout_s)
        await self._take_version(weight_version)

    async def destroy_weights_group(self, name: str) -> None:
        await self._update("/shutdown_weight_transfer_engine", {})

    async def lora_config(self) -> dict[str, Any] | None:
        """Returns the arguments for adapters that the server was started with; None without --enable-lora."""
        with self.reading("/server_info"):
            config: dict[str, Any] | None = (await self.request("GET", _SERVER_INFO))["vllm_config"]["lora_config"]
            return config and {**config, "lora_target_modules": config["target_modules"]}

    async def load_adapter(
        self, name: str, config: dict[str, Any], payloads: Sequence[str], checksums: dict[str, str], *, timeout_s: float
    ) -> None:
        """Adds a LoRA adapter from the folder `payloads[0]`, which must stay while requests use the adapter."""
        body = {"lora_name": name, "lora_path": payloads[0]}
        await self.request("POST", "/v1/load_lora_adapter", body, timeout_s=timeout_s, num_retries=0, read=None)

    async def unload_adapter(self, name: str, *, timeout_s: float = 0.0) -> None:
        """Removes an adapter's name; requests that use the adapter continue."""
        path, body = "/v1/unload_lora_adapter", {"lora_name": name}
        await self.request("POST", path, body, timeout_s=timeout_s, num_retries=0, read=None)

    def is_unknown_adapter(self, error: EngineError) -> bool:
        """Whether the server refused a request because it lacks the adapter, which happens after a restart."""
        return isinstance(error, ServerRefused) and error.status == _NOT_FOUND and "The model `" in str(error)

    async def _take_version(self, weight_version: str | None) -> None:
        if weight_version is not None:
            await self.set_weight_version(weight_version)
            await self.flush_cache()

    def _num_cached_of(self, answer: dict[str, Any]) -> int:
        with self.reading(self.generate_path):
            details = answer["usage"]["prompt_tokens_details"]
            if details is not None:
                return int(details["cached_tokens"] or 0)
        raise EngineError(_describe_missing(self.name, ["--enable-prompt-tokens-details"]))

    async def _missing_arguments(self, timeout_s: float) -> list[str]:
        """Finds missing arguments with a request that is always refused; the `?` keeps it out of the queue."""
        try:
            await self.request("POST", f"{self.generate_path}?", {}, timeout_s=timeout_s, num_retries=0, read=None)
        except ServerRefused as error:
            if error.status == _UNAUTHORIZED:
                raise
            return ["--enable-scale-out"] if error.status == _FORBIDDEN else []
        return []

    async def _explain_absence(self, timeout_s: float) -> str:
        """Describes, for an error message, the program that answers at this address but has no /weight_info."""
        if await self.has_path("/model_info", timeout_s):
            return f"{self.name} is an SGLang server. Set the engine to SGLangEngine, or urls to vLLM servers."
        if not await self.has_path("/version", timeout_s):
            return f"{self.name} is not a vLLM server. Set urls to the addresses of vLLM servers."
        if await self.has_path(_SERVER_INFO, timeout_s):
            return f"{self.name} is a vLLM server without /weight_info. Use vLLM 0.32 or later."
        missing = ["VLLM_SERVER_DEV_MODE=1 in its environment", *await self._missing_arguments(timeout_s)]
        return _describe_missing(self.name, missing)


def _describe_missing(name: str, arguments: Sequence[str]) -> str:
    return f"The vLLM server at {name} was started without {' and '.join(arguments)}. {_RESTART_HELP}"


def read_server_info(config: dict[str, Any]) -> ServerInfo:
    """Parses `vllm_config` in an answer from `/server_info`."""
    model, parallel, cache = config["model_config"], config["parallel_config"], config["cache_config"]
    dtype_name = str(model["dtype"]).removeprefix("torch.")
    tp_size, pp_size = int(parallel["tensor_parallel_size"]), int(parallel["pipeline_parallel_size"])
    settings = {"quantization": model["quantization"], **{name: parallel.get(name) for name in _OTHER_LAYOUTS}}
    problems = [f"{name}={value}" for name, value in settings.items() if value not in (None, 1)]
    returns_routes = model.get(_ROUTES_FLAG) or (config.get("aux_output_config") or {}).get(_ROUTES_FLAG)
    is_coarse = model["quantization"] or str(cache["cache_dtype"]).startswith("fp8")
    return ServerInfo(
        identity=str(config["instance_id"]),
        num_ranks=tp_size,
        dtype=next((dtype for dtype in DTYPES if str(dtype) == str(model["dtype"])), None),
        is_cpu=str(config["device_config"]["device"]) == "cpu",
        is_vllm=True,
        layout_problem=f"it was started with {', '.join(problems)}" if problems else None,
        model_path=str(model["model"]),
        page_tokens=int(cache["block_size"]),
        computes_in="float8_e4m3fn" if is_coarse else dtype_name,
        world_size=tp_size * pp_size,
        returned_columns=frozenset({ROUTES.name} if returns_routes else ()),
    )


def rank_digests(checksums: dict[str, str]) -> RankDigests:
    """Parses each rank's digests from `{"dp0:pp0:pcp0:tp1:model.norm.weight": "…64 digits"}`; "" for empty tensors."""
    ranks: dict[int, dict[str, str]] = {}
    for key, checksum in checksums.items():
        *_, rank, name = key.replace(".base_layer.", ".").split(":")  # --enable-lora adds base_layer
        digest = "" if checksum.startswith(_EMPTY_DIGEST) else checksum[:16]
        ranks.setdefault(int(rank.removeprefix("tp")), {})[name] = digest
    return [held for _, held in sorted(ranks.items())]
