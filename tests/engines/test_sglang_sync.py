"""The load protocol against processes that speak SGLang's interface: who serves which version, whatever fails."""

import asyncio
import threading
import weakref

import pytest
import torch
from sync_cases import asked, config_of, sync, version_of, weights
from transformers import Qwen3Config

from lightrl.concurrency import loop_thread
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.sync import server_sync
from lightrl.engines.servers.sync.report import SyncFailed, SyncReport
from lightrl.engines.servers.sync.server_sync import BucketFeed, ServerSync
from lightrl.engines.servers.sync.transports import BroadcastTransport, DiskTransport, SharedMemoryTransport
from lightrl.engines.sglang.client import SGLangClient
from lightrl.errors import WeightSyncError
from lightrl.weights import Bucket, ServerForm, WeightFolder, bucketed

CONFIG = Qwen3Config()
UPDATE = "/update_weights_from_disk"


@pytest.fixture
def folder(tmp_path):
    return WeightFolder(tmp_path / "weights", CONFIG, form=ServerForm())


@pytest.fixture
def two_servers(start):
    return [start(), start()]


def test_servers_take_the_version_and_continue(folder, two_servers):
    report = sync(two_servers, DiskTransport(folder), weights(3), 3)
    assert report.versions == {server.url: 3 for server in two_servers}
    assert not report.lost
    assert report.num_bytes > sum(tensor.numel() * 4 for tensor in weights(3).values())
    assert set(report.seconds) == {"stage", "pause", "load", "verify", "resume"}
    for server in two_servers:
        assert version_of(server) == "3"
        stats = server.stats()
        assert not stats["is_paused"]
        assert stats["requests"][UPDATE] == 1
        assert "/flush_cache" not in stats["requests"]  # once, with the update


def test_a_disk_that_hangs_pauses_no_server_and_is_named_at_the_deadline(folder, two_servers):
    is_over = threading.Event()

    class Hanging(WeightFolder):
        """As a network folder whose server is gone."""

        def begin(self, weight_version):
            is_over.wait(600)
            return super().begin(weight_version)

    hanging = Hanging(folder.root, CONFIG, form=ServerForm())
    with pytest.raises(SyncFailed, match=r"took longer than engine.timeouts.sync_s=0\.5.*network folder"):
        sync(two_servers, DiskTransport(hanging), weights(1), 1, timeout_s=0.5, previous_version=0)
    is_over.set()
    assert not any("/pause_generation" in server.stats()["requests"] for server in two_servers)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        *[("error", UPDATE), ("die", UPDATE), ("drop", UPDATE), ("garbage", UPDATE), ("error", "/pause_generation")],
        *[("drop", "/model_info"), ("wrong_version", UPDATE), ("lose_update", UPDATE)],
        ("error", "/continue_generation"),
    ],
)
def test_a_server_that_fails_is_lost_and_the_other_continues(folder, two_servers, kind, path):
    transport = DiskTransport(folder)
    sync(two_servers, transport, weights(0), 0)
    broken, sound = two_servers
    broken.fault(kind, path, count=-1)
    report = sync(two_servers, transport, weights(1), 1, previous_version=0)
    assert report.versions == {sound.url: 1}
    assert list(report.lost) == [broken.url]
    assert version_of(sound) == "1"
    assert not sound.stats()["is_paused"]


def test_servers_that_hold_other_bytes_than_most_are_lost(folder, two_servers, start):
    servers = [*two_servers, start()]
    transport = DiskTransport(folder)
    sync(servers, transport, weights(0), 0)
    odd = sync(servers[:1], transport, weights(5), 1)  # the first alone gets other bytes under the next version
    assert odd.versions == {servers[0].url: 1}
    servers[0].fault("lose_update", UPDATE)
    report = sync(servers, transport, weights(1), 1)
    assert list(report.lost) == [servers[0].url]
    assert "checksum" in report.lost[servers[0].url]
    assert len(report.versions) == 2


def test_without_servers_there_is_nothing_to_load_into(folder):
    with pytest.raises(SyncFailed, match="no server"):
        sync([], DiskTransport(folder), weights(0), 0)


def in_a_thread(servers, transport, buckets, **settings) -> SyncReport:
    """`ServerSync.load_from_thread` with an event loop in another thread."""
    home = HomeLoop(lambda: "")
    targets = [Server(SGLangClient(server.url, num_retries=0)) for server in servers]
    try:
        return ServerSync(transport).load_from_thread(home, targets, buckets, **settings)
    finally:
        for target in targets:
            home.call(target.client.close(), 10)
        home.close(home.end_tasks)


def test_buckets_are_made_in_the_main_thread_and_at_most_two_live_at_once(folder, two_servers):
    alive: list[weakref.ref] = []
    most, made_in = [], set()

    def made():
        for number in range(8):
            tensor = torch.full((1000,), float(number))
            alive.append(weakref.ref(tensor))
            most.append(sum(ref() is not None for ref in alive))
            made_in.add(threading.current_thread())
            yield from bucketed([(f"p{number}", tensor)], 4000)
            del tensor

    report = in_a_thread(two_servers, DiskTransport(folder), made(), weight_version=2)
    assert set(report.versions.values()) == {2}
    assert made_in == {threading.main_thread()}
    assert len(most) == 8
    assert max(most) <= 2


BUCKET = Bucket({"a": torch.zeros(4)})


@pytest.mark.parametrize("is_closed", [False, True], ids=["stopped", "closed"])
def test_a_loop_that_has_ended_is_an_error_not_a_wait(is_closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_thread, "WAIT_S", 0.01)
    loop = asyncio.new_event_loop()
    feed = BucketFeed(loop)
    if is_closed:
        loop.close()
    with pytest.raises(WeightSyncError, match="engine's event loop stopped during a weight sync"), feed:
        feed.put(BUCKET)
    loop.close()


def test_a_blocked_loop_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_sync, "BLOCKED_S", 0.1)
    loop, unblocked = asyncio.new_event_loop(), threading.Event()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    loop.call_soon_threadsafe(unblocked.wait, 600)
    feed = BucketFeed(loop)
    with pytest.raises(WeightSyncError, match=r"did not answer for 0\.1 s during a weight sync"), feed:
        feed.put(BUCKET)
    unblocked.set()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def make_transport(name, folder):
    if name == "disk":
        return DiskTransport(folder)
    return BroadcastTransport() if name == "broadcast" else SharedMemoryTransport()


@pytest.fixture
def parameters(models):
    """Makes the parameters of a version."""
    return lambda version: weights(version, dict(models[0].named_parameters()))


@pytest.mark.parametrize("name", ["broadcast", "shared memory"])
def test_streamed_weights_are_those_of_the_disk(model_servers, parameters, tmp_path, name):
    folder = WeightFolder(tmp_path, config_of())
    sync(model_servers, DiskTransport(folder), parameters(1), 1)
    expected = asked(model_servers[0], "checksum")["per_engine_checksum"]
    before = [server.stats()["requests"] for server in model_servers]
    transport = make_transport(name, folder)
    sync(model_servers, transport, parameters(2), 2)
    assert asked(model_servers[0], "checksum")["per_engine_checksum"] != expected
    assert set(sync(model_servers, transport, parameters(1), 3).versions.values()) == {3}
    for server, requests in zip(model_servers, before, strict=True):
        assert asked(server, "checksum")["per_engine_checksum"] == expected
        stats = server.stats()
        assert not stats["is_bracketed"]
        assert stats["requests"]["/begin_weight_update"] - requests.get("/begin_weight_update", 0) == 2
    asyncio.run(transport.close())


@pytest.mark.parametrize("name", ["disk", "broadcast", "shared memory"])
def test_a_late_server_gets_what_the_transport_holds(folder, model_servers, parameters, name):
    transport = make_transport(name, folder)
    sync(model_servers[:1], transport, parameters(7), 7)
    assert sync(model_servers[1:], transport, None, 7).versions == {model_servers[1].url: 7}
    sums = [asked(server, "checksum")["per_engine_checksum"] for server in model_servers]
    assert sums[0] == sums[1]
    asyncio.run(transport.close())


def test_a_bracket_that_a_crashed_trainer_left_open_is_ended_first(model_servers, parameters):
    asked(model_servers[0], "begin_weight_update")
    assert len(sync(model_servers, SharedMemoryTransport(), parameters(8), 8).versions) == 2
    assert not model_servers[0].stats()["is_bracketed"]


def test_a_bucket_goes_through_shared_memory_in_parts_and_only_the_last_brings_the_version(
    model_servers, parameters, tmp_path
):
    sync(model_servers, DiskTransport(WeightFolder(tmp_path, config_of())), parameters(1), 1)
    expected = asked(model_servers[0], "checksum")["per_engine_checksum"]
    sync(model_servers, SharedMemoryTransport(), parameters(2), 2)
    before = model_servers[0].stats()["requests"]["/update_weights_from_tensor"]
    transport = SharedMemoryTransport(part_bytes=5000)
    report = sync(model_servers, transport, parameters(1), 3, bucket_bytes=2**30)
    num_parts = len(list(bucketed(parameters(1).items(), 5000)))
    assert num_parts > 3
    assert model_servers[0].stats()["requests"]["/update_weights_from_tensor"] == before + num_parts
    assert set(report.versions.values()) == {3}
    assert asked(model_servers[0], "checksum")["per_engine_checksum"] == expected
