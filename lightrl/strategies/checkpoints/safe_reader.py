"""Reads checkpoints as data: whatever a file says, no code runs, and damaged bytes are refused.

torch's own reader of folders unpickles single values, and an index, without limits, so a crafted file runs any command.
It checks no CRC-32 of a record, and reads files of two saves as one. Here the index is JSON, single values are plain
data, and each file has its save's id.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
    from torch.futures import Future

INDEX_FILE = "index.zip"  # a zip, for its CRC-32
_INDEX = "index.json"  # in it
PARTS = ".distcp"  # how the files of tensors end
# A damaged or crafted pickle fails in as many ways as there are operations.
_OPERATIONS_FAIL = (ValueError, TypeError, AttributeError, LookupError, ImportError, MemoryError, ArithmeticError)
_DAMAGE = (*_OPERATIONS_FAIL, pickle.UnpicklingError, EOFError, RuntimeError, struct.error, zipfile.BadZipFile)


class DamagedCheckpoint(ValueError):
    """A checkpoint's file is not what was written."""


def load_plain(file: Path, *, mmap: bool = False) -> dict[str, Any]:
    """The content of a checkpoint's file, on the CPU; raises ValueError if it is damaged or more than plain data."""
    with named(file):
        check_records(file)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    return of_run(content, file)


def of_run(content: object, file: str | Path) -> dict[str, Any]:
    """`content`, if Lightning wrote it; raises ValueError for anything else that torch can read."""
    if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
        raise ValueError(f"{str(file)!r} is not a checkpoint of a run. To start from weights, set model.policy.")
    return content


@contextlib.contextmanager
def named(file: str | Path) -> Iterator[None]:
    """Inside, what is raised for a file that is damaged, or more than plain data, is a ValueError with its name."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (*_DAMAGE, OSError) as error:
        cause = _without_advice(error)
        raise DamagedCheckpoint(
            f"{str(file)!r} is not a checkpoint of lightrl, or it is damaged ({cause}). Use an earlier one."
        ) from cause


def check_records(content: Path | IO[bytes], of: str = "the file") -> None:
    """Reads once what `torch.save` wrote; raises ValueError for a record with other bytes than its CRC-32 says."""
    with zipfile.ZipFile(content) as records:
        packed = [info.filename for info in records.infolist() if info.compress_type != zipfile.ZIP_STORED]
        damaged = packed[0] if packed else records.testzip()
    if damaged is not None:
        raise ValueError(f"record {damaged} of {of} has other bytes than were written, by its CRC-32")


def _without_advice(error: BaseException) -> BaseException:
    """The error, without torch's text on how to read a file that holds code all the same."""
    if not isinstance(error, pickle.UnpicklingError):
        return error
    code = re.search(r"GLOBAL (\S+)", str(error))
    return ValueError(f"it names code to run, {code[1]}" if code else "it is damaged, or holds more than plain data")


def load_parts(state: dict[str, Any], folder: Path, *, no_dist: bool = False) -> None:
    """Fills a state in place from a checkpoint folder, or raises ValueError; collective unless `no_dist`."""
    try:
        dcp.state_dict_loader.load(state, storage_reader=SafeReader(folder), planner=_SafePlanner(), no_dist=no_dist)
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        if isinstance(failure, DamagedCheckpoint):
            raise failure from None
        cause = _without_advice(failure)
        what = f"Checkpoint {str(folder)!r} cannot be read (rank {rank}: {cause})"
        raise ValueError(f"{what}. Use an earlier one.") from cause


def save_id_of(saved: Metadata) -> str:
    """The id that each file of this save begins with."""
    assert saved.storage_meta is not None
    return str(saved.storage_meta.save_id)


def mark_of(save_id: str, name: str) -> bytes:
    """What a file of tensors begins with: of which save it is, and its name there."""
    return f"{save_id} {name}\n".encode()


def write_index(stream: IO[bytes], saved: Metadata, save_id: str) -> None:
    """Writes where a folder has each tensor and value: name -> dtype, shape and parts; name -> place."""

    def place_of(index: MetadataIndex) -> tuple[str, int, int]:
        place: _StorageInfo = saved.storage_data[index]
        return place.relative_path, place.offset, place.length

    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, item in saved.state_dict_metadata.items():
        if isinstance(item, TensorStorageMetadata):
            parts = [(part.offsets, part.sizes, *place_of(MetadataIndex(name, part.offsets))) for part in item.chunks]
            tensors[name] = str(item.properties.dtype).removeprefix("torch."), item.size, parts
        else:
            values[name] = place_of(MetadataIndex(name))
    with zipfile.ZipFile(stream, "w") as records:
        records.writestr(_INDEX, json.dumps({"save_id": save_id, "tensors": tensors, "values": values}))


def read_index(folder: Path) -> Metadata:
    """What `write_index` wrote, as torch has it; raises ValueError for anything else."""
    file = folder / INDEX_FILE
    with named(file):
        check_records(file)
        with zipfile.ZipFile(file) as records:
            index = json.loads(records.read(_INDEX))
        items: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for name, (dtype_name, shape, parts) in index["tensors"].items():
            dtype = getattr(torch, dtype_name)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{dtype_name!r} of {name!r} is no dtype")
            chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes, *_ in parts]
            items[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)
            places |= {MetadataIndex(name, offsets): _StorageInfo(*place) for offsets, _, *place in parts}
        for name, place in index["values"].items():
            items[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _StorageInfo(*place)
        for outside in (place.relative_path for place in places.values()):
            if Path(outside).name != outside:
                raise ValueError(f"it names the file {outside!r}, which is not in the folder")
        return Metadata(items, storage_data=places, storage_meta=StorageMeta(save_id=index["save_id"]))


class SafeReader(FileSystemReader):
    """torch's reader of a checkpoint folder, which checks every byte."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_index(Path(self.path))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError, on one rank, for a file that another save has written; reads the first bytes of each."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        if not is_coordinator:
            return
        folder, needed = Path(self.path), {place.relative_path for place in self.storage_data.values()}
        for name in sorted(needed | {file.name for file in folder.glob(f"*{PARTS}")}):
            mark = mark_of(save_id_of(metadata), name)
            with named(folder / name), (folder / name).open("rb") as file:
                if file.read(len(mark)) != mark:
                    left_over = "" if name in needed else ", which does not need it. Remove it"
                    raise ValueError(f"it is of another save than {INDEX_FILE}{left_over}")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        indices = {item.storage_index for item in plan.items}
        for index in sorted(indices, key=lambda index: self.storage_data[index].offset):
            place = self.storage_data[index]
            file = Path(self.path) / place.relative_path
            with named(file), file.open("rb") as stream:
                stream.seek(place.offset)
                check_records(io.BytesIO(stream.read(place.length)), index.fqn)
        return super().read_data(plan, planner)


class _SafePlanner(DefaultLoadPlanner):
    """torch's planner, which loads single values as plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # Not torch's method, which loads without limits.
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], torch.load(value, weights_only=True))
