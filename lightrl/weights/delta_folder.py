"""DeltaFolder: a folder on a server's host that holds one weight version. Full versions replace it; deltas update it.

    root/version-00000012/   what a server loads: model-00001.safetensors …, index, config.json, version.json
    root/incoming/           parts of the next version while they arrive; the version above is unchanged
    root/.changing/          the version's name while a delta is applied to it in place
    root/undo/               the parts of the last delta, so that it can be undone

The disk holds the model once, plus a delta. A folder named version-… is always complete, even after a process was
killed; the next start removes everything else. Before a version gets that name, its digest is computed from the files
and must equal the trainer's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightrl.concurrency.owner import own_prefix
from lightrl.trace.spans import host_memory
from lightrl.weights.delta import (
    Bits,
    Block,
    DeltaError,
    apply,
    checksum,
    chunk,
    num_chunks,
    read_part,
    unpack,
    version_digest,
)
from lightrl.weights.disk import INDEX_FILE

_STATE_FILE, _VERSION = "version.json", re.compile(r"version-\d+")
_THREADS = min(8, os.cpu_count() or 1)
_LENGTH_BYTES = 8  # a safetensors file starts with the length of its header


class NotTheBase(DeltaError):
    """The folder does not hold the version that the delta starts from."""


@dataclass(frozen=True)
class Version:
    """A weight version in a run; `digest` is its `version_digest`."""

    run: str
    weight_version: int
    digest: str


NOTHING = Version("", -1, "")


class DeltaFolder:
    """Holds one version in `root`: an empty folder, or an earlier DeltaFolder's. Nothing else may write there.

    Only `write` may be called concurrently.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self.root.mkdir(parents=True, exist_ok=True)
        self.version = NOTHING
        self._session = ""  # the id of the current upload
        self._base = ""  # as in `begin`
        self._checks: dict[int, int] = {}  # uploaded part → checksum
        self._files: dict[str, int] = {}  # the version's files → bytes
        self._bits: dict[str, Bits] = {}  # the version's parameters → their bits, mapped from the files
        self._pool = ThreadPoolExecutor(_THREADS, "lightrl-delta")
        self._take_over()

    @property
    def path(self) -> Path:
        """The folder that a server loads."""
        return self._path_of(self.version)

    @property
    def undo(self) -> Version:
        """The version that `revert` restores; NOTHING if there is none."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Version(**json.loads((self.root / "undo" / _STATE_FILE).read_text()))
        return NOTHING

    def begin(self, session: str, base: str) -> None:
        """Starts the upload of a version, and discards any unfinished upload.

        Args:
            session: the upload's id, which the sender chooses and sends with each part.
            base: the digest of the version that the delta starts from. It is empty for a full version; in that case,
                the current version is removed immediately, to free space.
        """
        self._session = ""
        self._remove("incoming")
        if base:
            self._check_base(base)
        else:
            self.clear()
        (self.root / "incoming").mkdir()
        self._session, self._base, self._checks = session, base, {}

    def write(self, session: str, index: int, content: bytes, check: int) -> None:
        """Stores part `index`; parts may arrive in any order. `check` is the part's `checksum`."""
        self._check_session(session)
        if checksum(content) != check:
            raise DeltaError(f"Part {index} is corrupt: its checksum differs.")
        _check_space(self.root, len(content))
        (self.root / "incoming" / self._part_name(index)).write_bytes(content)
        self._checks[index] = check

    def finish(self, session: str, version: Version, num_parts: int, config: Mapping[str, Any]) -> Path:
        """Builds the version from the uploaded parts, which are a full version's safetensors files or a delta's parts.

        Args:
            session: as in `begin`.
            num_parts: number of parts that were sent.
            config: the content of config.json; ignored for a delta.

        Returns:
            The folder that a server loads.

        Raises:
            DeltaError: if parts are missing or corrupt (nothing changes), or the result is not the trainer's version
                (the folder is emptied).
        """
        self._check_session(session)
        self._session = ""
        incoming = self.root / "incoming"
        parts = [incoming / self._part_name(index) for index in range(num_parts)]
        for index, part in enumerate(parts):
            if index not in self._checks or not part.is_file() or checksum(part.read_bytes()) != self._checks[index]:
                raise DeltaError(f"Part {index} of {num_parts} of version {version.weight_version} is lost or corrupt.")
        if self._base:
            self._check_base(self._base)
            previous = self.version
            self._apply_parts(parts, version)
            self._remove("undo")
            (incoming / _STATE_FILE).write_text(json.dumps(asdict(previous)))
            incoming.rename(self.root / "undo")  # applied backward, these parts restore `previous`
        else:
            self._map_files(incoming)
            (incoming / "config.json").write_text(json.dumps(config, indent=2))
            self._publish(incoming, version)
        return self.path

    def revert(self, digest: str) -> Path:
        """Undoes the last delta; `digest` must be the previous version's digest."""
        undo = self.undo
        if not digest or undo.digest != digest:
            raise NotTheBase("This version cannot be restored, because the last delta here did not start from it.")
        self._apply_parts(sorted((self.root / "undo").glob("part-*")), undo, backward=True)
        self._remove("undo")
        return self.path

    def clear(self) -> None:
        """Removes all files."""
        self.version = NOTHING
        self._bits, self._files = {}, {}
        for path in self.root.iterdir():
            self._remove(path.name)

    def close(self) -> None:
        self._pool.shutdown()

    def _take_over(self) -> None:
        """Adopts the version that an earlier process left, if it is complete; removes everything else."""
        folders = [path for path in self.root.iterdir() if _VERSION.fullmatch(path.name)]
        try:
            (folder,) = folders
            version = Version(**json.loads((folder / _STATE_FILE).read_text()))
            self._map_files(folder)
            self._publish(folder, version)
        except (OSError, ValueError, TypeError, KeyError):  # no version, several, or a bad one; the next sync is full
            self.clear()
        for name in (".changing", "incoming"):
            self._remove(name)

    def _check_base(self, base: str) -> None:
        if base != self.version.digest:
            raise NotTheBase(
                f"The delta starts from version {base[:12]}, but the folder holds "
                f"{self.version.digest[:12] or 'none'} ({self.version.weight_version})."
            )

    def _check_session(self, session: str) -> None:
        if not session or session != self._session:
            raise NotTheBase("No upload of this version has started here, or a later upload has replaced it.")

    def _apply_parts(self, parts: Sequence[Path], target: Version, *, backward: bool = False) -> None:
        """Turns the current version into `target`, in place; if that fails, removes all files and raises DeltaError."""
        changing = self.root / ".changing"
        source = self.path
        sizes = {path.name: path.stat().st_size for path in source.glob("*.safetensors")}
        if sizes != self._files:
            self.clear()  # now, because reading a mapped page that no longer exists would crash the process
            raise DeltaError(f"The files of {source} have changed: one is missing or has a different size.")
        source.rename(changing)
        self.version = NOTHING
        sums: dict[tuple[str, int], int] = {}
        try:
            for part in parts:
                blocks = read_part(part.read_bytes())
                chunk_ids = [(name, number) for block in blocks for name, number, _, _ in block.chunks]
                if len(set(chunk_ids)) < len(chunk_ids) or not sums.keys().isdisjoint(chunk_ids):
                    raise DeltaError("The delta contains a chunk twice.")
                for changed in self._pool.map(lambda block: self._apply_block(block, backward=backward), blocks):
                    sums |= changed
            self._publish(changing, target, sums)
        except DeltaError:
            self.clear()
            raise

    def _apply_block(self, block: Block, *, backward: bool) -> dict[tuple[str, int], int]:
        """Changes a block's chunks; returns their checksums, each computed while the chunk is in a core's cache."""
        sums = {}
        for change in unpack(block):
            name, number = change.name, change.number
            bits = self._bits.get(name)
            if bits is None or not 0 <= number < num_chunks(len(bits)):
                raise DeltaError(f"The delta changes chunk {number} of {name!r}, which the model lacks.")
            chunk_bits = chunk(bits, number)
            apply(change, chunk_bits, backward=backward)
            sums[name, number] = checksum(chunk_bits)
        return sums

    def _publish(self, folder: Path, version: Version, sums: Mapping[tuple[str, int], int] | None = None) -> None:
        """Names the folder after the version; if the digest is wrong, removes all files and raises DeltaError."""
        all_sums = dict(sums or {})  # (parameter, chunk) → checksum; `sums` covers the chunks that a delta changed
        chunks = {name: [(name, index) for index in range(num_chunks(len(bits)))] for name, bits in self._bits.items()}
        missing = [key for keys in chunks.values() for key in keys if key not in all_sums]
        added = self._pool.map(lambda key: checksum(chunk(self._bits[key[0]], key[1])), missing)
        all_sums |= dict(zip(missing, added, strict=True))
        checksums = {name: [all_sums[key] for key in keys] for name, keys in chunks.items()}
        if version_digest(version.run, version.weight_version, checksums) != version.digest:
            self.clear()
            raise DeltaError(f"The result is not the trainer's version {version.weight_version}: its digest differs.")
        (folder / _STATE_FILE).write_text(json.dumps(asdict(version)))
        folder.rename(self._path_of(version))
        self.version = version

    def _map_files(self, folder: Path) -> None:
        """Maps the parameters in a folder's safetensors files into memory, and writes their index."""
        self._bits, self._files = {}, {}
        weight_map: dict[str, str] = {}
        for path in sorted(folder.glob("*.safetensors")):
            for name, bits in _map_tensors(path):
                self._bits[name] = bits
                weight_map[name] = path.name
            self._files[path.name] = path.stat().st_size
        index = {"metadata": {"total_size": sum(self._files.values())}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index))

    def _path_of(self, version: Version) -> Path:
        return self.root / f"version-{version.weight_version:08d}"

    def _part_name(self, index: int) -> str:
        return f"part-{index:06d}" if self._base else f"model-{index + 1:06d}.safetensors"

    def _remove(self, name: str) -> None:
        shutil.rmtree(self.root / name, ignore_errors=True)


def folder_in_memory(prefix: str) -> Path:
    """Makes a new folder in /dev/shm, or in the temporary folder if this process may not write there."""
    memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix=own_prefix(prefix, memory), dir=memory))


def _map_tensors(path: Path) -> Iterator[tuple[str, Bits]]:
    """Yields (name, flat bits) of each tensor in a safetensors file, mapped from the file."""
    try:
        content = np.memmap(path, np.uint8, "r+")
        start = _LENGTH_BYTES + int(content[:_LENGTH_BYTES].view("<u8")[0])
        header = json.loads(content[_LENGTH_BYTES:start].tobytes())
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, end = entry["data_offsets"]
            num_elements = int(np.prod(entry["shape"], dtype=np.int64))
            width = (end - first) // max(1, num_elements)
            if start + end > len(content):
                raise DeltaError(f"{path.name} is truncated.")
            yield name, content[start + first : start + end].view(f"u{width or 1}")
    except (ValueError, KeyError, TypeError) as error:
        raise DeltaError(f"{path.name} is corrupt: {error}.") from error


def _check_space(root: Path, num_bytes: int) -> None:
    """Raises OSError (ENOSPC) if less than `num_bytes` is free on the disk, or in memory if the folder is there."""
    free = shutil.disk_usage(root).free
    if root.is_relative_to("/dev/shm"):
        free = min(free, host_memory()[0])
    if free < num_bytes:
        raise OSError(errno.ENOSPC, f"{free / 2**20:.0f} MiB are free, {num_bytes / 2**20:.0f} MiB are needed")
