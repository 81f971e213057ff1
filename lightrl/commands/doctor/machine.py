"""What `lightrl doctor run` checks of the machine, before anything is built: versions, devices, memory, ports, disk."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import lightning as L
import torch
from packaging.requirements import Requirement

import lightrl
from lightrl.commands.doctor.findings import Finding, judged, ok
from lightrl.engines import SGLangEngine

GIB = 2**30
_CONNECT_S = 2.0
_LEAST_FREE = 0.1  # of the host's memory: less, and the run's start may already fail
_LEAST_DISK_BYTES = GIB


def environment() -> Iterator[Finding]:
    """Versions, and installed packages that are older than lightrl needs."""
    names = ("torch", "lightning", "transformers")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    yield ok("environment", f"lightrl {lightrl.__version__}, Python {platform.python_version()}, {versions}")
    wrong = list(_unmet_requirements())
    if wrong:
        fix = 'Run pip install -c constraints.txt -e ".".'
        yield Finding("environment", "warning", f"lightrl needs {', '.join(wrong)}.", fix)


def _unmet_requirements() -> Iterator[str]:
    try:
        lines = metadata.requires("lightrl") or []
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement} (not installed)"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement} (has {version})"


def devices(trainer: L.Trainer) -> Iterator[Finding]:
    """The trainer's devices and the memory that is free on them and on the host."""
    kind = trainer.strategy.root_device.type
    used = f"{trainer.world_size} x {kind}, {os.cpu_count()} CPU cores, {torch.get_num_threads()} threads per process"
    num_gpus = torch.cuda.device_count()
    yield judged(
        "devices",
        f"The trainer uses {used}; this machine has {num_gpus} GPUs.",
        "warning",
        "Set trainer.accelerator to auto or gpu.",
        is_wrong=num_gpus > 0 and kind == "cpu",
    )
    for index in range(num_gpus if kind == "cuda" else 0):
        free, total = torch.cuda.mem_get_info(index)
        yield judged(
            "memory",
            f"GPU {index}, {torch.cuda.get_device_name(index)}: {free / GIB:.1f} of {total / GIB:.1f} GiB are free.",
            "warning",
            "Another process uses this GPU: nvidia-smi shows which. End it, or choose other trainer.devices.",
            is_wrong=free < 0.9 * total,
        )
    free, total = host_memory()
    yield judged(
        "memory",
        f"The host has {free / GIB:.1f} of {total / GIB:.1f} GiB free.",
        "warning",
        "End other processes.",
        is_wrong=free < _LEAST_FREE * total,
    )


def host_memory() -> tuple[int, int]:
    """Available and total bytes of the host's memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    kib = {name: int(value.split()[0]) for name, value in (line.split(":", 1) for line in lines)}
    return kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024


def ports(engine: Any, port: int | None) -> Iterator[Finding]:
    """Whether servers that run already answer, and the trainer's port is free.

    Args:
        engine: the run's.
        port: that the ranks meet at; None if the run chooses one.
    """
    urls: Sequence[str] = engine.urls or () if isinstance(engine, SGLangEngine) else ()
    for url in urls:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme in ("http", "https"):
            yield _answers(url, str(parts.hostname), parts.port or (443 if parts.scheme == "https" else 80))
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield ok("ports", f"Ports of this machine can be opened, such as {server.getsockname()[1]}.")
        return
    try:
        socket.create_server(("", port)).close()
        yield ok("ports", f"Port {port}, where the ranks meet, is free.")
    except OSError as error:
        fix = "End the process that listens there (ss -ltnp shows it), or set another MASTER_PORT or launch.port."
        yield Finding("ports", "fails", f"Port {port}, where the ranks meet, cannot be opened: {error}.", fix)


def _answers(url: str, host: str, port: int) -> Finding:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        fix = "Start the server (lightrl serve), or correct engine.urls."
        return Finding("ports", "fails", f"The server {url} cannot be reached: {error}.", fix)
    return ok("ports", f"The server {url} can be reached.")


def disk(root: str, needed_bytes: float = 0) -> Finding:
    """Whether the run's folder can be written, and has room for `needed_bytes`."""
    folder = Path(root).absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        return Finding(
            "disk", "fails", f"{folder} cannot be written.", "Set trainer.default_root_dir to another folder."
        )
    free = shutil.disk_usage(folder).free
    needs = f"; the run writes about {bytes_text(needed_bytes)}" if needed_bytes else ""
    return judged(
        "disk",
        f"{folder} has {bytes_text(free)} free{needs}.",
        "fails" if free < needed_bytes else "warning",
        "Free disk space, set trainer.default_root_dir to another disk, or keep fewer checkpoints (save_top_k).",
        is_wrong=free < max(needed_bytes, _LEAST_DISK_BYTES),
    )


def bytes_text(num: float) -> str:
    """With a unit that a person reads."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num < 1024:
            return f"{num:.0f} {unit}" if unit == "bytes" else f"{num:.1f} {unit}"
        num /= 1024
    return f"{num:.1f} TiB"
