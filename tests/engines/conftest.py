"""Fake servers and engines on them (sync_cases.py), and the one real server of each kind (real_servers.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_servers import shared_server, stop_servers
from sync_cases import EngineOn, Start, engines_on_servers, started_servers

start = pytest.fixture(started_servers, name="start")


@pytest.fixture(scope="session")
def _ends_real_servers() -> Iterator[None]:
    yield
    stop_servers()


@pytest.fixture
def _shared_folder(tmp_path_factory: pytest.TempPathFactory, _ends_real_servers: None) -> Path:
    folder = tmp_path_factory.getbasetemp()
    # One of pytest's workers has a folder of its own; the one above is of the run.
    return folder.parent if folder.name.startswith("popen-") else folder


@pytest.fixture
def real_server(_shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """`url` and `token` of a real SGLang server with a tiny Qwen3, this test's alone while it runs."""
    with shared_server(_shared_folder, "sglang") as found:
        monkeypatch.setenv("LIGHTRL_SERVER_TOKEN", found["token"])
        yield found


@pytest.fixture
def real_vllm(_shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The same of a real vLLM server."""
    with shared_server(_shared_folder, "vllm") as found:
        monkeypatch.setenv("LIGHTRL_SERVER_TOKEN", found["token"])
        yield found


@pytest.fixture
def engine_on(start: Start) -> Iterator[EngineOn]:
    """Its engines are closed before the servers of `start` end."""
    yield from engines_on_servers()
