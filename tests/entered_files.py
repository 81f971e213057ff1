"""Lists the files of lightrl that the processes of a run enter while a flag is up, in order of first entry.

Entered is a file of which a function, method or coroutine runs; what only is imported is not.
"""

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

CHECK_S = 0.001  # between two looks at the flag


class Watcher:
    """Writes `<time in ns> <file>` to `<process id>.entered` in a folder while it has a file named `flag`.

    Args:
        folder: of the flag and the records.
        package: whose files count.

    `is_up` may also be set from inside the process, so that nothing is missed.
    """

    def __init__(self, folder: Path, package: Path) -> None:
        self.flag = folder / "flag"
        self._record = folder / f"{os.getpid()}.entered"
        self._package = f"{package}{os.sep}"
        self._seen: set[str] = set()
        self.is_up = False
        self._next_check_s = 0.0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        if (now_s := time.monotonic()) > self._next_check_s:
            self._next_check_s = now_s + CHECK_S
            self.is_up = self.flag.exists()
        name = frame.f_code.co_filename
        if self.is_up and name not in self._seen and name.startswith(self._package):
            if frame.f_code.co_name == "<module>":
                return
            self._seen.add(name)
            with self._record.open("a") as file:
                file.write(f"{time.time_ns()} {name.removeprefix(self._package)}\n")


def watch() -> None:
    """Watches this process from now on, all of its later threads too."""
    watcher = Watcher(Path(os.environ["ENTERED_FOLDER"]), Path(os.environ["ENTERED_PACKAGE"]))
    threading.setprofile(watcher)
    sys.setprofile(watcher)


def entered(folder: Path) -> list[str]:
    """The files that all processes together have entered, in order of first entry."""
    first: dict[str, int] = {}
    for record in folder.glob("*.entered"):
        for line in record.read_text().splitlines():
            moment, name = line.split(" ", 1)
            first[name] = min(int(moment), first.get(name, int(moment)))
    return sorted(first, key=first.__getitem__)
