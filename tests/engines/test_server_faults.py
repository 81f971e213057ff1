"""What a run survives, each fault with real processes and sockets: who goes on, what is lost, what is said.

docs/faults.md has each. Two servers of which one fails, if a test does not say otherwise. Token i of a completion is a
hash of its seed and i, so that one which is lost or counted twice shows.
"""

import asyncio
import contextlib
import dataclasses
import functools
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import psutil
import pytest
import torch
from engine_contract import run
from fake_sglang import python_of_fakes
from fake_sglang.process import FakeServerProcess
from sync_cases import EngineOn, Start, asked, config_of, one_weight, version_of
from transformers import Qwen3Config
from waits import Deadlines, until

from lightrl.engines.sglang.engine import SGLangEngine
from lightrl.errors import EngineError, WeightSyncError
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket, WeightFolder

NUM_TOKENS = 20
NUM_REQUESTS = 8
PACE = {"seconds_per_token": 0.02}
SLOWLY = {"seconds_per_token": 1.0}  # a request is under way for as long as a test needs it to be
UPDATE = "/update_weights_from_disk"
DEADLINES: dict[str, Any] = {"timeouts": Deadlines(hang_s=2.0, request_s=5.0, sync_s=5.0, server_wait_s=5.0)}
BY_NAME = {"kill": FakeServerProcess.kill, "freeze": FakeServerProcess.freeze}
ENDS = pytest.mark.parametrize("end", BY_NAME, ids=["kill -9", "SIGSTOP"])
HANGS_OR_ENDS = pytest.mark.parametrize(
    "end", ["freeze", pytest.param("kill", marks=pytest.mark.extra)], ids=["SIGSTOP", "kill -9"]
)


@pytest.fixture
def engine_on(engine_on: EngineOn) -> EngineOn:
    return functools.partial(engine_on, **DEADLINES)


def request(engine: SGLangEngine, number: int, num_tokens: int = NUM_TOKENS) -> Any:
    sampling = Sampling(max_new_tokens=num_tokens, seed=number)
    return engine.generate([1, 2], sampling, session=str(number))


async def requests(engine: SGLangEngine, num: int = NUM_REQUESTS) -> list[Any]:
    return [group[0] for group in await asyncio.gather(*(request(engine, number) for number in range(num)))]


def wait_for_update(server: FakeServerProcess, path: str = UPDATE) -> None:
    """Until it has been asked for the second time: of version 1."""
    while server.stats()["requests"].get(path, 0) != 2:
        time.sleep(0.01)


@contextlib.contextmanager
def meanwhile(action: Callable[[], object]) -> Iterator[None]:
    """Acts in a thread while the body loads weights."""
    thread = threading.Thread(target=action)
    thread.start()
    yield
    thread.join()


def state(engine: SGLangEngine, server: FakeServerProcess) -> str:
    return engine.fleet.servers[server.url].state


def written(start: Start, engine_on: EngineOn) -> list[list[int]]:
    """What the requests give where nothing fails."""
    engine = engine_on(start())
    completions = run(requests(engine))
    engine.close()
    return [completion.token_ids for completion in completions]


def assert_whole(completions: list[Any], expected: list[list[int]], versions: set[int]) -> None:
    """Each request once, with all its tokens, each with a version that served."""
    assert [completion.token_ids for completion in completions] == expected
    for completion in completions:
        assert len(completion.logprobs) == len(completion.weight_versions) == NUM_TOKENS
        assert completion.weight_versions == sorted(completion.weight_versions)
        assert set(completion.weight_versions) <= versions


@ENDS
def test_a_server_that_ends_while_idle_is_noticed_and_gets_no_request(end, start, engine_on):
    doomed, left = start(), start()
    engine = engine_on(doomed, left)
    BY_NAME[end](doomed)
    run(until(lambda: state(engine, doomed) == "lost"))
    assert doomed.url in engine.fleet.servers[doomed.url].reason
    assert "last answered" in engine.fleet.servers[doomed.url].reason
    assert len(run(requests(engine))) == NUM_REQUESTS
    assert left.stats()["requests"]["/generate"] == NUM_REQUESTS


@ENDS
def test_requests_of_a_server_that_ends_continue_elsewhere(end, start, engine_on):
    expected = written(start, engine_on)
    doomed, left = start(**SLOWLY), start(**SLOWLY)
    engine = engine_on(doomed, left)

    async def scenario() -> list[Any]:
        task = asyncio.create_task(requests(engine))
        await until(lambda: doomed.stats()["running"] == left.stats()["running"] == NUM_REQUESTS // 2)
        BY_NAME[end](doomed)
        left.pace(0)
        return await task

    assert_whole(run(scenario()), expected, {0})
    assert state(engine, doomed) == "lost"
    assert "last answered" in engine.fleet.servers[doomed.url].reason
    assert engine.queue_depths() == {"running": 0, "waiting": 0}
    assert engine.fleet.servers[left.url].outstanding_tokens == 0


@ENDS
def test_a_sync_continues_without_the_server_that_ends(end, start, engine_on):
    expected = written(start, engine_on)
    doomed, left = start(**PACE), start(**PACE)
    engine = engine_on(doomed, left)
    doomed.fault("slow", UPDATE, seconds=60)

    async def scenario() -> list[Any]:
        task = asyncio.create_task(requests(engine))
        await until(lambda: doomed.stats()["running"] == left.stats()["running"] == NUM_REQUESTS // 2)
        loading = asyncio.create_task(asyncio.to_thread(engine.load_weights, one_weight(1), weight_version=1))
        await until(lambda: doomed.stats()["requests"].get(UPDATE, 0) == 2)
        BY_NAME[end](doomed)
        await loading
        return await task

    assert_whole(run(scenario()), expected, {0, 1})
    assert engine.weight_version == 1
    assert engine.last_sync.versions == {left.url: 1}
    assert doomed.url in engine.last_sync.lost[doomed.url]
    assert "last answered" in engine.last_sync.lost[doomed.url]
    before = left.stats()["requests"]["/generate"]
    assert {version for item in run(requests(engine)) for version in item.weight_versions} == {1}
    assert left.stats()["requests"]["/generate"] == before + NUM_REQUESTS


def test_a_server_that_hung_in_a_sync_comes_back_with_the_new_version(start, engine_on):
    hanging, left = start(), start()
    engine = engine_on(hanging, left)
    hanging.freeze()
    engine.load_weights(one_weight(1), weight_version=1)
    assert state(engine, hanging) == "lost"
    hanging.thaw()
    run(until(lambda: state(engine, hanging) == "routable"))
    assert version_of(hanging) == "1"
    assert asked(hanging, "checksum")["per_engine_checksum"] == asked(left, "checksum")["per_engine_checksum"]
    assert {version for item in run(requests(engine)) for version in item.weight_versions} == {1}
    assert hanging.stats()["requests"]["/generate"] > 0


@ENDS
def test_a_broadcast_that_a_server_leaves_reaches_the_other_whole(end, start, engine_on, models, model_folder):
    path = "/update_weights_from_distributed"
    left, doomed = start(model_folder), start(model_folder)
    timeouts = dataclasses.replace(DEADLINES["timeouts"], hang_s=2.0)
    engine = engine_on(doomed, left, config=config_of(), transport="distributed", timeouts=timeouts)
    engine.load_weights([Bucket(dict(models[0].named_parameters()), is_last=True)], weight_version=0)
    doomed.fault("slow", path, seconds=60)
    with meanwhile(lambda: (wait_for_update(doomed, path), BY_NAME[end](doomed))):
        engine.load_weights([Bucket(dict(models[1].named_parameters()), is_last=True)], weight_version=1)
    assert engine.last_sync.versions == {left.url: 1}
    assert doomed.url in engine.last_sync.lost[doomed.url]
    (completion,) = run(engine.generate([5, 6], Sampling(max_new_tokens=4, temperature=0), session="s"))
    greedy = models[1].generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False)[0, 2:].tolist()
    assert completion.token_ids == greedy
    assert completion.weight_versions == [1] * 4


@HANGS_OR_ENDS
def test_when_all_servers_end_requests_say_what_became_of_each(end, start, engine_on):
    servers = [start(**SLOWLY), start(**SLOWLY)]
    engine = engine_on(*servers)

    async def scenario() -> None:
        task = asyncio.create_task(requests(engine))
        await until(lambda: all(server.stats()["running"] for server in servers))
        for server in servers:
            BY_NAME[end](server)
        await task

    with pytest.raises(EngineError, match="No server is left") as caught:
        run(scenario())
    for server in servers:
        assert f"{server.url} is lost with version 0" in str(caught.value)
        assert f"{server.url} last answered" in str(caught.value)


@HANGS_OR_ENDS
def test_when_all_servers_end_during_a_sync_it_names_the_version_and_each_server(end, start, engine_on):
    servers = [start(), start()]
    engine = engine_on(*servers)

    def end_them() -> None:
        for server in servers:
            wait_for_update(server)
        for server in servers:
            BY_NAME[end](server)

    for server in servers:
        server.fault("slow", UPDATE, seconds=60)
    with meanwhile(end_them), pytest.raises(WeightSyncError, match="Weight version 1 reached no server") as caught:
        engine.load_weights(one_weight(1), weight_version=1)
    assert all(f"{server.url} last answered" in str(caught.value) for server in servers)
    assert engine.weight_version == 0
    with pytest.raises(EngineError, match="No server is left"):
        run(request(engine, 0))


@pytest.mark.parametrize("moment", ["mid-generation", "mid-sync"])
def test_a_server_of_ours_is_restarted_and_has_the_weights_before_requests(moment, start, engine_on, tmp_path):
    expected = written(start, engine_on)
    python = python_of_fakes(tmp_path, "--seconds-per-token", "0.02")
    engine = SGLangEngine(servers=2, sglang_python=python, **DEADLINES)
    engine.start(Qwen3Config(vocab_size=1000))
    engine.load_weights(one_weight(0), weight_version=0)
    processes = [server.process for server in engine.fleet.in_state()]
    doomed = processes[0].url

    async def scenario() -> list[Any]:
        task = asyncio.create_task(requests(engine))
        await until(lambda: all(server.num_requests for server in engine.fleet.servers.values()))
        if moment == "mid-sync":
            await asyncio.to_thread(killed_during, engine, processes[0])
        else:
            kill(processes[0])
        await until(lambda: len(engine.fleet.urls("routable")) == 2 and doomed not in engine.fleet.servers)
        return await task

    version = 1 if moment == "mid-sync" else 0
    try:
        assert_whole(run(scenario()), expected, {0, version})
        assert {item.weight_version for item in engine.fleet.servers.values()} == {version}
        assert {number for item in run(requests(engine)) for number in item.weight_versions} == {version}
    finally:
        engine.close()
    assert not any(process.is_alive() for process in processes)


def test_a_server_that_dies_at_each_request_is_lost_with_the_end_of_its_log(tmp_path):
    engine = SGLangEngine(servers=1, sglang_python=python_of_fakes(tmp_path, "--dies-at", "/generate"), **DEADLINES)
    engine.start(Qwen3Config(vocab_size=1000))
    engine.load_weights(one_weight(0), weight_version=0)
    (server,) = engine.fleet.in_state()

    async def scenario() -> None:
        task = asyncio.create_task(requests(engine, 1))
        await until(lambda: server.state == "restarting")
        task.cancel()

    try:
        run(scenario())
        assert f"Log: {server.process.log_file}" in engine.fleet.describe()
        assert "the fake server dies, as requested" in engine.fleet.describe()
    finally:
        engine.close()


def killed_during(engine: SGLangEngine, server: Any) -> None:
    """Loads version 1; the server is killed while it loads."""
    fake = FakeServerProcess()
    fake.port = server.port
    fake.fault("slow", UPDATE, seconds=60)
    with meanwhile(lambda: (wait_for_update(fake), kill(server))):
        engine.load_weights(one_weight(1), weight_version=1)


def kill(server: Any) -> None:
    """The server itself, not the process that watches it."""
    psutil.Process(server.pid).children()[0].kill()


@pytest.mark.parametrize("seconds", [0.0, 0.1], ids=["before the answer", "amid the generation"])
def test_a_request_whose_connection_is_cut_is_asked_again(seconds, start, engine_on):
    expected = written(start, engine_on)
    server = start(**PACE)
    engine = engine_on(server)
    server.fault("drop", "/generate", count=NUM_REQUESTS, seconds=seconds)
    assert_whole(run(requests(engine)), expected, {0})
    assert server.stats()["requests"]["/generate"] == 2 * NUM_REQUESTS
    assert state(engine, server) == "routable"


@pytest.mark.parametrize("kind", ["lose_update", "wrong_version"])
def test_a_server_that_acknowledges_another_version_serves_no_token_of_it(kind, start, engine_on):
    liar, left = start(), start()
    engine = engine_on(liar, left)
    liar.fault(kind, UPDATE)
    engine.load_weights(one_weight(1), weight_version=1)
    assert "instead of 1" in engine.last_sync.lost[liar.url]
    run(until(lambda: state(engine, liar) == "routable"))
    assert version_of(liar) == "1"
    assert {version for item in run(requests(engine)) for version in item.weight_versions} == {1}


def test_the_only_server_that_acknowledges_another_version_goes_back_to_the_old_one(start, engine_on):
    server = start()
    engine = engine_on(server)
    server.fault("lose_update", UPDATE)
    with pytest.raises(WeightSyncError, match="reports version '0' instead of 1"):
        engine.load_weights(one_weight(1), weight_version=1)
    assert {version for item in run(requests(engine)) for version in item.weight_versions} == {0}
    engine.load_weights(one_weight(2), weight_version=2)
    assert {version for item in run(requests(engine)) for version in item.weight_versions} == {2}


def test_a_weight_file_that_is_cut_short_under_way_leaves_the_old_weights(start, engine_on, tmp_path):
    servers = [start(), start()]
    engine = engine_on(*servers, weight_folder=str(tmp_path))
    for server in servers:
        server.fault("slow", UPDATE, seconds=0.5)

    def cut() -> None:
        for server in servers:
            wait_for_update(server)
        file = tmp_path / "version-00000001" / "model-00001.safetensors"
        file.write_bytes(file.read_bytes()[:-9])

    with meanwhile(cut), pytest.raises(WeightSyncError, match="ends within weight") as caught:
        engine.load_weights(one_weight(1), weight_version=1)
    assert all(f"{server.url} serves version 0" in str(caught.value) for server in servers)
    assert {version for item in run(requests(engine)) for version in item.weight_versions} == {0}
    engine.load_weights(one_weight(2), weight_version=2)
    assert [version_of(server) for server in servers] == ["2", "2"]


WRITER = """
import sys, time, torch
from transformers import Qwen3Config
from lightrl.weights import Bucket, WeightFolder
writer = WeightFolder(sys.argv[1], Qwen3Config()).begin(1)
writer.add(Bucket({"a": torch.ones(1000)}))
print("half", flush=True)
time.sleep(60)
"""


def test_a_writer_that_is_killed_leaves_no_version_and_its_remains_go_with_the_next_write(tmp_path):
    folder = WeightFolder(tmp_path, Qwen3Config())
    folder.write(one_weight(0), 0)
    (tmp_path / "writer.py").write_text(WRITER)
    command = [sys.executable, str(tmp_path / "writer.py"), str(tmp_path)]
    with forked.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "half\n"
        process.kill()
    assert folder.versions() == [0]
    assert len(list(tmp_path.glob(".unfinished-*"))) == 1
    folder.write(one_weight(1), 1)
    assert folder.versions() == [0, 1]
    assert not list(tmp_path.glob(".unfinished-*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("this user may mount no file system; tests/weights/test_disk.py has the fault without one")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_pauses_no_server_and_the_next_sync_with_space_succeeds(start, engine_on, small_disk):
    servers = [start(), start()]
    engine = engine_on(*servers, size=7000, weight_folder=str(small_disk))
    with pytest.raises(WeightSyncError, match="is full") as caught:
        engine.load_weights(one_weight(1, 7000), weight_version=1)
    assert str(small_disk) in str(caught.value)
    assert not list(small_disk.glob(".unfinished-*"))
    assert [server.stats()["requests"]["/pause_generation"] for server in servers] == [1, 1]  # of the first sync
    assert {version for item in run(requests(engine)) for version in item.weight_versions} == {0}
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    engine.load_weights(one_weight(1, 7000), weight_version=1)
    assert [version_of(server) for server in servers] == ["1", "1"]
