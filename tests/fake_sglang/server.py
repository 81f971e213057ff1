"""A small HTTP process that speaks SGLang's interface, for tests without SGLang; it fails on request.

    python tests/fake_sglang --port 30000 --model-path FOLDER     a LocalEngine behind it
    python tests/fake_sglang --port 30000 --delay-s 0.5           a script behind it, no torch
    … --model-path FOLDER --is-embedding                          a reward model, for /classify

It takes SGLang's own arguments (and ignores those it has no use for) and ends with its parent. Its behavior was
measured on SGLang 0.5.23: `retract`, the lock between generations and weight updates, the bracket around an update,
versions per token, the ways to kill a server. It honors the sampling seed as under `--enable-deterministic-inference`.

POST `/fake/faults` requests a fault, see faults.py. GET `/fake/stats` counts requests; POST `/fake/pace` changes a
script's `seconds_per_token` from the next token on, for a test that acts during a generation and waits for its end.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from forked import end_with_parent

from fake_sglang.faults import OF_LOADS, OF_SERVED_WEIGHTS, Fault, Faults, faulty_answer
from fake_sglang.script import Refused, Run, ScriptedModel, die
from fake_sglang.weights import LoraRoutes, PromptCache, Route, WeightRoutes
from lightrl.engines.servers.connection import raise_open_files

MAX_MASK_TOKENS = 4096  # --sampling-mask-max-tokens
DEFAULT_PARAMS: dict[str, Any] = {
    "max_new_tokens": 128, "stop": None, "stop_token_ids": None, "stop_regex": None, "temperature": 1.0, "top_p": 1.0,
    "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
    "min_new_tokens": 0, "n": 1, "ignore_eos": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "no_stop_trim": False, "logit_bias": None, "sampling_seed": None,
    "custom_params": None, "stream_interval": None, "json_schema": None, "regex": None, "ebnf": None,
    "structural_tag": None,
}  # fmt: skip


class FakeServer:
    """The routes of generation, pause and memory, and what the others share; aiohttp runs its `application`."""

    def __init__(self, model: ScriptedModel, *, arguments: dict[str, Any]) -> None:
        self.model = model
        self.arguments = arguments
        self.faults = Faults()
        self.counts: Counter[str] = Counter()
        self.started_at = time.time()
        self.runs: dict[str, Run] = {}
        self.cache = PromptCache()
        self._released: Counter[str] = Counter()
        self._is_paused = False  # with requests retracted
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._weights = WeightRoutes(self)
        self._lora = LoraRoutes(self)

    def is_busy(self) -> bool:
        """Whether requests run that a weight update waits for."""
        return not self._is_paused and bool(self.runs)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._around], client_max_size=2**32)
        routes: dict[str, Route] = {
            "/generate": self._generate,
            "/classify": self._classify,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._take_back,
            "/fake/faults": self._add_fault,
            "/fake/pace": self._set_pace,
            "/fake/reset": self._reset,
            **self._weights.routes(),
            **self._lora.routes(),
        }
        for path, route in routes.items():
            app.router.add_post(path, json_handler(route))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/ready", self._health)
        app.router.add_get("/health", self._health)
        app.router.add_get("/fake/stats", self._stats)
        return app

    def is_open(self, path: str) -> bool:
        """Whether this route asks for no token."""
        return path.startswith(("/health", "/ready", "/metrics", "/fake"))

    @web.middleware
    async def _around(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
        path = request.path
        self.counts[path] += 1
        key = self.arguments.get("api_key")
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key and given != key and not self.is_open(path):
            return web.json_response({"error": "Unauthorized"}, status=401)
        if path.startswith("/fake"):
            return await handler(request)
        if (fault := self.faults.next(path, OF_SERVED_WEIGHTS)) is not None:
            await self._serve_old_weights(fault)
        fault = self.faults.next(path)
        return await (handler(request) if fault is None else faulty_answer(fault, request, handler))

    async def _serve_old_weights(self, fault: Fault) -> None:
        await self.model.revert(fault)
        if fault.kind == "restart":
            self._weights.flush_cache()
            self.started_at = time.time()

    async def _generate(self, body: dict[str, Any]) -> Any:
        params = body.get("sampling_params") or {}
        unknown = sorted(set(params) - set(DEFAULT_PARAMS))
        if unknown:
            raise Refused(f"unknown field `{unknown[0]}`, expected one of {', '.join(DEFAULT_PARAMS)}")
        params = {**DEFAULT_PARAMS, **params}
        if params["n"] != 1:
            raise Refused("the fake server writes one completion per request")
        prompt: list[int] = body.get("input_ids") or []
        self._check(prompt, int(params["max_new_tokens"]))
        lora = body.get("lora_path")
        self._lora.check(lora)
        if params["temperature"] < 0:
            raise Refused("temperature must be non-negative")
        rid = body.get("rid") or secrets.token_hex(16)
        if rid in self.runs:
            raise Refused(f"Duplicate request ID detected: {rid}")
        has_logprobs = bool(body.get("return_logprob"))
        scores_prompt = has_logprobs and body.get("logprob_start_len") == 0
        run = Run(rid, prompt, params, lora)
        if body.get("return_sampling_mask"):
            if not 1 <= params["top_k"] <= MAX_MASK_TOKENS:
                raise Refused(
                    "return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= "
                    f"{MAX_MASK_TOKENS}; got top_k={params['top_k']}."
                )
            run.supports = []
        cache_key = f"{body.get('extra_key')} {lora}"
        answer = await self._one(run, has_logprobs, lambda: self._look_up(run, cache_key, scores_prompt))
        if scores_prompt:
            scores = await asyncio.to_thread(self.model.score, prompt, lora)
            answer["meta_info"]["input_token_logprobs"] = [
                [None if index == 0 else score, prompt[index], None] for index, score in enumerate(scores)
            ]
            if body.get("top_logprobs_num"):
                top_logprobs = await asyncio.to_thread(self.model.top_logprobs, prompt, body["top_logprobs_num"])
                answer["meta_info"]["input_top_logprobs"] = [
                    [[score, token, None] for score, token in place] or None for place in top_logprobs
                ]
        return answer

    def _look_up(self, run: Run, extra_key: str | None, scores_prompt: bool) -> None:
        """SGLang computes a prompt anew if it returns the prompt's logprobs."""
        num_cached, load = self.cache.look_up(run.prompt, extra_key, self.model.num_loads)
        if not scores_prompt:
            run.num_cached, run.is_stale = num_cached, num_cached > 0 and load < self.model.num_loads
        if run.is_stale:
            for fault in self.faults:
                fault.num_wrong_values += fault.kind == "keep_cache"

    async def _classify(self, body: dict[str, Any]) -> Any:
        if not self.arguments.get("is_embedding"):
            raise Refused(
                "This model does not appear to be an embedding model by default. Please add `--is-embedding` when "
                "launching the server or try another model."
            )
        rows: list[list[int]] = body["input_ids"]
        for row in rows:
            self._check(row, 0)
        rewards = await asyncio.to_thread(self.model.classify, rows)
        return [
            {"embedding": numbers, "meta_info": {"id": rid, "prompt_tokens": len(row)}}
            for rid, row, numbers in zip(body.get("rid") or [None] * len(rows), rows, rewards, strict=True)
        ]

    def _check(self, prompt: Any, max_new_tokens: int) -> None:
        if not isinstance(prompt, list) or not prompt:
            raise Refused("input_ids has to be a list of token ids that is not empty")
        if min(prompt) < 0 or max(prompt) >= self.model.vocab_size:
            die("IndexError: index out of range in self")
        if len(prompt) + max_new_tokens > self.model.max_context:
            raise Refused(f"Requested token count exceeds the context length of {self.model.max_context} tokens")

    async def _one(self, run: Run, wants_logprobs: bool, look_up: Callable[[], None]) -> dict[str, Any]:
        self.runs[run.rid] = run
        try:
            while not (self._unpaused.is_set() and self._weights.is_idle.is_set()):
                await self._unpaused.wait()
                await self._weights.is_idle.wait()
                if run.is_aborted:
                    break
            look_up()
            writing = asyncio.ensure_future(self.model.write(run))
            aborting = asyncio.ensure_future(run.aborted.wait())
            try:
                await asyncio.wait({writing, aborting}, return_when=asyncio.FIRST_COMPLETED)
                if not writing.done() and self._is_paused:
                    finish = "abort"  # what was written and not yet streamed is lost
                else:
                    finish = await writing
            finally:
                aborting.cancel()
                if not writing.done():
                    writing.cancel()
        finally:
            del self.runs[run.rid]
        return _answer(run, finish, wants_logprobs, self.model.version)

    async def _abort(self, body: dict[str, Any]) -> None:
        rid = body.get("rid") or ""
        if rid or body.get("abort_all"):
            self.abort_all("" if body.get("abort_all") else rid)

    def abort_all(self, prefix: str = "") -> None:
        for run in self.runs.values():
            if run.rid.startswith(prefix):
                run.is_aborted = True
                run.aborted.set()

    async def _pause(self, body: dict[str, Any]) -> Any:
        if body.get("mode") != "retract":
            raise Refused("the fake server only knows the mode retract")
        self._unpaused.clear()
        for run in self.runs.values():
            run.minimum_from = len(run.token_ids)
        await self.model.pause()
        self._is_paused = True
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue(self, body: dict[str, Any]) -> Any:
        self._is_paused = False
        await self.model.resume()
        self._unpaused.set()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def _flush(self, body: dict[str, Any]) -> Any:
        if self.is_busy():
            raise Refused("Flush cache failed: there are running or waiting requests.")
        if self.faults.next("/flush_cache", ("keep_cache",)) is None:
            self._weights.flush_cache()

    async def _release(self, body: dict[str, Any]) -> Any:
        if self.is_busy():
            die("AssertionError: release_memory_occupation requires an idle server")
        self._released.update(body.get("tags") or ["kv_cache", "weights", "cuda_graph"])

    async def _take_back(self, body: dict[str, Any]) -> Any:
        for tag in body.get("tags") or ["kv_cache", "weights", "cuda_graph"]:
            if not self._released[tag]:
                die(f"KeyError: {tag!r}")
            self._released[tag] = 0

    async def _model_info(self, request: web.Request) -> web.Response:
        config = self.model.config
        return web.json_response({
            "model_path": self._weights.model_path, "weight_version": self.model.version, "is_generation": True,
            "model_type": config and config.model_type, "architectures": config and config.architectures,
        })  # fmt: skip

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({
            "dtype": "float32",
            **{name: value for name, value in self.arguments.items() if not name.endswith("key")},
            "startup_time": {"scheduler_e2e": self.started_at}, "device": "cpu", "version": "fake",
        })  # fmt: skip

    async def _models(self, request: web.Request) -> web.Response:
        base = self._weights.model_path
        names = [name for name, is_loaded in self._lora.names.items() if is_loaded]
        entries = [{"id": base, "root": base, "parent": None}]
        entries += [{"id": name, "root": "__tensor__", "parent": base} for name in names]
        return web.json_response({"object": "list", "data": entries})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._unpaused.is_set() else 503)

    async def _add_fault(self, body: dict[str, Any]) -> Any:
        fault = Fault(**body)
        if fault.kind in (*OF_LOADS, *OF_SERVED_WEIGHTS):
            self.model.keep_history()
        self.faults.append(fault)
        return {}

    async def _reset(self, body: dict[str, Any]) -> Any:
        self.faults.clear()
        self.model.forget_history()
        self.model.keep_history()
        self._is_paused = False
        self._unpaused.set()
        await self.model.resume()
        self._weights.flush_cache()
        return {}

    async def _set_pace(self, body: dict[str, Any]) -> Any:
        self.model.seconds_per_token = float(body["seconds_per_token"])
        return {}

    async def _stats(self, request: web.Request) -> web.Response:
        return web.json_response({
            "requests": dict(self.counts), "running": len(self.runs),
            "written": [len(run.token_ids) for run in self.runs.values()],
            "processor_s": time.process_time(), "is_paused": not self._unpaused.is_set(),
            "is_bracketed": self._weights.is_bracketed,
            "faults": [dataclasses.asdict(fault) for fault in self.faults],
        })  # fmt: skip


def _answer(run: Run, finish: str, wants_logprobs: bool, version: str) -> dict[str, Any]:
    spans: list[dict[str, Any]] = []
    for index, version in enumerate(run.versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": index, "end": index})
        spans[-1]["end"] = index + 1
    reason: dict[str, Any] = {"type": finish}
    if finish == "stop":
        reason["matched"] = run.token_ids[-1]
    elif finish == "length":
        reason["length"] = len(run.token_ids)
    else:
        reason |= {"message": "Aborted", "status_code": None, "err_type": None}
    meta: dict[str, Any] = {
        "id": run.rid, "finish_reason": reason, "prompt_tokens": len(run.prompt),
        "completion_tokens": len(run.token_ids), "cached_tokens": run.num_cached,
        "weight_version": run.versions[-1] if run.versions else version, "weight_versions": spans,
    }  # fmt: skip
    if wants_logprobs:
        meta["input_token_logprobs"] = []
        is_truncated = run.supports is not None  # then SGLang's are those before truncation, which are not known here
        meta["output_token_logprobs"] = [
            [None if is_truncated else logprob, token, None]
            for logprob, token in zip(run.logprobs, run.token_ids, strict=True)
        ]
    if run.supports is not None:
        meta["output_token_sampling_mask"] = run.supports
        meta["output_token_sampling_logprobs"] = run.logprobs
        meta["output_token_sampling_mask_length"] = len(run.token_ids)
    return {"output_ids": run.token_ids, "meta_info": meta}


def json_handler(route: Route) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
        except ValueError:
            return web.json_response({"object": "error", "message": "the body is not JSON"}, status=400)
        try:
            answer = await route(body)
            return answer if isinstance(answer, web.Response) else web.json_response(answer)
        except Refused as error:
            return web.json_response({"success": False, "error": {"message": str(error)}}, status=400)

    return handle


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python tests/fake_sglang", description=__doc__.split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one; it is printed")
    parser.add_argument("--model-path", "--model", help="Hugging Face folder; without it a script answers")
    parser.add_argument("--is-embedding", action="store_true", help="the model is a reward model")
    parser.add_argument("--api-key", default=os.environ.get("LIGHTRL_SERVER_TOKEN"))
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--vocab-size", type=int, default=1000, help="of the script")
    parser.add_argument("--context-length", type=int, default=2**20, help="of the script")
    parser.add_argument("--tp-size", type=int, default=1, help="of the model: how many ranks its checksums tell")
    parser.add_argument("--speculative-algorithm", choices=["EAGLE"], help="the model's checksums tell of a draft too")
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument("--dies-at", help="a path at which each request ends the process")
    parser.add_argument("--delay-s", type=float, default=0.0, help="of the script, before the first token")
    parser.add_argument("--seconds-per-token", type=float, default=0.0, help="of the script")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-lora-rank", type=int)
    parser.add_argument("--max-loras", type=int, help="vLLM's")
    parser.add_argument("--lora-target-modules", nargs="*", action="extend")
    parser.add_argument("--vllm", action="store_true", help="speak vLLM's interface instead")
    parser.add_argument("--vllm-without", action="append", help="a flag that vLLM was started without, see vllm.py")
    parser.add_argument("--piece-tokens", type=int, default=16, help="of the model, between two checks for aborts")
    return parser


async def serve(server: FakeServer, host: str = "127.0.0.1", port: int = 0) -> None:
    """Runs until the process ends; prints `{"port": ...}` when it listens."""
    runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=8192).start()
    sys.stdout.write(json.dumps({"port": runner.addresses[0][1]}) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def _serve(options: argparse.Namespace) -> None:
    model: ScriptedModel
    if options.model_path is None:
        model = ScriptedModel(
            vocab_size=options.vocab_size,
            max_context=options.context_length,
            delay_s=options.delay_s,
            seconds_per_token=options.seconds_per_token,
            version=options.weight_version,
        )
    else:
        from fake_sglang.model import DraftModel, EmbeddedModel, RewardModel

        model = (
            RewardModel(options.model_path, version=options.weight_version)
            if options.is_embedding
            else EmbeddedModel(
                options.model_path,
                version=options.weight_version,
                piece_tokens=options.piece_tokens,
                dtype=options.dtype,
                num_ranks=options.tp_size,
                draft=DraftModel() if options.speculative_algorithm else None,
            )
        )
    kind = FakeServer
    if options.vllm:
        from fake_sglang.vllm import FakeVLLMServer as kind
    server = kind(model, arguments=vars(options))
    if options.dies_at is not None:
        server.faults.append(Fault("die", options.dies_at, count=-1))
    await serve(server, options.host, options.port)


def main(argv: Sequence[str] | None = None) -> None:
    options, _ = make_parser().parse_known_args(argv)  # SGLang has 500 more
    end_with_parent()
    raise_open_files()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(options))
