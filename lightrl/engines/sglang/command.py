"""SGLangProcess: an SGLang server as a child process: which Python has SGLang, its command line and environment."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from lightrl.engines.servers.processes.command import environment_for, flags
from lightrl.engines.servers.processes.process import ServerProcess

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
    "api_key": "LIGHTRL_SERVER_TOKEN",
    "admin_api_key": "LIGHTRL_SERVER_TOKEN",
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
        """The server's environment: see `environment_for`, and what lightrl relies on."""
        variables = environment_for(self.path)
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


class SGLangProcess(ServerProcess):
    """An SGLang server.

    Args:
        model_folder: with config.json, and weights unless `args` has `load_format: dummy`; see `write_model_folder`.
        python: of an environment with SGLang; see `find_python` for None.
        args: SGLang's own arguments by their own names, for example `{"mem_fraction_static": 0.6}`.
        tp: its GPUs (`tp_size`).
        seed: of its random numbers.
        settings: of ServerProcess.
    """

    secret_arguments = ("api-key", "admin-api-key")
    info_path = "/model_info"  # servers before 0.5.20 or so have no /ready

    def __init__(
        self,
        model_folder: str | Path,
        *,
        python: str | None = None,
        args: Mapping[str, Any] | None = None,
        tp: int = 1,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        if not (Path(model_folder) / "config.json").is_file():
            raise ValueError(
                f"{model_folder} is not a model folder: it has no config.json. Fix the path, or create the folder with "
                "write_model_folder."
            )
        self._python = find_python(python)
        self._model_folder = Path(model_folder).absolute()
        defaults = {"random_seed": seed, **context_args(Path(model_folder)), **({"tp_size": tp} if tp > 1 else {})}
        self.args = {**defaults, **{name.replace("-", "_"): value for name, value in (args or {}).items()}}
        check_server_args(self.args)
        super().__init__((), **settings)

    def command_line(self, secrets_file: str) -> list[str]:
        return command_line(
            self._python, self._model_folder, host=self.host, port=self.port, secrets_file=secrets_file, args=self.args
        )

    def environment(self) -> dict[str, str]:
        return self._python.environment()
