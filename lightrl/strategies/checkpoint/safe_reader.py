"""Reads torch's checkpoints as data: no code runs, whatever a file contains, and damaged bytes are refused.

torch's reader unpickles `.metadata` and individual values without restriction, so a crafted file can run any command.
torch writes a CRC-32 of every record but checks none, and mixes files from different saves; lightrl's have a save id.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from lightrl.checks.files import check_sums

_METADATA_FILE = ".metadata"
OWN = "lightrl "  # prefix of a save id
PARTS = ".distcp"  # suffix of tensor files
# Any operation in a damaged or crafted pickle can fail.
_OPERATIONS_FAIL = (ValueError, TypeError, AttributeError, LookupError, ImportError, MemoryError, ArithmeticError)
_DAMAGE = (*_OPERATIONS_FAIL, pickle.UnpicklingError, EOFError, RuntimeError, struct.error, zipfile.BadZipFile)
_CLASSES: tuple[type, ...] = (
    metadata.Metadata,
    metadata.StorageMeta,
    metadata.MetadataIndex,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
)


class DamagedCheckpoint(ValueError):
    """Raised if a checkpoint file differs from what was written."""


def load_plain(file: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Reads a checkpoint file onto the CPU; raises ValueError if it is damaged or contains more than plain data."""
    with naming_file(file):
        check_records(file)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    return of_run(content, file)


def of_run(content: object, file: str | Path) -> dict[str, Any]:
    """Returns `content` if Lightning wrote it; raises ValueError for anything else that torch can read."""
    if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
        raise ValueError(f"{str(file)!r} is not a run's checkpoint. To start from weights, set model.policy.")
    return content


@contextlib.contextmanager
def naming_file(file: str | Path) -> Iterator[None]:
    """Inside the context, replaces an error from reading the file with a DamagedCheckpoint that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (*_DAMAGE, OSError) as error:
        cause = _without_advice(error)
        raise DamagedCheckpoint(
            f"{str(file)!r} is not a lightrl checkpoint, or it is damaged ({cause}). Use an earlier one."
        ) from cause


def check_records(content: Path | IO[bytes], of: str = "the file") -> None:
    """Raises ValueError if a record of a `torch.save` file is damaged, or compressed (torch never compresses)."""
    with zipfile.ZipFile(content) as records:
        compressed = [info.filename for info in records.infolist() if info.compress_type != zipfile.ZIP_STORED]
        damaged = compressed[0] if compressed else records.testzip()
    if damaged is not None:
        raise ValueError(f"record {damaged} of {of} does not match its CRC-32, so it changed after it was written")


def _without_advice(error: BaseException) -> BaseException:
    """Returns the error without torch's advice on how to read files that contain code."""
    if not isinstance(error, pickle.UnpicklingError):
        return error
    code = re.search(r"GLOBAL (\S+)", str(error))
    return ValueError(f"it names code to run, {code[1]}" if code else "it is damaged, or holds more than plain data")


def load_parts(state: dict[str, Any], folder: Path, *, no_dist: bool = False) -> None:
    """Fills a state in place from a checkpoint folder, or raises ValueError. Collective unless `no_dist`."""
    try:
        dcp.state_dict_loader.load(state, storage_reader=SafeReader(folder), planner=_SafePlanner(), no_dist=no_dist)
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        if isinstance(failure, DamagedCheckpoint):
            raise failure from None
        cause = _without_advice(failure)
        raise ValueError(
            f"Checkpoint {str(folder)!r} cannot be read (rank {rank}: {cause}). Use an earlier one."
        ) from cause


def own_save_id(saved: Metadata) -> str | None:
    """Returns the id that each file of this save must contain; None if the save is not lightrl's."""
    save_id = getattr(saved.storage_meta, "save_id", None)
    return save_id if isinstance(save_id, str) and save_id.startswith(OWN) else None


def mark_of(save_id: str, name: str) -> bytes:
    """Returns the first bytes of a tensor file: the id of the save it belongs to, and its name."""
    return f"{save_id} {name}\n".encode()


class SafeReader(FileSystemReader):
    """torch's reader for checkpoint folders; also checks every byte and restricts the classes in `.metadata`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads `.metadata`; raises ValueError if it is not in torch's format."""
        file = Path(self.path) / _METADATA_FILE
        try:
            with file.open("rb") as stream, _unchanged_classes():
                unpickled = _MetadataUnpickler(stream).load()
            read = _checked_metadata(unpickled)
        except _DAMAGE as error:
            raise ValueError(
                f"{str(file)!r} is not what torch.distributed.checkpoint writes ({error}). The checkpoint is damaged, "
                "or was made to run code. Use an earlier one."
            ) from error
        read.storage_meta = read.storage_meta or StorageMeta()
        check_sums(file.parent, "Use an earlier checkpoint.", needed=[_METADATA_FILE] if own_save_id(read) else ())
        read.storage_meta.load_id = self.load_id
        return read

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError, on one rank, if a file's first bytes name a different save."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        if not is_coordinator or (save_id := own_save_id(metadata)) is None:
            return
        folder, needed = Path(self.path), {item.relative_path for item in self.storage_data.values()}
        for name in sorted(needed | {file.name for file in folder.glob(f"*{PARTS}")}):
            mark = mark_of(save_id, name)
            with naming_file(folder / name), (folder / name).open("rb") as file:
                if file.read(len(mark)) != mark:
                    left_over = "" if name in needed else ", which does not need it. Remove it"
                    raise ValueError(f"it is not from the same save as {_METADATA_FILE}{left_over}")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        indices = {item.storage_index for item in plan.items}
        for index in sorted(indices, key=lambda index: self.storage_data[index].offset):
            place = self.storage_data[index]
            file = Path(self.path) / place.relative_path
            with naming_file(file), file.open("rb") as stream:
                stream.seek(place.offset)
                check_records(io.BytesIO(stream.read(place.length)), index.fqn)
        return super().read_data(plan, planner)


class _SafePlanner(DefaultLoadPlanner):
    """torch's planner, changed to load individual values as plain data; torch's unpickles them unrestricted."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], torch.load(value, weights_only=True))


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        # New functions for each object, because a pickle can set attributes of everything that it names.
        self._names: dict[tuple[str, str], object] = {
            **{(kind.__module__, kind.__qualname__): kind for kind in _CLASSES},
            **dict.fromkeys([(module, "PosixPath") for module in _PATHLIB], lambda *parts: "/".join(parts)),
            **dict.fromkeys([(module, "WindowsPath") for module in _PATHLIB], lambda *parts: "\\".join(parts)),
            ("torch", "Size"): torch.Size,
            ("torch.serialization", "_get_layout"): lambda name: {"torch.strided": torch.strided}[name],
            ("collections", "OrderedDict"): dict,
        }

    def find_class(self, module: str, name: str) -> object:
        value = self._names.get((module, name))
        if value is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            value = getattr(torch, name)
        if value is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return value


_PATHLIB = ("pathlib", "pathlib._local")  # Python 3.13 uses the second


@contextlib.contextmanager
def _unchanged_classes() -> Iterator[None]:
    """On exit, reverts attributes that a pickle has set on torch's classes, and raises ValueError if there are any."""
    before = [(kind, dict(vars(kind))) for kind in _CLASSES]
    try:
        yield
    finally:
        changed = [kind for kind, attributes in before if dict(vars(kind)) != attributes]
        for kind, attributes in before:
            for name in vars(kind).keys() - attributes.keys():
                delattr(kind, name)
            for name, value in attributes.items():
                if vars(kind)[name] is not value:
                    setattr(kind, name, value)
    if changed:
        raise ValueError(f"it changes the class {changed[0].__name__}")


def _checked_metadata(read: object) -> Metadata:
    """Returns its argument; raises ValueError unless it is the metadata of files in the same folder."""
    if not isinstance(read, Metadata) or not isinstance(read.state_dict_metadata, dict):
        raise ValueError(f"it holds {type(read).__name__}")
    files = read.storage_data
    if not isinstance(files, dict):
        raise ValueError("it does not say where tensors are")
    for file in files.values():
        name = getattr(file, "relative_path", None)
        if not isinstance(file, filesystem._StorageInfo) or not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"it names the file {name!r}, which is not in the folder")
    return read
