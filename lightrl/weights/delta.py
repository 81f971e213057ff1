"""Deltas: the bitwise differences between two versions of a model. Computes, encodes and applies them.

The functions work on chunks of `CHUNK` elements of a flat tensor, whose bits are read as unsigned integers. An update
of 1e-6 changes about one bfloat16 value in a hundred, mostly to the neighboring value. A chunk is therefore sent as:

    sparse    the gaps between changed elements, one byte each, and the differences of their bits
    dense     the difference of each element's bits, if a quarter or more of the elements changed
    nothing   if no element changed

It is compressed, unless that costs more time than it saves. Differences are `new - old`, so a delta can be undone. A
block encodes several chunks, to save numpy calls; a part is a sequence of blocks, each `[lengths][header][body]`.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from lightrl.weights.bucket import Bucket, ServerForm, bucketed
from lightrl.weights.disk import write_safetensors

CHUNK = 2**19  # elements; small enough that a chunk stays in a core's cache while it is compared
BLOCK_CHUNKS = 8  # maximum number of chunks in a block
PART_BYTES = 16 * 2**20  # approximate size of a part
_ESCAPE = 255  # marks a gap this large or larger, which follows as four bytes
_DENSE_FRACTION = 0.25  # if more elements changed, sending positions costs more than sending zeros
_STORED_FRACTION = 1 / 16  # if fewer elements changed, gaps are nearly random, and compressing them takes too long
_LARGE, _LARGE_FRACTION = 15, 1 / 8  # if few differences are 15 or more, these follow the half bytes in full
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LENGTHS = struct.Struct("<II")

Bits = npt.NDArray[Any]  # unsigned integers


class DeltaError(ValueError):
    """A delta cannot be applied, because it is corrupt, malformed, or for a different model."""


class Change(NamedTuple):
    """The change of one chunk."""

    name: str  # tensor name
    number: int  # index of the chunk in its tensor
    positions: npt.NDArray[np.int64] | None  # changed elements, ascending; None for all elements
    values: Bits  # differences of the changed elements' bits


class Block(NamedTuple):
    """The encoded changes of several chunks."""

    chunks: list[tuple[str, int, int, bool]]  # for each change: name, number, number of values, whether it is sparse
    width: int  # bytes of an element
    body: bytes


def bits_of(tensor: Tensor) -> Bits:
    """Returns the bits of a contiguous CPU tensor as a flat view of its memory."""
    size = tensor.element_size()
    return tensor.detach().reshape(-1).view(_SIGNED[size]).numpy().view(f"u{size}")


def num_chunks(num_elements: int) -> int:
    return -(-num_elements // CHUNK)


def chunk(bits: Bits, number: int) -> Bits:
    return bits[number * CHUNK : (number + 1) * CHUNK]


def replace_chunk(name: str, number: int, old: Bits, new: Bits) -> Change | None:
    """Overwrites the chunk `old` with `new`; returns the change, or None if they were equal."""
    positions = np.flatnonzero(old != new)
    if not len(positions):
        return None
    if len(positions) >= _DENSE_FRACTION * len(new):
        values = new - old
        old[:] = new
        return Change(name, number, None, values)
    changed = new[positions]
    values = changed - old[positions]
    old[positions] = changed
    return Change(name, number, positions, values)


def apply(change: Change, bits: Bits, *, backward: bool = False) -> None:
    """Applies a change to the chunk `bits` in place, or undoes it if `backward`.

    Raises:
        DeltaError: if the change does not fit; the chunk is left unchanged.
    """
    positions, values = change.positions, change.values
    if values.dtype != bits.dtype or (positions is None and len(values) != len(bits)):
        raise DeltaError(f"The delta of {change.name!r} has a different dtype or size than the parameter.")
    if positions is None:
        bits += -values if backward else values
    elif len(positions):
        if positions[0] < 0 or positions[-1] >= len(bits):
            raise DeltaError(f"The delta of {change.name!r} ends at {positions[-1]}, beyond {len(bits)} elements.")
        np.add.at(bits, positions, -values if backward else values)


def pack(changes: Sequence[Change]) -> Block:
    """Packs up to `BLOCK_CHUNKS` changes with one element size into a block: gaps between positions, then values."""
    sparse = [index * CHUNK + change.positions for index, change in enumerate(changes) if change.positions is not None]
    gaps = np.diff(np.concatenate(sparse), prepend=-1) if sparse else np.empty(0, np.int64)
    gap_bytes = [np.minimum(gaps, _ESCAPE).astype(np.uint8).tobytes(), gaps[gaps >= _ESCAPE].astype("<u4").tobytes()]
    body = _compress(gap_bytes, 0 if len(gaps) < _STORED_FRACTION * CHUNK * len(sparse) else 1)
    values = np.concatenate([change.values for change in changes])
    chunks = [(name, number, len(values), positions is not None) for name, number, positions, values in changes]
    return Block(chunks, values.dtype.itemsize, body + _encode(values))


def unpack(block: Block) -> list[Change]:
    """Decodes the changes of a block; raises DeltaError if it is corrupt."""
    num_gaps = sum(num for _, _, num, is_sparse in block.chunks if is_sparse)
    try:
        unpacker = zlib.decompressobj()
        gap_bytes = np.frombuffer(unpacker.decompress(block.body), np.uint8)
        values = _decode(unpacker.unused_data, sum(num for _, _, num, _ in block.chunks), np.dtype(f"u{block.width}"))
        gaps = gap_bytes[:num_gaps].astype(np.int64)
        gaps[gaps == _ESCAPE] = gap_bytes[num_gaps:].view("<u4")
    except (zlib.error, ValueError, TypeError) as error:
        raise DeltaError(f"The delta is corrupt: {error}.") from error
    positions = np.cumsum(gaps)
    changes, position, value = [], 0, 0  # the last two are where the chunk's positions and values start
    for index, (name, number, num, is_sparse) in enumerate(block.chunks):
        in_chunk = positions[position : position + num] - (index * CHUNK + 1) if is_sparse else None
        changes.append(Change(name, number, in_chunk, values[value : value + num]))
        position, value = position + num * is_sparse, value + num
    return changes


def parts(blocks: Iterable[Block | None], part_bytes: int = PART_BYTES) -> Iterator[bytes]:
    """Yields the encoded blocks in parts of about `part_bytes`; skips None, a block without changes."""
    held: list[bytes] = []
    size = 0
    for block in blocks:
        if block is None:
            continue
        header = zlib.compress(json.dumps(block[:2], separators=(",", ":")).encode(), 1)
        held += [_LENGTHS.pack(len(header), len(block.body)), header, block.body]
        size += len(block.body)
        if size >= part_bytes:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def read_part(part: bytes) -> list[Block]:
    """Decodes the blocks of a part; raises DeltaError if it is corrupt."""
    blocks, start = [], 0
    try:
        while start < len(part):
            header_bytes, body_bytes = _LENGTHS.unpack_from(part, start)
            start += _LENGTHS.size + header_bytes
            chunks, width = json.loads(zlib.decompress(part[start - header_bytes : start]))
            body = part[start : start + body_bytes]
            blocks.append(Block([(str(name), int(n), int(num), bool(s)) for name, n, num, s in chunks], width, body))
            start += body_bytes
    except (struct.error, zlib.error, ValueError, TypeError) as error:
        raise DeltaError(f"The delta is corrupt: {error}.") from error
    if start != len(part):
        raise DeltaError(f"The delta has {len(part)} bytes instead of {start}.")
    return blocks


def checksum(bits: Bits | bytes) -> int:
    """Returns the checksum of a chunk or part, which detects random damage and is 14 times as fast as a CRC."""
    return xxhash.xxh3_64_intdigest(bits)  # type: ignore[arg-type]  # any buffer


def version_digest(run: str, weight_version: int, checksums: Mapping[str, Sequence[int]]) -> str:
    """Returns a digest that identifies a version in a run by its content.

    Args:
        run: the run's random id, so that two runs never have the same digest.
        checksums: parameter → checksums of its chunks.
    """
    content = json.dumps([run, weight_version, sorted(checksums.items())], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


def _compress(streams: Sequence[bytes], level: int = 1) -> bytes:
    """Compresses inputs into one zlib stream, with a Huffman code each; skips the search for rare matches."""
    packer = zlib.compressobj(level, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    packed = []
    for stream in streams:
        packed += [packer.compress(stream), packer.flush(zlib.Z_BLOCK)]
    return b"".join([*packed, packer.flush()])


def _encode(values: Bits) -> bytes:
    """Packs values into half bytes if nearly all are small, which is 5 times as fast as zlib; otherwise uses zlib."""
    width = values.dtype.itemsize
    folded = (values << 1) ^ -(values >> (8 * width - 1))  # 0, -1, 1, -2 … become 0, 1, 2, 3 …
    large = folded[folded >= _LARGE]
    if len(large) > _LARGE_FRACTION * len(folded):  # the lowest byte of each value, then the next byte of each …
        return b"P" + _compress([plane.tobytes() for plane in folded.view(np.uint8).reshape(-1, width).T])
    halves = np.zeros(len(folded) + len(folded) % 2, np.uint8)
    halves[: len(folded)] = np.minimum(folded, _LARGE)
    return b"H" + (halves[::2] | halves[1::2] << 4).tobytes() + large.tobytes()


def _decode(packed: bytes, num_values: int, dtype: np.dtype[Any]) -> Bits:
    """Unpacks the result of `_encode`; raises ValueError or zlib.error if it is corrupt."""
    if packed[:1] == b"P":  # planes: the lowest byte of each value, then the next byte of each
        planes = np.frombuffer(zlib.decompress(packed[1:]), np.uint8).reshape(dtype.itemsize, num_values)
        return _unfolded(np.ascontiguousarray(planes.T).reshape(-1).view(dtype))
    pairs = np.frombuffer(packed, np.uint8, (num_values + 1) // 2, offset=1)  # then come the large values in full
    values = _PAIRS[dtype.itemsize].take(pairs).view(dtype)[:num_values]
    values[values == _unfolded(np.array([_LARGE], dtype))] = _unfolded(np.frombuffer(packed[1 + len(pairs) :], dtype))
    return values


def _unfolded(folded: Bits) -> Bits:
    return (folded >> 1) ^ -(folded & 1)


# Element size in bytes → a table from each byte to the two values in its halves, as one item.
_HALVES = np.array([[byte & _LARGE, byte >> 4] for byte in range(256)])
_PAIRS = {width: _unfolded(_HALVES.astype(f"u{width}")).view(f"V{2 * width}").ravel() for width in (1, 2, 4, 8)}


class HostCopy:
    """A copy of the whole model in host memory, so that the trainer may update parameters before they are sent.

    Each version overwrites the previous one in place, including the buckets that `add` returned, because allocating
    the memory again is slow.
    """

    def __init__(self, form: ServerForm | None = None) -> None:
        self.form = form or ServerForm()
        self.weight_version = -1  # -1 while the copy is incomplete
        self._next_version = -1
        self._tensors: dict[str, Tensor] = {}
        self._names: list[list[str]] = []  # the parameters of each bucket

    def begin(self, weight_version: int) -> None:
        """Starts copying a version; the copy is incomplete until its last bucket."""
        self.weight_version = -1
        self._next_version = weight_version
        self._names = []

    def add(self, bucket: Bucket, copy: Callable[[str, Tensor, Tensor], object] | None = None) -> Bucket:
        """Copies a bucket and returns the copy; if `copy` is given, `copy(name, stored, tensor)` does the copying."""
        copied: dict[str, Tensor] = {}
        for name, dtype, shape in self.form.layout(bucket):
            tensor = bucket.tensors[name].detach()
            stored = self._tensors.get(name)
            if stored is None or stored.shape != shape or stored.dtype != dtype:
                stored = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda)
                self._tensors[name] = stored
            if copy is None:
                stored.copy_(tensor)
            else:
                copy(name, stored, tensor)
            copied[name] = stored
        self._names.append(list(copied))
        if bucket.is_last:
            self.weight_version = self._next_version
        return Bucket(copied, is_last=bucket.is_last)

    def buckets(self) -> Iterator[Bucket]:
        """Yields the copied buckets again."""
        for index, names in enumerate(self._names):
            yield Bucket({name: self._tensors[name] for name in names}, is_last=index + 1 == len(self._names))


_THREADS = min(8, os.cpu_count() or 1)
_Task = tuple[str, int, Bits, Tensor, torch.dtype]  # a chunk: name, number, stored bits, trainer's tensor, sent dtype


class DeltaCopy(HostCopy):
    """Holds the last version sent. Casts, compares and copies a chunk while it is in a core's cache."""

    def __init__(self, form: ServerForm | None = None) -> None:
        super().__init__(form)
        self.checksums: dict[str, list[int]] = {}  # parameter → checksums of its chunks
        # Each of the pool's threads uses one torch thread, because OpenMP's threads would compete with the pool.
        self._pool = ThreadPoolExecutor(_THREADS, "lightrl-delta", torch.set_num_threads, (1,))

    def close(self) -> None:
        self._pool.shutdown(wait=False)

    def begin(self, weight_version: int) -> None:
        super().begin(weight_version)
        self.checksums = {}

    def take_delta(self, bucket: Bucket, has_base: bool) -> tuple[list[bytes], Bucket]:
        """Copies a bucket; returns its delta from the last version in parts (no parts without a base), and the copy."""
        tasks: list[_Task] = []

        def plan(name: str, stored: Tensor, tensor: Tensor) -> None:
            old, flat = bits_of(stored), tensor.reshape(-1)
            for index in range(num_chunks(len(old))):
                source = flat[index * CHUNK : (index + 1) * CHUNK]
                tasks.append((name, index, chunk(old, index), source, stored.dtype))
            self.checksums[name] = []

        def compare(group: Sequence[_Task]) -> tuple[Block | None, list[int]]:
            changes, sums = [], []
            for name, index, old, source, dtype in group:
                new = bits_of(source.to(dtype=dtype, device="cpu"))
                sums.append(checksum(new))
                if not has_base:
                    old[:] = new
                elif (change := replace_chunk(name, index, old, new)) is not None:
                    changes.append(change)
            return pack(changes) if changes else None, sums

        copy = self.add(bucket, plan)
        by_width = [list(run) for _, run in itertools.groupby(tasks, lambda task: task[-1].itemsize)]
        groups = [run[i : i + BLOCK_CHUNKS] for run in by_width for i in range(0, len(run), BLOCK_CHUNKS)]
        num_threads = torch.get_num_threads()
        blocks = []
        for group, (block, sums) in zip(groups, self._pool.map(compare, groups), strict=True):
            blocks.append(block)
            for task, chunk_sum in zip(group, sums, strict=True):
                self.checksums[task[0]].append(chunk_sum)
        torch.set_num_threads(num_threads)  # the pool's threads have changed the number for all new threads
        return list(parts(blocks)), copy


def full_parts(copy: Bucket, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
    """Yields a copied bucket as safetensors files of at most `part_bytes`, unless a single tensor is larger."""
    for part in bucketed(copy.tensors.items(), part_bytes):
        file = io.BytesIO()
        layout = [(name, tensor.dtype, tensor.shape) for name, tensor in part.tensors.items()]
        if layout:
            write_safetensors(file, layout, part.tensors.items())
            yield file.getvalue()
