"""ModelProcess: runs a model server as a child process; finds the Python to use and makes the arguments.

It uses the first Python that exists: the given path; $LIGHTRL_…_PYTHON; this environment, if the server is installed
here; the environment that scripts/…_cpu/build.py built for this machine's CPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lightrl.engines.servers.processes.command import environment_for
from lightrl.engines.servers.processes.process import ServerProcess

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class ModelProcess(ServerProcess):
    """A model server on this machine.

    Args:
        model_folder: contains config.json, and weights unless `load_format` is dummy; see `write_model_folder`.
        python: Python in an environment with this kind of server; None to use `find_python`.
        args: the server's arguments, keyed by name with `_` or `-`; see `flags`. They override the defaults.
        tp: number of GPUs.
        seed: seed for the server's random number generator.
        settings: other arguments to ServerProcess.
    """

    title: str  # for example SGLang; packages use it in lower case, and environment variables in upper case
    preset: ClassVar[Mapping[str, str]]  # argument that lightrl sets → lightrl's setting to use instead
    defaults: ClassVar[Mapping[str, Any]]
    cpu_defaults: ClassVar[Mapping[str, Any]]  # added to `defaults` in an environment built for this machine's CPU

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
        self.model_folder = Path(model_folder).absolute()
        file = self.model_folder / "config.json"
        if not file.is_file():
            raise ValueError(
                f"{model_folder} is not a model folder: it has no config.json. Fix the path, or create the folder with "
                "write_model_folder."
            )
        self.python, self.is_cpu_build = self.find_python(python)
        defaults = {**self.defaults, **(self.cpu_defaults if self.is_cpu_build else {})}
        self.args = {**defaults, **self.args_for(json.loads(file.read_text()), tp, seed), **self.named(args or {})}
        super().__init__((), **settings)

    @classmethod
    def find_python(cls, path: str | None = None) -> tuple[str, bool]:
        """Returns the Python with this kind of server, and whether it was built for this machine's CPU."""
        kind = cls.title.lower()
        setting, variable = f"{kind}_python", f"LIGHTRL_{kind.upper()}_PYTHON"
        how = (
            f"Set {setting} (or {variable}) to the python of an environment with `pip install {kind}`; for this "
            f"machine's CPU, build one with `python scripts/{kind}_cpu/build.py`."
        )

        def is_built(python: str) -> bool:
            return (Path(python).parent.parent / f"lightrl-{kind}-cpu.json").is_file()  # build.py writes it last

        for name, value in ((setting, path), (variable, os.environ.get(variable))):
            if value:
                program = shutil.which(str(Path(value).expanduser()))
                if program is None:
                    raise ValueError(f"{name}={value} is not a program. {how}")
                return program, is_built(program)
        if importlib.util.find_spec(kind) is not None:
            return sys.executable, is_built(sys.executable)
        cache = os.environ.get(f"LIGHTRL_{kind.upper()}_CACHE") or "~/.cache/lightrl"
        built = str(Path(cache).expanduser() / f"{kind}-cpu/bin/python")
        if is_built(built):
            return built, True
        problem = f"No Python with {cls.title} was found: {setting} is not set, and {built} does not exist. {how}"
        raise ValueError(problem)

    @classmethod
    def named(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments with `_` instead of `-` in names; raises ValueError for one that lightrl sets."""
        named = {name.removeprefix("--").replace("-", "_"): value for name, value in args.items()}
        for name in sorted(cls.preset.keys() & named.keys()):
            raise ValueError(f"server_args has {name}, which lightrl sets. Remove it, and use {cls.preset[name]}.")
        return named

    @classmethod
    def served_config(cls, config: PretrainedConfig, args: Mapping[str, Any], tp: int) -> PretrainedConfig:
        """Returns the model's config on servers with these arguments, which may quantize the model."""
        return config

    @abstractmethod
    def args_for(self, config: Mapping[str, Any], tp: int, seed: int) -> dict[str, Any]:
        """Returns the arguments for a model with this config on `tp` GPUs."""

    def environment(self) -> dict[str, str]:
        """Returns the environment; HF_HUB_OFFLINE is 1 unless set, so the server downloads nothing."""
        return environment_for(self.python) | {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
