"""Files: why a write failed, atomic publishing, SHA-256 sums, and the file names that `lightrl status` reads."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import errno
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

# How safetensors, and torch's zip writer after a short write, report a full disk without an errno.
_FULL_DISK_TEXTS = ("No space left on device", "Disk quota exceeded", "inline_container.cc", "os error 28")


def check_local(**path_by_setting: object) -> None:
    """Raises ValueError if a setting's path is a URL, which would otherwise become the name of a local folder."""
    for name, path in path_by_setting.items():
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
            fix = "Copy the folder there after the run."
            raise ValueError(f"{name}={str(path)!r} must be a local or mounted folder, not a URL. {fix}")


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed because the disk is full or a quota is used up."""
    if (system_error := next(_of_system(error), None)) is not None:
        return system_error.errno in (errno.ENOSPC, errno.EDQUOT)
    return any(text in str(link) for link in _links(error) for text in _FULL_DISK_TEXTS)


def write_problem(error: BaseException, place: Path, num_bytes: int | None = None) -> str:
    """Returns why `place` could not be written, as the end of a sentence.

    Args:
        error: the exception; may be torch's, which collects the errors from several processes.
        place: the file or folder. Delete a partial write first, so that its space counts as free.
        num_bytes: the size to write; None if unknown.
    """
    if is_disk_full(error):
        folder = nearest_folder(place.absolute().parent)
        free = f"{_size(shutil.disk_usage(folder).free)} free"
        needed = "" if num_bytes is None else f", {_size(num_bytes)} to write"
        return f"the disk that holds {str(folder)!r} is full ({free}{needed})"
    if (system_error := next(_of_system(error), None)) is not None:
        return str(system_error.strerror)
    *_, last = _links(error)
    return (str(last) or type(last).__name__).splitlines()[0]


def nearest_files(path: Path, *suffixes: str) -> str:
    """Returns a hint for a missing file: the folder that is missing, similar names, or files with these suffixes."""
    missing = path
    while not missing.parent.is_dir():
        missing = missing.parent
    folder, is_file = missing.parent.absolute(), missing == path
    names = sorted(item.name for item in folder.iterdir() if item.is_file() == is_file)
    similar = difflib.get_close_matches(missing.name, names, n=3, cutoff=0.6)
    if is_file and not (similar := similar or [name for name in names if name.endswith(suffixes)][:5]):
        return f"{folder} has no {' or '.join(suffixes)} file."
    reason = "" if is_file else f"There is no folder {missing}. "
    return f"{reason}Nearest in {folder}: {', '.join(similar)}." if similar else reason.strip()


def nearest_folder(place: Path) -> Path:
    """Returns the folder, or its nearest parent that exists."""
    return next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.is_dir())


def cause_to_show(error: BaseException) -> BaseException | None:
    """Returns the cause for `raise … from`: the underlying OSError or else the error itself; None for a full disk."""
    return None if is_disk_full(error) else next(_of_system(error), error)


def _of_system(error: BaseException) -> Iterator[OSError]:
    return (link for link in _links(error) if isinstance(link, OSError) and link.strerror)


def _links(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and its causes; if several processes failed, follows only the first failure."""
    link: BaseException | None = error
    while link is not None:
        yield link
        failures = getattr(link, "failures", None)  # torch.distributed.checkpoint: rank → (error, traceback)
        link = next(iter(failures.values()))[0] if failures else link.__cause__ or link.__context__


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**10:,.0f} KiB" if num_bytes < 2**20 else f"{num_bytes / 2**20:,.0f} MiB"


SUMS_FILE = "sha256sums.txt"


def publish(part: Path, place: Path) -> None:
    """Atomically renames a complete file or folder to `place` and syncs the names; writers must sync the contents."""
    if part.is_dir():
        _sync_names(part)
    _rename(part, place)
    _sync_names(place.parent)


def restore(place: Path) -> None:
    """Renames the old folder back to `place` if `publish` was killed midway on a system without atomic exchange."""
    if not place.exists() and _replaced(place).exists():
        _replaced(place).rename(place)


def sync_files(folder: Path) -> None:
    """Waits until the contents of all files in a folder have been written to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _replaced(place: Path) -> Path:
    return place.with_name(f"{place.name}.replaced")


def _sync_names(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot sync folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _rename(part: Path, place: Path) -> None:
    """Renames a file or folder to `place`, replacing whatever is there; atomically if the system supports it."""
    is_link = place.is_symlink()
    if not part.is_dir() and (is_link or not place.is_dir()):
        part.replace(place)
    elif not is_link and not place.exists():
        part.rename(place)
    elif _swap(part, place):
        remove_path(part)
    elif is_link or not place.is_dir():
        place.unlink()
        part.rename(place)
    else:
        # If the process is killed between these two renames, `restore` moves the old folder back.
        old = _replaced(place)
        remove_path(old)
        place.rename(old)
        part.rename(place)
        remove_path(old)


def remove_path(path: Path) -> None:
    """Removes a file, a folder or a link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _swap(left: Path, right: Path) -> bool:
    """Atomically exchanges two paths; returns False if the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    with contextlib.suppress(OSError, AttributeError):
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        return bool(rename(here, os.fsencode(left), here, os.fsencode(right), exchange) == 0)
    return False


def write_sums(folder: Path, names: Iterable[str] | None = None) -> None:
    """Writes the checksums of the named files in a folder, or of all its files, to SUMS_FILE."""
    names = sorted(path.name for path in folder.iterdir()) if names is None else names
    with (folder / SUMS_FILE).open("w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(f"{_sum_of(folder / name)}  {name}\n" for name in names)
        file.flush()
        os.fsync(file.fileno())


def check_sums(folder: Path, fix: str, *, needed: Iterable[str] = ()) -> None:
    """Raises ValueError, ending with `fix`, if a file is missing or does not match its checksum.

    Files in `needed` must have a checksum; if any file has one, all weight files must.
    """
    sums = folder / SUMS_FILE
    lines = sums.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if sums.is_file() else []
    sum_by_name = {name: expected_sum for expected_sum, _, name in (line.partition("  ") for line in lines)}
    for name in sorted(set(needed) - sum_by_name.keys()):
        raise ValueError(f"{str(sums)!r} is missing or does not list {name}. {fix}")
    for file in sorted(folder.glob("*.safetensors")) if lines else []:
        if file.name not in sum_by_name:
            raise ValueError(f"{str(file)!r} is not in {SUMS_FILE}: they come from two saves. Delete the older one.")
    for name, expected_sum in sum_by_name.items():
        file = folder / name
        if not file.is_file() or _sum_of(file) != expected_sum:
            problem = "has changed: its SHA-256 differs from" if file.is_file() else "is missing, but is listed in"
            raise ValueError(f"{str(file)!r} {problem} {SUMS_FILE}. {fix}")


def _sum_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


STATUS_FILE = "status.json"  # written by a run
STATE_FILE = "launch.json"  # written by a launch


def host_names(nodes: int) -> list[str]:
    """Returns the launch scripts' placeholders for hosts that the scheduler has not assigned yet."""
    return [f"${{hosts[{number}]}}" for number in range(nodes)]


def with_hosts(text: str, hosts: Sequence[str]) -> str:
    """Replaces the placeholders of `host_names` in a text with hosts, or with `?` for a host that is not assigned."""
    host_by_name = dict(zip(host_names(len(hosts)), hosts, strict=True))
    return re.sub(r"\$\{hosts\[\d+\]\}", lambda name: host_by_name.get(name[0], "?"), text)
