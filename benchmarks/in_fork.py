"""A function in a fork of this process, which has imported everything: a run without the seconds of its imports."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from forked import end_with_parent


def in_fork(play: Callable[[], None], output: Path, variables: Mapping[str, object] | None = None) -> int:
    """The process id of a child that calls `play` and ends with exit code 0, or 1 if that raised.

    The child ends with this process, which must have one thread only.

    Args:
        output: a file, to which all that the child prints is appended.
        variables: of the child's environment.
    """
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    end_with_parent()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 0
    try:
        torch.set_num_threads(1)
        os.environ.update({name: str(value) for name, value in (variables or {}).items()})
        play()
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
