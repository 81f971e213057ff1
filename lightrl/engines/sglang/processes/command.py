"""The command line of an SGLang server: which Python has SGLang, its arguments as flags, each server's devices.

Pure, except that it checks whether a Python exists; process.py runs the result.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from lightrl.checks.bounds import check_bounds

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Names of variables that hold a secret: HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, SSH_AUTH_SOCK, ...
_SECRET = re.compile(r"(^|_)(TOKENS?|KEYS?|APIKEY|SECRETS?|PASSW(OR)?D|PASS|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE)
_READY = "lightrl-sglang-cpu.json"  # scripts/sglang_cpu/build.py writes it last, into the environment
_RESERVED_TOKENS = 8
_HOW = (
    "Set sglang_python (or LIGHTRL_SGLANG_PYTHON) to the python of an environment with `pip install sglang`; for this "
    "machine's CPU, build one with `python scripts/sglang_cpu/build.py`."
)
_OURS = {
    "model_path": "the model folder",
    "host": "host=",
    "port": "port=",
    "config": "server_args",
    "api_key": "token=",
    "admin_api_key": "token=",
}
_DEFAULTS: dict[str, Any] = {
    "sampling_defaults": "openai",  # else the checkpoint's generation_config sets top-p and such on some routes
    "skip_server_warmup": True,
}
_CPU_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "lora_backend": "torch_native",
    "mem_fraction_static": 0.1,
    "max_total_tokens": 16384,
    "sleep_on_idle": True,  # else an idle server uses a core
    "enable_deterministic_inference": True,  # else SGLang ignores the seeds of requests; it costs nothing here
}


@dataclass(frozen=True)
class SGLangPython:
    """A Python that has SGLang; `is_plain_cpu` if scripts/sglang_cpu/build.py built it, without GPU kernels."""

    path: str
    is_plain_cpu: bool = False

    @property
    def module(self) -> str:
        """Module for `python -m`."""
        return "lightrl_sglang_cpu.launch" if self.is_plain_cpu else "sglang.launch_server"

    def environment(self) -> dict[str, str]:
        """The server's: the trainer's, without secrets and paths to its packages, and what lightrl relies on."""
        ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"} if self.path != sys.executable else set()
        variables = {name: value for name, value in os.environ.items() if name not in ours and not _SECRET.search(name)}
        # Without it the last tokens of an interrupted request are lost (up to 49).
        variables["SGLANG_FORCE_STREAM_INTERVAL"] = "1"
        variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # see `context_args`
        variables.setdefault("HF_HUB_OFFLINE", "1")  # the model is a local folder
        if self.is_plain_cpu:
            variables["OMP_NUM_THREADS"] = "1"
        return variables


def find_python(path: str | None = None) -> SGLangPython:
    """The Python with SGLang: at `path`, else $LIGHTRL_SGLANG_PYTHON, else this one, else the CPU environment."""
    for name, value in (("sglang_python", path), ("LIGHTRL_SGLANG_PYTHON", os.environ.get("LIGHTRL_SGLANG_PYTHON"))):
        if not value:
            continue
        program = shutil.which(str(Path(value).expanduser()))
        if program is None:
            raise ValueError(f"{name}={value} is not a program. {_HOW}")
        return SGLangPython(program, _is_plain_cpu(program))
    if importlib.util.find_spec("sglang") is not None:
        return SGLangPython(sys.executable, _is_plain_cpu(sys.executable))
    built = Path(os.environ.get("LIGHTRL_SGLANG_CACHE") or "~/.cache/lightrl").expanduser() / "sglang-cpu/bin/python"
    if _is_plain_cpu(str(built)):
        return SGLangPython(str(built), is_plain_cpu=True)
    raise ValueError(f"No Python with SGLang was found: sglang_python is not set, and {built} does not exist. {_HOW}")


def _is_plain_cpu(python: str) -> bool:
    return (Path(python).parent.parent / _READY).is_file()


def command_line(
    python: SGLangPython,
    model_folder: str | Path,
    *,
    host: str,
    port: int,
    secrets_file: str | Path,
    args: Mapping[str, Any],
) -> list[str]:
    """The server's program and arguments; no shell sees them, and they contain no secret.

    Args:
        secrets_file: a YAML file of further arguments, which only this user can read.
        args: SGLang's arguments by their own names, with `_` or `-`: True is the bare flag, False and None omit it, a
            list is several values, a dict is JSON. They override lightrl's defaults.
    """
    named = check_server_args(args)
    settings = {**_DEFAULTS, **(_CPU_DEFAULTS if python.is_plain_cpu else {}), **named}
    return [
        *(python.path, "-m", python.module, "--model-path", str(model_folder)),
        *("--host", host, "--port", str(port), "--config", str(secrets_file), *flags(settings)),
    ]


def check_server_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by SGLang's names; raises ValueError for one that lightrl sets."""
    named = {name.removeprefix("--").replace("-", "_"): value for name, value in args.items()}
    for name in sorted(_OURS.keys() & named.keys()):
        raise ValueError(f"server_args has {name}, which lightrl sets. Remove it and use {_OURS[name]}.")
    return named


def usable_token(token: str | None) -> str:
    """The server's token, or a random one for None."""
    if token is not None and token.startswith("-"):  # in its secrets file too
        raise ValueError(
            "The server's token starts with '-', which SGLang takes for an option. Change token= or "
            "LIGHTRL_SERVER_TOKEN, or omit it for a random one."
        )
    return token or secrets.token_hex(32)


def context_args(model_folder: Path) -> dict[str, Any]:
    """A context slightly above the model's: SGLang reserves up to 6 positions, which the trainer counts as usable."""
    length = json.loads((model_folder / "config.json").read_text()).get("max_position_embeddings")
    return {} if length is None else {"context_length": length + _RESERVED_TOKENS}


def dtype_of_auto(config: PretrainedConfig | None) -> torch.dtype:
    """Dtype that `auto` is in SGLang 0.5.23: the config's, but float16 for float32, or bfloat16 for Gemma."""
    dtype = getattr(config, "dtype", None) or torch.float32
    if dtype != torch.float32:
        return cast(torch.dtype, dtype)
    return torch.bfloat16 if getattr(config, "model_type", "").startswith("gemma") else torch.float16


def flags(args: Mapping[str, Any]) -> list[str]:
    """`{"tp_size": 2, "enable_metrics": True}` as `--tp-size 2 --enable-metrics`."""
    words: list[str] = []
    for name, value in args.items():
        if value is None or value is False:
            continue
        words.append("--" + name.removeprefix("--").replace("_", "-"))
        if isinstance(value, Mapping):
            words.append(json.dumps(value))
        elif isinstance(value, list | tuple):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(str(value))
    return words


def devices_of_servers(servers: int, tp: int, devices: Sequence[int | str]) -> list[list[str]]:
    """`tp` devices for each server, in order; empty lists if there are no devices at all."""
    check_bounds(1, servers=servers, tp=tp)
    if devices and len(devices) < servers * tp:
        raise ValueError(
            f"servers={servers} with tp={tp} need {servers * tp} devices, but there are {len(devices)} "
            f"({', '.join(map(str, devices))}). Lower servers or tp, or list more devices."
        )
    return [[str(device) for device in devices[index * tp : (index + 1) * tp]] for index in range(servers)]


def gpus_of_servers(
    num: int,
    *,
    available: int,
    trainer: Collection[int],
    placement: Literal["separate", "colocated"],
) -> list[int] | None:
    """`num` GPUs of this machine, numbered as torch numbers them; None if there are none.

    Args:
        num: servers times `tp`.
        available: GPUs that torch sees.
        trainer: those of the trainer's ranks on this machine.
        placement: of the engine.

    Raises:
        ValueError: if there are too few.
    """
    if available == 0:
        return None
    free = [gpu for gpu in range(available) if (gpu in trainer) == (placement == "colocated")]
    if len(free) < num:
        which_gpus = "of the trainer" if placement == "colocated" else f"next to the trainer's {sorted(trainer)}"
        raise ValueError(
            f"The servers need {num} GPUs (servers × tp) {which_gpus}, but there are {len(free)} of {available}. Lower "
            "servers, tp or trainer.devices, or set placement to "
            f"{'separate' if placement == 'colocated' else 'colocated'}."
        )
    return free[:num]


def visible(gpus: Sequence[int]) -> list[str]:
    """Names of GPUs in CUDA_VISIBLE_DEVICES: torch numbers only those that this process sees."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return [names[gpu] if gpu < len(names) else str(gpu) for gpu in gpus]
