"""lightrl serve: SGLang servers in the foreground, for runs that are started elsewhere or one after the other."""

from __future__ import annotations

import argparse
import logging
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from lightrl.commands.cli import reported
from lightrl.engines.sglang.command import devices_of_servers, usable_token
from lightrl.engines.sglang.fleet import ServerFleet
from lightrl.engines.sglang.server import SGLangServer, write_model_folder
from lightrl.errors import EngineError
from lightrl.models import ModelSpec

log = logging.getLogger(__name__)

_FROM_ENGINE = ("servers", "tp", "sglang_python", "server_args", "devices", "seed", "token", "startup_timeout_s")
_SERVER_ARG = "--server_args."
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_EPILOG = """\
examples:
  lightrl serve --config run.yaml --servers 2 --tp 2
  lightrl serve --model Qwen/Qwen3-0.6B --port 30000 --server_args.mem_fraction_static 0.7

Then, where the run is started: LIGHTRL_SERVER_ADDRS and LIGHTRL_SERVER_TOKEN as printed, and
`--trainer.engine SGLangEngine`. The run loads its weights into the servers before its first request.
"""


def serve(
    model: ModelSpec,
    *,
    servers: int = 1,
    tp: int = 1,
    host: str = "127.0.0.1",
    port: int | None = None,
    token: str | None = None,
    sglang_python: str | None = None,
    server_args: dict[str, Any] | None = None,
    devices: Sequence[int | str] = (),
    seed: int = 0,
    startup_timeout_s: float = 900.0,
    log_folder: Path | None = None,
    until: threading.Event | None = None,
    say: Callable[[str], object] = sys.stdout.write,
) -> None:
    """Starts servers, says where they are, restarts those that die at their address, ends them at the end.

    Args:
        model: a path serves its weights; a config serves random ones, for a run to load its own.
        servers, tp: how many, and the GPUs of each.
        host: address to listen on.
        port: of the first server, the next ones count up; None takes free ones.
        token: that requests carry; None makes a random one.
        sglang_python, server_args, devices, seed, startup_timeout_s: as for `SGLangServer`.
        log_folder: of the servers' logs; None makes one.
        until: set by whoever wants the end; None is Ctrl-C or SIGTERM alone.
        say: gets what is printed.

    Raises:
        ValueError: if there is no SGLang, no such model, or fewer devices than wanted.
        EngineError: if a server does not get ready, or is given up later.
    """
    shares = devices_of_servers(servers, tp, devices)
    token = usable_token(token)
    ended = until or threading.Event()
    given_up: list[str] = []

    def give_up(url: str, message: str) -> None:
        given_up.append(message)
        ended.set()

    with tempfile.TemporaryDirectory(prefix="lightrl-serve-", ignore_cleanup_errors=True) as scratch:
        folder = served_folder(model, Path(scratch) / "model")
        logs = log_folder or Path(tempfile.mkdtemp(prefix="lightrl-serve-logs-"))
        args = {**({"load_format": "dummy"} if model.path is None else {}), **({"tp_size": tp} if tp > 1 else {})}
        fleet = ServerFleet(
            [
                SGLangServer(
                    folder,
                    name=f"server {index}",
                    python=sglang_python,
                    host=host,
                    port=0 if port is None else port + index,
                    token=token,
                    args={**args, **(server_args or {})},
                    devices=share or None,
                    seed=seed + index,
                    log_file=logs / f"server-{index}.log",
                    startup_timeout_s=startup_timeout_s,
                )
                for index, share in enumerate(shares)
            ],
            on_lost=lambda url, reason: None,  # the fleet says so itself
            on_started=lambda url: None,  # a run gives its weights to servers that were away
            on_given_up=give_up,
        )
        log.info("Starting %d server%s; logs in %s.", servers, "s" if servers > 1 else "", logs)
        try:
            fleet.start()
            say(usage(fleet, token, host))
            while not ended.wait(1.0):
                pass
        finally:
            fleet.stop()
    if given_up:
        raise EngineError(given_up[0])


def usage(fleet: ServerFleet, token: str, host: str) -> str:
    """Where the servers are, and what to type to use them."""
    name = host if host in _LOOPBACK else socket.gethostname()
    addresses = ",".join(f"{name}:{server.port}" for server in fleet.servers)
    lines = [
        *("Ready:", *(f"  http://{name}:{server.port}  log {server.log_file}" for server in fleet.servers)),
        *("For runs on these servers:", f"  export LIGHTRL_SERVER_ADDRS={addresses}"),
        *(f"  export LIGHTRL_SERVER_TOKEN={token}", "  lightrl fit --config run.yaml --trainer.engine SGLangEngine"),
    ]
    if host not in _LOOPBACK:
        lines.append("They listen beyond this machine, without TLS: let only the run's machines reach these ports.")
    return "\n".join([*lines, "Ctrl-C ends them.\n"])


def served_folder(model: ModelSpec, folder: Path) -> Path:
    """A model folder for servers: without end tokens in its config, and with the weights where `model` has a path."""
    if model.path is None:
        return write_model_folder(model.load_config(), folder)
    source = Path(model.path)
    if not source.is_dir():
        from huggingface_hub import snapshot_download

        source = Path(snapshot_download(model.path, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    write_model_folder(model.load_config(), folder)
    has_tokenizer = any(source.glob("tokenizer*"))
    for file in source.iterdir():
        if file.name in ("config.json", "generation_config.json") or file.is_dir():
            continue
        link = folder / file.name
        if has_tokenizer or not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(file.resolve())
    return folder


def settings_of(configs: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The policy and the engine's settings of run configurations; later ones win.

    Raises:
        ValueError: if a file is none, or the engine is another than SGLangEngine.
    """
    policy: Any = None
    found: dict[str, Any] = {}
    for config in configs:
        try:
            content = yaml.safe_load(Path(config).read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"--config {config} cannot be read: {error}. Give a run's YAML file.") from error
        policy = ((content.get("model") or {}).get("init_args") or {}).get("policy", policy)
        engine = (content.get("trainer") or {}).get("engine")
        if isinstance(engine, dict):
            if str(engine.get("class_path", "")).rpartition(".")[2] != "SGLangEngine":
                raise ValueError(
                    f"{config} has the engine {engine.get('class_path')}, expected SGLangEngine or none. Leave that "
                    "file out."
                )
            settings = engine.get("init_args") or {}
            server_args = {**found.get("server_args", {}), **(settings.get("server_args") or {})}
            given = {name: settings[name] for name in _FROM_ENGINE if settings.get(name) is not None}
            found = {**found, **given, "server_args": server_args}
    return policy, found


def model_of(policy: Any) -> ModelSpec:
    """From a path, or from the mapping that a config has."""
    if not isinstance(policy, dict):
        return ModelSpec.of(policy)
    values = policy.get("init_args", policy) if "class_path" in policy else policy
    return model_of(values["model"]) if "model" in values else ModelSpec(**values)  # a Role's, or the model itself


def parse(args: Sequence[str]) -> dict[str, Any]:
    """The arguments of `serve` that a command line and its configurations mean.

    Raises:
        ValueError: if they name no model.
    """
    parser = argparse.ArgumentParser(
        prog="lightrl serve",
        description="Starts SGLang servers, prints their addresses, and ends them on Ctrl-C.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="append", default=[], help="a run's YAML: its policy and SGLangEngine")
    parser.add_argument("--model", help="a hub name or a folder with weights, instead of the config's policy")
    parser.add_argument("--servers", type=int, help="how many (default 1)")
    parser.add_argument("--tp", type=int, help="GPUs of each (default 1)")
    parser.add_argument("--devices", type=lambda text: text.split(","), help="GPUs to use, for example 0,1,2,3")
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1, this machine only)")
    parser.add_argument("--port", type=int, help="of the first server, the next ones count up (default: free ones)")
    parser.add_argument("--token", help="that requests must carry (default: a random one, printed)")
    parser.add_argument("--sglang_python", help="the python of an environment with SGLang")
    parser.add_argument("--seed", type=int, help="of the servers' random numbers (default 0)")
    parser.add_argument("--startup_timeout_s", type=float, help="for a server to get ready (default 900)")
    parser.add_argument("--log_folder", type=Path, help="of the servers' logs (default: a temporary one, printed)")
    parser.add_argument("--server_args.NAME", dest="_", metavar="VALUE", help="any argument of SGLang by its own name")
    given, rest = parser.parse_known_args(list(args))
    policy, settings = settings_of(given.config)
    server_args = {**settings.get("server_args", {}), **_server_args(rest, parser)}
    typed = {name: value for name, value in vars(given).items() if value is not None}
    if "model" in typed:
        policy = typed["model"]
    if policy is None:
        raise ValueError("lightrl serve was given no model. Add --model PATH, or --config with model.init_args.policy.")
    chosen = {name: value for name, value in typed.items() if name not in ("config", "model", "_")}
    return {**settings, **chosen, "server_args": server_args, "model": model_of(policy)}


def _server_args(rest: list[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """`--server_args.dtype float32 --server_args.enable_metrics` as a dict; a name without a value is true."""
    found: dict[str, Any] = {}
    waiting = list(rest)
    while waiting:
        name, has_value, value = waiting.pop(0).partition("=")
        if not name.startswith(_SERVER_ARG):
            parser.error(f"{name} is not an argument of serve. Arguments of SGLang begin with {_SERVER_ARG}")
        if not has_value and waiting and not waiting[0].startswith("--"):
            has_value, value = "=", waiting.pop(0)
        found[name.removeprefix(_SERVER_ARG)] = yaml.safe_load(value) if has_value else True
    return found


def run(args: Sequence[str]) -> int:
    """`lightrl serve`.

    Args:
        args: without the command's name.

    Returns:
        0 ended by Ctrl-C or SIGTERM, 1 a server failed, 2 something to mend in the call.
    """
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def command(callbacks: Sequence[Any]) -> int:
        settings = parse(args)
        signal.signal(signal.SIGTERM, end)
        try:
            serve(**settings, until=ended)
        except KeyboardInterrupt:
            sys.stderr.write("The servers are ended.\n")
        return 0

    return reported(command)
