"""Run by gpu_check.sh: packs wheels, installs missing ones, runs sections and writes one report."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / ".gpu_wheels"
LIMIT_S = 580  # time limit of a section
IS_CPU = os.environ.get("LIGHTRL_GPU_DEVICE") == "cpu"

# Packages that a machine with CUDA's torch, transformers and lightning lacks (first half) or has in an older release
# (second half); constraints.txt has the versions.
PACKAGES = (
    "datasets", "dill", "docstring-parser", "jsonargparse", "jsonschema",
    "jsonschema-specifications", "multiprocess", "referencing", "rpds-py",
    "typeshed-client",
    "transformers", "tokenizers", "safetensors", "regex", "huggingface-hub", "hf-xet", "httpx2", "httpcore2", "click",
    "truststore", "idna", "anyio", "h11",
)  # fmt: skip
PLATFORMS = [f"manylinux_2_{number}_x86_64" for number in (5, 12, 17, 24, 27, 28, 31, 34)]
PLATFORMS += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]

# name → (what it shows, command on a GPU, short command on a CPU)
_TESTS = ["-m", "pytest", "-p", "no:cacheprovider", "--timeout", "240"]
SECTIONS: dict[str, tuple[str, list[str], list[str]]] = {
    "tests": (
        "attention kernels; logprobs and gradients against the CPU's; engines and CUDA IPC; FSDP2 on one GPU; resume",
        [*_TESTS, "-n6", "tests/gpu", "-k", "not quickstart"],
        [*_TESTS, "-n2", "tests/gpu", "-k", "not quickstart"],
    ),
    "quickstart": (
        "the quickstart learns",
        [*_TESTS, "-n0", "tests/gpu/test_gpu_training.py", "-k", "quickstart"],
        [],
    ),
    "update": (
        "the update of Qwen3 0.6 B and 1.7 B: tokens/s, MFU, memory, against a plain loop",
        ["-m", "benchmarks.gpu_update"],
        ["-m", "benchmarks.gpu_update", "--quick"],
    ),
    "local_engine": (
        "LocalEngine, 0.6 B",
        [
            *("-m", "benchmarks.local_engine", "--models=0.6B", "--batches=256", "--cap=1024", "--alone"),
            *("--workloads=equal,skewed", "--repeats=1", "--device=cuda"),
        ],
        ["-m", "benchmarks.local_engine", "--quick"],
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pack", nargs="*", metavar="NAME", help="download wheels, also of these packages")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("sections", nargs="*", help=f"from {', '.join(SECTIONS)}; default: all")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.sections) - SECTIONS.keys())
    if unknown:
        parser.error(f"unknown section {unknown[0]!r}; choose from {', '.join(SECTIONS)}")
    if given.list:
        print("\n".join(f"{name:<14} {text}" for name, (text, *_) in SECTIONS.items()))
    elif given.pack is not None:
        pack(given.pack)
    else:
        run(given.sections or list(SECTIONS), only_check=given.check)


def pack(more: Sequence[str]) -> None:
    """Downloads the wheels for Python 3.12 and x86-64."""
    WHEELS.mkdir(exist_ok=True)
    (WHEELS / ".gitignore").write_text("*\n")
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M))
    wanted = [f"{name}=={pins[name]}" if name in pins else name for name in (*PACKAGES, *more)]
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *platforms]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, "-d", str(WHEELS), *wanted], check=True)
    wheels = sorted(WHEELS.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    print(f"{len(wheels)} wheels, {size:.0f} MiB, in {WHEELS}. Copy the folder with the repository.")


def install_missing(folder: Path) -> list[str]:
    """Installs the packed wheels whose packages are missing or older here; returns their file names."""
    missing = []
    for wheel in sorted(WHEELS.glob("*.whl")) if WHEELS.is_dir() else []:
        name, version = wheel.name.split("-")[:2]
        try:
            is_missing = Version(importlib.metadata.version(name)) < Version(version)
        except importlib.metadata.PackageNotFoundError:
            is_missing = True
        missing += [wheel] if is_missing else []
    if missing:
        quiet = ["-q", "--no-index", "--no-deps", "--no-compile", "--target", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "install", *quiet, *map(str, missing)], check=True)
    return [wheel.name for wheel in missing]


def environment(folder: Path) -> dict[str, str]:
    paths = [str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")]
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    one_machine = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}  # the machine may have no network
    return {**one_machine, **os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), **quiet}


_MACHINE = """
import json, torch, transformers, lightning, lightrl, lightrl.trainer
from lightrl.models.conversion import SEMI_PRIVATE, semi_private
for names in SEMI_PRIVATE.values():
    list(map(semi_private, names))
has_gpu = torch.cuda.is_available()
print(json.dumps({
    "gpu": torch.cuda.get_device_name() if has_gpu else None,
    "capability": torch.cuda.get_device_capability() if has_gpu else None,
    "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if has_gpu else None,
    "torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__,
    "lightning": lightning.__version__, "lightrl": lightrl.__version__,
}))
"""


def machine(env: dict[str, str]) -> dict[str, Any]:
    """Returns the machine and its versions; exits with the error if lightrl cannot be imported."""
    done = subprocess.run([sys.executable, "-c", _MACHINE], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"lightrl cannot be imported here. Run scripts/gpu_check.sh --pack where there is a network.\n{done.stderr}"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["gpu"] is None and not IS_CPU:
        raise SystemExit("torch finds no GPU here. LIGHTRL_GPU_DEVICE=cpu runs the checks on the CPU.")
    return {**found, "python": platform.python_version(), "source": source_digest()}


def source_digest() -> str:
    """Returns a digest of the package's files, which identifies the code without git."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "lightrl").rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def run(names: Sequence[str], *, only_check: bool) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        installed = install_missing(Path(scratch))
        env = environment(Path(scratch))
        about = machine(env)
        print(json.dumps({**about, "installed": installed}), flush=True)
        if only_check:
            return
        name = re.sub(r"\W+", "-", about["gpu"] or f"cpu-{platform.machine()}").strip("-").lower()
        path = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "gpu") / f"{name}.json"
        report = json.loads(path.read_text()) if path.exists() else {}
        if report.get("machine") != about:  # other code or another machine: start a new report
            report = {"machine": about, "sections": {}}
        for name in names:
            report["sections"][name] = section(name, env)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: item["passed"] for name, item in report["sections"].items()}))
    print(f"report: {path}")
    raise SystemExit(0 if all(report["sections"][name]["passed"] for name in names) else 1)


def section(name: str, env: dict[str, str]) -> dict[str, Any]:
    """Runs a section; returns its exit code, its JSON lines and, if it failed, the end of its output."""
    text, command, short = SECTIONS[name]
    command = (short or command) if IS_CPU else command
    print(f"== {name}: {text}", flush=True)
    start = time.monotonic()
    output = []
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline = threading.Timer(LIMIT_S, process.kill)
    deadline.start()
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        output.append(line.rstrip("\n"))
    code = process.wait()
    deadline.cancel()
    lines = [json.loads(line) for line in output if line.startswith("{") and line.endswith("}")]
    tail = output[-1:] if code == 0 else output[-40:]
    result = {"passed": code == 0, "seconds": round(time.monotonic() - start, 1), "command": command, "results": lines}
    return result if code == 0 and lines else {**result, "exit_code": code, "output": tail}


if __name__ == "__main__":
    main()
