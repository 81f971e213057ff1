"""Servers that announce themselves in a folder: they join a run, leave it, and are forgotten when they fall silent."""

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_sglang.script import ScriptedModel
from sync_cases import EngineOn, Start
from test_server_faults import DEADLINES
from waits import until

from lightrl.engines.servers import registry
from lightrl.engines.servers.registry import Announcement, Registry, ServerEntry, registry_at
from lightrl.errors import EngineTimeout

NUM_TOKENS = 400
A, B = ServerEntry("http://a:1", "http://a:9"), ServerEntry("http://b:2")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BEAT_S", 0.1)
    monkeypatch.setattr("lightrl.engines.servers.watch.READ_EVERY_S", 0.05)


@pytest.fixture
def announced(tmp_path: Path) -> Iterator[Any]:
    """Starts an announcement in the folder; all end with the test."""
    started: list[Announcement] = []

    def announce(*servers: ServerEntry) -> Announcement:
        started.append(Announcement(tmp_path))
        started[-1].start(servers)
        return started[-1]

    yield announce
    for one in started:
        one.end()


def reader_from_before(folder: Path) -> Registry:
    """One that was there before the servers."""
    reader = Registry(folder)
    assert reader.read() == {}
    return reader


def test_a_registry_knows_the_servers_that_announce_themselves(tmp_path: Path, announced: Any) -> None:
    reader = reader_from_before(tmp_path)
    both = announced(A, B)
    assert reader.read() == {"http://a:1": A, "http://b:2": B}
    both.end()
    assert reader.read() == {}


def write_entry(folder: Path, server: ServerEntry, *, beat: int) -> None:
    """What an announcement writes, at the moments that a test chooses."""
    entry = {"url": server.url, "receiver": server.receiver, "is_leaving": False, "beat": f"start-{beat}"}
    (folder / f"{server.url.partition('//')[2].replace(':', '-')}.json").write_text(json.dumps(entry))


def test_an_entry_from_before_the_run_counts_once_it_changes(tmp_path: Path) -> None:
    for server in (A, B):
        write_entry(tmp_path, server, beat=1)
    reader = reader_from_before(tmp_path)
    write_entry(tmp_path, A, beat=2)
    assert reader.read() == {A.url: A}


def test_a_run_waits_for_as_many_servers_as_its_address_says(
    tmp_path: Path, announced: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reader = registry_at([f"file://{tmp_path}?servers=2"])
    assert reader.num_expected == 2
    assert reader.read() == {}
    announced(A)
    threading.Timer(0.3, announced, [B]).start()
    assert reader.wait_for_servers(60) == [A, B]
    reader.num_expected = 3
    assert reader.wait_for_servers(0.0) == [A, B]  # better than none
    assert "2 of 3 servers announced themselves" in caplog.text


def test_an_entry_without_a_beat_expires_by_the_clock_of_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(registry.time, "monotonic", lambda: now[0])
    reader = reader_from_before(tmp_path)
    write_entry(tmp_path, A, beat=1)
    assert list(reader.read()) == [A.url]
    now[0] += registry.EXPIRE_S - 1
    assert list(reader.read()) == [A.url]
    write_entry(tmp_path, A, beat=2)
    reader.read()
    now[0] += registry.EXPIRE_S - 1
    assert list(reader.read()) == [A.url]
    now[0] += 2
    assert reader.read() == {}


def test_a_torn_entry_is_ignored_until_it_is_whole(tmp_path: Path, announced: Any) -> None:
    reader = reader_from_before(tmp_path)
    (tmp_path / "x-1.json").write_text('{"url": "http://x:1", "is_lea')
    announced(A)
    assert list(reader.read()) == [A.url]


def test_a_server_that_leaves_waits_until_it_is_released(tmp_path: Path, announced: Any) -> None:
    leaving = announced(A)
    assert not leaving.leave(timeout_s=0.3)  # no run has taken note
    reader = reader_from_before(tmp_path)
    leaving = announced(A)
    with ThreadPoolExecutor() as pool:
        is_released = pool.submit(leaving.leave, timeout_s=60)
        while not reader.read()[A.url].is_leaving:
            pass
        reader.release(A.url)
        assert is_released.result()
    assert announced(A).leave(timeout_s=0)  # asks nobody
    assert reader.read() == {}


def test_a_registry_is_the_only_address(tmp_path: Path) -> None:
    assert registry_at(["http://a:1"]) is None
    assert registry_at(["file:///shared/servers"]) == Registry(Path("/shared/servers"))
    for urls in (["file:///a", "http://b:1"], ["file://relative"], ["file:///a?servers=all"], ["file:///a?num=2"]):
        with pytest.raises(ValueError, match="registry"):
            registry_at(urls)


def test_a_run_without_servers_says_how_to_start_some(tmp_path: Path) -> None:
    with pytest.raises(EngineTimeout, match="lightrl serve --register"):
        Registry(tmp_path).wait_for_servers(0.0)


def is_whole(token_ids: list[int]) -> bool:
    """A token is a hash of the seed and of its place: one that is lost or counted twice shows."""
    return token_ids == [ScriptedModel().token([1], 1, place, False) for place in range(1, NUM_TOKENS + 1)]


def test_a_server_that_dies_without_a_word_is_forgotten_and_joins_again(
    tmp_path: Path, announced: Any, monkeypatch: pytest.MonkeyPatch, start: Start, engine_on: EngineOn
) -> None:
    monkeypatch.setattr(registry, "EXPIRE_S", 0.5)
    first, second = start(), start()
    announced(ServerEntry(first.url))
    doomed = announced(ServerEntry(second.url))
    engine = engine_on(urls=[f"file://{tmp_path}"], **DEADLINES)
    doomed.end()
    second.kill()

    async def scenario() -> None:
        await until(lambda: engine.fleet.urls() == [first.url])
        await asyncio.to_thread(second.start)
        announced(ServerEntry(second.url))
        await until(lambda: set(engine.fleet.urls("routable")) == {first.url, second.url})

    asyncio.run(scenario())
