"""Delta syncs between real processes: weight receivers and servers, whoever of them is killed."""

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import forked
import psutil
import pytest
import torch
from fake_sglang import python_of_fakes
from safetensors.torch import load_file
from sync_cases import asked, sync, version_of
from transformers import Qwen3Config
from waits import Deadlines

from lightrl.concurrency import listener
from lightrl.engines import SGLangEngine
from lightrl.engines.servers.connection import Connection
from lightrl.engines.servers.processes.process import HeldPort
from lightrl.engines.servers.sync.receiver import Receiver
from lightrl.engines.servers.sync.receivers import Receivers
from lightrl.engines.servers.sync.report import SyncFailed
from lightrl.engines.servers.sync.transports import DeltaTransport
from lightrl.testing import tiny_policy
from lightrl.weights import ServerForm, bucketed
from lightrl.weights.delta_folder import DeltaFolder

UPDATE, TOKEN = "/update_weights_from_disk", "a-token"


class ReceiverProcess:
    """One receiver, at the same address and in the same folder after a restart."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.held = folder, HeldPort("127.0.0.1")
        self.url = f"http://127.0.0.1:{self.held.number}"
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "lightrl.engines.servers.sync.receiver", "--port", str(self.held.number)]
        self.process = forked.Popen(
            [*command, "--folder", str(self.folder)], env=os.environ | {"LIGHTRL_SERVER_TOKEN": TOKEN}
        )

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def content(self) -> dict[str, torch.Tensor]:
        """What a server would load."""
        found = {}
        for file in self.folder.glob("version-*/*.safetensors"):
            found |= load_file(file)
        return found


@contextlib.contextmanager
def receiving(num, root):
    receivers = [ReceiverProcess(root / f"receiver-{index}") for index in range(num)]
    try:
        for receiver in receivers:
            receiver.start()
        yield receivers
    finally:
        for receiver in receivers:
            receiver.kill()
            receiver.held.close()


@pytest.fixture
def receiver(tmp_path):
    with receiving(1, tmp_path) as (one,):
        yield one


@pytest.fixture
def transport_to():
    """Makes transports: server i loads from receiver i, or from the only one."""
    made = []

    def make(receivers, servers=(), wait_s=30.0, token=TOKEN):
        places = {server.url: receivers[index % len(receivers)].url for index, server in enumerate(servers)}
        transport = DeltaTransport(
            ServerForm(torch.bfloat16),
            Qwen3Config(),
            connect=lambda url: Connection(url, token=token, timeouts=Deadlines(request_s=600)),
            receiver_of=lambda url: places.get(url, receivers[0].url),
            wait_s=wait_s,
        )
        made.append(transport)
        return transport

    yield make
    for transport in made:
        asyncio.run(transport.close())


def parameters(version, num_elements=20_000):
    """Each version is a small step from the one before."""
    generator = torch.Generator().manual_seed(0)
    start = {name: torch.randn(num_elements, generator=generator) * 0.02 for name in ("a", "b", "c")}
    return {name: tensor * (1 + 1e-4 * version) for name, tensor in start.items()}


def has(receiver, version, **sizes):
    expected = {name: tensor.bfloat16() for name, tensor in parameters(version, **sizes).items()}
    found = receiver.content()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def sums_of(version):
    """The fake server's checksums of these weights."""
    return {
        name: hashlib.sha256(tensor.bfloat16().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, tensor in parameters(version).items()
    }


def serves(server, version):
    return version_of(server) == str(version) and asked(server, "checksum")["ranks"][0]["checksums"] == sums_of(version)


def test_servers_serve_the_trainers_weights_and_only_the_change_travels(start, receiver, transport_to):
    servers = [start(), start()]
    transport = transport_to([receiver], servers)
    full = sync(servers, transport, parameters(0), 0)
    assert full.num_bytes > 2 * 60_000
    for version in (1, 2, 3):
        report = sync(servers, transport, parameters(version), version, previous_version=version - 1)
        assert report.versions == dict.fromkeys([server.url for server in servers], version)
        assert report.num_bytes < 0.1 * full.num_bytes
        assert has(receiver, version)
        assert all(serves(server, version) for server in servers)


def test_the_delta_is_fetched_and_applied_before_the_pause(start, receiver, transport_to):
    servers = [start()]
    transport = transport_to([receiver], servers)
    sync(servers, transport, parameters(0), 0)
    servers[0].fault("error", "/pause_generation", count=-1)
    with pytest.raises(SyncFailed):
        sync(servers, transport, parameters(1), 1)
    assert has(receiver, 1)


def test_a_server_that_was_restarted_loads_the_version_that_the_receiver_has(start, receiver, transport_to):
    servers = [start()]
    transport = transport_to([receiver], servers)
    sync(servers, transport, parameters(0), 0)
    sync(servers, transport, parameters(1), 1)
    servers[0].start()
    assert transport.holds(1)
    assert sync(servers, transport, None, 1).num_bytes == 0
    assert serves(servers[0], 1)


def test_servers_that_all_refuse_continue_with_the_previous_version(start, receiver, transport_to):
    servers = [start(), start()]
    transport = transport_to([receiver], servers)
    sync(servers, transport, parameters(0), 0)
    for server in servers:
        server.fault("error", UPDATE, count=1)
    with pytest.raises(SyncFailed) as caught:
        sync(servers, transport, parameters(1), 1, previous_version=0)
    assert caught.value.report.versions == dict.fromkeys([server.url for server in servers], 0)
    assert all(serves(server, 0) for server in servers)
    assert has(receiver, 0)
    sync(servers, transport, parameters(2), 2)
    assert all(serves(server, 2) for server in servers)


def test_a_receiver_that_is_killed_between_syncs_comes_back_with_its_version(start, receiver, transport_to):
    servers = [start()]
    transport = transport_to([receiver], servers)
    full = sync(servers, transport, parameters(0), 0)
    receiver.kill()
    receiver.start()  # the sync waits until it answers
    assert sync(servers, transport, parameters(1), 1).num_bytes < 0.1 * full.num_bytes
    assert serves(servers[0], 1)


def test_a_receiver_that_is_killed_while_it_applies_gets_the_whole_version(start, receiver, transport_to):
    sizes = {"num_elements": 20_000_000}
    servers = [start()]
    transport = transport_to([receiver], servers)
    sync(servers, transport, parameters(0, **sizes), 0, bucket_bytes=2**26)
    killer = subprocess.Popen(
        [sys.executable, "-c", KILLER, str(receiver.folder / ".changing"), str(receiver.process.pid)],
        stdout=subprocess.PIPE,
    )
    assert killer.stdout.readline() == b"watching\n"
    restarting = threading.Thread(target=lambda: (killer.wait(600), receiver.process.wait(), receiver.start()))
    restarting.start()
    report = sync(servers, transport, parameters(1, **sizes), 1, bucket_bytes=2**26)
    restarting.join()
    killer.stdout.close()
    assert killer.returncode == 0
    assert report.versions == {servers[0].url: 1}
    assert report.num_bytes > 2 * 3 * sizes["num_elements"]  # the whole after the delta
    assert has(receiver, 1, **sizes)


KILLER = """
import os, signal, sys, time
print("watching", flush=True)
while not os.path.exists(sys.argv[1]):
    pass
os.kill(int(sys.argv[2]), signal.SIGKILL)
"""


def test_a_receiver_that_does_not_answer_is_named_with_the_command_that_starts_it(start, tmp_path, transport_to):
    lone = ReceiverProcess(tmp_path)
    servers = [start()]
    with pytest.raises(SyncFailed) as caught:
        sync(servers, transport_to([lone], servers, wait_s=0.5), parameters(0), 1, previous_version=0)
    assert caught.value.report.versions == {servers[0].url: 0}  # it goes on with what it has
    assert lone.url in str(caught.value)
    assert "python -m lightrl.engines.servers.sync.receiver --host" in str(caught.value)
    assert "/pause_generation" not in servers[0].stats()["requests"]
    lone.held.close()


def test_a_wrong_token_and_a_server_in_place_of_a_receiver_are_named(start, receiver, transport_to):
    servers = [start()]
    with pytest.raises(SyncFailed, match=r"HTTP 401.*LIGHTRL_SERVER_TOKEN"):
        sync(servers, transport_to([receiver], servers, token="another"), parameters(0), 0)
    with pytest.raises(SyncFailed, match="HTTP 404"):
        sync(servers, transport_to(servers, servers), parameters(0), 0)


def test_connections_without_the_token_take_few_files_of_a_receiver_and_the_trainer_gets_in(tmp_path, monkeypatch):
    monkeypatch.setattr(listener.resource, "getrlimit", lambda _: (80, 80))  # so 10 without the token
    monkeypatch.setattr(listener, "UNDER_PRESSURE_S", 0.1)

    async def scenario(held: HeldPort) -> int:
        connection = Connection(f"http://127.0.0.1:{held.number}", token=TOKEN)
        serving = asyncio.create_task(Receiver(DeltaFolder(tmp_path), TOKEN).serve("127.0.0.1", held.number))
        await connection.request("POST", "/state", {})
        with contextlib.ExitStack() as opened:
            for number in range(30):
                idle = opened.enter_context(socket.create_connection(("127.0.0.1", held.number)))
                idle.sendall(b"POST /state HTTP/1.1\r\nHost: a\r\n" if number % 2 else b"")
            await asyncio.sleep(0.01)
            assert (await connection.request("POST", "/state", {}))["digest"] == ""
            await connection.close()
            connections = psutil.Process().net_connections()
        serving.cancel()
        await asyncio.wait({serving})
        return sum(each.laddr.port == held.number for each in connections)

    with contextlib.closing(HeldPort("127.0.0.1")) as held:
        assert asyncio.run(scenario(held)) <= 13  # with the trainer's own, one that waits, and the listener


def test_each_receiver_gets_its_own_upload_and_one_that_dies_loses_only_its_own_server(start, tmp_path, transport_to):
    servers = [start() for _ in range(3)]
    with receiving(3, tmp_path) as receivers:
        transport = transport_to(receivers, servers, wait_s=30)
        full = sync(servers, transport, parameters(0), 0)
        model_bytes = sum(2 * tensor.numel() for tensor in parameters(0).values())
        assert full.num_bytes == pytest.approx(3 * model_bytes, rel=0.05)
        assert all(has(receiver, 0) for receiver in receivers)
        receivers[0].kill()
        transport._wait_s = 1.0
        report = sync(servers, transport, parameters(1), 1)
        assert list(report.lost) == [servers[0].url]
        assert receivers[0].url in report.lost[servers[0].url]
        assert all(has(receiver, 1) for receiver in receivers[1:])
        assert all(serves(server, 1) for server in servers[1:])


def test_an_engine_starts_a_receiver_for_its_servers_and_leaves_nothing(tmp_path, monkeypatch):
    folder = tmp_path / "weights"
    folder.mkdir()
    monkeypatch.setattr("lightrl.engines.servers.sync.receivers.folder_in_memory", lambda prefix: folder)
    spec = tiny_policy()
    python = python_of_fakes(tmp_path, "--dtype", "bfloat16")
    engine = SGLangEngine(servers=2, sglang_python=python, transport="delta")
    engine.start(spec.load_config())
    try:
        for version in range(3):
            engine.load_weights(bucketed(parameters(version).items(), 1000), weight_version=version)
        assert engine.last_sync.num_bytes < 0.2 * 2 * 60_000
        assert len(list(folder.glob("version-*"))) == 1
    finally:
        engine.close()
    assert not folder.exists()


def test_servers_without_a_receiver_on_their_host_are_refused_at_the_start(monkeypatch):
    monkeypatch.setenv("LIGHTRL_RECEIVER_ADDRS", "10.9.8.6:4000")
    engine = SGLangEngine(urls=["http://10.9.8.7:30000"], transport="delta")
    with pytest.raises(ValueError, match=r"needs a weight receiver on 10\.9\.8\.7.*http://10\.9\.8\.6:4000"):
        engine.start(tiny_policy().load_config())


def test_receivers_are_found_by_the_host_of_the_server(monkeypatch):
    monkeypatch.setenv("LIGHTRL_RECEIVER_ADDRS", "one:4000, two:4000")
    receivers = Receivers()
    receivers.connect([], ["http://two:30000", "http://one:30000", "http://one:30001"])
    assert receivers.of("http://two:30000") == "http://two:4000"
    assert json.dumps(receivers.urls) == '["http://one:4000", "http://two:4000"]'
