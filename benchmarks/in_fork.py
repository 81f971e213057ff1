"""Runs a function in a fork of this process, which has already imported everything, to save the time of imports."""

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
    """Returns the process id of a child that calls `play` and exits with code 0, or 1 if that raised.

    The child ends with this process, which must have only one thread.

    Args:
        output: a file to which the child's output is appended.
        variables: the child's environment variables.
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
