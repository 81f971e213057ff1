"""WeightFolder: writes each weight version as a Hugging Face folder of safetensors, completely or not at all.

    root/version-00000012/            model-00001.safetensors …, model.safetensors.index.json, config.json
    root/.unfinished-00000013-4711/   a version that is being written; renamed when it is complete
    root/.share-3/                    rank 3's files, if several ranks write; rank 0 moves them into the version

A bucket is written to a file directly from the tensors' memory, with at most one tensor copied at a time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PretrainedConfig

from lightrl.checks.files import is_disk_full
from lightrl.errors import WeightSyncError
from lightrl.weights.bucket import Bucket, ServerForm, WrittenFile

KEPT_VERSIONS = 2  # the newest two, so that servers can return to the previous version if a sync fails
INDEX_FILE = "model.safetensors.index.json"
_FINISHED = re.compile(r"version-(\d+)")
_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class WeightFolder:
    """The newest versions of a model's weights, for syncs, rollbacks and servers that join late.

    A version is written under a hidden name and then renamed, so readers never see a partial one. The next write
    removes what a killed writer left behind. Only one process may write.

    Args:
        root: the versions' folder, created if missing; servers must be able to read it. /dev/shm keeps them in memory.
        config: the model's config, written next to the weights.
        form: the dtype and names that the servers need.
    """

    def __init__(self, root: str | Path, config: PretrainedConfig, *, form: ServerForm | None = None) -> None:
        self.root = Path(root).absolute()
        self.config = config
        self.form = form or ServerForm.of(config)

    def write(self, buckets: Iterable[Bucket], weight_version: int) -> Path:
        """Writes a version; returns its folder. If the disk fails, raises WeightSyncError; keeps earlier versions."""
        writer = self.begin(weight_version)
        try:
            for bucket in buckets:
                writer.add(bucket)
            return writer.finish()
        finally:
            writer.discard()

    def begin(self, weight_version: int) -> VersionWriter:
        """Starts writing a version bucket by bucket."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _disk_error(error, self.root, weight_version, 0) from error
        for left_over in [*self.root.glob(".unfinished-*"), *self.root.glob(".replaced-*")]:
            shutil.rmtree(left_over, ignore_errors=True)
        return VersionWriter(self, weight_version)

    def path_of(self, weight_version: int) -> Path:
        return self.root / f"version-{weight_version:08d}"

    def versions(self) -> list[int]:
        """Returns the complete versions, oldest first."""
        matches = [_FINISHED.fullmatch(path.name) for path in self.root.glob("version-*")]
        numbers = sorted(int(match[1]) for match in matches if match)
        return [number for number in numbers if is_whole(self.path_of(number))]

    def remove_old(self, in_use: Iterable[int] = ()) -> None:
        """Removes all versions except the newest KEPT_VERSIONS and those in `in_use`, which servers may be reading."""
        numbers = self.versions()
        for number in set(numbers[:-KEPT_VERSIONS]) - set(in_use):
            shutil.rmtree(self.path_of(number), ignore_errors=True)


class VersionWriter:
    """Writes one version; `finish` publishes it, and `discard` removes it if it is unfinished.

    `add` and `finish` raise WeightSyncError if the disk is full or fails.
    """

    def __init__(self, folder: WeightFolder, weight_version: int) -> None:
        self.folder = folder
        self.weight_version = weight_version
        self.num_bytes = 0
        self._files: dict[str, int] = {}  # file name → size in bytes
        self._file_of: dict[str, str] = {}  # parameter name → file name
        self._place = folder.root / f".unfinished-{weight_version:08d}-{os.getpid()}"

    def add(self, bucket: Bucket) -> None:
        """Writes the bucket to a file, and moves files that other ranks have written into the version."""
        for rank_file in bucket.files:
            self._adopt(rank_file)
        layout = self.folder.form.layout(bucket)
        if not layout:
            return
        name = f"model-{len(self._files) + 1:05d}.safetensors"
        self._check_new([parameter for parameter, _, _ in layout])
        try:
            self._place.mkdir(exist_ok=True)
            with (self._place / name).open("wb", buffering=0) as file:
                self._files[name] = write_safetensors(file, layout, self.folder.form.tensors(bucket))
        except OSError as error:
            raise _disk_error(error, self.folder.root, self.weight_version, self.num_bytes) from error
        self.num_bytes += self._files[name]
        self._file_of.update({parameter: name for parameter, _, _ in layout})

    def finish(self) -> Path:
        """Renames the complete folder to the version's name and returns it; removes old versions."""
        if not self._files:
            raise WeightSyncError(f"Version {self.weight_version} has no parameters.")
        metadata = {"weight_version": self.weight_version, "file_bytes": self._files, "total_size": self.num_bytes}
        index = {"metadata": metadata, "weight_map": self._file_of}
        place = self.folder.path_of(self.weight_version)
        replaced = self.folder.root / f".replaced-{self.weight_version:08d}-{os.getpid()}"
        try:
            config = served_config(self.folder.config, self.folder.form)
            (self._place / "config.json").write_text(json.dumps(config, indent=2))
            (self._place / INDEX_FILE).write_text(json.dumps(index, indent=2))
            if place.exists():  # written before this run resumed from an older checkpoint
                shutil.rmtree(replaced, ignore_errors=True)
                place.rename(replaced)
            self._place.rename(place)
        except OSError as error:
            raise _disk_error(error, self.folder.root, self.weight_version, self.num_bytes) from error
        shutil.rmtree(replaced, ignore_errors=True)
        self.folder.remove_old(in_use=[self.weight_version])
        return place

    def discard(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)

    def _adopt(self, file: WrittenFile) -> None:
        """Moves a file that another rank has written into this version."""
        path = Path(file.path)
        self._check_new(file.shapes)
        try:
            num_bytes = path.stat().st_size
            if num_bytes != file.num_bytes:
                raise WeightSyncError(
                    f"{file.path!r} has {num_bytes} bytes, but the rank that wrote it reported {file.num_bytes}. The "
                    "folder must be shared by all the trainer's hosts. The servers keep the old weights."
                )
            self._place.mkdir(exist_ok=True)
            path.rename(self._place / path.name)
        except OSError as error:
            raise _disk_error(error, self.folder.root, self.weight_version, self.num_bytes) from error
        self._files[path.name] = num_bytes
        self.num_bytes += num_bytes
        self._file_of.update(dict.fromkeys(file.shapes, path.name))

    def _check_new(self, parameters: Iterable[str]) -> None:
        repeated = [parameter for parameter in parameters if parameter in self._file_of]
        if repeated:
            raise WeightSyncError(f"Parameter {repeated[0]!r} arrived twice in version {self.weight_version}.")


def served_config(config: PretrainedConfig, form: ServerForm) -> dict[str, object]:
    """Returns the content of config.json for weights that `form` converts."""
    values: dict[str, object] = json.loads(config.to_json_string(use_diff=False))
    if form.dtype is not None:
        values["dtype"] = str(form.dtype).removeprefix("torch.")
    return values


def is_whole(folder: Path) -> bool:
    """Whether a version has all its files, each at its full size."""
    try:
        sizes: dict[str, int] = json.loads((folder / INDEX_FILE).read_text())["metadata"]["file_bytes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def write_safetensors(
    file: BinaryIO, layout: list[tuple[str, torch.dtype, torch.Size]], tensors: Iterable[tuple[str, Tensor]]
) -> int:
    """Writes the safetensors format tensor by tensor; returns the file's size in bytes.

    `safetensors.torch.save_file` would first copy all tensors to bytes.
    Source: https://github.com/huggingface/safetensors#format.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in layout:
        if dtype not in _DTYPE_NAMES:
            raise WeightSyncError(f"Parameter {name!r} is {dtype}, not one of {sorted(_DTYPE_NAMES.values())}.")
        end = offset + shape.numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8
    _write_all(file, memoryview(len(text).to_bytes(8, "little") + text))
    for _, tensor in tensors:
        _write_all(file, memoryview(tensor.cpu().reshape(-1).view(torch.uint8).numpy().data))
    return 8 + len(text) + offset


def _write_all(file: BinaryIO, data: memoryview) -> None:
    """Writes all data; a single unbuffered write stops at 2 GiB, or when the disk is full."""
    while len(data):
        data = data[file.write(data) :]


def _disk_error(error: OSError, root: Path, weight_version: int, num_bytes: int) -> WeightSyncError:
    after = f"after {num_bytes / 2**20:.0f} MiB"
    if is_disk_full(error):
        return WeightSyncError(
            f"The disk that holds {str(root)!r} is full: writing weight version {weight_version} failed {after}. "
            "The folder needs space for 3 versions of the model. The servers keep the old weights. Free space there, "
            "or set a different weight_folder."
        )
    return WeightSyncError(
        f"Writing weight version {weight_version} to {str(root)!r} failed {after}: {error}. The servers keep the old "
        "weights. Make the folder writable, or set a different weight_folder."
    )


@dataclass(frozen=True)
class SharedFolder:
    """A rank's settings for writing its share of a version; `vars` returns them as plain JSON."""

    root: str
    dtype: str | None  # the torch dtype of floating-point weights; None keeps the trainer's
    skip_names: list[str]
    timeout_s: float  # time limit for all ranks to write their shares
    is_block_fp8: bool = False

    @property
    def form(self) -> ServerForm:
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        return ServerForm(dtype, self.skip_names, self.is_block_fp8)


class ShareWriter:
    """Writes this rank's buckets to files. The export is collective, so a failure does not raise: `record` reports it.

    The constructor removes this rank's files from earlier versions.
    """

    def __init__(self, folder: SharedFolder, rank: int) -> None:
        self.problem: str | None = None
        self.files: list[WrittenFile] = []
        self._form = folder.form
        self._rank = rank
        self._place = Path(folder.root) / f".share-{rank}"
        shutil.rmtree(self._place, ignore_errors=True)

    def add(self, bucket: Bucket) -> None:
        """Checks a bucket, quantizes it if necessary, and writes it; does nothing after a failure."""
        if self.problem is not None or not self._form.layout(bucket):
            return
        path = self._place / f"model-{self._rank:04d}-{len(self.files) + 1:05d}.safetensors"
        for name, tensor in bucket.tensors.items():
            if not torch.isfinite(tensor).all():
                self.problem = f"Parameter {name!r} has values that are not finite."
                return
        bucket = self._form.quantized(bucket)
        layout = self._form.layout(bucket)
        try:
            self._place.mkdir(exist_ok=True)
            with path.open("wb", buffering=0) as file:
                num_bytes = write_safetensors(file, layout, self._form.tensors(bucket))
        except OSError as error:
            reason = "the disk is full" if is_disk_full(error) else str(error)
            self.problem = f"Rank {self._rank} could not write its share to {str(self._place)!r}: {reason}."
            return
        shapes = {name: list(shape) for name, _, shape in layout}
        self.files.append(WrittenFile(str(path), num_bytes, shapes))

    def record(self) -> dict[str, Any]:
        """Returns plain JSON for rank 0: this rank's files, or the problem."""
        return {"problem": self.problem, "files": [asdict(file) for file in self.files]}


def files_of(records: list[dict[str, Any]]) -> tuple[WrittenFile, ...]:
    """Returns the files in all ranks' records; raises WeightSyncError, which names the rank, if a rank failed."""
    problems = [record["problem"] for record in records if record["problem"] is not None]
    if problems:
        raise WeightSyncError(f"{' '.join(problems)} The servers keep the old weights.")
    return tuple(WrittenFile(**file) for record in records for file in record["files"])


def read_back(files: Iterable[WrittenFile]) -> Iterator[Bucket]:
    """Yields each file's tensors as a bucket, so that digests are computed from the weights that servers will load."""
    for file in files:
        yield Bucket(load_file(file.path))
