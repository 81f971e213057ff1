"""Digests of the trainer's weights in a server's dtype and layout, to compare with the digests that servers report.

SGLang's `/weights_checker` and vLLM's `/weight_checker` return a digest per parameter and rank. Servers fuse q, k and v
into one tensor, gate and up into another, and all experts of a layer into two. Each rank holds a shard, and the
vocabulary is padded with zeros. `Digests` computes the same digests from the buckets:

    bucket ─► parts of a tensor ─► complete? ─► a thread: cast, cut into shards, hash ─► digests by rank and name
                  (q, k, v)         no: copied, to wait for the other parts

Source: SGLang 0.5.23, srt/utils/weight_checker.py, layers/linear.py, layers/vocab_parallel_embedding.py,
layers/moe/fused_moe_triton/layer.py, configs/update_config.py (the padding on a CPU),
kernels/ops/memory/gpu_tensor_hash.py (a Triton kernel).
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import torch
from torch import Tensor
from transformers import PretrainedConfig

from lightrl.errors import WeightSyncError
from lightrl.weights import block_fp8
from lightrl.weights.bucket import OUTPUT_HEAD, Bucket, ServerForm
from lightrl.weights.server_layout import CPU_PADDING, ServerLayout

# Constants of SGLang's GPU hash, which mixes each 32-bit word with its position and sums tiles of 8192 words.
_SEED = 0x243F6A88
_SECOND_SEED = ((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_POSITION = (0x27D4EB2D, 0x165667B1)
_TILE_WORDS = 8192
_TILES_AT_ONCE = 256  # limits each intermediate tensor to about 16 MiB
_WORD = 2**32 - 1
_MASK = 2**64 - 1


def tile_hash(tensor: Tensor) -> int:
    """Computes SGLang's 64-bit GPU hash of a tensor's bytes, on the tensor's device; 0 if it is empty."""
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
        for index, (factor, seed, shift) in enumerate(zip(_POSITION, (_SEED, _SECOND_SEED), (15, 13), strict=True)):
            rotated = ((position << shift) | (position >> (32 - shift))) & _WORD
            mixed = _mixed(block ^ (((position * factor + seed) & _WORD) ^ rotated))
            padding = -mixed.numel() % _TILE_WORDS
            tiles = torch.nn.functional.pad(mixed, (0, padding)).view(-1, _TILE_WORDS).sum(1) & _WORD
            sums[index] += _mixed(tiles ^ size).sum()
    first, second = (int(value) for value in sums.tolist())
    return _split_mix(((first << 32) + second) & _MASK)


def _mixed(words: Tensor) -> Tensor:
    """Applies murmur3's finalizer to 32-bit words in int64, modulo 2 ** 32."""
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


_Part = tuple[Tensor, ...]  # (parameter,), or (weight in float8, scales)
RankDigests = list[dict[str, str]]  # a dict for each rank: the server's parameter name → 16 hexadecimal digits

_EMBEDDING = "model.embed_tokens.weight"
_FUSED = {"q_proj": ("qkv_proj", 0, 3), "k_proj": ("qkv_proj", 1, 3), "v_proj": ("qkv_proj", 2, 3),
          "gate_proj": ("gate_up_proj", 0, 2), "up_proj": ("gate_up_proj", 1, 2)}  # fmt: skip
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
# An expert's projection → the fused parameter [E, ...], the index of this part in it, and its number of parts.
_OF_EXPERT = {"gate_proj": ("w13_weight", 0, 2), "up_proj": ("w13_weight", 1, 2), "down_proj": ("w2_weight", 0, 1),
              "w1": ("w13_weight", 0, 2), "w3": ("w13_weight", 1, 2), "w2": ("w2_weight", 0, 1)}  # fmt: skip
_VOCABULARY_PADDING = 64


class Digests:
    """Hashes a version's buckets while they are transferred; copies only the parts of incomplete tensors.

    Args:
        form: the dtype and names of the weights that are sent.
        timeout_s: limit for hashing one bucket.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        form: ServerForm,
        layouts: Collection[ServerLayout],
        *,
        timeout_s: float = 600.0,
        num_threads: int = 1,
    ) -> None:
        self._config = config
        self._form = form
        self._layouts = list(layouts)
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="lightrl-digests")
        self._parts: dict[str, dict[int, _Part]] = {}  # incomplete tensor → its parts
        self._running: list[Future[None]] = []
        self._digests: dict[ServerLayout, RankDigests] = {
            layout: [{} for _ in range(layout.num_ranks)] for layout in self._layouts
        }

    def add(self, bucket: Bucket) -> None:
        """Waits for the previous bucket and starts hashing this one, which must not change until the next `wait`."""
        self.wait()
        if not self._layouts:
            return
        added: list[tuple[str, int]] = []
        for name, tensor in bucket.tensors.items():
            if name in self._form.skip_names or name.endswith(block_fp8.SCALE):
                continue
            fused, index, num = _fused(name, getattr(self._config, "num_experts", 0))
            parts = self._parts.setdefault(fused, {})
            scale = bucket.tensors.get(name + block_fp8.SCALE)
            parts[index] = (tensor.detach(),) if scale is None else (tensor, scale)
            added.append((fused, index))
            if len(parts) == num:
                del self._parts[fused]
                self._running.append(self._threads.submit(self._hash, fused, [parts[i] for i in range(num)]))
        for fused, index in added:
            if fused in self._parts:  # a later bucket completes the tensor, but this bucket is freed now
                self._parts[fused][index] = tuple(tensor.clone() for tensor in self._parts[fused][index])

    def wait(self) -> None:
        """Waits until all buckets so far are hashed; raises WeightSyncError if that takes longer than `timeout_s`."""
        running, self._running = self._running, []
        for future in running:
            try:
                future.result(self._timeout_s)
            except FutureTimeout as error:
                raise WeightSyncError(f"a bucket's digests took longer than {self._timeout_s:g} s") from error

    def finish(self) -> dict[ServerLayout, RankDigests]:
        """Returns the version's digests by layout; stops the threads."""
        self.wait()
        self.close()
        return self._digests

    def close(self) -> None:
        """Stops the threads. Safe to call twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _hash(self, name: str, sent: list[_Part]) -> None:
        """Computes a complete tensor's digest on each rank of each layout, from its parts in fusion order."""
        # Servers hash quantized weights in bfloat16, even if other weights have a different dtype.
        parts = [part[0] if len(part) == 1 else block_fp8.dequantize(*part) for part in sent]
        is_cast = len(sent[0]) == 1
        if self._form.dtype is not None and is_cast:
            parts = [part.to(self._form.dtype) if part.is_floating_point() else part for part in parts]
        for layout in self._layouts:
            cast = [part.to(layout.dtype) if part.is_floating_point() and is_cast else part for part in parts]
            digests = self._digests[layout]
            previous: tuple[list[Tensor], str] | None = None
            ep = layout.ep if ".experts." in name else 1
            num_of_group = len(cast) // ep
            for rank in range(layout.num_ranks):
                group = rank * ep // layout.num_ranks
                group_parts = cast[group * num_of_group : (group + 1) * num_of_group]
                shards = [self._shard(name, index, part, rank, layout) for index, part in enumerate(group_parts)]
                if previous is not None and all(map(operator.is_, shards, previous[0])):
                    digest = previous[1]  # a replicated parameter
                else:
                    digest = _digest(shards, layout)
                previous = shards, digest
                digests[rank][name] = digest
                if name == _EMBEDDING and OUTPUT_HEAD in self._form.skip_names:
                    digests[rank][OUTPUT_HEAD] = digest  # some servers hold a copy of a tied head

    def _shard(self, name: str, index: int, part: Tensor, rank: int, layout: ServerLayout) -> Tensor:
        """Returns `rank`'s shard of part `index` of a fused parameter, padded as on servers; or a replicated part."""
        *_, module, kind = ("", *name.split("."))
        num = layout.num_ranks
        if module == "embed_tokens" and self._config.model_type == "gemma3_text":
            return part  # replicated on each rank
        if module in ("embed_tokens", "lm_head"):
            unit = _VOCABULARY_PADDING
            if _padded(part.shape[0], unit) % num:
                unit *= num
            return _cut(part, 0, _padded(part.shape[0], unit), num, rank)
        if module == "qkv_proj":
            if index > 0 and num > (heads := self._config.num_key_value_heads):
                return _cut(part, 0, part.shape[0], heads, rank * heads // num)
            return _cut(part, 0, part.shape[0], num, rank)
        if module in ("gate_up_proj", "down_proj", "experts") and not (module == "down_proj" and kind == "bias"):
            dim = 0 if module == "gate_up_proj" or kind == "w13_weight" else 1
            size = _padded(part.shape[dim], CPU_PADDING * num) if layout.is_padded else part.shape[dim]
            num = num // layout.ep if module == "experts" else num
            return _cut(part, dim, size, num, rank % num)  # the rank's index in its ep group
        if module == "o_proj" and kind == "weight":
            return _cut(part, 1, part.shape[1], num, rank)
        return part


def _fused(name: str, num_experts: int) -> tuple[str, int, int]:
    """Returns the fused parameter that contains this parameter, the index of this part, and the number of parts."""
    if (expert := _EXPERT.fullmatch(name)) is not None:
        fused, index, num = _OF_EXPERT[expert[3]]
        return f"{expert[1]}.{fused}", int(expert[2]) * num + index, num_experts * num
    pieces = name.split(".")
    if len(pieces) > 1 and pieces[-2] in _FUSED:
        pieces[-2], index, num = _FUSED[pieces[-2]]
        return ".".join(pieces), index, num
    return name, 0, 1


def _padded(size: int, unit: int) -> int:
    return math.ceil(size / unit) * unit


def _cut(tensor: Tensor, dim: int, size: int, num: int, index: int) -> Tensor:
    """Pads dimension `dim` with zeros to `size`, and returns shard `index` of `num` along it."""
    if num == 1 and size == tensor.shape[dim]:
        return tensor
    length = size // num
    start = min(index * length, tensor.shape[dim])
    shard = tensor.narrow(dim, start, min(length, tensor.shape[dim] - start))
    missing = length - shard.shape[dim]
    after = (0, 0) * (tensor.dim() - 1 - dim)  # for the dimensions after `dim`, because `pad` starts at the last
    return torch.nn.functional.pad(shard, (*after, 0, missing)) if missing else shard


def _digest(parts: list[Tensor], layout: ServerLayout) -> str:
    """Computes a server's digest of the concatenated parts: SGLang's GPU hash on its GPUs, otherwise SHA-256."""
    if not layout.is_cpu and not layout.is_vllm:
        return f"{tile_hash(torch.cat([part.reshape(-1) for part in parts])):016x}"
    digest = hashlib.sha256()  # releases the GIL
    for part in parts:
        digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
