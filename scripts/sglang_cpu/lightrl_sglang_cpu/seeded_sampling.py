"""SGLang's hash behind `sampling_seed`, in plain torch; SGLang has it for Triton and for sgl_kernel only."""

import sys

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF  # products of 32-bit numbers overflow int64, their low 32 bits are right all the same


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 (32 bit) of (seed, position, column): [rows] and [columns] to uint32 values in int64 [rows, columns].

    Source: https://en.wikipedia.org/wiki/MurmurHash; sglang/kernels/ops/sampling/murmur_hash.py.
    """
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    rows = torch.zeros_like(seed)
    for block in (seed & _LOW, (seed >> 32) & _LOW, positions.to(torch.int64) & _LOW):
        rows = _mixed(rows, block)
    hashed = _mixed(rows[:, None], col_indices.to(torch.int64)[None, :]) ^ 16  # bytes hashed
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & _LOW
    return hashed ^ (hashed >> 16)


def _mixed(hashed: Tensor, block: Tensor) -> Tensor:
    block = (_rotated((block * 0xCC9E2D51) & _LOW, 15) * 0x1B873593) & _LOW
    return (_rotated(hashed ^ block, 13) * 5 + 0xE6546B64) & _LOW


def _rotated(value: Tensor, bits: int) -> Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _LOW


def install() -> None:
    """Puts it where SGLang's sampler finds it, imported already or not."""
    import sglang.kernels.ops.sampling.murmur_hash as kernel

    kernel.murmur_hash32 = murmur_hash32
    sampler = sys.modules.get("sglang.srt.layers.sampler")
    if sampler is not None:
        sampler.murmur_hash32 = murmur_hash32  # type: ignore[attr-defined]
