"""Why a file could not be written; every writer reports a full disk in its own way."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

# In errors without an errno: of safetensors, and of torch's zip writer, which finds too few bytes written.
_FULL_DISK_TEXTS = ("No space left on device", "Disk quota exceeded", "inline_container.cc", "os error 28")


def check_local(**places: object) -> None:
    """Raises ValueError for a place, by the name of its setting, that is a URL: it would become a local folder."""
    for name, place in places.items():
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(place)):
            raise ValueError(
                f"{name}={str(place)!r} must be a folder of this machine or a mounted one, not a URL. Copy it there "
                "after the run."
            )


def is_disk_full(error: BaseException) -> bool:
    """Whether writing failed because the disk is full or a quota is used up."""
    if (system_error := next(_of_system(error), None)) is not None:
        return system_error.errno in (errno.ENOSPC, errno.EDQUOT)
    return any(text in str(link) for link in _links(error) for text in _FULL_DISK_TEXTS)


def write_problem(error: BaseException, place: Path, num_bytes: int | None = None) -> str:
    """Why `place` could not be written, as the end of a sentence.

    Args:
        error: what was raised; may be torch's collection of the errors of several processes.
        place: the file or folder; delete its half-written part first, so that this counts as free.
        num_bytes: the size to write; None if unknown.
    """
    if is_disk_full(error):
        folder = nearest_folder(place.absolute().parent)
        free = f"{_size(shutil.disk_usage(folder).free)} free"
        needed = "" if num_bytes is None else f", {_size(num_bytes)} to write"
        return f"the disk of {str(folder)!r} is full ({free}{needed})"
    if (system_error := next(_of_system(error), None)) is not None:
        return str(system_error.strerror)
    *_, last = _links(error)
    return (str(last) or type(last).__name__).splitlines()[0]


def nearest_folder(place: Path) -> Path:
    """The folder itself, or the nearest of its parents that exists."""
    return next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.is_dir())


def cause_to_show(error: BaseException) -> BaseException | None:
    """The cause for `raise … from`: the system's error, if any; None for a full disk, which needs no details."""
    return None if is_disk_full(error) else next(_of_system(error), error)


def _of_system(error: BaseException) -> Iterator[OSError]:
    return (link for link in _links(error) if isinstance(link, OSError) and link.strerror)


def _links(error: BaseException) -> Iterator[BaseException]:
    """The error and those that led to it; for other processes, only the first one's."""
    link: BaseException | None = error
    while link is not None:
        yield link
        of_ranks = getattr(link, "failures", None)  # torch.distributed.checkpoint: by rank, with the traceback
        link = next(iter(of_ranks.values()))[0] if of_ranks else link.__cause__ or link.__context__


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**10:,.0f} KiB" if num_bytes < 2**20 else f"{num_bytes / 2**20:,.0f} MiB"
