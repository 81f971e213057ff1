"""A small HTTP process that speaks SGLang's interface, for tests and for CI without a server; it fails on request.

    python -m lightrl.testing.fake_server --port 30000 --model-path FOLDER     a LocalEngine behind it
    python -m lightrl.testing.fake_server --port 30000 --delay-s 0.5           a script behind it, no torch
    … --model-path FOLDER --is-embedding                                              a reward model, for /classify

It takes SGLang's own arguments (those it has no use for are ignored) and ends when its parent does. What it does was
measured on SGLang 0.5.23: pause modes, the lock between generations and weight updates, the bracket around an update,
versions per token, the ways to kill a server. Where it differs: `in_place` recomputes key-values, as `retract` does;
and the sampling seed is always honored, as under `--enable-deterministic-inference`.

Faults are asked for with `--fault KIND[:PATH[:COUNT[:SECONDS]]]` or by POST to `/fake/faults`: `late` (to start, of
SECONDS), `slow` (SECONDS before the answer), `drop` (the connection, at once or after SECONDS), `error` (HTTP 500),
`garbage` (no JSON), `hang` (no answer), `die` (the process, SECONDS into the request), `lose_update` (a weight update
is acknowledged and not done), `wrong_version` (done, under another version). COUNT requests of PATH suffer it; -1 is
all of them. GET `/fake/stats` counts requests; POST `/fake/pace` changes a script's `seconds_per_token` from the next
token on, for a test that acts amid a generation and waits for its end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aiohttp import web

from lightrl.concurrency.parent_guard import end_with_parent
from lightrl.engines.sglang.open_files import raise_open_files
from lightrl.testing.fake_server_script import LoadRefused, Run, ScriptedModel, ServedModel

KINDS = ("late", "slow", "drop", "error", "garbage", "hang", "die", "lose_update", "wrong_version")
MAX_MASK_TOKENS = 4096
DEFAULT_PARAMS: dict[str, Any] = {
    "max_new_tokens": 128, "stop": None, "stop_token_ids": None, "stop_regex": None, "temperature": 1.0, "top_p": 1.0,
    "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
    "min_new_tokens": 0, "n": 1, "ignore_eos": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "no_stop_trim": False, "logit_bias": None, "sampling_seed": None,
    "custom_params": None, "stream_interval": None, "json_schema": None, "regex": None, "ebnf": None,
}  # fmt: skip


@dataclass
class Fault:
    """What goes wrong with the next `count` requests whose path begins so; see the module."""

    kind: str
    path: str = "/generate"
    count: int = 1
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"The fault {self.kind!r} is unknown, expected one of {', '.join(KINDS)}.")

    @classmethod
    def parse(cls, text: str) -> Fault:
        kind, *rest = text.split(":")
        path = (
            rest[0] if rest and rest[0] else ("/update_weights" if "update" in kind or "wrong" in kind else "/generate")
        )
        return cls(kind, path, int(rest[1]) if len(rest) > 1 else 1, float(rest[2]) if len(rest) > 2 else 0.0)


class _Refused(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class FakeServer:
    """The routes and what they share; `application` is what aiohttp runs."""

    def __init__(self, model: ServedModel, *, arguments: dict[str, Any], faults: Sequence[Fault] = ()) -> None:
        self.model = model
        self.arguments = arguments
        self.faults = list(faults)
        self.model_path = arguments.get("model_path")
        self.counts: Counter[str] = Counter()
        self.most_running = 0
        self._told_version: str | None = None  # after the fault wrong_version
        self._runs: dict[str, Run] = {}
        self._released: Counter[str] = Counter()
        self._is_bracketed = False
        self._receiver: Any = None
        self._pause_mode: str | None = None
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._no_update = asyncio.Event()  # clear while an update waits for running requests
        self._no_update.set()
        self._updating = asyncio.Lock()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._around], client_max_size=2**32)
        routes: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {
            "/generate": self._generate,
            "/classify": self._classify,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/update_weights_from_disk": self._from_disk,
            "/update_weights_from_distributed": self._from_distributed,
            "/update_weights_from_tensor": self._from_tensor,
            "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/update_weight_version": self._set_version,
            "/weights_checker": self._checksum,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._take_back,
            "/fake/faults": self._add_fault,
            "/fake/pace": self._set_pace,
        }
        for path, handler in routes.items():
            app.router.add_post(path, _json_handler(handler))
        for path, answer in {
            "/model_info": self._model_info, "/get_model_info": self._model_info, "/server_info": self._server_info,
            "/ready": self._ready, "/health": self._health, "/health_generate": self._health, "/ping": self._ping,
            "/v1/loads": self._loads, "/fake/stats": self._stats,
        }.items():  # fmt: skip
            app.router.add_get(path, answer)
        return app

    # ------------------------------------------------------------------ around every request

    @web.middleware
    async def _around(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
        path = request.path
        self.counts[path] += 1
        is_open = path.startswith(("/health", "/ready", "/metrics", "/fake"))
        key = self.arguments.get("admin_api_key") or self.arguments.get("api_key")
        if key and not is_open:
            keys = {self.arguments.get("api_key"), self.arguments.get("admin_api_key")} - {None}
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if given not in keys:
                return web.json_response({"error": "Unauthorized"}, status=401)
        fault = None if path.startswith("/fake") else self._next_fault(path)
        if fault is None:
            return await handler(request)
        return await self._suffer(fault, request, handler)

    def _next_fault(self, path: str, kinds: Sequence[str] = KINDS[1:7]) -> Fault | None:
        for fault in self.faults:
            if fault.count != 0 and fault.kind in kinds and path.startswith(fault.path):
                fault.count -= fault.count > 0
                return fault
        return None

    async def _suffer(
        self, fault: Fault, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]
    ) -> Any:
        if fault.kind == "die":
            asyncio.get_running_loop().call_later(fault.seconds, os._exit, 1)
            return await handler(request)
        if fault.kind == "drop" and fault.seconds > 0:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(handler(request), fault.seconds)
        elif fault.seconds > 0:
            await asyncio.sleep(fault.seconds)
        if fault.kind == "slow":
            return await handler(request)
        if fault.kind == "error":
            return web.json_response({"error": {"message": "the fake server fails, as it was told to"}}, status=500)
        if fault.kind == "garbage":
            return web.Response(text="<html>this is no JSON</html>")
        if fault.kind == "hang":
            await asyncio.sleep(1e6)
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    # ------------------------------------------------------------------ generation

    async def _generate(self, body: dict[str, Any]) -> Any:
        params = body.get("sampling_params") or {}
        unknown = sorted(set(params) - set(DEFAULT_PARAMS))
        if unknown:
            raise _Refused(f"unknown field `{unknown[0]}`, expected one of {', '.join(DEFAULT_PARAMS)}")
        params = {**DEFAULT_PARAMS, **params}
        prompt = body.get("input_ids")
        self._check(prompt, params, body)
        if not prompt or isinstance(prompt[0], list):
            prompts: list[list[int]] = prompt or [[]]
        else:
            prompts = [prompt]
        num = int(params["n"])
        is_single = num == 1 and prompts is not prompt and len(prompts) == 1
        rid = body.get("rid") or secrets.token_hex(16)
        if rid in self._runs:
            raise _Refused(f"Duplicate request ID detected: {rid}")
        rids = [rid] if is_single else [secrets.token_hex(16) for _ in range(num * len(prompts))]
        runs = [Run(name, prompts[index // num], params) for index, name in enumerate(rids)]
        answers = await asyncio.gather(*(self._one(run, bool(body.get("return_logprob"))) for run in runs))
        for run, answer in zip(runs, answers, strict=True):
            if body.get("return_logprob") and body.get("logprob_start_len") == 0:
                scores = await asyncio.to_thread(self.model.score, run.prompt)
                answer["meta_info"]["input_token_logprobs"] = [
                    [None if index == 0 else score, run.prompt[index], None] for index, score in enumerate(scores)
                ]
                if body.get("top_logprobs_num"):
                    likeliest = await asyncio.to_thread(self.model.likeliest, run.prompt, body["top_logprobs_num"])
                    answer["meta_info"]["input_top_logprobs"] = [
                        [[score, token, None] for score, token in place] or None for place in likeliest
                    ]
            if body.get("return_sampling_mask"):
                answer["meta_info"]["output_token_sampling_logprobs"] = run.logprobs
        return answers[0] if is_single else answers

    async def _classify(self, body: dict[str, Any]) -> Any:
        prompt = body.get("input_ids")
        if not self.arguments.get("is_embedding"):
            raise _Refused(
                "This model does not appear to be an embedding model by default. Please add `--is-embedding` when "
                "launching the server or try another model."
            )
        self._check(prompt, {"max_new_tokens": 0, "temperature": 1.0}, body)
        assert isinstance(prompt, list)
        is_single = not isinstance(prompt[0], list)
        rows: list[list[int]] = [prompt] if is_single else prompt
        found = await asyncio.to_thread(self.model.classify, rows)
        answers = [
            {"embedding": numbers, "meta_info": {"prompt_tokens": len(row), "weight_version": self._version()}}
            for row, numbers in zip(rows, found, strict=True)
        ]
        return answers[0] if is_single else answers

    def _check(self, prompt: Any, params: dict[str, Any], body: dict[str, Any]) -> None:
        if not isinstance(prompt, list) or not prompt:
            raise _Refused("input_ids has to be a list of token ids that is not empty")
        for ids in prompt if isinstance(prompt[0], list) else [prompt]:
            if not ids:
                raise _Refused("input_ids is empty")
            if min(ids) < 0 or max(ids) >= self.model.vocab_size:
                sys.stderr.write("IndexError: index out of range in self" + "\n")
                os._exit(1)  # as the real server does
            if len(ids) + int(params["max_new_tokens"]) > self.model.max_context:
                raise _Refused(f"Requested token count exceeds the context length of {self.model.max_context} tokens")
        if params["temperature"] < 0:
            raise _Refused("temperature must be non-negative")
        if body.get("return_sampling_mask") and not 1 <= int(params["top_k"]) <= MAX_MASK_TOKENS:
            raise _Refused(f"return_sampling_mask requires a finite top_k of at most {MAX_MASK_TOKENS}")

    async def _one(self, run: Run, wants_logprobs: bool) -> dict[str, Any]:
        self._runs[run.rid] = run
        started = time.monotonic()
        try:
            while not (self._unpaused.is_set() and self._no_update.is_set()):
                await self._unpaused.wait()
                await self._no_update.wait()
                if run.is_aborted:
                    break
            self.most_running = max(self.most_running, len(self._runs))
            writing = asyncio.ensure_future(self.model.write(run))
            aborting = asyncio.ensure_future(run.aborted.wait())
            try:
                await asyncio.wait({writing, aborting}, return_when=asyncio.FIRST_COMPLETED)
                if not writing.done() and self._pause_mode == "retract":
                    finish = "abort"  # what was written and not yet streamed is lost
                else:
                    finish = await writing
            finally:
                aborting.cancel()
                if not writing.done():
                    writing.cancel()
        finally:
            del self._runs[run.rid]
        return self._answer(run, finish, wants_logprobs, time.monotonic() - started)

    def _answer(self, run: Run, finish: str, wants_logprobs: bool, latency_s: float) -> dict[str, Any]:
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
            "completion_tokens": len(run.token_ids), "cached_tokens": 0, "num_retractions": run.num_retractions,
            "weight_version": run.versions[-1] if run.versions else self._version(), "weight_versions": spans,
            "e2e_latency": latency_s,
        }  # fmt: skip
        if wants_logprobs:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                [logprob, token, None] for logprob, token in zip(run.logprobs, run.token_ids, strict=True)
            ]
        return {"output_ids": run.token_ids, "meta_info": meta}

    async def _abort(self, body: dict[str, Any]) -> Any:
        rid = body.get("rid") or ""
        for run in list(self._runs.values()):
            if body.get("abort_all") or (rid and run.rid.startswith(rid)):
                run.is_aborted = True
                run.aborted.set()
        return None

    # ------------------------------------------------------------------ pause, cache, memory

    async def _pause(self, body: dict[str, Any]) -> Any:
        mode = body.get("mode", "abort")
        self._unpaused.clear()
        if mode == "abort":
            await self._abort({"abort_all": True})
            while any(not run.is_aborted or run.token_ids for run in self._runs.values()):
                await asyncio.sleep(0.01)
        else:
            for run in self._runs.values():
                run.num_retractions += mode == "retract"
            await self.model.pause()
        self._pause_mode = mode
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue(self, body: dict[str, Any]) -> Any:
        self._pause_mode = None
        await self.model.resume()
        self._unpaused.set()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def _flush(self, body: dict[str, Any]) -> Any:
        if self._runs and self._pause_mode != "retract":
            raise _Refused("Flush cache failed: there are running or waiting requests.")
        return None

    async def _release(self, body: dict[str, Any]) -> Any:
        if self._runs and self._pause_mode != "retract":
            sys.stderr.write("AssertionError: release_memory_occupation requires an idle server" + "\n")
            os._exit(1)
        self._released.update(body.get("tags") or ["kv_cache", "weights", "cuda_graph"])
        return None

    async def _take_back(self, body: dict[str, Any]) -> Any:
        for tag in body.get("tags") or ["kv_cache", "weights", "cuda_graph"]:
            if not self._released[tag]:
                sys.stderr.write(f"KeyError: {tag!r}" + "\n")
                os._exit(1)
            self._released[tag] = 0
        return None

    # ------------------------------------------------------------------ weights

    @contextlib.asynccontextmanager
    async def _update(self, body: dict[str, Any]) -> AsyncIterator[None]:
        """Paused, an update goes at once; else it waits until running requests are done and holds new ones."""
        async with self._updating:
            if body.get("abort_all_requests"):
                await self._abort({"abort_all": True})
            self._no_update.clear()
            try:
                while self._pause_mode is None and self._runs:
                    await asyncio.sleep(0.01)
                yield
            except (LoadRefused, KeyError) as error:
                raise _Refused(str(error)) from error
            finally:
                self._no_update.set()

    async def _load(self, path: str, body: dict[str, Any], load: Callable[[str | None], Awaitable[None]]) -> Any:
        version = body.get("weight_version")
        async with self._update(body):
            if self._next_fault(path, ("lose_update",)) is None:
                is_wrong = version is not None and self._next_fault(path, ("wrong_version",)) is not None
                await load(f"not-{version}" if is_wrong else version)
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    async def _from_disk(self, body: dict[str, Any]) -> Any:
        folder = body["model_path"]

        async def load(version: str | None) -> None:
            await self.model.load_folder(folder, version)
            self.model_path = folder

        return await self._load("/update_weights_from_disk", body, load)

    async def _from_distributed(self, body: dict[str, Any]) -> Any:
        self._check_bracket("distributed")
        receiver = self._receiving()
        if not receiver.has(body["group_name"]):
            raise _Refused(f"Group {body['group_name']} is not initialized")

        tensors = await asyncio.to_thread(receiver.receive, body)
        return await self._load(
            "/update_weights_from_distributed", body, lambda version: self.model.load_tensors(tensors, version)
        )

    async def _from_tensor(self, body: dict[str, Any]) -> Any:
        self._check_bracket("tensor")
        from lightrl.testing.fake_server_model import unpacked

        tensors = await asyncio.to_thread(unpacked, body["serialized_named_tensors"][0], body.get("load_format"))
        return await self._load(
            "/update_weights_from_tensor", body, lambda version: self.model.load_tensors(tensors, version)
        )

    async def _init_group(self, body: dict[str, Any]) -> Any:
        await asyncio.to_thread(self._receiving().join, body)
        return {"success": True, "message": "Succeeded to initialize the process group."}

    async def _destroy_group(self, body: dict[str, Any]) -> Any:
        if not self._receiving().has(body["group_name"]):
            raise _Refused("The group to be destroyed does not exist.")
        await asyncio.to_thread(self._receiving().leave, body["group_name"])
        return {"success": True, "message": "Succeeded to destroy the process group."}

    def _receiving(self) -> Any:
        if isinstance(self.model, ScriptedModel):
            raise _Refused("A fake server with a script takes no tensors, start it with --model-path.")
        if self._receiver is None:
            from lightrl.testing.fake_server_model import TensorReceiver

            self._receiver = TensorReceiver()
        return self._receiver

    def _check_bracket(self, kind: str) -> None:
        if not self._is_bracketed:
            raise _Refused(f"update_weights_from_{kind} must run between begin_weight_update() and end_weight_update()")

    async def _begin(self, body: dict[str, Any]) -> Any:
        if self._is_bracketed:
            raise _Refused("begin_weight_update() was called twice")
        self._is_bracketed = True
        return {"success": True, "message": ""}

    async def _end(self, body: dict[str, Any]) -> Any:
        if not self._is_bracketed:
            raise _Refused("end_weight_update() without begin_weight_update()")
        self._is_bracketed = False
        return {"success": True, "message": ""}

    async def _set_version(self, body: dict[str, Any]) -> Any:
        if body.get("abort_all_requests", True):
            await self._abort({"abort_all": True})
        self.model.version = body["new_version"]
        return {"success": True, "message": "", "new_version": body["new_version"]}

    async def _checksum(self, body: dict[str, Any]) -> Any:
        if body.get("action") != "checksum":
            raise _Refused(f"action {body.get('action')!r} is not known to the fake server")
        sums = await asyncio.to_thread(self.model.checksums)
        whole = _digest(sums)
        ranks = [{"checksums": sums, "per_gpu_checksum": whole, "parallelism_info": {}}]
        return {"success": True, "message": "", "ranks": ranks, "per_engine_checksum": whole}

    # ------------------------------------------------------------------ who it is

    def _version(self) -> str:
        return self.model.version

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({
            "model_path": self.model_path, "served_model_name": self.model_path, "is_generation": True,
            "tokenizer_path": self.model_path, "weight_version": self._version(), "model_type": "fake",
        })  # fmt: skip

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({
            **{name: value for name, value in self.arguments.items() if not name.endswith("key")},
            "version": "fake", "max_total_num_tokens": 2**20, "internal_states": [{}],
        })  # fmt: skip

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._unpaused.is_set() else 503)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._unpaused.is_set() else 503)

    async def _ping(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _loads(self, request: web.Request) -> web.Response:
        load = {"dp_rank": 0, "num_running_reqs": len(self._runs), "num_waiting_reqs": 0}
        return web.json_response({"timestamp": time.time(), "version": "fake", "loads": [load]})

    async def _add_fault(self, body: dict[str, Any]) -> Any:
        self.faults.append(Fault(**body))
        return {"faults": [asdict(fault) for fault in self.faults]}

    async def _set_pace(self, body: dict[str, Any]) -> Any:
        if not isinstance(self.model, ScriptedModel):
            raise _Refused("Only a script has a pace, not a model. Start the fake server without --model-path.")
        self.model.seconds_per_token = float(body["seconds_per_token"])
        return {}

    async def _stats(self, request: web.Request) -> web.Response:
        return web.json_response({
            "requests": dict(self.counts), "running": len(self._runs),
            "written": [len(run.token_ids) for run in self._runs.values()], "most_running": self.most_running,
            "processor_s": time.process_time(), "is_paused": not self._unpaused.is_set(),
            "is_bracketed": self._is_bracketed,
            "released": [tag for tag, count in self._released.items() if count],
        })  # fmt: skip


def _json_handler(
    handler: Callable[[dict[str, Any]], Awaitable[Any]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
        except ValueError:
            return web.json_response({"object": "error", "message": "the body is no JSON"}, status=400)
        try:
            answer = await handler(body)
            return answer if isinstance(answer, web.Response) else web.json_response(answer)
        except _Refused as error:
            return web.json_response({"success": False, "error": {"message": error.message}}, status=400)

    return handle


def _digest(sums: dict[str, str]) -> str:
    import hashlib

    return hashlib.blake2b(json.dumps(sums, sort_keys=True).encode(), digest_size=16).hexdigest()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lightrl.testing.fake_server", description=__doc__.split("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one; it is printed")
    parser.add_argument("--model-path", "--model", help="Hugging Face folder; without it a script answers")
    parser.add_argument("--is-embedding", action="store_true", help="the model is a reward model")
    parser.add_argument("--api-key", default=os.environ.get("LIGHTRL_SERVER_TOKEN"))
    parser.add_argument("--admin-api-key")
    parser.add_argument("--weight-version", default="default")
    parser.add_argument("--vocab-size", type=int, default=1000, help="of the script")
    parser.add_argument("--context-length", type=int, default=2**20, help="of the script")
    parser.add_argument("--delay-s", type=float, default=0.0, help="of the script, before the first token")
    parser.add_argument("--seconds-per-token", type=float, default=0.0, help="of the script")
    parser.add_argument("--piece-tokens", type=int, default=16, help="of the model, between two looks at aborts")
    parser.add_argument("--fault", action="append", default=[], type=Fault.parse, help="KIND[:PATH[:COUNT[:SECONDS]]]")
    return parser


async def serve(options: argparse.Namespace) -> None:
    """Runs until the process ends; prints `{"port": ...}` when it listens."""
    late_s = sum(fault.seconds for fault in options.fault if fault.kind == "late")
    if late_s:
        await asyncio.sleep(late_s)
    model: ServedModel
    if options.model_path is None:
        model = ScriptedModel(
            vocab_size=options.vocab_size,
            max_context=options.context_length,
            delay_s=options.delay_s,
            seconds_per_token=options.seconds_per_token,
            version=options.weight_version,
        )
    else:
        from lightrl.testing.fake_server_model import EmbeddedModel, JudgingModel

        model = (
            JudgingModel(options.model_path, version=options.weight_version)
            if options.is_embedding
            else EmbeddedModel(options.model_path, version=options.weight_version, piece_tokens=options.piece_tokens)
        )
    arguments = {name: value for name, value in vars(options).items() if name != "fault"}
    server = FakeServer(model, arguments=arguments, faults=options.fault)
    runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, options.host, options.port, backlog=8192)
    await site.start()
    sys.stdout.write(json.dumps({"port": runner.addresses[0][1]}) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


def main(argv: Sequence[str] | None = None) -> None:
    options, _ = make_parser().parse_known_args(argv)  # SGLang has 500 more
    end_with_parent()
    raise_open_files()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(options))


if __name__ == "__main__":
    main()
