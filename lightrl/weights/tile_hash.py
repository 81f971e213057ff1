"""SGLang's hash of a tensor on a GPU, in torch: each 32-bit word mixed with its position, summed by tiles of 8192.

Source: SGLang 0.5.23, sglang/kernels/ops/memory/gpu_tensor_hash.py (a Triton kernel).
"""

from __future__ import annotations

import torch
from torch import Tensor

_SEED = 0x243F6A88
_SECOND_SEED = ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_POSITION = (0x27D4EB2D, 0x165667B1)
_TILE_WORDS = 8192
_TILES_AT_ONCE = 256  # bounds the memory of the intermediate values to some 16 MiB each
_WORD = 2**32 - 1
_MASK = 2**64 - 1


def tile_hash(tensor: Tensor) -> int:
    """64 bits of the tensor's bytes, on its own device; 0 if it is empty."""
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    num_bytes = content.numel()
    if num_bytes == 0:
        return 0
    if num_bytes % 4:
        content = torch.cat([content, content.new_zeros(-num_bytes % 4)])
    words = content.view(torch.int32)
    size = (words.numel() * 4) & _WORD
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _TILE_WORDS * _TILES_AT_ONCE):
        block = words[start : start + _TILE_WORDS * _TILES_AT_ONCE].to(torch.int64) & _WORD
        position = torch.arange(start, start + block.numel(), device=words.device) & _WORD
        for which, (factor, seed, turn) in enumerate(zip(_POSITION, (_SEED, _SECOND_SEED), (15, 13), strict=True)):
            turned = ((position << turn) | (position >> (32 - turn))) & _WORD
            mixed = _mixed(block ^ (((position * factor + seed) & _WORD) ^ turned))
            padding = -mixed.numel() % _TILE_WORDS
            tiles = torch.nn.functional.pad(mixed, (0, padding)).view(-1, _TILE_WORDS).sum(1) & _WORD
            sums[which] += _mixed(tiles ^ size).sum()
    first, second = (int(value) for value in sums.tolist())
    return _split_mix(((first << 32) + second) & _MASK)


def _mixed(words: Tensor) -> Tensor:
    """The finalizer of murmur3, on 32-bit words in int64; a product that overflows keeps its low 32 bits."""
    words = words ^ (words >> 16)
    words = (words * _MIX[0]) & _WORD
    words = words ^ (words >> 13)
    words = (words * _MIX[1]) & _WORD
    return words ^ (words >> 16)


def _split_mix(value: int) -> int:
    value ^= value >> 30
    value = (value * 0xBF58476D1CE4E5B9) & _MASK
    value ^= value >> 27
    value = (value * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
