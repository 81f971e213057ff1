"""Checks whether all ranks share a folder, since hosts may have different folders under the same path.

Rank 0 creates a marker file there. The other ranks wait for it and create their own, which rank 0 must see.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from lightrl.checks.files import nearest_folder
from lightrl.strategies.ranks.processes import Ranks, mark_as_on_all_ranks

VISIBLE_WITHIN_S = 10.0  # time until a new file on a network file system is visible on other hosts
_LOOK_S = 0.1
_ARRIVE_WITHIN_S = 300.0  # time for all ranks to answer rank 0


def ranks_without(folder: Path, ranks: Ranks) -> list[tuple[int, str]]:
    """Returns the ranks, and their hosts, that do not share rank 0's folder or cannot write there. Collective."""
    mark = f".seen-by-all-{secrets.token_hex(8)}"
    if ranks.is_main:
        (folder / mark).touch()
    root, mark = ranks.broadcast_json([str(folder), mark])
    has_marked = leave_mark(Path(root), ranks.rank, mark)
    answers = ranks.gather_json([socket.gethostname(), has_marked], timeout_s=_ARRIVE_WITHIN_S)
    missing: list[tuple[int, str]] = []
    if ranks.is_main:
        marks = {rank: folder / f"{mark}-{rank}" for rank, (_, has_marked) in enumerate(answers) if has_marked}
        present = _appeared(marks.values())
        missing = [(rank, host) for rank, (host, _) in enumerate(answers) if marks.get(rank) not in present]
        for path in (folder / mark, *marks.values()):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return [(rank, host) for rank, host in ranks.broadcast_json(missing)]


def check_all_see(folders: Iterable[Path], ranks: Ranks) -> None:
    """Raises ValueError on all ranks if a rank does not share a folder. Folders need not exist yet. Collective."""
    for folder in folders:
        if missing := ranks_without(nearest_folder(folder), ranks):
            names = ", ".join(f"rank {rank} on {host}" for rank, host in missing)
            raise mark_as_on_all_ranks(
                ValueError(
                    f"Checkpoints go to {folder}, but {names} cannot see rank 0's files there, or cannot write, so a "
                    "checkpoint would lack the weights of those ranks. Set trainer.default_root_dir, or "
                    "ModelCheckpoint's dirpath, to a folder that all hosts share under the same path."
                )
            )


def leave_mark(folder: Path, rank: int, mark: str) -> bool:
    """Creates this rank's marker file; returns False if rank 0's file is not visible or the folder is not writable."""
    if _appeared([folder / mark]):
        with contextlib.suppress(OSError):
            (folder / f"{mark}-{rank}").touch()
            return True
    return False


def _appeared(paths: Collection[Path]) -> list[Path]:
    """Waits until all of these files exist, at most `VISIBLE_WITHIN_S`; returns those that exist."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while True:
        present = [path for path in paths if path.exists()]
        if len(present) == len(paths) or time.monotonic() > deadline:
            return present
        time.sleep(_LOOK_S)
