"""One real SGLang server on the CPU for the whole suite, whichever of pytest's workers asks first.

Its tests take turns: each holds a lock while it uses the server, for they load weights into it. Where the environment
is not built they are skipped, and the last lines of the run say what to do about it.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from sync_cases import config_of
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from lightrl.engines.servers.processes.process import ServerProcess, write_model_folder
from lightrl.engines.sglang.command import SGLangProcess

BUILD = Path(__file__).parents[2] / "scripts/sglang_cpu/build.py"
NOT_BUILT = f"SGLang for this machine's CPU is not built. Build it: {sys.executable} {BUILD}"


def tiny_config() -> Qwen3Config:
    return config_of(head_dim=16, tie_word_embeddings=True, eos_token_id=1)


def tiny_models(count: int = 3) -> list[PreTrainedModel]:
    """Random weights of some spread, different in each."""
    models = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(count):
            model = AutoModelForCausalLM.from_config(tiny_config(), dtype=torch.float32).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            models.append(model)
    return models


def build_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_sglang_cpu", BUILD)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sglang_python() -> str:
    """Of the built environment; skips the test where there is none."""
    python = build_script().built_python()
    if python is None:
        pytest.skip(NOT_BUILT)
    return str(python)


@contextmanager
def shared_server(folder: Path) -> Iterator[dict[str, Any]]:
    """`url`, `token`, `start_s` and more of the one server, for this process alone until the end; `folder` is shared.

    The worker that finds none running starts it; it ends with that worker. Should another one need it afterwards, it
    is started once more.
    """
    python = sglang_python()
    with (folder / "real-sglang.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        notes = folder / "real-sglang.json"
        found = json.loads(notes.read_text()) if notes.exists() else None
        if found is None or not _is_running(found["watch_pid"]):
            found = _start(folder, python)
            notes.write_text(json.dumps(found))
        yield found


def _start(folder: Path, python: str) -> dict[str, Any]:
    started = time.monotonic()
    server = SGLangProcess(
        write_model_folder(tiny_config(), folder / "real-sglang-model"),
        name="the real SGLang",
        python=python,
        args={"load_format": "dummy"},
        log_file=folder / "real-sglang.log",
        startup_timeout_s=170,
    )
    server.start()
    _alive.append(server)  # its pipe must stay open
    server.wait_ready()
    return {
        "url": server.url,
        "token": server.token,
        "watch_pid": server.pid,
        "command": server.command,
        "log": str(server.log_file),
        "start_s": time.monotonic() - started,
    }


_alive: list[ServerProcess] = []


def stop_servers() -> None:
    """Of this process; at its end."""
    while _alive:
        _alive.pop().stop(grace_s=0)


def _is_running(pid: int) -> bool:
    return subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout[:1] not in "Z"
