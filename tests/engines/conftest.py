"""Fake servers and engines on them (sync_cases.py), and the one real SGLang server (real_sglang.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from real_sglang import shared_server, stop_servers
from sync_cases import EngineOn, Start, engines_on_servers, started_servers

start = pytest.fixture(started_servers, name="start")


@pytest.fixture(scope="session")
def _ends_real_servers() -> Iterator[None]:
    yield
    stop_servers()


@pytest.fixture
def real_server(
    tmp_path_factory: pytest.TempPathFactory, _ends_real_servers: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """`url` and `token` of a real SGLang server with a tiny Qwen3, this test's alone while it runs."""
    folder = tmp_path_factory.getbasetemp()
    if folder.name.startswith("popen-"):  # of one of pytest's workers; the one above is of the run
        folder = folder.parent
    with shared_server(folder) as found:
        monkeypatch.setenv("LIGHTRL_SERVER_TOKEN", found["token"])
        yield found


@pytest.fixture
def engine_on(start: Start) -> Iterator[EngineOn]:
    """Its engines are closed before the servers of `start` end."""
    yield from engines_on_servers()
