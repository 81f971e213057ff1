"""lightrl serve: runs servers in the foreground, for a run on another machine or for several runs in succession.

`lightrl serve --policy` serves a trained policy from this process instead, to tools that evaluate it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from argparse import ArgumentError
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from jsonargparse import DefaultHelpFormatter

from lightrl.checks.printable import count_text
from lightrl.commands.config_errors import TextParser, explain
from lightrl.commands.config_layers import ClassOrText, UsageError, UserSettings, joined, to_plain
from lightrl.commands.console import reported
from lightrl.concurrency.in_thread import call_all
from lightrl.concurrency.owner import LOGS_KEPT_S, own_prefix
from lightrl.engines import LocalEngine
from lightrl.engines.servers.addresses import RECEIVER_VARIABLE, TOKEN_VARIABLE
from lightrl.engines.servers.processes.keeper import end_all, keep, start_all
from lightrl.engines.servers.processes.model_process import ModelProcess
from lightrl.engines.servers.processes.process import ServerProcess, make_servers, usable_token, write_model_folder
from lightrl.engines.servers.registry import Announcement, ServerEntry
from lightrl.engines.servers.sync.receivers import Receivers
from lightrl.engines.sglang import SGLangProcess
from lightrl.engines.vllm import VLLMProcess
from lightrl.errors import EngineError
from lightrl.models import ModelSpec, Role
from lightrl.models.chat_template import stop_token_ids, with_stop_tokens
from lightrl.models.tuning import whole_parameters
from lightrl.trajectory import JsonMapping, Sampling
from lightrl.weights import Bucket, block_fp8

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

Kind = Literal["sglang", "vllm"]
_PROCESSES: dict[Kind, type[ModelProcess]] = {"sglang": SGLangProcess, "vllm": VLLMProcess}
_ENGINES: dict[str, Kind] = {"SGLangEngine": "sglang", "VLLMEngine": "vllm"}
_FROM_ENGINE = ("servers", "tp", "sglang_python", "vllm_python")
_SERVER_ARG = "--server_args."
_LOOPBACK, _ANY = ("127.0.0.1", "localhost", "::1"), ("", "0.0.0.0", "::")
_EPILOG = """\
examples:
  lightrl serve --config run.yaml --servers 2 --tp 2
  lightrl serve --model Qwen/Qwen3-0.6B --port 30000 --server_args.mem_fraction_static 0.7
  lightrl serve --model Qwen/Qwen3-0.6B --engine vllm
  lightrl serve --policy last.ckpt    a policy for evaluation, without SGLang; see lightrl serve --policy --help

Start the run with LIGHTRL_SERVER_ADDRS, LIGHTRL_SERVER_TOKEN and `--trainer.engine` as printed. The run loads its
weights into the servers before its first request.
"""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):  # type: ignore[misc]
    """Keeps the line breaks in the examples."""


def serve(
    model: ModelSpec,
    *,
    engine: Kind = "sglang",
    servers: int = 1,
    tp: int = 1,
    devices: list[int] | str = "",
    host: str = "127.0.0.1",
    port: int | None = None,
    token: str | None = None,
    sglang_python: str | None = None,
    vllm_python: str | None = None,
    server_args: dict[str, Any] | None = None,
    seed: int = 0,
    startup_timeout_s: float = 900.0,
    log_folder: Path | None = None,
    register: Path | None = None,
    leave_s: float = 30.0,
    until: threading.Event | None = None,
    write: Callable[[str], object] = sys.stdout.write,
) -> None:
    """Starts servers and their weight receiver, prints their addresses, restarts failed ones and stops all on Ctrl-C.

    Args:
        model: a model with a path is served with its weights. A model that is only a config, or that the servers
            quantize, has random weights until a run loads its own.
        engine: the kind of server, `sglang` or `vllm`.
        servers: number of servers.
        tp: number of GPUs per server.
        devices: GPUs to use, such as `0,1,2,3`; each server gets the next `tp` of them.
        host: address to listen on; with the default only this machine can connect.
        port: the first server's port; the other servers and then the receiver use the next ones. None picks free ports.
        token: the token that requests must carry; by default LIGHTRL_SERVER_TOKEN or a random one, which is printed.
        sglang_python: the Python interpreter of an environment with SGLang.
        vllm_python: the Python interpreter of an environment with vLLM.
        server_args: arguments for the server program by name; on the command line `--server_args.NAME VALUE`.
        seed: seed for the servers' random numbers.
        startup_timeout_s: seconds that a server may take to become ready.
        log_folder: folder for the servers' logs; by default a temporary one, whose path is printed.
        register: folder in which the servers register; a run finds them if its only server address is `file://FOLDER`.
        leave_s: seconds that these runs have to move their requests elsewhere before the servers stop.
        until: an event that stops the servers; if None, only Ctrl-C and SIGTERM do.
        write: called with the text to print.

    Raises:
        ValueError: if the program or the model does not exist, or there are too few devices.
        EngineError: if a server does not become ready, or fails too often later.
    """
    token = usable_token(token or os.environ.get(TOKEN_VARIABLE))
    receivers, gpus = Receivers(), devices.split(",") if isinstance(devices, str) and devices else devices
    with tempfile.TemporaryDirectory(prefix=own_prefix("lightrl-serve-"), ignore_cleanup_errors=True) as scratch:
        logs = log_folder or Path(tempfile.mkdtemp(prefix=own_prefix("lightrl-logs-", kept_s=LOGS_KEPT_S)))
        process, args = _PROCESSES[engine], server_args or {}
        loaded = model.load_config()
        config = process.served_config(loaded, args, tp)
        has_weights = model.path is not None and block_fp8.is_block_fp8(config) == block_fp8.is_block_fp8(loaded)
        processes = make_servers(
            process, served_folder(model, config, Path(scratch) / "model"), servers, tp=tp, devices=gpus or None,
            seed=seed, port=port or 0, args={**({} if has_weights else {"load_format": "dummy"}), **args},
            log_folder=logs, host=host, python=vllm_python if engine == "vllm" else sglang_python, token=token,
            startup_timeout_s=startup_timeout_s,
        )  # fmt: skip
        log.info("Starting %s; logs in %s.", count_text(servers, "server"), logs)
        try:
            receiver = receivers.start(host, token, port=port + servers if port else 0, log_folder=logs)
            announcement = Announcement(register) if register is not None else None
            start_all(processes)
            if announcement is not None:
                announcement.start(entries(processes, receivers, host))
            write(usage(processes, receivers, token, host, register, engine))
            try:
                asyncio.run(_keep_all(processes, receiver, until or threading.Event()))
            finally:
                if announcement is not None and not announcement.leave(leave_s):
                    log.warning("Runs did not release these servers in time; stopping them anyway.")
        finally:
            call_all(lambda: end_all(processes), receivers.stop)


async def _keep_all(servers: Sequence[ServerProcess], receiver: ServerProcess, until: threading.Event) -> None:
    """Restarts processes that exit or hang, until the event is set; raises EngineError if a server fails too often."""
    keepers = [asyncio.ensure_future(keep(process)) for process in (*servers, receiver)]
    while not until.is_set():
        given_up, _ = await asyncio.wait(keepers[:-1], timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        if given_up:  # only servers: the receiver may fail, since most runs do not need it
            raise EngineError(given_up.pop().result())


def entries(servers: Sequence[ServerProcess], receivers: Receivers, host: str) -> list[ServerEntry]:
    """Describes the servers as registry entries."""
    name = socket.gethostname() if host in _ANY else host
    (receiver,) = (f"http://{name}:{urlsplit(url).port}" for url in receivers.urls)
    return [ServerEntry(f"http://{name}:{server.port}", receiver) for server in servers]


def usage(
    servers: Sequence[ServerProcess], receivers: Receivers, token: str, host: str, register: Path | None, kind: Kind
) -> str:
    """Lists the servers' addresses, and the commands that use them."""
    announced = entries(servers, receivers, host)
    urls, receiver = [entry.url for entry in announced], str(announced[0].receiver)
    addresses = ",".join(url.removeprefix("http://") for url in urls)
    if register is not None:
        addresses = f"file://{register.absolute()}"
    engine = next(name for name, engine_kind in _ENGINES.items() if engine_kind == kind)
    lines = [
        *("Ready:", *(f"  {url}  log {server.log_file}" for url, server in zip(urls, servers, strict=True))),
        *("For runs on these servers:", f"  export LIGHTRL_SERVER_ADDRS={addresses}"),
        f"  export {RECEIVER_VARIABLE}={receiver.removeprefix('http://')}  # for transport: delta",
        *(f"  export LIGHTRL_SERVER_TOKEN={token}", f"  lightrl fit --config run.yaml --trainer.engine {engine}"),
    ]
    if host not in _LOOPBACK:
        lines.append("Other machines can connect, without TLS: let only the run's machines reach these ports.")
        if kind == "vllm":
            lines.append("vLLM's routes that load weights require no token.")
    return "\n".join([*lines, "Ctrl-C stops the servers.\n"])


def serve_policy(
    policy: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    until: threading.Event | None = None,
    write: Callable[[str], object] = sys.stdout.write,
) -> None:
    """Serves a policy through an OpenAI-compatible API, for completions and chats with logprobs, until Ctrl-C.

    LocalEngine generates in this process. To use servers, export the checkpoint and run `lightrl serve --model FOLDER`.

    Args:
        policy: a checkpoint, an exported folder, a hub name, or a run's YAML, whose untrained policy is served.
        host: address to listen on; with the default only this machine can connect.
        port: 0 for any free port.
        token: the token that requests must carry; by default LIGHTRL_SERVER_TOKEN or a random one, which is printed.
        until: an event that stops the server; if None, only Ctrl-C and SIGTERM do.
        write: called with the text to print.

    Raises:
        ValueError: if the policy does not exist. RolloutError: if the port cannot be opened.
    """
    from lightrl.models.images import ImageReader
    from lightrl.workflows.agent_workflow import PolicyAccess, serving_policy
    from lightrl.workflows.multi_turn import TurnRenderer

    token = usable_token(token or os.environ.get(TOKEN_VARIABLE))
    with tempfile.TemporaryDirectory(prefix=own_prefix("lightrl-policy-"), ignore_cleanup_errors=True) as scratch:
        spec = _spec_of_policy(policy, Path(scratch) / "exported")
        model, tokenizer = spec.load_model(), spec.load_tokenizer()
        engine = LocalEngine()
        engine.expect_policy(model, num_versions=1)
        try:
            engine.start(model.config)
            engine.load_weights([Bucket(dict(whole_parameters(model)), is_last=True)], weight_version=0)
            context = engine.max_context or 2**31
            sources = stop_token_ids(model, tokenizer, Sampling())
            renderer = TurnRenderer(tokenizer, ImageReader.of(model.config))
            renderer.end_token_ids.update(*sources.values())
            sampling = with_stop_tokens(Sampling(max_new_tokens=context), sources)
            access = PolicyAccess(engine, renderer, sampling, context)
            with serving_policy(access, host=host, port=port, key=token) as (url, key):
                lines = [f"Ready: {policy} as model 'policy'", f"  export OPENAI_BASE_URL={url}"]
                lines += [f"  export OPENAI_API_KEY={key}", "Ctrl-C stops it.\n"]
                if host not in _LOOPBACK:
                    lines.insert(-1, "Other machines can connect, without TLS.")
                write("\n".join(lines))
                (until or threading.Event()).wait()
        finally:
            engine.close()


def _spec_of_policy(policy: str, exported: Path) -> ModelSpec:
    """Returns the policy of a run's YAML, a folder or a hub name; exports a checkpoint first."""
    from lightrl.commands.export import export_checkpoint

    path = Path(policy)
    if path.suffix in (".yaml", ".yml"):
        model = _section(UserSettings.read(["--config", policy]), "model", "init_args").get("policy")
        if model is None:
            raise UsageError(f"{policy} must have model.init_args.policy.")
        return model_of(model)
    if path.exists() and not (path / "config.json").exists():
        export_checkpoint(path, exported, merged=True)
        return ModelSpec(str(exported))
    return ModelSpec(policy)


def served_folder(model: ModelSpec, config: PretrainedConfig, folder: Path) -> Path:
    """Makes a model folder for servers, with weights if `model` has a path; see `write_model_folder` for its config."""
    if model.path is None:
        return write_model_folder(config, folder)
    source = Path(model.path)
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        source = Path(snapshot_download(model.path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    write_model_folder(config, folder)
    has_tokenizer = any(source.glob("tokenizer*"))
    for file in source.iterdir():
        if file.name in ("config.json", "generation_config.json") or file.is_dir():
            continue
        link = folder / file.name
        if has_tokenizer or not link.exists():  # otherwise keep the tokenizer written above
            link.unlink(missing_ok=True)
            link.symlink_to(file.resolve())
    return folder


def _section(user_settings: UserSettings, *names: str) -> JsonMapping:
    """Returns the section at this path, {} if it is missing or a class name; raises UsageError for other values."""
    section: JsonMapping = user_settings.settings
    for number, name in enumerate(names, 1):
        inner = section.get(name)
        if inner is None or isinstance(inner, str):
            return {}
        if not isinstance(inner, Mapping):
            place = ".".join(names[:number])
            at = user_settings.origin(place)
            raise UsageError(f"{place} must be settings as `key: value`, got {inner!r:.80}{at}.")
        section = inner
    return section


def settings_of(configs: Sequence[str], engine_flag: str | None = None) -> tuple[Any, dict[str, Any]]:
    """Merges the policy and engine settings of run configs; later ones win. `engine_flag` overrides their engine."""
    merged = UserSettings.read([word for config in configs for word in ("--config", config)])
    policy = _section(merged, "model", "init_args").get("policy")
    settings: dict[str, Any] = {}
    server_args: dict[str, dict[str, Any]] = {}  # kind of engine → its arguments
    for config, text in merged.files.items():  # a file may be a pipe, which can be read only once
        content = UserSettings(text.settings, text.origins)
        engine = _section(content, "trainer").get("engine")
        engine = {"class_path": engine} if isinstance(engine, str) else engine
        if isinstance(engine, dict):
            kind = settings.get("engine")  # from an earlier file; this one may add settings to it
            if kind is None or "class_path" in engine:
                kind = _ENGINES.get(str(engine.get("class_path", "")).rpartition(".")[2])
            if kind is None:
                problem = f"but {config} has {engine.get('class_path')}. Omit that file."
                raise ValueError(f"The engine must be {' or '.join(_ENGINES)}, {problem}")
            settings["engine"] = kind
            args = engine.get("init_args") or {}
            if (kind, args.get("transport")) == ("vllm", "distributed"):
                server_args.setdefault(kind, {})["weight_transfer_config"] = {"backend": "nccl"}
            server_args.setdefault(kind, {}).update(args.get("server_args") or {})
            settings |= {name: args[name] for name in _FROM_ENGINE if args.get(name) is not None}
            if "startup_s" in (args.get("timeouts") or {}):
                settings["startup_timeout_s"] = args["timeouts"]["startup_s"]
    chosen = engine_flag or settings.get("engine", "sglang")
    settings["server_args"] = server_args.pop(chosen, None)
    for other, names in server_args.items():
        if names:
            log.warning("Ignored server_args for %s, because the servers run %s: %s.", other, chosen, ", ".join(names))
    return policy, settings


def model_of(policy: Any) -> ModelSpec:
    """Makes a spec from a path, or from the mapping in a config."""
    if not isinstance(policy, dict):
        return ModelSpec.of(policy)
    values = policy.get("init_args", policy) if "class_path" in policy else policy
    if isinstance(path := values.get("class_path"), ClassOrText):  # a path to which a later config added settings
        added = {name: value for name, value in values.items() if name != "class_path"}
        inner = added.pop("model", {})
        role = {item.name for item in dataclasses.fields(Role)}
        values = {"path": str(path), **inner, **{name: added[name] for name in added if name not in role}}
    if "model" in values:  # the policy is a Role
        return model_of(values["model"])
    names = [item.name for item in dataclasses.fields(ModelSpec)]
    if unknown := [name for name in values if name not in names]:
        raise UsageError(f"model.init_args.policy has no setting {unknown[0]!r}. It has {', '.join(names)}.")
    return ModelSpec(**values)


def parse(args: Sequence[str]) -> dict[str, Any]:
    """Returns the arguments of `serve` from a command line and its configs; the command line wins."""
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument("--config", action="append", default=[])
    reader.add_argument("--engine")
    options, rest = reader.parse_known_args([_with_value(*pair) for pair in zip(args, [*args[1:], "--"], strict=False)])
    policy, settings = settings_of(options.config, options.engine)
    rest += [] if options.engine is None else [f"--engine={options.engine}"]

    parser = TextParser(prog="lightrl serve", exit_on_error=False, epilog=_EPILOG, formatter_class=_HelpFormatter)
    parser.add_argument("--config", help="a run's YAML, which sets the policy and the engine; may be repeated")
    parser.add_argument("--model", help="a hub name or a folder with weights, instead of the config's policy")
    token_help = "file with the token; default: LIGHTRL_SERVER_TOKEN, or a random one"
    parser.add_argument("--token_file", type=Path | None, help=token_help)
    parser.add_function_arguments(serve, skip={"model", "until", "write", "token"})
    parser.set_defaults(settings)
    if any(arg.partition("=")[0] == "--token" for arg in rest):
        fix = "Set LIGHTRL_SERVER_TOKEN, or pass --token_file FILE, instead of --token."
        raise UsageError(f"All users on this machine can read a command line. {fix}")
    try:
        values = to_plain(parser.parse_args(joined(rest))).as_dict()
    except ArgumentError as error:
        hint = f" The server's own arguments start with {_SERVER_ARG}" if "unrecognized" in error.message else ""
        raise UsageError(explain(error, parser, UserSettings.read(rest)) + hint) from error
    del values["config"]
    policy = values.pop("model") or policy
    if policy is None:
        raise ValueError("lightrl serve needs a model. Add --model PATH, or --config with model.init_args.policy.")
    token = _token_of(values.pop("token_file"))
    return {**values, "model": model_of(policy), "token": token}


def parse_policy(args: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="lightrl serve", description=str(serve_policy.__doc__).partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--policy", required=True, help="a checkpoint, an exported folder, a hub name or a run's YAML")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0, the default, for any free port")
    parser.add_argument("--token_file", type=Path, help="file with the token; default: LIGHTRL_SERVER_TOKEN, or random")
    values = vars(parser.parse_args(list(args)))
    token = _token_of(values.pop("token_file"))
    return {**values, "token": token}


def _token_of(file: Path | None) -> str | None:
    token = os.environ.get(TOKEN_VARIABLE) if file is None else file.read_text().strip()
    if file is not None and not token:
        raise ValueError(f"--token_file={file} is empty. Write the token into it.")
    return token


def _with_value(arg: str, following: str) -> str:
    """Adds `=true` to a flag such as `--server_args.enable_metrics` that has no value."""
    is_bare = arg.startswith(_SERVER_ARG) and "=" not in arg and following.startswith("--")
    return f"{arg}=true" if is_bare else arg


def run(args: Sequence[str]) -> int:
    """Runs `lightrl serve ARGS`; returns 0 after Ctrl-C or SIGTERM, 1 if a server failed, 2 for wrong arguments."""

    def command(callbacks: Sequence[object]) -> int:
        is_policy = any(arg.partition("=")[0] == "--policy" for arg in args)
        settings = parse_policy(args) if is_policy else parse(args)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            (serve_policy if is_policy else serve)(**settings)
        except KeyboardInterrupt:
            sys.stderr.write("Stopped serving.\n" if is_policy else "Stopped the servers.\n")
        return 0

    return reported(command)
