"""Checkpoints that are whole or absent: a reader never meets half of one, whenever the writer dies."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target, to disk, then renames: after `kill -9` the name leads to the old file or the new one.

    The stock writer goes through the system's temporary folder, from where a move to another file system is a copy.
    """

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """As Lightning's, but a URL is read with `weights_only=True` too: a checkpoint runs no code."""
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
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except (OSError, RuntimeError) as error:  # torch's writer makes a RuntimeError of a full disk
            raise OSError(
                f"Checkpoint {target} could not be written ({error}), expected a disk with room and the right to "
                "write. Free some, or set another default_root_dir; a file that was there before is still whole."
            ) from error
        finally:
            part.unlink(missing_ok=True)
        for left in target.parent.glob(f"{target.name}.*.part"):
            if not _is_alive(left.name.split(".")[-2]):
                left.unlink(missing_ok=True)


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
