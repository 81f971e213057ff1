"""What kept a file from being written, in words: writers report a full disk each in their own way."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

# How those say it whose errors have no errno: safetensors, and torch's zip writer, which finds too few bytes written.
_FULL_IN_WORDS = ("No space left on device", "Disk quota exceeded", "inline_container.cc", "os error 28")


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk, or a quota that is used up, is why writing failed."""
    if (found := next(_of_system(error), None)) is not None:
        return found.errno in (errno.ENOSPC, errno.EDQUOT)
    return any(words in str(link) for link in _links(error) for words in _FULL_IN_WORDS)


def write_problem(error: BaseException, place: Path, num_bytes: int | None = None) -> str:
    """Why `place` could not be written, as the end of a sentence.

    Args:
        error: what was raised; of several processes, torch's collection of theirs.
        place: the file or folder; half of it should be gone already, so that its room counts as free.
        num_bytes: that were to be written; None if that is not known.
    """
    if is_disk_full(error):
        folder = next(folder for folder in place.absolute().parents if folder.is_dir())
        free = f"{_size(shutil.disk_usage(folder).free)} free"
        needed = "" if num_bytes is None else f", {_size(num_bytes)} to write"
        return f"the disk of {str(folder)!r} is full ({free}{needed})"
    if (found := next(_of_system(error), None)) is not None:
        return str(found.strerror)
    *_, last = _links(error)
    return (str(last) or type(last).__name__).splitlines()[0]


def cause_to_show(error: BaseException) -> BaseException | None:
    """What to `raise … from`: the system's error, if it is one; none for a full disk, of which all is said."""
    return None if is_disk_full(error) else next(_of_system(error), error)


def _of_system(error: BaseException) -> Iterator[OSError]:
    return (link for link in _links(error) if isinstance(link, OSError) and link.strerror)


def _links(error: BaseException) -> Iterator[BaseException]:
    """The error and those that led to it; the first that another process had stands for all of theirs."""
    link: BaseException | None = error
    while link is not None:
        yield link
        of_ranks = getattr(link, "failures", None)  # of torch.distributed.checkpoint: by rank, with the traceback
        link = next(iter(of_ranks.values()))[0] if of_ranks else link.__cause__ or link.__context__


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**10:,.0f} KiB" if num_bytes < 2**20 else f"{num_bytes / 2**20:,.0f} MiB"
