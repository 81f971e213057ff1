"""ShareWriter: one rank's files of a weight version that several ranks of the trainer write together.

    root/.share-3/model-0003-00001.safetensors …          rank 3 writes here
    root/version-00000012/model-0003-00001.safetensors    rank 0 moves it here, once every rank is done

Only rank 0 makes a version exist, with an index of all files: a rank that dies meanwhile leaves the version absent.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lightrl.checks.disk_errors import is_disk_full
from lightrl.errors import WeightSyncError
from lightrl.weights.bucket import Bucket, WrittenFile
from lightrl.weights.disk import write_safetensors
from lightrl.weights.server_form import ServerForm


@dataclass(frozen=True)
class SharedFolder:
    """The facts that a rank needs to write its share; plain JSON by `vars`."""

    root: str
    dtype: str | None  # torch's name, for floating-point parameters; None keeps the trainer's
    skip_names: list[str]
    timeout_s: float  # until every rank has written its share

    @property
    def form(self) -> ServerForm:
        return ServerForm(None if self.dtype is None else getattr(torch, self.dtype), self.skip_names)


class ShareWriter:
    """Writes each bucket of this rank as a file. A failure is kept for `record`: the other ranks need the rest.

    Removes what an earlier version left of this rank.

    Args:
        folder: of all ranks.
        rank: of this process.
    """

    def __init__(self, folder: SharedFolder, rank: int) -> None:
        self.problem: str | None = None
        self.files: list[WrittenFile] = []
        self._form = folder.form
        self._rank = rank
        self._place = share_place(folder.root, rank)
        shutil.rmtree(self._place, ignore_errors=True)

    def add(self, bucket: Bucket) -> None:
        layout = self._form.layout(bucket)
        if self.problem is not None or not layout:
            return
        path = self._place / f"model-{self._rank:04d}-{len(self.files) + 1:05d}.safetensors"
        for name, tensor in bucket.tensors.items():
            if not torch.isfinite(tensor).all():
                self.problem = f"Parameter {name!r} has values that are not finite."
                return
        try:
            self._place.mkdir(exist_ok=True)
            with path.open("wb", buffering=0) as file:
                num_bytes = write_safetensors(file, layout, self._form.tensors(bucket))
        except OSError as error:
            why = "the disk is full" if is_disk_full(error) else str(error)
            self.problem = f"Rank {self._rank} could not write its share to {str(self._place)!r}: {why}."
            return
        shapes = {name: list(shape) for name, _, shape in layout}
        self.files.append(WrittenFile(str(path), num_bytes, shapes))

    def record(self) -> dict[str, Any]:
        """Encodes the share for rank 0 as plain JSON."""
        return {"problem": self.problem, "files": [asdict(file) for file in self.files]}


def files_of(records: list[dict[str, Any]]) -> tuple[WrittenFile, ...]:
    """The files of all ranks.

    Raises:
        WeightSyncError: if a rank could not write; it names the rank.
    """
    problems = [record["problem"] for record in records if record["problem"] is not None]
    if problems:
        raise WeightSyncError(f"{' '.join(problems)} The servers keep the old weights.")
    return tuple(WrittenFile(**file) for record in records for file in record["files"])


def read_back(files: Iterable[WrittenFile]) -> Iterator[Bucket]:
    """The files' tensors, file by file, as they are in the folder now: for digests of what servers will load."""
    for file in files:
        yield Bucket(load_file(file.path))


def share_place(root: str | Path, rank: int) -> Path:
    return Path(root) / f".share-{rank}"
