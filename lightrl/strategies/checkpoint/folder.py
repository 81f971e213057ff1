"""Checkpoint folders from several processes: every rank saves and loads its part, under global parameter names.

The format is torch.distributed.checkpoint's, so any number of processes and any strategy can read it; `meta.pt` in the
folder holds everything except weights and optimizers. Every file contains the id of its save; a folder that mixes two
saves, for example after an interrupted copy, is refused.

torch's HuggingFaceStorageWriter and Reader (2.13) are not an option. They restore tensors exactly on other meshes, but
write values that are not tensors, like a learning rate, before the header, which makes the file unreadable. Writing
takes twice the memory of the tensors. Missing files, changed bytes and mixed saves cause no error.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightrl.checks.files import cause_to_show, publish, remove_path, write_sums
from lightrl.concurrency.owner import remove_left_behind
from lightrl.strategies.checkpoint.atomic_write import Progress, TrackedFile, write_error
from lightrl.strategies.checkpoint.fit import check_named_optimizer, check_optimizer_names, check_weights, parameter_of
from lightrl.strategies.checkpoint.safe_reader import (
    OWN,
    PARTS,
    DamagedCheckpoint,
    SafeReader,
    load_parts,
    load_plain,
    mark_of,
    own_save_id,
)

META_FILE = "meta.pt"
_SAVE_ID = "save_id"
# Entries are keyed by name, because ranks may hold different parameters, so positions in a list would not match.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def folder_writer(
    checkpoint: dict[str, Any], place: Path, *, writer_mark: str, group: dist.ProcessGroup, is_main: bool, copies: bool
) -> Callable[[Progress], None]:
    """Returns a function that writes this rank's part of a checkpoint, and renames the folder once all ranks have.

    Args:
        checkpoint: Lightning's checkpoint; weights and optimizer states are removed from it.
        place: the folder's path, the same on all ranks.
        writer_mark: rank 0's mark (owner.py) and a unique suffix, which identify this save in every file.
        group: all ranks; used only by the writing thread.
        copies: whether to copy the tensors to host memory now, because training continues during the write.

    Raises:
        OSError: from the returned function, if the folder cannot be written.
    """
    part = place.with_name(f"{place.name}.{writer_mark}.part")
    state = {"state_dict": checkpoint.pop("state_dict")}
    state |= {f"optimizer_{index}": values for index, values in enumerate(checkpoint.pop("optimizer_states", []))}
    state = {name: values for name, values in state.items() if values}  # a rank may have no values
    if copies:
        state = tree_map_only(Tensor, lambda value: value.to("cpu", copy=True), state)
    rest = io.BytesIO()
    save_id = f"{OWN}{writer_mark}"
    torch.save({**checkpoint, _SAVE_ID: save_id}, rest)

    def write(progress: Progress) -> None:
        try:
            if is_main:
                with progress.at_disk():
                    remove_path(part)
                    part.mkdir(parents=True)
                    remove_left_behind(place.parent, "*.part")
                    with io.BufferedWriter(TrackedFile(part / META_FILE, progress)) as file:
                        file.write(rest.getbuffer())
                        file.flush()
                        os.fsync(file.fileno())
            dist.barrier(group=group)  # otherwise a faster rank would create the folder first
            dcp.state_dict_saver.save(state, storage_writer=_Writer(part, save_id, progress), process_group=group)
            if is_main:  # all ranks have written, since a save ends with a reduction
                with progress.at_disk():
                    write_sums(part, [".metadata"])  # the other files contain checksums
                    files = {file.relative_path for file in SafeReader(part).read_metadata().storage_data.values()}
                    if missing := sorted(name for name in files if not (part / name).is_file()):
                        raise OSError(f"{', '.join(missing[:3])} from other ranks did not appear in {part}")
                    publish(part, place)
        except (OSError, RuntimeError, CheckpointException) as error:
            if is_main:
                shutil.rmtree(part, ignore_errors=True)
            raise write_error(error, place, "to be shared by all ranks") from cause_to_show(error)

    return write


class _Writer(FileSystemWriter):
    def __init__(self, folder: Path, save_id: str, progress: Progress) -> None:
        super().__init__(folder)
        self.fs = _TrackedFiles(save_id, progress)
        self._id = save_id  # torch would set a different id on each rank

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._id)


class _TrackedFiles(FileSystem):
    """Files in a checkpoint that report write progress until they are synced and closed."""

    def __init__(self, save_id: str, progress: Progress) -> None:
        super().__init__()
        self._save_id = save_id
        self._progress = progress

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with contextlib.ExitStack() as stack:
            if mode == "wb":
                stack.enter_context(self._progress.at_disk())
                file = stack.enter_context(io.BufferedWriter(TrackedFile(Path(path), self._progress), 2**20))
                if Path(path).suffix == PARTS:
                    file.write(mark_of(self._save_id, Path(path).name))
                yield file
            else:
                yield stack.enter_context(super().create_stream(path, mode))


def load_folder(path: Path, model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Loads weights and optimizers, saved by any number of ranks, in place; returns all other entries. Collective.

    Roles that were not saved keep their weights.

    Raises:
        ValueError: if the folder is incomplete, or its models or optimizers differ from this run's.
    """
    rest = read_rest(path)
    saved = SafeReader(path).read_metadata().state_dict_metadata
    state: dict[str, Any] = get_model_state_dict(model)
    loaded = {name: value for name, value in state.items() if f"state_dict.{name}" in saved}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    # Frozen roles are not saved, and other ranks may have models that this rank lacks.
    needed = {name: value.shape for name, value in state.items() if name in trained | loaded.keys()}
    check_weights({name: getattr(saved[f"state_dict.{name}"], "size", needed[name]) for name in loaded}, needed, path)
    load_parts({"state_dict": loaded} if loaded else {}, path)  # collective, even for a rank without weights
    model.load_state_dict(loaded, strict=False)
    for index, optimizer in enumerate(optimizers):
        key = f"optimizer_{index}"
        saved_names = {name.removeprefix(f"{key}.") for name in saved if name.startswith(f"{key}.")}
        own_state = _state_to_fill(model, optimizer)
        check_optimizer_names(saved_names, own_state, optimizer, path)
        own_state = {name: value for name, value in own_state.items() if name in saved_names}
        load_parts({key: own_state} if own_state else {}, path)
        load_optimizer_state(model, optimizer, own_state, path)
    return rest


def read_folder(folder: Path) -> dict[str, Any]:
    """Reads a whole checkpoint, saved by any number of processes. Keys optimizer states by parameter name."""
    checkpoint = read_rest(folder)
    checkpoint["state_dict"] = read_tensors(folder, "state_dict.")
    optimizers = checkpoint["optimizer_states"] = list[dict[str, Any]]()
    while state := read_tensors(folder, f"optimizer_{len(optimizers)}.", with_numbers=True):
        optimizers.append(state)
    return checkpoint


def read_tensors(folder: Path, prefix: str, *, with_numbers: bool = False) -> dict[str, Any]:
    """Reads tensors (`with_numbers`: also other values) whose names start with `prefix`; removes it from the keys."""
    tensors: dict[str, Any] = {}
    for name, item in SafeReader(folder).read_metadata().state_dict_metadata.items():
        if name.startswith(prefix) and isinstance(item, TensorStorageMetadata):
            tensors[name] = torch.empty(item.size, dtype=item.properties.dtype)
        elif name.startswith(prefix) and with_numbers:
            tensors[name] = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # as intended
        if tensors:
            load_parts(tensors, folder, no_dist=True)
    return {name.removeprefix(prefix): value for name, value in tensors.items()}


def read_rest(folder: Path) -> dict[str, Any]:
    """Reads all entries except weights and optimizers; raises ValueError if the checkpoint folder is incomplete."""
    if not (folder / META_FILE).is_file() or not (folder / ".metadata").is_file():
        raise ValueError(
            f"Checkpoint folder {folder} lacks {META_FILE} or .metadata, so it is not a complete checkpoint of several "
            "processes. Use a complete one, or start from exported weights: model.policy=FOLDER."
        )
    rest = load_plain(folder / META_FILE)
    if rest.pop(_SAVE_ID, None) != own_save_id(SafeReader(folder).read_metadata()):
        raise DamagedCheckpoint(f"{str(folder / META_FILE)!r} was not saved with .metadata. Use another checkpoint.")
    return rest


def optimizer_state(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the state keyed by parameter name. Parameters that never had a gradient have only group settings."""
    with _without_empty_groups(optimizer) as plain:
        has_stepped = bool(plain.state)
        state = get_optimizer_state_dict(model, plain, options=_FLAT) if plain.param_groups else {}
        if not has_stepped:  # torch has made the state of a first step, and the optimizer would continue from it
            plain.state.clear()
            state = {name: value for name, value in state.items() if not name.startswith("state.")}
    return state


def _state_to_fill(model: torch.nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the state keyed by parameter name; a new optimizer gets the state of a first step for each parameter."""
    optimizer.zero_grad()  # torch makes no state while there are gradients, for example from an earlier fit
    with _without_empty_groups(optimizer) as plain:
        return get_optimizer_state_dict(model, plain, options=_FLAT) if plain.param_groups else {}


def load_optimizer_state(
    model: torch.nn.Module, optimizer: Optimizer, state: dict[str, Any], where: str | Path | None
) -> None:
    """Loads the result of `optimizer_state`; raises ValueError if a different optimizer saved it."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    filled = _state_to_fill(model, optimizer)
    check_optimizer_names(state.keys(), filled.keys(), optimizer, where)
    without_state = {parameter_of(name) for name in filled.keys() - state.keys()}
    with _without_empty_groups(optimizer) as plain:
        if plain.param_groups:
            check_named_optimizer(state, plain, names, where)
            set_optimizer_state_dict(model, plain, optim_state_dict=filled | state, options=_FLAT)
            for parameter in [parameter for parameter in plain.state if names[parameter] in without_state]:
                del plain.state[parameter]


@contextlib.contextmanager
def _without_empty_groups(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yields Lightning's wrapped optimizer without empty groups (of roles on other ranks), which torch rejects."""
    plain: Optimizer = getattr(optimizer, "optimizer", optimizer)
    groups = plain.param_groups
    plain.param_groups = [group for group in groups if group["params"]]
    try:
        yield plain
    finally:
        filled = iter(plain.param_groups)  # loading creates new groups
        plain.param_groups = [next(filled) if group["params"] else group for group in groups]
