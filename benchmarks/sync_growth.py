"""The growth rows of benchmarks/weight_sync.py for a process group and a shared folder, to 1 … 16 receivers.

    python -m benchmarks.weight_sync --transports growth [--receivers 1,2,4,8,16] [--growth-mib 64]

The receivers are processes of this machine with tensors of their own. *models_sent_by_trainer* is what leaves rank 0,
counted by the kernel for its sockets (`ss`), or written to the folder, in models.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config

from lightrl.weights import BroadcastGroup, ServerForm, WeightFolder, bucketed
from lightrl.weights.broadcast import listen

MIB = 2**20


def grown(num: int, mib: int) -> dict[str, dict[str, float]]:
    """Seconds until all receivers have a version, and what the trainer sent, by transport."""
    torch.manual_seed(0)
    named = {f"layers.{index}": torch.randn(MIB // 2).bfloat16() for index in range(mib)}
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["lightrl.weights", "torch", "transformers", "safetensors.torch"])
    listener = listen()
    port = listener.getsockname()[1]
    questions, answers = [context.Queue() for _ in range(num)], context.Queue()
    members = [
        context.Process(target=_receive, args=(rank + 1, num + 1, port, mib, questions[rank], answers), daemon=True)
        for rank in range(num)
    ]
    for member in members:
        member.start()
    group = BroadcastGroup(
        "127.0.0.1", port, rank=0, world_size=num + 1, name="growth", listener=listener, interface="lo"
    )
    place = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        _ask("broadcast", None, questions)
        group.broadcast(named.values())  # connects, and touches the receivers' memory
        _settle(answers, num, named)
        found = {}
        before, start = _sent_bytes(), time.perf_counter()
        _ask("broadcast", None, questions)
        group.broadcast(named.values())
        _settle(answers, num, named)
        seconds = time.perf_counter() - start
        found["broadcast"] = _row(seconds, (_sent_bytes() - before) / (mib * MIB))
        folder = WeightFolder(place, Qwen3Config(tie_word_embeddings=False), form=ServerForm(torch.bfloat16))
        start = time.perf_counter()
        path = folder.write(bucketed(named.items(), 64 * MIB), 0)
        _ask("folder", str(path), questions)
        _settle(answers, num, named)
        seconds = time.perf_counter() - start
        written = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        found["shared folder"] = _row(seconds, written / (mib * MIB))
    finally:
        _ask("end", None, questions)
        for member in members:
            member.join(30)
            member.kill()
        group.close()
        shutil.rmtree(place, ignore_errors=True)
    return found


def _receive(rank: int, world_size: int, port: int, mib: int, questions: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    held = {f"layers.{index}": torch.zeros(MIB // 2, dtype=torch.bfloat16) for index in range(mib)}
    group = BroadcastGroup("127.0.0.1", port, rank=rank, world_size=world_size, name="growth", interface="lo")
    while (question := questions.get())[0] != "end":
        kind, content = question
        if kind == "broadcast":
            group.broadcast(held.values())
        else:
            for file in sorted(Path(content).glob("*.safetensors")):
                for name, tensor in load_file(file).items():
                    held[name].copy_(tensor)
        answers.put(_sum(held))
        for tensor in held.values():
            tensor.zero_()
    group.close()


def _ask(kind: str, content: str | None, questions: list[Any]) -> None:
    for queue in questions:
        queue.put((kind, content))


def _settle(answers: Any, num: int, named: dict[str, Tensor]) -> None:
    expected = _sum(named)
    for _ in range(num):
        assert answers.get(timeout=300) == expected


def _sum(named: dict[str, Tensor]) -> int:
    """Of the bits."""
    return sum(int(tensor.view(torch.int16).sum()) for tensor in named.values())


def _row(seconds: float, sent: float) -> dict[str, float]:
    return {"seconds": round(seconds, 3), "models_sent_by_trainer": round(sent, 3)}


def _sent_bytes() -> float:
    """By the open TCP sockets of this process; NaN without iproute2."""
    try:
        told = subprocess.run(["ss", "-tinpH"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return float("nan")
    entries = re.split(r"\n(?=\S)", told)
    ours = [entry for entry in entries if f"pid={os.getpid()}," in entry]
    return float(sum(int(match[1]) for entry in ours if (match := re.search(r"bytes_sent:(\d+)", entry))))
