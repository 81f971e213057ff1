"""Saves and loads a single process's checkpoints: files that are complete or absent even if the writer dies."""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from torch.utils._pytree import tree_leaves

from lightrl.checks.files import cause_to_show, publish
from lightrl.concurrency.owner import own_mark, remove_left_behind
from lightrl.strategies.checkpoint.atomic_write import (
    BackgroundWrites,
    Progress,
    TrackedFile,
    logged_behind_failure,
    write_error,
)
from lightrl.strategies.checkpoint.fit import check_optimizers, check_weights, parameter_of, refusal
from lightrl.strategies.checkpoint.folder import load_optimizer_state, read_folder
from lightrl.strategies.checkpoint.safe_reader import check_records, naming_file, of_run


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes and syncs a file next to the target, then renames it: even `kill -9` leaves the old or the new file.

    Lightning's writer uses the system's temporary folder; a move to another file system is a copy, which is not atomic.

    Args:
        save_async: continue training while a checkpoint is written from a copy in memory. If the write fails, the next
            save or the end of the run raises the error.
    """

    def __init__(self, *, save_async: bool = False) -> None:
        super().__init__()
        self.save_async = save_async
        self._writes = BackgroundWrites()

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., object] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Loads as Lightning does, but with `weights_only=True` even for URLs, so that loading runs no code.

        A folder saved by several processes is read whole, with optimizer states keyed by parameter name.
        """
        self._writes.wait()
        remove_left_behind(Path(path).parent, "*.part")
        if Path(path).is_dir():
            return read_folder(Path(path))
        files = get_filesystem(path)
        with naming_file(path):
            if "http" not in files.protocol and files.isfile(str(path)):
                with files.open(str(path), "rb") as file:
                    check_records(file)
            checkpoint = super().load_checkpoint(path, map_location, weights_only is None or weights_only)
        return of_run(checkpoint, path)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes `checkpoint`, or raises OSError and keeps the previous file. Removes files left by dead writers."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        if not self.save_async:
            write = functools.partial(torch.save, checkpoint)
            num_bytes = sum(leaf.nbytes for leaf in tree_leaves(checkpoint) if isinstance(leaf, torch.Tensor))
            self._writes.run(target, functools.partial(_write, target, write, num_bytes))
            return
        copy = io.BytesIO()
        torch.save(checkpoint, copy)
        content = copy.getbuffer()
        self._writes.add(target, functools.partial(_write, target, lambda file: file.write(content), len(content)))

    def remove_checkpoint(self, path: str | Path) -> None:
        if "://" in str(path):
            super().remove_checkpoint(path)
        else:
            self._writes.remove(path)

    def teardown(self) -> None:
        with logged_behind_failure():
            self._writes.wait()


def _write(target: Path, write: Callable[[IO[bytes]], object], num_bytes: int, progress: Progress) -> None:
    """Writes a file that is complete or absent, and removes files that dead writers left next to it."""
    part = target.with_name(f"{target.name}.{own_mark()}.part")
    with progress.at_disk():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with io.BufferedWriter(TrackedFile(part, progress), 2**20) as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            publish(part, target)
        except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
            _discard(part)  # first, so that the part's space counts as free
            raise write_error(error, target, "write permission", num_bytes) from cause_to_show(error)
        finally:
            _discard(part)
        remove_left_behind(target.parent, "*.part")


def _discard(part: Path) -> None:
    with contextlib.suppress(OSError):  # for example on a read-only disk, where the write has also failed
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def explained_mismatch(module: LightningModule, checkpoint: dict[str, Any]) -> Iterator[None]:
    """Inside the context, replaces an error from loading weights with one that names the differences."""
    try:
        yield
    except RuntimeError as error:
        saved, own = (
            {name: value.shape for name, value in tensors.items() if isinstance(value, torch.Tensor)}
            for tensors in (checkpoint["state_dict"], module.state_dict())
        )
        try:
            check_weights(saved, own, module.trainer.ckpt_path)
        except ValueError as mismatch:
            raise mismatch from None  # torch's error has a line for each weight
        raise error


def load_optimizers(
    strategy: Strategy, by_position: Callable[[dict[str, Any]], None], checkpoint: dict[str, Any]
) -> None:
    """Loads optimizer states in one process: by position, using Lightning's `by_position`, or by name."""
    module = strategy.lightning_module
    where = None if module is None else module.trainer.ckpt_path
    states, optimizers = checkpoint["optimizer_states"], strategy.optimizers
    if all("param_groups" in state for state in states):
        check_optimizers(states, optimizers, where)
        by_position(checkpoint)
        return
    assert strategy.model is not None
    if len(states) != len(optimizers):
        raise ValueError(refusal(f"it has {len(states)} optimizers, but this run has {len(optimizers)}", where))
    # The two ends of a pipeline save a shared weight under both of its names.
    names = {name for name, _ in strategy.model.named_parameters()}
    for optimizer, state in zip(optimizers, states, strict=True):
        own = {key: value for key, value in state.items() if parameter_of(key) in names}
        load_optimizer_state(strategy.model, optimizer, own, where)
