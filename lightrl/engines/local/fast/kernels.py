"""Kernels: calls LocalEngine's compiled loops in `kernels.cpp`, for float32 on a CPU.

With few rows or a small model, a torch operation takes longer to call than to compute, and each layer needs many
operations. Here a whole step is one call, which releases Python's GIL. On first use, the system's C++ compiler builds
the library for this processor, in a few seconds, and it is stored in the user's cache folder. Without a compiler, or if
the library computes wrong products, torch computes everything.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

HEAD_SIZES = frozenset({16, 32, 64, 128, 256})  # the head sizes that `step` is compiled for

_SOURCE = Path(__file__).with_suffix(".cpp")
_FLAGS = ["-O3", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
_FLAGS += ["-shared", "-fPIC", "-pthread"]
_BUILD_TIMEOUT_S = 120.0

_Address = ctypes.c_void_p
_Count = ctypes.c_int64


class LinearOfKernel(ctypes.Structure):
    """A packed weight and its bias, in the layout of the C++ struct."""

    _fields_ = (("packed", _Address), ("bias", _Address), ("inputs", _Count), ("outputs", _Count))


class LayerOfKernel(ctypes.Structure):
    _fields_ = (
        *((name, LinearOfKernel) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _Address) for name in ("input_norm", "mlp_norm", "qk_norm")),
    )


class ModelOfKernel(ctypes.Structure):
    _fields_ = (
        *((name, _Count) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_size", "intermediate")),
        *(("embedding", _Address), ("final_norm", _Address), ("layers", ctypes.POINTER(LayerOfKernel))),
        ("eps", ctypes.c_double),
    )


class CacheOfKernel(ctypes.Structure):
    """The KV cache, and the rotation of each position."""

    _fields_ = (
        ("keys", _Address),
        ("values", _Address),
        ("slots", _Count),
        ("capacity", _Count),
        ("rotations", _Address),
    )


class Kernels:
    """Calls the functions of a library that was built from `kernels.cpp`.

    A call divides the rows among up to `threads` threads; one thread takes at least a tile of rows. Tensors are created
    explicitly as float32, because during a forward, Lightning's bf16-true changes torch's default dtype in all threads.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.threads = 1
        self._packed_size = _function(library.packed_size, _Count, [_Count, _Count])
        self._repack = _function(library.repack, None, [_Address, _Count, _Count, _Address, ctypes.c_bool])
        self._linear = _function(
            library.linear, None, [ctypes.POINTER(LinearOfKernel), _Address, _Count, _Address, _Address, _Count]
        )
        self._step = _function(
            library.step,
            None,
            [ctypes.POINTER(ModelOfKernel), ctypes.POINTER(CacheOfKernel), _Count, *[_Address] * 3, _Count],
        )

    def pack(self, weight: Tensor) -> Tensor:
        """Returns a packed copy of a contiguous float32 weight [out, in]."""
        packed = torch.zeros(self._packed_size(*weight.shape), dtype=torch.float32)
        self._repack(weight.data_ptr(), *weight.shape, packed.data_ptr(), False)
        return packed

    def unpack(self, packed: Tensor, weight: Tensor) -> None:
        """Unpacks `packed` into `weight` [out, in]."""
        self._repack(weight.data_ptr(), *weight.shape, packed.data_ptr(), True)

    def linear(self, inputs: Tensor, weight: LinearOfKernel, added: Tensor | None = None) -> Tensor:
        """Returns `inputs` [..., in] times the weight, plus the bias and `added` [n, out]: [..., out]."""
        rows = inputs.contiguous()
        outputs = torch.empty(*inputs.shape[:-1], weight.outputs, dtype=torch.float32)
        count = rows.numel() // weight.inputs
        self._linear(weight, rows.data_ptr(), count, address(added), outputs.data_ptr(), self.threads)
        return outputs

    def step(self, model: ModelOfKernel, cache: CacheOfKernel, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Adds the last tokens [n] to the KV cache, in slots 0 to n - 1; returns normed hidden states [n, hidden]."""
        outputs = torch.empty(len(token_ids), model.hidden, dtype=torch.float32)
        token_ids, positions = token_ids.contiguous(), positions.contiguous()
        addresses = token_ids.data_ptr(), positions.data_ptr(), outputs.data_ptr()
        self._step(model, cache, len(token_ids), *addresses, self.threads)
        return outputs


def address(tensor: Tensor | None) -> int | None:
    """Returns the address of a contiguous tensor's elements, or None for None; the caller keeps the tensor alive."""
    return None if tensor is None else tensor.data_ptr()


def kernels() -> Kernels | None:
    """Returns the kernels, or warns once and returns None if they cannot be built or loaded here."""
    library = _library()
    return None if library is None else Kernels(library)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Builds the library if necessary, and loads it; None if either fails."""
    try:
        path = _build()
        library = ctypes.CDLL(str(path))
        if _is_right(Kernels(library)):
            return library
        reason = f"{path} computes wrong products"
    except subprocess.SubprocessError as error:
        reason = f"{error} {getattr(error, 'stderr', None) or ''}".rstrip()
    except (OSError, AttributeError, RuntimeError) as error:  # RuntimeError if there is no home folder
        reason = str(error)
    log.warning(
        "LocalEngine's kernels could not be built, so it uses torch's operations, which are several times slower for a "
        "small model. Install a C++ compiler such as g++, or set CXX to one. %s",
        reason,
    )
    return None


def _build() -> Path:
    """Returns the path of the library, built if it is missing; raises OSError or SubprocessError if that fails."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise FileNotFoundError("No C++ compiler was found.")
    command = [compiler, *_FLAGS, "-mcpu=native" if platform.machine() in ("arm64", "aarch64") else "-march=native"]
    version = _run([compiler, "--version"])
    key = hashlib.sha256("\n".join([_SOURCE.read_text(), *command, version, _processor()]).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lightrl"
    library = folder / f"kernels-{key}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as build_folder:
            log.info("Building LocalEngine's kernels for this processor, once; this takes a few seconds.")
            built = Path(build_folder) / library.name
            _run([*command, str(_SOURCE), "-o", str(built)])
            built.replace(library)  # atomic, because other ranks may also build it
    return library


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, errors="replace", timeout=_BUILD_TIMEOUT_S).stdout


def _processor() -> str:
    """Describes this machine's processor, because machines with different ones may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))


def _is_right(built: Kernels) -> bool:
    """Whether products of small integers, with bias and `added`, are exact for sizes that do not fill the tiles."""
    weight, inputs = torch.arange(-150, 150).float().view(50, 6) % 7, torch.arange(114).float().view(19, 6) % 5
    bias, added = torch.arange(50).float(), torch.arange(950).float().view(19, 50)
    packed, again = built.pack(weight), torch.empty_like(weight)
    built.unpack(packed, again)
    product = built.linear(inputs, LinearOfKernel(packed.data_ptr(), bias.data_ptr(), 6, 50), added)
    return torch.equal(again, weight) and torch.equal(product, inputs @ weight.t() + bias + added)


def _function(function: Any, result: Any, arguments: list[Any]) -> Callable[..., Any]:
    function.restype, function.argtypes = result, arguments
    typed: Callable[..., Any] = function
    return typed
