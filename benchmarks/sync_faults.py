"""Provokes silent faults of a weight sync to see which check detects each, and when; counts false alarms.

    python -m benchmarks.sync_faults [--quick] [--faults WORDS,WORDS] [--syncs 1000] [--write benchmarks/faults.md]

For each fault, GRPO trains a tiny policy with SGLangEngine and one or two fake servers, at a learning rate of 1e-6 in
bfloat16. One server reports success for the sync of version 2, or for a request after it, but does something else, and
counts its values that differ from those sent. *Iterations* are the rollouts that had begun with wrong weights at the
first warning or error: 0 is the sync itself, before a token is sampled.

Unusually many of the policy's values are near a bfloat16 rounding boundary, so a step of 1e-6 changes every tensor.

Healthy syncs come from runs without faults: with each transport, both dtypes, LoRA, rollouts in the background, servers
that compute in bfloat16, and adapters served in three dtypes at three learning rates. Any warning, error or lost server
there is a false alarm. `--write` replaces the table between two markers of a Markdown file.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fake_sglang.process import FakeServerProcess
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen3Config

import lightrl
from benchmarks.report import Report
from lightrl import (
    GRPO,
    LoRA,
    ModelSpec,
    Prompt,
    Role,
    Sampling,
    SGLangEngine,
    StalenessControl,
    Trajectory,
    WeightSync,
)
from lightrl.callbacks import RLCallback, weight_sync
from lightrl.engines import Timeouts
from lightrl.engines.servers.addresses import RECEIVER_VARIABLE, TOKEN_VARIABLE
from lightrl.engines.servers.processes.process import HeldPort
from lightrl.errors import LightRLError
from lightrl.testing import QUIET

LR = 1e-6
WRONG_VERSION = 2  # of which the sync goes wrong
MORE_ITERATIONS = 3
BUCKET_BYTES = 16_384  # several files or buckets
UPDATES = "/update_weights"
TOKEN = "a-token"  # of the weight receiver
MARKERS = ("<!-- python -m benchmarks.sync_faults --write benchmarks/faults.md -->", "<!-- end of the table -->")


@dataclass(frozen=True)
class SyncFault:
    """A fault, and the run in which it happens."""

    name: str
    fault: Mapping[str, Any]  # the fake server's
    servers: tuple[int, ...] = (1, 2)  # numbers of servers to try
    transport: str = "disk"
    dtype: str = "bfloat16"  # of the servers
    has_lora: bool = False
    adapters: str = "merged"
    lr: float = LR
    damage: str = ""  # one of DAMAGES, to what the delta's receiver holds, in place of a server's fault
    models: tuple[str, str] = ("model", "model")  # of MODELS: the trainer's, and what the servers start with
    armed_at: int | None = WRONG_VERSION - 1  # by the start of the rollout with this version; None before the run
    on_all: bool = False  # on every server, else on the first
    is_silent: bool = True


def _load(name: str, kind: str, *, names: str = "", versions_back: int = 1, **run: Any) -> SyncFault:
    return SyncFault(name, {"kind": kind, "path": UPDATES, "names": names, "versions_back": versions_back}, **run)


def _adapter(name: str, kind: str, **run: Any) -> SyncFault:
    """Makes a fault of adapters that are served next to their base."""
    return SyncFault(
        name, {"kind": kind, "path": "/load_lora_adapter_from_tensors"}, dtype="float32", has_lora=True,
        adapters="served", models=("model", "adapters, float32"), **run,
    )  # fmt: skip


def _damage(name: str, damage: str) -> SyncFault:
    return SyncFault(name, {}, transport="delta", damage=damage)


FAULTS = (
    _load("acknowledged and ignored", "ignore_update"),
    _load("acknowledged and ignored by both servers", "ignore_update", servers=(2,), on_all=True),
    _load("one file of the folder dropped", "drop_file"),
    _load("one bucket dropped, shared memory", "ignore_update", transport="tensor"),
    _load("one bucket dropped, broadcast", "ignore_update", transport="distributed"),
    _load("one bucket of the previous version, shared memory", "old_version", transport="tensor"),
    _load("one layer keeps its old values", "keep", names=r"layers\.1\."),
    _load("the embedding keeps its old values", "keep", names="embed_tokens"),
    _load("the final norm keeps its old values", "keep", names=r"^model\.norm"),
    _load("the head keeps its old values", "keep", names="lm_head"),
    _load("one of two tp ranks keeps its old shard", "old_rank", models=("model", "two ranks")),
    _load("one matrix left at zero", "zero", names=r"layers\.0\.self_attn\.o_proj"),
    _load("query norm and key norm swapped", "swap", names=r"layers\.0\.self_attn\.[qk]_norm"),
    _load("gate and up projection swapped", "swap", names=r"layers\.1\.mlp\.(gate|up)_proj"),
    _load("the same matrix of two layers swapped", "swap", names=r"mlp\.down_proj"),
    _load("heads in another order", "swap_halves", names=r"layers\.1\.self_attn\.q_proj"),
    _load("a square matrix transposed", "transpose", names=r"layers\.0\.self_attn\.o_proj"),
    _load("the head tied at the trainer only", "other_tie", models=("tied", "untied"), armed_at=0),
    _load("the head tied at the server only", "other_tie", models=("twin", "tied"), armed_at=None),
    _load("the previous version loaded", "old_version"),
    _load("the version before the previous one loaded", "old_version", versions_back=2),
    _load("a delta applied twice", "delta_twice"),
    _load("a delta applied to a wrong base", "delta_on_wrong_base"),
    _load("a torn file: full length, zeros at its end", "torn_file"),
    _load("the lowest bit of one value flipped", "flip_bit", names=r"layers\.1\.mlp\.up_proj"),
    _load("kept in bfloat16 by a float32 server", "round", dtype="float32"),
    _load("truncated to bfloat16 by a float32 server", "truncate", dtype="float32"),
    _load("kept in float16 by a float32 server", "through_float16", dtype="float32"),
    _load("adapters never delivered: the base", "old_version", versions_back=1000, has_lora=True),
    _load("one matrix without its adapter", "old_version", versions_back=1000, has_lora=True, names="1.mlp.up_proj"),
    _load("the prefix cache not flushed", "keep_cache"),
    _adapter("served adapters acknowledged and not kept", "lose_update", is_silent=False),
    _adapter("served adapters of the previous version under the new name", "old_adapter"),
    _adapter("the same at lr 1e-4, usual for adapters", "old_adapter", lr=1e-4),
    _load("acknowledged and ignored, delta", "ignore_update", transport="delta"),
    _load("the previous version loaded, delta", "old_version", transport="delta"),
    _damage("a delta's base with one bit flipped", "flip_bit"),
    _damage("a delta's base with two parameters swapped", "swap"),
    _damage("a delta's base of the version before, in place of the right one", "old"),
    _damage("a delta's base with zeros at the end of a file", "torn"),
    SyncFault("old weights back after the sync was verified", {"kind": "revert", "path": "/continue_generation"}),
    SyncFault("old weights back amid a rollout", {"kind": "revert", "skip": 2}, armed_at=WRONG_VERSION),
    SyncFault("restarted with old weights as the new version", {"kind": "restart", "skip": 2}, armed_at=WRONG_VERSION),
    _load("another version reported", "wrong_version", is_silent=False),
    _load("update lost, old version reported", "lose_update", is_silent=False),
)

# What a message says, and what noticed the fault; the first that matches.
NOTICED_BY = {
    r"another model": "comparison of models",
    r"reports version": "version",
    r"different process answers|was restarted": "identity",
    r"unlike those of the other": "replicas",
    r"differ from the trainer's": "digests",
    r"did not take a delta": "digest of the delta's result",
    r"does not list it": "list of adapters",
    r"key-values": "canary",
    r"probe differs": "probe bound",
    r"mismatch": "mismatch bound",
}


OUTCOMES = {
    r"gets the (weights anew|new version)": "the server got the next version",
    r"is lost": "the server left and got the version again",
    r"gets the whole version": "the whole version was sent",
    r"Its cache is flushed": "the server's cache was flushed",
}


class Scored(GRPO):
    """Gives every completion a different reward, so that each iteration has a gradient."""

    def reward(self, trajectory: Trajectory) -> float:
        return sum((position + 1) * token % 13 for position, token in enumerate(trajectory.completion_ids)) / 13


class Watch(RLCallback):
    """Arms a fault; keeps warnings and errors, each with the number of rollouts begun since the wrong version.

    Args:
        arm: called when the rollout with version `armed_at` starts; never if that is None.
        before: called when the previous rollout starts.
    """

    def __init__(
        self,
        arm: Callable[[], object] = lambda: None,
        armed_at: int | None = WRONG_VERSION - 1,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self.arm = arm
        self.before = before
        self.armed_at = armed_at
        self.num_rollouts = 0
        self.notices: list[tuple[int, str]] = []

    def on_rollout_start(self, trainer: Any, module: Any) -> None:
        if trainer.weight_version == self.armed_at:
            self.arm()
        elif self.armed_at is not None and trainer.weight_version == self.armed_at - 1:
            self.before()
        if trainer.weight_version >= WRONG_VERSION:
            self.num_rollouts += 1

    def notice(self, text: str) -> None:
        self.notices.append((self.num_rollouts, text))


class _Warnings(logging.Handler):
    def __init__(self, watch: Watch) -> None:
        super().__init__(logging.WARNING)
        self.watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        self.watch.notice(record.getMessage())


@dataclass
class Result:
    """The outcome of a run."""

    notices: list[tuple[int, str]]
    error: str  # that ended it; empty if it ran to its end
    num_syncs: int
    seconds: float
    num_fired: int = 0
    num_wrong_values: int = 0

    @property
    def noticed_by(self) -> str | None:
        """The first check that noticed the fault, or the message if it is of no known check."""
        if not self.notices:
            return None
        text = self.notices[0][1]
        return next((name for pattern, name in NOTICED_BY.items() if re.search(pattern, text)), text[:60])

    @property
    def iterations(self) -> int | None:
        return self.notices[0][0] if self.notices else None

    @property
    def outcome(self) -> str:
        """How the run ended."""
        if self.error:
            return "the run ended"
        return next((what for pattern, what in OUTCOMES.items() if self.has(pattern)), "the run continued")

    def has(self, pattern: str) -> bool:
        """Whether a warning or error matches."""
        return any(re.search(pattern, text) for _, text in self.notices)


def on_borders(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Moves every sixteenth value (every one of a vector) to within 4e-6 of the border between two bfloat16 values."""
    bits = tensor.view(torch.int32) & -0x10000 | 0x8000
    near = bits.view(torch.float32) + (torch.rand(tensor.shape, generator=generator) * 8 - 4) * LR
    chosen = torch.zeros(tensor.numel(), dtype=torch.bool)
    chosen[:: 16 if tensor.dim() == 2 else 1] = True
    return torch.where(chosen.view(tensor.shape), near, tensor)


_LORA = {
    "enable_lora": True, "max_lora_rank": 2,
    "lora_target_modules": [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")],
}  # fmt: skip

# Name: a folder of `write_models`, and arguments of a server that starts with it.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "model": ("model", {}),
    "bfloat16": ("model", {"dtype": "bfloat16"}),
    "two ranks": ("model", {"tp_size": 2}),
    **{f"adapters, {dtype}": ("model", {"dtype": dtype} | _LORA) for dtype in ("float32", "bfloat16", "float16")},
    "draft model": ("model", {"speculative_algorithm": "EAGLE"}),
    "tied": ("tied", {}),
    "twin": ("twin", {}),
    "untied": ("untied", {}),
}
ELSEWHERE = ("tied", "untied")  # servers of other hosts: the run cannot read what they started with


def write_models(root: Path) -> None:
    """Writes the initial models of runs and servers; the last three share all weights but the head.

    `tied`: the embedding. `twin`: a parameter that differs from it in one value. `untied`: an equal one, in bfloat16.
    """
    generator = torch.Generator().manual_seed(0)
    for name in ("model", "tied", "twin", "untied"):
        config = Qwen3Config(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=name == "tied",
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for tensor in model.parameters():
                start = torch.randn(tensor.shape, generator=generator) * 0.1 + (tensor.dim() == 1)
                tensor.copy_(on_borders(start, generator))
            if name in ("twin", "untied"):
                model.load_state_dict(AutoModelForCausalLM.from_pretrained(root / "tied").state_dict())
            if name == "twin":
                model.lm_head.weight[0, 0] += 0.01
        model.to(torch.bfloat16 if name == "untied" else torch.float32).save_pretrained(root / name)


# What changes in a file of safetensors, given the file of the version before: [bytes], behind the header.
DAMAGES: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "flip_bit": lambda held, old: np.concatenate([held[:1] ^ 1, held[1:]]),
    "swap": lambda held, old: np.roll(held, len(held) // 2),
    "old": lambda held, old: old,
    "torn": lambda held, old: np.concatenate([held[:-64], np.zeros(64, np.uint8)]),
}


class DeltaReceiver:
    """A weight receiver whose files can be damaged without its knowledge."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._held = HeldPort("127.0.0.1")
        self.url = f"http://127.0.0.1:{self._held.number}"
        command = [sys.executable, "-m", "lightrl.engines.servers.sync.receiver", "--port", str(self._held.number)]
        self._process = subprocess.Popen(
            [*command, "--folder", str(root)], env=os.environ | {TOKEN_VARIABLE: TOKEN, "OMP_NUM_THREADS": "1"}
        )
        self._old: dict[str, bytes] = {}

    def keep(self) -> None:
        """Copies the receiver's current version, for `old`."""
        self._old = {file.name: file.read_bytes() for file in self._files()}

    def damage(self, name: str) -> int:
        """Changes the receiver's files in place; returns how many bfloat16 values are then wrong."""
        num_wrong = 0
        for file in self._files():
            right, old = file.read_bytes(), self._old[file.name]
            start = 8 + int.from_bytes(right[:8], "little")
            held, before = (np.frombuffer(content[start:], np.uint8) for content in (right, old))
            wrong = DAMAGES[name](held, before)
            num_wrong += int((wrong.view("<u2") != held.view("<u2")).sum())
            with file.open("r+b") as opened:  # the receiver has it mapped
                opened.write(right[:start] + wrong.tobytes())
        return num_wrong

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._held.close()

    def _files(self) -> list[Path]:
        return sorted(self.root.glob("version-*/*.safetensors"))[-1:]


class Servers:
    """Fake servers that runs share, of one of MODELS each; they start when they are first needed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._processes: dict[tuple[str, str], list[FakeServerProcess]] = {}  # by model and dtype
        self._receiver: DeltaReceiver | None = None

    def folder(self, model: str) -> Path:
        return self.root / MODELS[model][0]

    def take(self, model: str, num: int, dtype: str = "bfloat16") -> list[FakeServerProcess]:
        """Returns `num` servers without faults, in this dtype if the model names none."""
        processes = self._processes.setdefault((model, dtype), [])
        while len(processes) < num:
            folder = self.root / f"served-{model}-{dtype}"
            processes.append(FakeServerProcess(str(folder), **{"dtype": dtype} | MODELS[model][1]))
        for process in processes[:num]:
            if not process.is_alive():
                shutil.copytree(self.folder(model), str(process.model_folder), dirs_exist_ok=True)
                process.start()
                if model in ELSEWHERE:
                    shutil.rmtree(str(process.model_folder))
            process.reset()
        return processes[:num]

    def receiver(self) -> DeltaReceiver:
        if self._receiver is None:
            self._receiver = DeltaReceiver(self.root / "receiver")
        return self._receiver

    def stop(self) -> None:
        if self._receiver is not None:
            self._receiver.stop()
        for process in [process for processes in self._processes.values() for process in processes]:
            process.stop()


@contextlib.contextmanager
def fake_servers() -> Iterator[Servers]:
    """Yields Servers whose models are in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="lightrl-faults-") as folder:
        write_models(Path(folder))
        servers = Servers(Path(folder))
        try:
            yield servers
        finally:
            servers.stop()


def fit(
    urls: Sequence[str],
    model: Path,
    watch: Watch,
    *,
    token: str | None = None,
    transport: str = "disk",
    has_lora: bool = False,
    adapters: str = "merged",
    receivers: Sequence[str] | None = None,
    lr: float = LR,
    max_staleness: int = 0,
    num_iterations: int = WRONG_VERSION + MORE_ITERATIONS,
) -> Result:
    """Runs a fit; returns a Result with its warnings and its error."""
    start = time.perf_counter()
    os.environ[RECEIVER_VARIABLE] = ",".join(receivers or [])
    os.environ[TOKEN_VARIABLE] = token or ""
    engine = SGLangEngine(
        urls=urls,
        transport=transport,  # type: ignore[arg-type]
        adapters=adapters,  # type: ignore[arg-type]
        timeouts=Timeouts(sync_s=60),
    )  # fmt: skip
    weight_sync.BUCKET_BYTES = BUCKET_BYTES
    sync = WeightSync()
    trainer = lightrl.Trainer(
        engine=engine, callbacks=[StalenessControl(max_staleness), sync, watch], max_steps=num_iterations,
        default_root_dir=tempfile.gettempdir(), **QUIET,
    )  # fmt: skip
    spec = ModelSpec(path=str(model), tokenizer="lightrl.testing.char_tokenizer")
    module = Scored(
        Role(spec, lora=LoRA(rank=2)) if has_lora else spec, lr=lr, group_size=4, sampling=Sampling(max_new_tokens=8)
    )
    # The same prompts in each iteration, for the prefix cache.
    prompts = [Prompt(f"p{number}", token_ids=[number % 2, 5, 8, 9]) for number in range(2 * num_iterations + 16)]
    handler, error = _Warnings(watch), ""
    logging.getLogger("lightrl").addHandler(handler)
    try:
        trainer.fit(module, DataLoader(prompts, batch_size=2, collate_fn=list))  # type: ignore[arg-type]
    except LightRLError as reason:
        error = str(reason)
        watch.notice(error)
    finally:
        logging.getLogger("lightrl").removeHandler(handler)
        del os.environ[RECEIVER_VARIABLE], os.environ[TOKEN_VARIABLE]  # or servers that start later require the token
    return Result(watch.notices, error, num_syncs=trainer.weight_version + 1, seconds=time.perf_counter() - start)


def delta_settings(receiver: DeltaReceiver | None) -> dict[str, Any]:
    """Returns arguments of `fit` for the transport delta."""
    return {} if receiver is None else {"receivers": [receiver.url], "token": TOKEN}


def run_fault(fault: SyncFault, num_servers: int, servers: Servers) -> Result:
    processes = servers.take(fault.models[1], num_servers, fault.dtype)

    receiver = servers.receiver() if fault.transport == "delta" else None
    num_damaged: list[int] = []  # values

    def arm() -> None:
        if fault.damage and receiver is not None:
            num_damaged.append(receiver.damage(fault.damage))
        for process in () if fault.damage else processes if fault.on_all else processes[:1]:
            process.fault(**fault.fault)

    if fault.armed_at is None:
        arm()
    result = fit(
        [process.url for process in processes], servers.folder(fault.models[0]),
        Watch(arm, fault.armed_at, receiver.keep if receiver else lambda: None),
        transport=fault.transport, has_lora=fault.has_lora, adapters=fault.adapters, lr=fault.lr,
        **delta_settings(receiver),
    )  # fmt: skip
    fired = [entry for process in processes for entry in process.stats()["faults"]]
    result.num_fired = sum(entry["num_fired"] for entry in fired) + len(num_damaged)
    result.num_wrong_values = sum(entry["num_wrong_values"] for entry in fired) + sum(num_damaged)
    return result


# Runs without a fault: arguments of `fit`, and of `Servers.take`.
Healthy = tuple[dict[str, Any], str, int]  # settings, model, number of servers
HEALTHY: tuple[Healthy, ...] = (
    ({}, "model", 1),
    ({"transport": "tensor"}, "model", 2),
    ({"dtype": "float32"}, "model", 1),
    ({"transport": "distributed", "has_lora": True}, "model", 2),
    ({"max_staleness": 1}, "tied", 1),
    ({"transport": "tensor", "dtype": "float32"}, "model", 1),
    ({}, "bfloat16", 1),
    ({"has_lora": True}, "bfloat16", 2),
    ({"transport": "tensor"}, "draft model", 1),
    ({"transport": "delta"}, "model", 2),
    *(
        ({"has_lora": True, "adapters": "served", "dtype": dtype, "lr": lr}, f"adapters, {dtype}", 1)
        for dtype, lrs in (("float32", (1e-6, 1e-7)), ("bfloat16", (1e-5, 1e-6, 1e-7)), ("float16", (1e-6, 1e-7)))
        for lr in lrs
    ),
)


def run_healthy(num_syncs: int, servers: Servers, kinds: Sequence[Healthy] = HEALTHY) -> dict[str, Any]:
    """Runs at least `num_syncs` syncs without a fault, and collects false alarms."""
    results = []
    for settings, model, num_servers in kinds:
        settings = dict(settings)
        processes = servers.take(model, num_servers, settings.pop("dtype", "bfloat16"))
        urls = [process.url for process in processes]
        num_iterations = max(1, math.ceil(num_syncs / len(kinds)) - 1)  # and the sync before the first one
        receiver = servers.receiver() if settings.get("transport") == "delta" else None
        more = settings | delta_settings(receiver)
        results.append(fit(urls, servers.folder(model), Watch(), num_iterations=num_iterations, **more))
    alarms = [text for result in results for _, text in result.notices]
    return {
        "healthy_syncs": sum(result.num_syncs for result in results), "false_alarms": len(alarms),
        "alarms": alarms[:5], "seconds": round(sum(result.seconds for result in results), 1),
    }  # fmt: skip


def row(fault: SyncFault, num_servers: int, result: Result) -> dict[str, Any]:
    return {
        "fault": fault.name, "servers": num_servers, "lr": fault.lr, "dtype": fault.dtype,
        "noticed_by": result.noticed_by, "iterations": result.iterations, "is_silent": fault.is_silent,
        "num_fired": result.num_fired, "wrong_values": result.num_wrong_values, "outcome": result.outcome,
        "seconds": round(result.seconds, 1), "message": result.notices[0][1] if result.notices else "",
    }  # fmt: skip


def markdown(rows: Sequence[Mapping[str, Any]], healthy: Mapping[str, Any]) -> str:
    """Returns the table of benchmarks/faults.md: a line for each fault, with one server and with two."""
    lines = [
        "| fault | dtype | wrong values | noticed with one server by | iterations | with two by | iterations |",
        "|---|---|--:|---|--:|---|--:|",
    ]
    for fault in FAULTS:
        found = {item["servers"]: item for item in rows if item["fault"] == fault.name}
        some = next(iter(found.values()))
        name = fault.name if fault.is_silent else f"{fault.name} (not silent)"
        cells = [name, fault.dtype, str(some["wrong_values"]) if fault.is_silent else "–"]
        for num in (1, 2):
            if num not in found:
                cells += ["–", "–"]
            elif found[num]["noticed_by"] is None:
                cells += ["**nothing**", "–"]
            else:
                cells += [found[num]["noticed_by"], str(found[num]["iterations"])]
        lines.append("| " + " | ".join(cells) + " |")
    summary = f"{healthy['healthy_syncs']:,} healthy syncs gave {healthy['false_alarms']} false alarms."
    return "\n".join([*lines, "", summary])


def write_table(file: Path, table: str, markers: tuple[str, str] = MARKERS) -> None:
    """Replaces the text between the two markers."""
    before, _, rest = file.read_text().partition(markers[0])
    _, _, after = rest.partition(markers[1])
    if not after:
        raise SystemExit(f"{file} must have the lines {markers[0]} and {markers[1]}.")
    file.write_text(f"{before}{markers[0]}\n{table}\n{markers[1]}{after}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync_faults", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="three faults with one server, 16 healthy syncs of one kind"
    )
    parser.add_argument("--faults", default="", help="only those whose name contains one of these words")
    parser.add_argument("--syncs", type=int, default=1000, help="healthy ones")
    parser.add_argument("--write", type=Path, help="a Markdown file whose table is replaced")
    options = parser.parse_args(argv)
    if options.write and (options.quick or options.faults):
        parser.error("--write needs all faults: leave out --quick and --faults.")
    words = options.faults.split(",") if options.faults else [""]
    chosen = [fault for fault in FAULTS if any(word in fault.name for word in words)]
    cases = [(fault, num) for fault in chosen for num in fault.servers]
    if options.quick:
        cases = [(fault, 1) for fault in (FAULTS[0], FAULTS[-2], FAULTS[-1])]
        options.syncs = 16
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    report = Report("sync_faults", lr=LR)
    with fake_servers() as servers:
        rows = [report.add("fault", **row(fault, num, run_fault(fault, num, servers))) for fault, num in cases]
        healthy = report.add(
            "healthy", lr=LR, **run_healthy(options.syncs, servers, HEALTHY[:1] if options.quick else HEALTHY)
        )
    report.finish(["fault", "servers", "dtype", "noticed_by", "iterations", "wrong_values", "outcome", "seconds"])
    if options.write:
        write_table(options.write, markdown(rows, healthy))


if __name__ == "__main__":
    main()
