"""Servers on other hosts: network namespaces with addresses of their own, a link that is cut, a host that dies.

Needs root; where there is none, the reason is in pytest's summary of skipped tests.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import COMMAND
from hosts import Hosts, why_not

from lightrl.engines.servers.addresses import interface_of, remote_servers, trainer_address
from lightrl.errors import EngineUnreachable

WHY_NOT = why_not()
IN_A_BOX = pytest.mark.skipif(WHY_NOT is not None, reason=f"hosts in a box: {WHY_NOT}")
RUN = str(Path(__file__).with_name("hosts_run.py"))
PORT = 30000
TRANSPORTS = pytest.mark.parametrize(
    "transport", ["distributed", *(pytest.param(name, marks=pytest.mark.extra) for name in ("disk", "delta"))]
)
TOKEN = {"LIGHTRL_SERVER_TOKEN": "a-token"}
ENDS = {"cut": Hosts.cut, "kill": Hosts.kill}


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


def serve(hosts: Hosts, number: int, model_folder: Path) -> str:
    """Starts a fake server on a host; its address."""
    address = hosts.address(number)
    command = [*COMMAND, "--host", address, "--port", str(PORT)]
    process = hosts.popen(number, [*command, "--model-path", str(model_folder)], stdout=subprocess.PIPE)
    assert json.loads(process.stdout.readline())["port"] == PORT
    return f"http://{address}:{PORT}"


def receive(hosts: Hosts, number: int, folder: Path) -> None:
    """Starts a weight receiver beside a host's server; returns when it listens."""
    address = hosts.address(number)
    command = [sys.executable, "-m", "lightrl.engines.servers.sync.receiver", "--host", address, "--port", "31000"]
    hosts.popen(number, [*command, "--folder", str(folder / f"receiver-{number}")], env=TOKEN)
    listens = f"until : >/dev/tcp/{address}/31000; do sleep 0.1; done"
    assert hosts.popen(number, ["bash", "-c", listens], stderr=subprocess.DEVNULL).wait(600) == 0


class Trainer:
    """hosts_run.py on host 1, line by line."""

    def __init__(self, hosts: Hosts, transport: str, model_folder: Path, weight_folder: object, *urls: str) -> None:
        command = [sys.executable, RUN, transport, str(model_folder), str(weight_folder), *urls]
        # gloo finds the interface by itself here, from the address that the servers are told
        env = {"GLOO_SOCKET_IFNAME": "", **TOKEN}
        self.process = hosts.popen(1, command, stdout=subprocess.PIPE, text=True, env=env)

    def line(self) -> dict[str, Any]:
        return json.loads(self.process.stdout.readline())


@pytest.mark.cluster
@IN_A_BOX
@TRANSPORTS
def test_a_server_on_another_host_gets_the_weights(
    transport: str, hosts: Hosts, model_folder: Path, tmp_path: Path
) -> None:
    url = serve(hosts, 2, model_folder)
    if transport == "delta":
        receive(hosts, 2, tmp_path)
    trainer = Trainer(hosts, transport, model_folder, tmp_path, url)
    assert trainer.line() == {"versions": {url: 0}}
    assert trainer.line() == {"is_right": True}
    assert trainer.process.wait(600) == 0


@pytest.mark.cluster
@IN_A_BOX
@pytest.mark.extra
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("transport", ["disk", "distributed", "delta"])
def test_a_host_that_is_lost_during_a_sync_is_named_and_the_other_gets_the_weights(
    transport: str, end: str, hosts: Hosts, model_folder: Path, tmp_path: Path, record_property: Any
) -> None:
    doomed, left = serve(hosts, 2, model_folder), serve(hosts, 3, model_folder)
    if transport == "delta":
        receive(hosts, 2, tmp_path)
        receive(hosts, 3, tmp_path)
    trainer = Trainer(hosts, transport, model_folder, tmp_path, doomed, left)
    assert trainer.line() == {"versions": {doomed: 0, left: 0}}
    assert trainer.line() == {"amid": True}
    ENDS[end](hosts, 2)
    result = trainer.line()
    assert result["versions"] == {left: 1}
    assert list(result["lost"]) == [doomed]
    assert doomed in result["lost"][doomed]
    record_property("synced_s", result["seconds"])
    assert trainer.process.wait(600) == 0


@pytest.mark.cluster
@IN_A_BOX
@pytest.mark.extra
def test_the_default_folder_is_refused_for_a_server_on_another_host(hosts: Hosts, model_folder: Path) -> None:
    trainer = Trainer(hosts, "disk", model_folder, "", f"http://{hosts.address(2)}:{PORT}")
    refused = trainer.line()["refused"]
    assert f"http://{hosts.address(2)}:{PORT} is on another machine" in refused
    assert "Set weight_folder" in refused


@pytest.mark.cluster
@IN_A_BOX
@pytest.mark.extra
def test_an_address_without_a_route_fails_within_seconds(hosts: Hosts, model_folder: Path, tmp_path: Path) -> None:
    """`Timeouts.startup_s` is the default, 15 minutes."""
    trainer = Trainer(hosts, "disk", model_folder, tmp_path, "http://192.168.9.9:30000")
    assert "192.168.9.9 port 30000: Network is unreachable" in trainer.line()["refused"]
    assert trainer.process.wait(600) == 0


def test_the_trainers_address_is_by_default_that_of_the_route() -> None:
    here = own_address()
    assert trainer_address(["http://127.0.0.1:1", "http://localhost:2", f"http://{here}:1"]) == "127.0.0.1"
    assert trainer_address(["http://127.0.0.1:1", "http://198.51.100.7:2"]) == here
    assert remote_servers(["http://127.0.0.1:1", "http://198.51.100.7:2"]) == ["http://198.51.100.7:2"]


@pytest.mark.parametrize(
    ("url", "given", "error", "message"),
    [
        (
            "http://198.51.100.7:30000",
            "localhost",
            ValueError,
            r"trainer_host='localhost' is 127\.0\.0\.1, where http.* would only reach itself",
        ),
        (
            "http://127.0.0.1:30000",
            "198.51.100.7",
            ValueError,
            r"trainer_host='198\.51\.100\.7' .*is not an address of this machine",
        ),
        ("http://no-such-host.invalid:1", None, EngineUnreachable, r"no route to http://no-such-host\.invalid:1"),
    ],
    ids=["loopback", "of another machine", "an unknown server"],
)
def test_an_address_that_servers_cannot_reach_is_refused(url: str, given: Any, error: Any, message: str) -> None:
    own_address()  # skips where there is no network
    with pytest.raises(error, match=message):
        trainer_address([url], given)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("198.51.100.7") is None


def own_address() -> str:
    """Of the route to an address that is elsewhere; a machine without a network has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.7", 9))
        except OSError:
            pytest.skip("this machine has no route to another one")
        return str(probe.getsockname()[0])
