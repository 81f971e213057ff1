"""Checkpoints that are whole or absent: a reader never meets half of one, whenever the writer dies.

One process writes a file. Several write a folder by the parameters' global names (torch.distributed.checkpoint), which
any number of processes and any strategy reads; `meta.pt` in it holds all but weights and optimizers.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import shutil
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.utils._pytree import tree_leaves

from lightrl.checks.disk_errors import cause_to_show, write_problem
from lightrl.strategies.checkpoint_fit import check_named_optimizer, check_optimizers, parameter_of, refusal

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
    from torch.distributed.checkpoint.planner import ReadItem

META_FILE = "meta.pt"
# Optimizer states by parameter name: ranks may hold different parameters, so lists of them would not fit together.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class BackgroundWrites:
    """Writes that go on while training does, one after the other in one thread; their errors surface at the next call.

    At most two wait, so that no more than two copies of the state are in memory.
    """

    def __init__(self) -> None:
        self._pending: deque[Future[None]] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._has_failed = False

    def add(self, write: Callable[[], None]) -> None:
        """Starts `write` when those before it have ended; waits while two are under way. Raises an earlier error."""
        while len(self._pending) > 1 or (self._pending and self._pending[0].done()):
            self._pending.popleft().result()
        self._submit(write)

    def remove(self, path: str | Path) -> None:
        """Removes a checkpoint, but not before what was to be written is: until then it may be the last whole one."""

        def remove() -> None:
            if not self._has_failed:
                remove_checkpoint(Path(path))

        if self._pending:
            self._submit(remove)
        else:
            remove()

    def wait(self) -> None:
        """Until all is written; raises the first error."""
        try:
            while self._pending:
                self._pending.popleft().result()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None

    def _submit(self, task: Callable[[], None]) -> None:
        def run() -> None:
            try:
                task()
            except BaseException:
                self._has_failed = True
                raise

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending.append(self._thread.submit(run))


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, to disk, then renames: after `kill -9` the name leads to the old file or the new one.

    The stock writer goes through the system's temporary folder, from where a move to another file system is a copy.

    Args:
        save_async: training goes on while a checkpoint is written, from a copy of it in memory. An error is raised by
            the next save or at the end of the run.
    """

    def __init__(self, *, save_async: bool = False) -> None:
        super().__init__()
        self.save_async = save_async
        self._writes = BackgroundWrites()

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """As Lightning's, but a URL is read with `weights_only=True` too: a checkpoint runs no code.

        A folder that several processes have saved is read whole, with optimizer states by parameter name.
        """
        self._writes.wait()
        if Path(path).is_dir():
            return read_folder(Path(path))
        return super().load_checkpoint(path, map_location, True if weights_only is None else weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes `checkpoint`; what dead writers of the same name left behind is cleared away.

        Raises:
            OSError: if it cannot be written; the file that was there before stays as it was.
        """
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        if not self.save_async:
            self._write(target, lambda file: torch.save(checkpoint, file), num_tensor_bytes(checkpoint))
            return
        copy = io.BytesIO()
        torch.save(checkpoint, copy)
        content = copy.getbuffer()
        self._writes.add(lambda: self._write(target, lambda file: file.write(content), len(content)))

    def remove_checkpoint(self, path: str | Path) -> None:
        if "://" in str(path):
            super().remove_checkpoint(path)
        else:
            self._writes.remove(path)

    def teardown(self) -> None:
        self._writes.wait()

    def _write(self, target: Path, write: Callable[[Any], Any], num_bytes: int) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            publish(part, target)
        except (OSError, RuntimeError) as error:  # torch's writer makes a RuntimeError of a full disk
            part.unlink(missing_ok=True)
            raise write_error(error, target, "the right to write", num_bytes) from cause_to_show(error)
        finally:
            part.unlink(missing_ok=True)
        for left in target.parent.glob(f"{target.name}.*.part"):
            if not _is_alive(left.name.split(".")[-2]):
                left.unlink(missing_ok=True)


def write_error(error: BaseException, place: Path, asked: str, num_bytes: int | None = None) -> OSError:
    """What to raise where a checkpoint could not be written to its place.

    Args:
        error: why.
        place: of the checkpoint.
        asked: what is expected of the disk beside room.
        num_bytes: of the checkpoint, if they are known.
    """
    return OSError(
        f"Checkpoint {place} could not be written: {write_problem(error, place, num_bytes)}. Expected a disk with room "
        f"and {asked}. Free some, or set another default_root_dir; one that was there before is still whole."
    )


def num_tensor_bytes(tree: Any) -> int:
    """Of all tensors in nested containers."""
    return sum(leaf.nbytes for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def publish(part: Path, place: Path) -> None:
    """Gives a complete file or folder its name, in one step: what has the name is whole, before and after."""
    if place.is_dir() and not place.is_symlink():  # a rename cannot replace a folder that has something in it
        if not _swap(part, place):
            # Two steps then; killed between them, the old one is beside its place.
            old = place.with_name(f"{place.name}.replaced")
            remove_checkpoint(old)
            place.rename(old)
            part.rename(place)
            remove_checkpoint(old)
            return
        remove_checkpoint(part)
    elif part.is_dir() and (place.is_symlink() or place.exists()) and _swap(part, place):
        remove_checkpoint(part)
    else:
        if part.is_dir():
            place.unlink(missing_ok=True)
        part.replace(place)


def remove_checkpoint(path: Path) -> None:
    """A file, a folder or a link; nothing if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read_folder(folder: Path) -> dict[str, Any]:
    """A sharded checkpoint in this one process, however many saved it; optimizer states are by parameter name.

    Raises:
        ValueError: if it is not whole.
    """
    check_folder(folder)
    checkpoint: dict[str, Any] = torch.load(folder / META_FILE, map_location="cpu", weights_only=True)
    checkpoint["state_dict"] = read_tensors(folder, "state_dict.")
    optimizers: list[dict[str, Any]] = []
    while found := read_tensors(folder, f"optimizer_{len(optimizers)}.", with_numbers=True):
        optimizers.append(found)
    checkpoint["optimizer_states"] = optimizers
    return checkpoint


def read_tensors(folder: Path, prefix: str, *, with_numbers: bool = False) -> dict[str, Any]:
    """The whole tensors whose names begin with `prefix`, by the rest of their names, whoever saved which part.

    Args:
        folder: of a sharded checkpoint.
        with_numbers: what is no tensor as well.
    """
    reader = FileSystemReader(folder)
    found: dict[str, Any] = {}
    for name, item in reader.read_metadata().state_dict_metadata.items():
        if not name.startswith(prefix):
            continue
        if isinstance(item, TensorStorageMetadata):
            found[name] = torch.empty(item.size, dtype=item.properties.dtype)
        elif with_numbers:
            found[name] = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # on purpose
        if found:
            load(found, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=True)
    return {name.removeprefix(prefix): value for name, value in found.items()}


def check_folder(folder: Path) -> None:
    """Raises ValueError unless it is a whole sharded checkpoint."""
    if not (folder / META_FILE).is_file() or not (folder / ".metadata").is_file():
        raise ValueError(
            f"Checkpoint {folder} is no folder with {META_FILE} and .metadata, expected a whole one that several "
            "processes saved. Give such a folder, or start from exported weights: model.policy=FOLDER."
        )


class SafeLoadPlanner(DefaultLoadPlanner):
    """Reads plain data only: a checkpoint runs no code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def load_optimizers(
    strategy: Strategy, by_position: Callable[[dict[str, Any]], None], checkpoint: dict[str, Any]
) -> None:
    """Gives optimizers of one process their state, by position as Lightning saves it, or by parameter name."""
    states, where = checkpoint["optimizer_states"], _path_of(strategy)
    if all("param_groups" in state for state in states):
        check_optimizers(states, strategy.optimizers, where)
        by_position(checkpoint)
        return
    assert strategy.model is not None
    if len(states) != len(strategy.optimizers):
        raise ValueError(refusal(f"it has {len(states)} optimizers, this run {len(strategy.optimizers)}", where))
    # The two ends of a pipeline save a shared weight under both of its names.
    known = {name for name, _ in strategy.model.named_parameters()}
    for optimizer, state in zip(strategy.optimizers, states, strict=True):
        own = {key: value for key, value in state.items() if parameter_of(key) in known}
        load_optimizer_state(strategy.model, optimizer, own, where)


def optimizer_state(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """By parameter name; nothing on a rank on which the optimizer has no parameters."""
    with _without_empty_groups(optimizer) as plain:
        return get_optimizer_state_dict(model, plain, options=FLAT) if plain.param_groups else {}


def load_optimizer_state(
    model: torch.nn.Module, optimizer: Any, state: dict[str, Any], where: str | Path | None
) -> None:
    """The inverse of `optimizer_state`.

    Raises:
        ValueError: if it is that of another optimizer; it names the checkpoint, which is at `where`.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    with _without_empty_groups(optimizer) as plain:
        if plain.param_groups:
            check_named_optimizer(state, plain, names, where)
            set_optimizer_state_dict(model, plain, optim_state_dict=state, options=FLAT)


@contextlib.contextmanager
def _without_empty_groups(optimizer: Any) -> Iterator[Any]:
    """Torch's optimizer behind Lightning's, inside without the groups of roles on other ranks: torch fails at them."""
    plain = getattr(optimizer, "_optimizer", optimizer)
    groups = plain.param_groups
    plain.param_groups = [group for group in groups if group["params"]]
    try:
        yield plain
    finally:
        filled = iter(plain.param_groups)  # loading makes new ones
        plain.param_groups = [next(filled) if group["params"] else group for group in groups]


def _path_of(strategy: Strategy) -> str | None:
    """Of the checkpoint that is being loaded."""
    module = strategy.lightning_module
    path = None if module is None else module.trainer.ckpt_path
    return None if path is None else str(path)


def _swap(left: Path, right: Path) -> bool:
    """Exchanges two names in one step; False where the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    with contextlib.suppress(OSError, AttributeError):
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        return bool(rename(here, os.fsencode(left), here, os.fsencode(right), exchange) == 0)
    return False


def _is_alive(process: str) -> bool:
    if not process.isdigit():
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
