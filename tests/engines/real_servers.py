"""One real server of each kind on the CPU for the whole suite, whichever of pytest's workers asks first.

Its tests take turns: each holds a lock while it uses the server, for they load weights into it. Where the environment
is not built they are skipped, and the last lines of the run say what to do about SGLang's.
"""

import fcntl
import importlib.util
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from sync_cases import config_of
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3Config

from lightrl import GRPO, ModelSpec, Prompt, Sampling, StalenessControl, Trainer, Trajectory
from lightrl.engines.servers.engine import ServerEngine
from lightrl.engines.servers.processes.model_process import ModelProcess
from lightrl.engines.servers.processes.process import ServerProcess, write_model_folder
from lightrl.engines.sglang.command import SGLangProcess
from lightrl.engines.vllm.command import VLLMProcess
from lightrl.models import LoRA, Role
from lightrl.testing import QUIET

Kind = Literal["sglang", "vllm"]
PROCESSES: dict[Kind, type[ModelProcess]] = {"sglang": SGLangProcess, "vllm": VLLMProcess}
NAMES: dict[Kind, str] = {"sglang": "SGLang", "vllm": "vLLM"}
STARTUP_S: dict[Kind, float] = {"sglang": 600, "vllm": 600}


def tiny_config(kind: Kind = "sglang", **changes: Any) -> Qwen3Config:
    """A config that this kind serves on a CPU; vLLM keeps a tied head, see test_real_vllm.py."""
    values = {"head_dim": 16, "tie_word_embeddings": True} if kind == "sglang" else {"head_dim": 32}
    return config_of(**{**values, "eos_token_id": 1, **changes})


def tiny_models(count: int = 3, config: Qwen3Config | None = None) -> list[PreTrainedModel]:
    """Random weights of some spread, different in each."""
    config = config or tiny_config()
    models = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(count):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.2)
            models.append(model)
    return models


class LikesLowTokens(GRPO):
    """Learns to write tokens below 20 of 61; rewards come from this process."""

    def reward(self, trajectory: Trajectory) -> float:
        return sum(token < 20 for token in trajectory.completion_ids) / len(trajectory.completion_ids)


def fit(
    engine: ServerEngine,
    config: PreTrainedConfig,
    folder: Path,
    *,
    max_steps: int = 4,
    max_staleness: int = 2,
    lora: LoRA | None = None,
) -> tuple[Trainer, list[float]]:
    """A trainer after its run against a real server, and the mean reward of each rollout."""
    policy = ModelSpec(config=config.to_dict(), tokenizer="tiny.char_tokenizer", seed=1)
    module = LikesLowTokens(Role(policy, lora=lora), lr=2e-2, group_size=8, sampling=Sampling(max_new_tokens=8))
    rewards: list[float] = []
    module.on_rollout_end = lambda groups: rewards.append(  # type: ignore[method-assign]
        mean(trajectory.reward for group in groups for trajectory in group.trajectories)
    )
    control = StalenessControl(max_staleness)
    trainer = Trainer(engine=engine, callbacks=[control], max_steps=max_steps, default_root_dir=folder, **QUIET)
    prompts = [Prompt(f"p{number}", token_ids=[number + 3, 5, 8]) for number in range(8)]
    trainer.fit(module, DataLoader(prompts, batch_size=4, collate_fn=list))
    return trainer, rewards


def build_file(kind: Kind) -> Path:
    return Path(__file__).parents[2] / f"scripts/{kind}_cpu/build.py"


def build_script(kind: Kind = "sglang") -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"build_{kind}_cpu", build_file(kind))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built_python(kind: Kind = "sglang") -> str:
    """Of the built environment; skips the test where there is none."""
    python = build_script(kind).FOLDER.find()
    if python is None:
        how = f"Build it: {sys.executable} {build_file(kind)}"
        pytest.skip(f"{NAMES[kind]} for this machine's CPU is not built. {how}")
    return str(python)


@contextmanager
def shared_server(folder: Path, kind: Kind) -> Iterator[dict[str, Any]]:
    """`url`, `token`, `start_s` and more of the one server, for this process alone until the end; `folder` is shared.

    The worker that finds none running starts it; it ends with that worker. Should another one need it afterwards, it
    is started once more.
    """
    built_python(kind)
    with (folder / f"real-{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        notes = folder / f"real-{kind}.json"
        found = json.loads(notes.read_text()) if notes.exists() else None
        if found is None or not _is_running(found["watch_pid"]):
            found = start_server(folder, kind, tiny_config(kind))
            notes.write_text(json.dumps(found))
        yield found


@contextmanager
def own_server(folder: Path, model: PreTrainedConfig | Path, **args: Any) -> Iterator[dict[str, Any]]:
    """A SGLang server of this test alone, of random weights or of a model folder; the environment has its token."""
    built_python()
    before = len(_alive)
    try:
        with pytest.MonkeyPatch.context() as patch:
            found = start_server(folder, "sglang", model, **args)
            patch.setenv("LIGHTRL_SERVER_TOKEN", found["token"])
            yield found
    finally:
        for server in _alive[before:]:
            _alive.remove(server)
            server.stop(grace_s=0)


def start_server(folder: Path, kind: Kind, model: PreTrainedConfig | Path, **args: Any) -> dict[str, Any]:
    """A server, of dummy weights if the model is a config; it ends with this process."""
    started = time.monotonic()
    if not isinstance(model, Path):
        model, args = write_model_folder(model, folder / f"real-{kind}-model"), {"load_format": "dummy", **args}
    server = PROCESSES[kind](
        model,
        name=f"the real {NAMES[kind]}",
        python=built_python(kind),
        args=args,
        log_file=folder / f"real-{kind}.log",
        startup_timeout_s=STARTUP_S[kind],
    )
    server.start()
    _alive.append(server)  # its pipe must stay open
    server.wait_ready()
    if kind == "vllm":  # its first completion takes as long as compilers do
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "logprobs": 0, "detokenize": False}}
        headers = {"Authorization": f"Bearer {server.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/inference/v1/generate", json.dumps(body).encode(), headers)
        urllib.request.urlopen(request, timeout=STARTUP_S[kind]).close()
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
