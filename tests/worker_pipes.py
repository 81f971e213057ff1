"""A fork of one of xdist's workers lets go of the worker's pipes, whose end tells pytest that the worker died."""

import functools
import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            pipes = plugin.channel.gateway._io
            for number in (pipes.infile.fileno(), pipes.outfile.fileno()):  # a thread may hold the files' own locks
                os.register_at_fork(after_in_child=functools.partial(os.dup2, null, number, inheritable=False))
