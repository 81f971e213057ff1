"""Puts tests/ on the import path, for tiny.py; one thread for each of pytest's workers, which share the cores.

Agents' clients obey `http_proxy`, which would look for the tests' servers on the proxy's machine; within a Slurm
job Lightning would expect the job's tasks.
"""

import asyncio
import gc
import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import forked
import pytest
import torch
import worker_pipes
from fake_sglang.process import FakeServerProcess

gc.disable()  # until all tests are collected: what imports make stays
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of children, as their imports read it
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
for name in [name for name in os.environ if name.startswith("SLURM_")]:
    del os.environ[name]
forked.server.environment = dict(os.environ)
FakeServerProcess.popen = forked.Popen
pytest_configure = worker_pipes.pytest_configure


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _levels_of_loggers() -> Iterator[None]:
    """A benchmark that a test runs in this process makes them quiet, also for `caplog` of later tests."""
    loggers = [logging.getLogger(name) for name in ("lightrl", "lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def _no_thread_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """It would go on in later tests. One that has given its result, or was told to end, has a moment to do so."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + (2 if request.path.parent.name == "trainer" else 10)  # a trainer waits for its own
    while left := [one.name for one in {*threading.enumerate()} - before if one.name.startswith(("lightrl", "reward"))]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the code under test starts are forked too; see forked.py."""
    monkeypatch.setattr(subprocess, "Popen", forked.Popen)


@pytest.fixture(autouse=True, scope="module")
def _no_variable_is_left() -> Iterator[None]:
    """Nor another value: else the children of later tests would not be forked, for it may matter at an import."""
    before = dict(os.environ)
    yield
    for name in {*os.environ, *before} - {"PYTEST_CURRENT_TEST"}:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]


@pytest.fixture(autouse=True, scope="module")
def _no_task_is_left_in_a_closed_loop() -> Iterator[None]:
    """Such a task would raise in its `finally` wherever it is collected, and fail another test."""
    yield
    tasks: Any = getattr(asyncio.tasks, "_all_tasks", None) or getattr(asyncio.tasks, "_scheduled_tasks", ())
    assert [task for task in list(tasks) if not task.done() and task.get_loop().is_closed()] == []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Skipped tests with a real SGLang, or its gateway, are easily overlooked among dots."""
    texts = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    found = [text[text.index("SGLang for this") :].rstrip("')\"") for text in texts if "SGLang for this" in text]
    if found:
        terminalreporter.write_line(f"!! {len(found)} tests with a real server were SKIPPED. {found[0]}", yellow=True)
    if num := sum("smg is not installed" in text for text in texts):
        terminalreporter.write_line(
            f"!! {num} tests with SGLang's gateway were SKIPPED: pip install -c constraints.txt smg", yellow=True
        )
