"""Delta: what changed between two versions of a model, bit for bit: its encoding, its application, and digests.

Pure functions on the bits of tensors, flat and as unsigned integers, in chunks of `CHUNK` elements. An update of 1e-6
moves about one bfloat16 value in a hundred, mostly to the neighboring one; so of a chunk travel

    sparse    the gaps between changed elements, a byte each, and by how much their bits changed
    dense     by how much the bits of each element changed, if a fourth or more of them did
    nothing   if none did

compressed unless that takes longer than it saves. The change is `new - old` of the bits, so a delta also leads back.

A part of a delta is `[length of the header][header][bodies of its chunks]`.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

CHUNK = 2**19  # elements: they stay in a core's cache from one step of the encoding to the next
PART_BYTES = 16 * 2**20  # of a delta, about
_ESCAPE = 255  # a gap of this or more follows as four bytes
_DENSE_FRACTION = 0.25  # of changed elements, from which on their positions cost more than zeros
_STORED_FRACTION = 1 / 16  # below it, gaps are nearly random: to compress them takes longer than to send them
_LARGE, _LARGE_FRACTION = 15, 1 / 8  # changes of the bits from 15 on follow in full, if they are few
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LENGTH = struct.Struct("<I")

Bits = npt.NDArray[Any]  # unsigned integers


class DeltaError(ValueError):
    """A delta that does not fit: torn, of another model, or malformed."""


class ChunkDelta(NamedTuple):
    """The change of one chunk."""

    name: str  # of the tensor
    number: int  # of the chunk in its tensor
    is_sparse: bool
    num_changed: int
    num_escapes: int
    body: bytes


def bits_of(tensor: Tensor) -> Bits:
    """[elements] The bits of a contiguous tensor of the CPU, in its memory."""
    size = tensor.element_size()
    return tensor.detach().reshape(-1).view(_SIGNED[size]).numpy().view(f"u{size}")


def num_chunks(num_elements: int) -> int:
    return -(-num_elements // CHUNK)


def chunk(bits: Bits, number: int) -> Bits:
    return bits[number * CHUNK : (number + 1) * CHUNK]


def replaced(name: str, number: int, old: Bits, new: Bits) -> ChunkDelta | None:
    """Makes `old`, a chunk, equal to `new`; the delta between them, or None if they were equal."""
    positions = np.flatnonzero(old != new)
    if not len(positions):
        return None
    is_sparse = len(positions) < _DENSE_FRACTION * len(new)
    if is_sparse:
        values = new[positions]
        changes = values - old[positions]
        old[positions] = values
        gaps = np.diff(positions, prepend=-1) - 1
        escapes = gaps[gaps >= _ESCAPE].astype("<u4")
        places = [np.minimum(gaps, _ESCAPE).astype(np.uint8).tobytes(), escapes.tobytes()]
        level = 0 if len(positions) < _STORED_FRACTION * len(new) else 1
        body, num_escapes = _packed(places, level), len(escapes)
    else:
        changes = new - old
        old[:] = new
        body, num_escapes = b"", 0
    return ChunkDelta(name, number, is_sparse, len(positions), num_escapes, body + _packed_changes(changes))


def apply(delta: ChunkDelta, bits: Bits, *, backward: bool = False) -> None:
    """Changes the chunk `bits` in place, from the old to the new version, or back.

    Raises:
        DeltaError: if the delta does not fit.
    """
    num_values = delta.num_changed if delta.is_sparse else len(bits)
    num_gaps = delta.num_changed if delta.is_sparse else 0
    places, values = b"", delta.body
    try:
        if delta.is_sparse:
            unpacker = zlib.decompressobj()
            places, values = unpacker.decompress(delta.body), unpacker.unused_data
        changes = _changes(values, num_values, bits.dtype)
    except (zlib.error, ValueError) as error:
        raise DeltaError(f"The delta of {delta.name!r} is torn: {error}.") from error
    if len(places) != num_gaps + 4 * delta.num_escapes:
        raise DeltaError(f"The delta of {delta.name!r} is torn: it has {len(places)} bytes of positions.")
    content = np.frombuffer(places, np.uint8)
    if not delta.is_sparse:
        np.subtract(bits, changes, out=bits) if backward else np.add(bits, changes, out=bits)
        return
    gaps = content[:num_gaps].astype(np.int64)
    escaped = np.flatnonzero(gaps == _ESCAPE)
    if len(escaped) != delta.num_escapes:
        raise DeltaError(f"The delta of {delta.name!r} has {len(escaped)} long gaps instead of {delta.num_escapes}.")
    gaps[escaped] = content[num_gaps : num_gaps + 4 * delta.num_escapes].view("<u4")
    positions = np.cumsum(gaps + 1) - 1
    if len(positions) and positions[-1] >= len(bits):
        raise DeltaError(f"The delta of {delta.name!r} ends at {positions[-1]}, beyond {len(bits)} elements.")
    bits[positions] = bits[positions] - changes if backward else bits[positions] + changes


def parts(deltas: Iterable[ChunkDelta | None], part_bytes: int = PART_BYTES) -> Iterator[bytes]:
    """The deltas as parts of about `part_bytes`; without chunks that did not change."""
    held: list[ChunkDelta] = []
    size = 0
    for delta in deltas:
        if delta is None:
            continue
        held.append(delta)
        size += len(delta.body)
        if size >= part_bytes:
            yield _part(held)
            held, size = [], 0
    if held:
        yield _part(held)


def read_part(part: bytes) -> list[ChunkDelta]:
    """The deltas of a part; raises DeltaError if it is torn."""
    try:
        (length,) = _LENGTH.unpack_from(part)
        header = json.loads(zlib.decompress(part[_LENGTH.size : _LENGTH.size + length]))
        deltas, start = [], _LENGTH.size + length
        for name, number, is_sparse, num_changed, num_escapes, num_bytes in header:
            body = part[start : start + num_bytes]
            deltas.append(ChunkDelta(name, number, is_sparse, num_changed, num_escapes, body))
            start += num_bytes
    except (struct.error, zlib.error, ValueError, TypeError) as error:
        raise DeltaError(f"The delta is torn: {error}.") from error
    if start != len(part):
        raise DeltaError(f"The delta has {len(part)} bytes instead of {start}.")
    return deltas


def checksum(bits: Bits | bytes) -> int:
    """Of a chunk or a part: finds what a faulty memory, disk or program does, 14 times as fast as a CRC."""
    return xxhash.xxh3_64_intdigest(bits)  # type: ignore[arg-type]  # any buffer


def version_digest(run: str, weight_version: int, checksums: Mapping[str, Sequence[int]]) -> str:
    """Identifies a version of a run and its content.

    Args:
        run: a random word, so that another run's version of the same number and content is another one.
        checksums: of each parameter's chunks.
    """
    content = json.dumps([run, weight_version, sorted(checksums.items())], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


def _part(deltas: Sequence[ChunkDelta]) -> bytes:
    header = [[*delta[:-1], len(delta.body)] for delta in deltas]
    packed = zlib.compress(json.dumps(header, separators=(",", ":")).encode(), 1)
    return b"".join([_LENGTH.pack(len(packed)), packed, *(delta.body for delta in deltas)])


def _packed(streams: Sequence[bytes], level: int = 1) -> bytes:
    """One zlib stream. Each part of it gets its own Huffman codes; matches, which rarely exist, are not sought."""
    packer = zlib.compressobj(level, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    packed = []
    for stream in streams:
        packed += [packer.compress(stream), packer.flush(zlib.Z_BLOCK)]
    return b"".join([*packed, packer.flush()])


def _packed_changes(changes: Bits) -> bytes:
    """Half a byte each if nearly all are small, which is 5 times as fast as to compress them; else compressed."""
    width = changes.dtype.itemsize
    folded = (changes << 1) ^ -(changes >> (8 * width - 1))  # 0, -1, 1, -2 … become 0, 1, 2, 3 …
    large = folded[folded >= _LARGE]
    if len(large) > _LARGE_FRACTION * len(folded):  # the lowest byte of each, then the next …
        return b"P" + _packed([plane.tobytes() for plane in folded.view(np.uint8).reshape(-1, width).T])
    halves = np.zeros(len(folded) + len(folded) % 2, np.uint8)
    halves[: len(folded)] = np.minimum(folded, _LARGE)
    return b"H" + (halves[::2] | halves[1::2] << 4).tobytes() + large.tobytes()


def _changes(packed: bytes, num_values: int, dtype: np.dtype[Any]) -> Bits:
    """What `_packed_changes` packed; raises ValueError or zlib.error if it is torn."""
    if packed[:1] == b"P":
        planes = np.frombuffer(zlib.decompress(packed[1:]), np.uint8).reshape(dtype.itemsize, num_values)
        folded = np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
    else:
        both = np.frombuffer(packed, np.uint8, (num_values + 1) // 2, offset=1)
        halves = np.empty(2 * len(both), np.uint8)
        halves[::2], halves[1::2] = both & _LARGE, both >> 4
        folded = halves[:num_values].astype(dtype)
        folded[halves[:num_values] == _LARGE] = np.frombuffer(packed[1 + len(both) :], dtype)
    return (folded >> 1) ^ -(folded & 1)
