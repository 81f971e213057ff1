"""The fake server with vLLM's interface: its routes and answers, on the same model, pause, cache and faults.

Its behavior was measured on vLLM 0.32 for the CPU: `keep`, an abort by the prefixed id, cached tokens of the same salt
alone, versions per token, the digest of nothing for what is packed; adapters from folders, which it reads again, and an
unload that waits for nothing.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.torch import load_file

from fake_sglang.script import Refused
from fake_sglang.server import FakeServer, json_handler
from lightrl.weights.shared_memory import payload_of

PREFIX = "generate-tokens-"
OF_NOTHING = hashlib.sha256(b"").hexdigest()
PACKED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


class FakeVLLMServer(FakeServer):
    """`vllm_without` in the arguments names what it lacks: `dev-mode`, `scale-out`, `details`, `mode`, `one` process.

    Without `max-logprobs` it allows vLLM's 20. Without `weight-info` it is an older vLLM, without `form` one whose
    answers have another form.
    """

    _folders: dict[str, Path]  # of the adapters, by name

    def is_open(self, path: str) -> bool:
        return not path.startswith(("/inference", "/v1"))

    def application(self) -> web.Application:
        self._folders = {}
        app = web.Application(middlewares=[self._around], client_max_size=2**32)
        without = self._without
        posts = {
            "/inference/v1/generate": self._generate_tokens if "scale-out" not in without else self._forbidden,
            "/v1/load_lora_adapter": self._take_adapter,
            "/v1/unload_lora_adapter": self._forget_adapter,
            "/fake/faults": self._add_fault,
            "/fake/pace": self._set_pace,
            "/fake/reset": self._reset,
        }
        gets = {"/version": self._version, "/health": self._health, "/fake/stats": self._stats}
        gets["/v1/models"] = self._models
        if "dev-mode" not in without:
            posts |= {
                "/pause": self._keep,
                "/resume": self._continue,
                "/abort_requests": self._abort_requests,
                "/collective_rpc": self._call,
                "/update_weight_version": self._name,
                "/reset_prefix_cache": self._reset_cache,
                "/weight_checker": self._digests,
            }
            gets |= {"/weight_info": self._weight_info, "/server_info": self._vllm_config}
        if "weight-info" in without:
            del gets["/weight_info"]
        for path, route in posts.items():
            app.router.add_post(path, json_handler(route))
        for path, handler in gets.items():
            app.router.add_get(path, handler)
        return app

    @property
    def _without(self) -> list[str]:
        return self.arguments.get("vllm_without") or []

    async def _forbidden(self, body: dict[str, Any]) -> Any:
        return _error(
            "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.", 403
        )

    async def _generate_tokens(self, body: dict[str, Any]) -> Any:
        if not body.get("token_ids") or "/" in body.get("cache_salt", ""):
            raise Refused("token_ids has to be a list that is not empty, cache_salt without /")
        if (adapter := body.get("model")) is not None and adapter not in self._lora.names:
            return _error(f"The model `{adapter}` does not exist.", 404)
        if adapter is not None and not (self._folders[adapter] / "adapter_config.json").exists():
            raise Refused(f"{adapter} was evicted, and its folder is missing")
        params = body["sampling_params"]
        num_logprobs, seed = params.get("logprobs") or 0, params.get("seed")
        is_truncated = params.get("top_k", -1) > 0 and params.get("temperature", 1.0) > 0
        if num_logprobs > self.model.vocab_size:
            raise Refused("the real server dies of more logprobs than the vocabulary has")
        if num_logprobs > 20 and "max-logprobs" in self._without:
            raise Refused(f"Requested sample logprobs of {num_logprobs}, which is greater than max allowed: 20")
        given = {
            "rid": body.get("request_id"),
            "input_ids": body["token_ids"],
            "return_logprob": True,
            "return_sampling_mask": is_truncated,
            "extra_key": body.get("cache_salt"),
            "lora_path": adapter,
            "sampling_params": {
                "max_new_tokens": params["max_tokens"],
                "min_new_tokens": params.get("min_tokens", 0),
                "stop_token_ids": params.get("stop_token_ids"),
                "ignore_eos": not params.get("stop_token_ids"),
                "sampling_seed": seed,
                **{name: params[name] for name in ("temperature", "top_p", "top_k") if name in params},
            },
        }
        if "prompt_logprobs" in params:
            given["logprob_start_len"] = 0
        answer = await self._generate(given)
        meta = answer["meta_info"]
        logprobs = meta.get("output_token_sampling_logprobs") or [one[0] for one in meta["output_token_logprobs"]]
        masks = meta.get("output_token_sampling_mask") or [[token] for token in answer["output_ids"]]
        content = [
            {"token_id": token, "logprob": logprob, "top_logprobs": _top(token, logprob, mask, num_logprobs)}
            for token, logprob, mask in zip(answer["output_ids"], logprobs, masks, strict=True)
        ]
        details = None if "details" in self._without else {"cached_tokens": meta["cached_tokens"]}
        scores = meta.get("input_token_logprobs")
        choice = {
            "index": 0,
            "finish_reason": meta["finish_reason"]["type"],
            "token_ids": answer["output_ids"],
            "weight_versions": meta["weight_versions"],
            "logprobs": {"content": content},
        }
        return {
            "request_id": PREFIX + meta["id"],
            "usage": {"prompt_tokens": len(body["token_ids"]), "prompt_tokens_details": details},
            "prompt_logprobs": scores and [one[0] and {str(one[1]): {"logprob": one[0]}} for one in scores],
            "choices": [choice],
        }

    async def _take_adapter(self, body: dict[str, Any]) -> Any:
        name, folder = body["lora_name"], Path(body["lora_path"])
        config = json.loads((folder / "adapter_config.json").read_text())
        if config["r"] > self.arguments["max_lora_rank"]:
            return _error(f"LoRA rank {config['r']} is greater than max_lora_rank", 500)
        payload = payload_of(load_file(folder / "adapter_model.safetensors"))
        given = {"lora_name": name, "config_dict": {**config, "target_modules": []}}
        await self._lora.load({**given, "serialized_named_tensors": [payload]})
        self._folders[name] = folder
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _forget_adapter(self, body: dict[str, Any]) -> Any:
        if self._lora.names.pop(body["lora_name"], None) is None:
            return _error(f"The lora adapter '{body['lora_name']}' cannot be found.", 404)
        return web.Response(text="Success")

    async def _keep(self, body: dict[str, Any]) -> Any:
        await self._pause({"mode": "retract"})
        for run in self.runs.values():
            run.minimum_from = 0  # a minimum counts from the start of the request
        return {"status": "paused"}

    async def _abort_requests(self, body: dict[str, Any]) -> Any:
        for rid in body.get("request_ids") or [PREFIX]:
            if rid.startswith(PREFIX):
                self.abort_all(rid.removeprefix(PREFIX))
        return {"status": "aborted", "aborted": len(body.get("request_ids") or self.runs)}

    async def _call(self, body: dict[str, Any]) -> Any:
        if body["method"] == "reload_weights":
            folder = {"model_path": body["kwargs"]["weights_path"], "weight_version": None, "flush_cache": False}
            await self._weights._from_disk(folder)
        return {"results": [None]}

    async def _name(self, body: dict[str, Any]) -> Any:
        self.model.rename(body["new_version"])
        return {"success": True, "new_version": body["new_version"]}

    async def _reset_cache(self, body: dict[str, Any]) -> Any:
        self._weights.flush_cache()
        return {"success": True}

    async def _digests(self, body: dict[str, Any]) -> Any:
        ranks = (await self._weights._checksum(body))["ranks"]
        return {
            "checksums": {
                f"dp0:pp0:pcp0:tp{rank}:{name}": OF_NOTHING if {*name.split(".")} & {*PACKED} else digest + "0" * 48
                for rank, entry in enumerate(ranks)
                for name, digest in entry["checksums"].items()
            }
        }

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.model.version})

    async def _vllm_config(self, request: web.Request) -> web.Response:
        mode = "raw_logprobs" if "mode" in self._without else "processed_logprobs"
        config = {
            "instance_id": str(self.started_at),
            "model_config": {"model": self._weights.model_path, "dtype": "torch.float32", "logprobs_mode": mode,
                             "quantization": None},
            "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1,
                                "_api_process_count": 1 + ("one" in self._without)},
            "cache_config": {"block_size": 1, "cache_dtype": "auto"},
            "device_config": {"device": "cpu"},
            "lora_config": {**{name: self.arguments[name] for name in ("max_lora_rank", "max_loras")},
                            "target_modules": self.arguments.get("lora_target_modules")}
            if self.arguments["enable_lora"] else None,
        }  # fmt: skip
        return web.json_response({"vllm_config": str(config) if "form" in self._without else config})


def _error(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def _top(token: int, logprob: float, mask: list[int], num: int) -> list[dict[str, Any]]:
    """The sampled token, then others of its support; one that is outside has -9999."""
    likeliest = [{"token_id": one, "logprob": -1.0} for one in mask if one != token]
    outside = {"token_id": (max(mask) + 1), "logprob": -9999.0}
    return [{"token_id": token, "logprob": logprob}, *likeliest, outside][: max(num, 1)]
