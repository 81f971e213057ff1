"""How an SGLang server is called: which Python has SGLang, its arguments as flags, which devices each server gets.

Pure but for looking whether a Python is there; server.py runs what this gives.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_READY = "lightrl-sglang-cpu.json"  # scripts/sglang_cpu/build.py writes it last, into the environment it built
_KEPT_BACK_TOKENS = 8
_OURS = {
    "model_path": "the model folder",
    "host": "host=",
    "port": "port=",
    "config": "server_args",
    "api_key": "token=",
    "admin_api_key": "token=",
}
_DEFAULTS: dict[str, Any] = {
    "sampling_defaults": "openai",  # else the checkpoint's generation_config fills in top-p and such on some routes
    "skip_server_warmup": True,
}
_CPU_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "mem_fraction_static": 0.1,
    "max_total_tokens": 16384,
    "sleep_on_idle": True,  # else an idle server takes a core
    "enable_deterministic_inference": True,  # else SGLang ignores the seeds of requests; it costs nothing here
}


@dataclass(frozen=True)
class SGLangPython:
    """A Python that has SGLang; `is_plain_cpu` if scripts/sglang_cpu/build.py built it, without GPU kernels."""

    path: str
    is_plain_cpu: bool = False

    @property
    def module(self) -> str:
        """What `python -m` starts."""
        return "lightrl_sglang_cpu.launch" if self.is_plain_cpu else "sglang.launch_server"

    def environment(self) -> dict[str, str]:
        """Of the server: the trainer's, without what leads to the trainer's packages, and what lightrl relies on."""
        ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"} if self.path != sys.executable else set()
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        # Without it the last tokens of an interrupted request are lost (up to 49).
        kept["SGLANG_FORCE_STREAM_INTERVAL"] = "1"
        kept["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # see `context_args`
        kept.setdefault("HF_HUB_OFFLINE", "1")  # the model is a local folder
        if self.is_plain_cpu:
            kept["OMP_NUM_THREADS"] = "1"
        return kept


def find_python(asked: str | None = None) -> SGLangPython:
    """The Python with SGLang: the one asked for, else $LIGHTRL_SGLANG_PYTHON, else this one, else the CPU environment.

    Raises:
        ValueError: if there is none; it says how to get one.
    """
    for name, path in (("sglang_python", asked), ("LIGHTRL_SGLANG_PYTHON", os.environ.get("LIGHTRL_SGLANG_PYTHON"))):
        if not path:
            continue
        found = shutil.which(str(Path(path).expanduser()))
        if found is None:
            raise ValueError(
                f"{name}={path} is no program, expected the python of an environment with SGLang. {_how()}"
            )
        return SGLangPython(found, _is_plain_cpu(found))
    if importlib.util.find_spec("sglang") is not None:
        return SGLangPython(sys.executable, _is_plain_cpu(sys.executable))
    built = Path(os.environ.get("LIGHTRL_SGLANG_CACHE") or "~/.cache/lightrl").expanduser() / "sglang-cpu/bin/python"
    if _is_plain_cpu(str(built)):
        return SGLangPython(str(built), is_plain_cpu=True)
    raise ValueError(f"No Python with SGLang was found: sglang_python is not set, and {built} is not there. {_how()}")


def _is_plain_cpu(python: str) -> bool:
    return (Path(python).parent.parent / _READY).is_file()


def _how() -> str:
    return (
        "Give sglang_python (or LIGHTRL_SGLANG_PYTHON) the python of an environment with `pip install sglang`; for "
        "this machine's CPU, build one with `python scripts/sglang_cpu/build.py`."
    )


def command_line(
    python: SGLangPython,
    model_folder: str | Path,
    *,
    host: str,
    port: int,
    secrets_file: str | Path,
    args: Mapping[str, Any],
) -> list[str]:
    """The server's program and arguments; no shell ever sees them, and no secret is among them.

    Args:
        python: whose SGLang.
        model_folder: with config.json.
        host, port: where it listens.
        secrets_file: a YAML file of further arguments, readable by this user only.
        args: SGLang's arguments by their own names, with `_` or `-`: True is the bare flag, False and None leave it
            out, a list is several values, a dict is JSON. They win over lightrl's defaults.

    Raises:
        ValueError: if an argument is one that lightrl sets.
    """
    given = {name.removeprefix("--").replace("-", "_"): value for name, value in args.items()}
    for name in sorted(_OURS.keys() & given.keys()):
        raise ValueError(f"server_args has {name}, which lightrl sets. Leave it out and use {_OURS[name]}.")
    settings = {**_DEFAULTS, **(_CPU_DEFAULTS if python.is_plain_cpu else {}), **given}
    return [
        *(python.path, "-m", python.module, "--model-path", str(model_folder)),
        *("--host", host, "--port", str(port), "--config", str(secrets_file), *flags(settings)),
    ]


def usable_token(token: str | None) -> str:
    """The token that a server is given, a random one where there is none.

    SGLang's argument parser takes what begins with `-` for the name of an option, in its secrets file too.

    Raises:
        ValueError: if the token begins with `-`.
    """
    if token is not None and token.startswith("-"):
        raise ValueError(
            "The server's token begins with '-', which SGLang takes for an option, expected another first character. "
            "Change token= or LIGHTRL_SERVER_TOKEN, or leave it out for a random one."
        )
    return token or secrets.token_hex(32)


def context_args(model_folder: Path) -> dict[str, Any]:
    """A context a little above the model's: SGLang keeps back up to 6 positions, of which the trainer knows nothing."""
    length = json.loads((model_folder / "config.json").read_text()).get("max_position_embeddings")
    return {} if length is None else {"context_length": length + _KEPT_BACK_TOKENS}


def flags(args: Mapping[str, Any]) -> list[str]:
    """`{"tp_size": 2, "enable_metrics": True}` as `--tp-size 2 --enable-metrics`."""
    found: list[str] = []
    for name, value in args.items():
        if value is None or value is False:
            continue
        found.append("--" + name.removeprefix("--").replace("_", "-"))
        if isinstance(value, Mapping):
            found.append(json.dumps(value))
        elif isinstance(value, list | tuple):
            found += [str(item) for item in value]
        elif value is not True:
            found.append(str(value))
    return found


def devices_of_servers(servers: int, tp: int, devices: Sequence[int | str]) -> list[list[str]]:
    """`tp` devices for each server, in order; empty lists where there are no devices at all.

    Raises:
        ValueError: if there are fewer than `servers * tp`.
    """
    if servers < 1 or tp < 1:
        raise ValueError(f"servers={servers}, tp={tp}, expected at least 1 of each. Raise them.")
    if not devices:
        return [[] for _ in range(servers)]
    if len(devices) < servers * tp:
        raise ValueError(
            f"servers={servers} with tp={tp} want {servers * tp} devices, but there are {len(devices)} "
            f"({', '.join(map(str, devices))}). Lower servers or tp, or make more devices visible."
        )
    return [[str(device) for device in devices[index * tp : (index + 1) * tp]] for index in range(servers)]
