"""SGLangClient: a method for each HTTP path of an SGLang server that lightrl uses.

Paths and fields match SGLang 0.5.21 and later; `begin_weight_update` detects an older server.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch

from lightrl.engines.servers.client import GroupPlace, MemoryPart, ServerClient, ServerInfo, TensorLayout
from lightrl.engines.servers.connection import ServerRefused
from lightrl.engines.servers.request import CompletionDraft, check_answers
from lightrl.engines.sglang import generation
from lightrl.errors import EngineError
from lightrl.weights.digests import RankDigests
from lightrl.weights.server_layout import DTYPES
from lightrl.weights.shared_memory import LOAD_FORMAT

_NOT_FOUND = 404
# Excludes speculative decoding's draft models, which share some parameters with the target model.
_TARGET = {"selector": "target"}
# Arguments that change parameters' values or which ranks hold them; see `layout_problem`.
_OTHER_LAYOUTS = ("quantization", "torchao_config", "enable_dp_attention", "enable_dp_lm_head", "enable_fp32_lm_head",
                  "modelopt_quant", "rl_quant_profile", "enable_eplb", "ep_num_redundant_experts")  # fmt: skip
# Argument values that keep experts in the checkpoint's order; other values reorder them.
_PLAIN_EXPERTS = {"moe_runner_backend": ("auto", "triton"), "moe_a2a_backend": ("none",),
                  "init_expert_location": ("trivial",)}  # fmt: skip


class SGLangClient(ServerClient):
    """One SGLang server; see `ServerClient` for the methods and `Connection` for the arguments."""

    program = "an SGLang server"
    version = "SGLang 0.5.23"
    column_help: ClassVar = {
        "supports": "Use SGLang 0.5.20 or later.",
        "routes": "A server needs enable_return_routed_experts, and a gateway must forward routed_experts: set router "
        "to null, or record_routes to false.",
    }
    hints: ClassVar = {
        (_NOT_FOUND, "/model_info"): "This is not an SGLang server. If it is a gateway, set router to it, and urls to "
        "the servers."
    }
    read_answer = staticmethod(generation.read_answer)

    @staticmethod
    def request_of(draft: CompletionDraft, rid: str, cache_key: str) -> dict[str, Any]:
        body, named = generation.request_of(draft, rid, cache_key), draft.named_version
        return body if named is None else body | {"lora_path": named.name}

    async def logprobs(self, token_ids: list[int], *, weights: str | None = None) -> list[float]:
        params = {"max_new_tokens": 0, "temperature": 1.0}
        body = {"input_ids": token_ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        if weights is not None:
            body["lora_path"] = weights
        answer = await self.ask(body, num_retries=0)
        with self.reading(self.generate_path):
            logprobs = answer["meta_info"].get("input_token_logprobs") or []
            return [0.0, *(float(entry[0]) for entry in logprobs[1:])] if len(logprobs) == len(token_ids) else []

    async def num_cached(self, token_ids: list[int], rid: str, cache_key: str, *, timeout_s: float) -> int:
        # Not greedy, because one greedy request makes SGLang sample different tokens for the whole batch.
        params = {"max_new_tokens": 1, "temperature": 1.0}
        body = {"rid": rid, "input_ids": token_ids, "sampling_params": params, "extra_key": cache_key}
        answer = await self.ask(body, num_retries=0, timeout_s=timeout_s)
        with self.reading(self.generate_path):
            return int(answer["meta_info"].get("cached_tokens") or 0)

    async def ask(self, body: dict[str, Any], **settings: Any) -> dict[str, Any]:
        """Calls `generate`; raises MalformedAnswer if the answer belongs to a different request."""
        body.setdefault("rid", secrets.token_hex(16))
        answer: dict[str, Any] = await self.generate(body, **settings)
        with self.reading(self.generate_path):
            self._check(answer["meta_info"], body["rid"], body["input_ids"])
        return answer

    def _check(self, meta: Mapping[str, Any], rid: str, token_ids: Sequence[int]) -> None:
        check_answers(rid, len(token_ids), meta.get("id"), meta.get("prompt_tokens"), self.name)

    async def classify(self, rows: Sequence[Sequence[int]], *, timeout_s: float = 0.0) -> list[list[float]]:
        """Returns the outputs of a reward model's head, usually one, at the last token of each row.

        The server needs `--is-embedding` and a `…ForSequenceClassification` model.
        """
        body: dict[str, Any] = {"rid": [secrets.token_hex(16) for _ in rows], "input_ids": [list(row) for row in rows]}
        answer = await self.request("POST", "/classify", body, timeout_s=timeout_s)
        with self.reading("/classify"):
            for entry, rid, row in zip(answer, body["rid"], rows, strict=True):
                self._check(entry["meta_info"], rid, row)
            return [entry["embedding"] for entry in answer]

    async def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        await self.request("POST", "/abort_request", {"rid": rid, "abort_all": abort_all}, read=None)

    async def model_info(self, *, timeout_s: float = 0.0, num_retries: int | None = None) -> dict[str, Any]:
        """Returns `model_path`, the current `weight_version` and more; also the cheapest health check."""
        try:
            with self.reading("/model_info"):
                return {**await self.request("GET", "/model_info", timeout_s=timeout_s, num_retries=num_retries)}
        except ServerRefused as error:
            if error.status != _NOT_FOUND or not await self.has_path("/version", timeout_s):
                raise
            problem = f"{self.name} is a vLLM server. Set the engine to VLLMEngine, or urls to SGLang servers."
            raise ServerRefused(problem, status=_NOT_FOUND) from error

    async def server_info(self, *, timeout_s: float = 0.0) -> ServerInfo:
        with self.reading("/server_info"):
            return read_server_info(await self.request("GET", "/server_info", timeout_s=timeout_s))

    async def pause(self, *, timeout_s: float = 0.0) -> None:
        await self.request("POST", "/pause_generation", {"mode": "retract"}, timeout_s=timeout_s, read=None)

    async def resume(self, *, timeout_s: float = 0.0) -> None:
        await self.request("POST", "/continue_generation", {"torch_empty_cache": True}, timeout_s=timeout_s, read=None)

    async def flush_cache(self, *, wait_s: float = 0.0) -> None:
        timeout_s = wait_s + self.timeouts.request_s if wait_s else 0.0
        await self.request("POST", f"/flush_cache?timeout={wait_s:g}", {}, read=None, timeout_s=timeout_s)

    async def release_memory(self, tags: Sequence[MemoryPart]) -> None:
        await self.request("POST", "/release_memory_occupation", {"tags": tags}, num_retries=0)

    async def resume_memory(self, tags: Sequence[MemoryPart]) -> None:
        await self.request("POST", "/resume_memory_occupation", {"tags": tags}, num_retries=0)

    async def begin_weight_update(self) -> bool:
        """Returns False if SGLang is older than 0.5.21."""
        try:
            await self._update("/begin_weight_update", _TARGET)
        except ServerRefused as error:
            if error.status == _NOT_FOUND:
                return False
            raise
        return True

    async def end_weight_update(self) -> None:
        await self._update("/end_weight_update", {})

    async def update_weights_from_disk(self, folder: str, weight_version: str | None, *, timeout_s: float) -> None:
        # By default, SGLang uses the `load_format` that it was started with; with `dummy`, it refuses real weights.
        body = {"model_path": folder, "load_format": "auto", "weight_version": weight_version, "flush_cache": True}
        await self._update("/update_weights_from_disk", body, timeout_s)

    async def init_weights_group(self, name: str, place: GroupPlace, *, timeout_s: float) -> None:
        await self._update("/init_weights_update_group", {"group_name": name, **asdict(place)}, timeout_s)

    async def update_weights_from_distributed(
        self, layout: TensorLayout, group_name: str, weight_version: str | None, *, timeout_s: float
    ) -> None:
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
        self, payloads: Sequence[str], weight_version: str | None, *, timeout_s: float
    ) -> None:
        body = {"serialized_named_tensors": list(payloads), "load_format": LOAD_FORMAT}
        await self._update("/update_weights_from_tensor", body | _TARGET | _version(weight_version), timeout_s)

    async def load_adapter(
        self, name: str, config: dict[str, Any], payloads: Sequence[str], checksums: dict[str, str], *, timeout_s: float
    ) -> None:
        """Adds a LoRA adapter from one payload per tp rank. The server crashes if a tensor's SHA-256 does not match."""
        body = {"lora_name": name, "config_dict": config, "expected_checksums": checksums, "load_format": LOAD_FORMAT}
        body |= {"serialized_named_tensors": list(payloads)}
        await self._update("/load_lora_adapter_from_tensors", body, timeout_s)

    async def unload_adapter(self, name: str, *, timeout_s: float = 0.0) -> None:
        """Removes a LoRA adapter once no request uses it; until then the server delays other adapter updates."""
        await self._update("/unload_lora_adapter", {"lora_name": name}, timeout_s)

    async def set_weight_version(self, weight_version: str) -> None:
        body = {"new_version": weight_version, "abort_all_requests": False}
        await self._update("/update_weight_version", body, num_retries=None)

    async def checksum(self, *, timeout_s: float = 0.0) -> dict[str, Any]:
        """Returns checksums of the server's weights: `per_engine_checksum`, and one for each rank and parameter."""
        return await self._update("/weights_checker", {"action": "checksum"}, timeout_s, num_retries=None)

    async def digests(self, *, timeout_s: float = 0.0) -> RankDigests | None:
        try:
            with self.reading("/weights_checker"):
                return target_digests(await self.checksum(timeout_s=timeout_s))
        except ServerRefused as error:
            if error.status == _NOT_FOUND:
                return None
            raise

    def is_unknown_adapter(self, error: EngineError) -> bool:
        """Whether the server refused a request because it lacks the adapter, which happens after a restart."""
        return isinstance(error, ServerRefused) and "LoRA adapter" in str(error)


def _version(weight_version: str | None) -> dict[str, Any]:
    return {"weight_version": weight_version, "flush_cache": weight_version is not None}


def read_server_info(info: Mapping[str, Any]) -> ServerInfo:
    """Parses an answer from `/server_info`, which contains the arguments that the server was started with."""
    started = info.get("startup_time")
    identity = None
    if started is not None:
        fields = json.dumps([started, info.get("random_seed"), info.get("launch_command")], sort_keys=True)
        identity = hashlib.sha256(fields.encode()).hexdigest()[:16]  # the command line may contain a key
    dtype = getattr(torch, str(info.get("dtype")), None)
    problems = [name for name in _OTHER_LAYOUTS if info.get(name) and (name, info[name]) != ("quantization", "fp8")]
    sizes = ("pp_size", "attn_cp_size", "dcp_size", "moe_dp_size")
    problems += [name for name in sizes if int(info.get(name) or 1) > 1]
    problems += [name for name, plain in _PLAIN_EXPERTS.items() if info.get(name) not in (None, *plain)]
    tp_size, is_coarse = int(info.get("tp_size") or 1), str(info.get("kv_cache_dtype")).startswith("fp8")
    return ServerInfo(
        identity,
        tp_size,
        dtype if dtype in DTYPES else None,
        info.get("device") == "cpu",
        f"it was started with {', '.join(f'{name}={info[name]}' for name in problems)}" if problems else None,
        str(info.get("model_path") or ""),
        str(info.get("json_model_override_args") or "{}"),
        int(info.get("page_size") or 1),
        info.get("dtype") == "auto" and not problems,
        "float8_e4m3fn" if is_coarse or info.get("quantization") else str(info.get("dtype") or "auto"),
        tp_size * int(info.get("pp_size") or 1),
        returned_columns=frozenset(name for name, names in generation.RETURNED.items() if info.get(names[0])),
        ep=int(info.get("ep_size") or 1),
    )


def target_digests(answer: Mapping[str, Any]) -> RankDigests:
    """Returns the digests in an answer from `/weights_checker`, except draft models'.

    Source: SGLang 0.5.23, managers/scheduler_components/weight_updater.py.
    """
    by_rank: list[tuple[int, dict[str, str]]] = []
    for entry in answer.get("ranks") or []:
        infos = entry.get("parallelism_info") or {}
        infos = infos if isinstance(infos, list) else [infos]
        roles = tuple(f"{info['role']}." for info in infos if info.get("role", "target") != "target")
        target = {
            name.replace(".base_layer.", "."): digest  # `enable_lora` adds base_layer
            for name, digest in entry["checksums"].items()
            if not name.startswith(roles)
        }
        by_rank.append((int(infos[0].get("tp_rank") or 0) if infos else 0, target))
    return [target for _, target in sorted(by_rank, key=lambda item: item[0])]
