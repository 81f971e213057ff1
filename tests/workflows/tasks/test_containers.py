"""Tasks in containers: by a fake command-line program, and, as an extra, by the real podman."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_tasks import play, task_in
from waits import comes_true, until

from lightrl.concurrency.owner import own_mark
from lightrl.errors import RolloutError
from lightrl.rewards.sandbox import RELAY_COMMAND
from lightrl.trajectory import Prompt
from lightrl.workflows.agent_workflow import AgentLimits
from lightrl.workflows.tasks import Task, Verifier, rows, runtime_of

TEST = """#!/bin/sh
[ "$(cat answer)" = 42 ] && [ ! -e old ] && reward=1 || reward=0
echo "{\\"reward\\": $reward, \\"colors\\": $COLORS}" > "$ROOT/logs/verifier/reward.json"
"""
TOML = '[environment]\nmemory_mb = 256\ndocker_image = "made/elsewhere"\n[environment.env]\nCOLORS = "3"\n'


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake program, by each name, first on PATH; returns its state."""
    (tmp_path / "bin").mkdir()
    for name in ("docker", "podman", "apptainer"):
        program = tmp_path / "bin" / name
        program.write_text(f"#!{sys.executable} -I\n" + Path(__file__).with_name("fake_containers.py").read_text())
        program.chmod(0o755)
    for name in ("images", "containers"):
        (tmp_path / "state" / name).mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CONTAINERS", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runtime_of.cache_clear()
    return tmp_path / "state"


def calls(state: Path, word: str) -> list[str]:
    return [line for line in (state / "calls").read_text().splitlines() if line.startswith(word)]


@pytest.mark.parametrize("runtime", ["docker", "podman", "apptainer"])
def test_an_agent_and_its_tests_run_in_two_containers_that_are_removed(runtime: str, state: Path) -> None:
    task = task_in(state / "tasks" / "a", {"tests/test.sh": TEST}, TOML)
    task_in(state / "tasks" / "b", {"tests/test.sh": TEST}, TOML)
    (row, _) = rows(folder=str(state / "tasks"), runtime=runtime)
    pulls = calls(state, "build --force" if runtime == "apptainer" else "pull")
    assert len(pulls) == 1  # both tasks have the same environment
    agent = "[ ! -e /tests ] && cat; echo 42 >answer; ln -s /etc/passwd link; (sleep 1000; echo 1 >answer) &"
    (reward, metrics), output = play(row, agent, Verifier(network="allow"))
    assert (reward, metrics) == (1, {"colors": 3, "tests_without_reward": 0}), output
    assert play(row, "true", Verifier(network="allow"))[0][0] == 0
    assert list((state / "containers").iterdir()) == []
    (start, *_) = calls(state, "instance start" if runtime == "apptainer" else "run")
    assert "--memory 256" in start
    assert "COLORS=3" not in (state / "calls").read_text()  # all users can read arguments
    assert task.image in pulls[0]


def test_what_an_agent_prints_and_leaves_is_bounded(state: Path) -> None:
    task_in(state / "tasks" / "a", {"tests/test.sh": TEST}, TOML)
    (row,) = rows(folder=str(state / "tasks"), runtime="docker")
    verifier = Verifier(network="allow", limits=AgentLimits(disk_mib=1))
    (reward, _), output = play(row, "yes | head -c 1000000; echo 42 >answer; echo end", verifier)
    assert reward == 1
    assert len(output) == 64 << 10
    assert output.endswith("y\nend\n")
    with pytest.raises(RolloutError, match=r"more than limits.disk_mib \(1 MiB\)"):
        play(row, "head -c 3000000 /dev/zero >big", verifier)


def test_a_dockerfile_is_built_once(state: Path) -> None:
    task = task_in(state / "tasks" / "a", {})
    for _ in range(2):
        list(rows(folder=str(state / "tasks"), runtime="docker"))
    (build,) = calls(state, "build")
    assert build == f"build -t localhost/lightrl-task:{task.digest} {task.folder}/environment"
    with pytest.raises(ValueError, match="builds no Dockerfiles"):
        list(rows(folder=str(state / "tasks"), runtime="apptainer"))


def started(state: Path) -> list[Path]:
    return list((state / "containers").glob("*/root/app/started"))


def test_a_cancellation_removes_the_container(state: Path) -> None:
    task_in(state / "tasks" / "a", {}, TOML)
    (row,) = rows(folder=str(state / "tasks"), runtime="docker")
    verifier = Verifier(network="allow")
    command = verifier.command(["sh", "-c", "touch started; sleep 1000"], verifier.start_agent)

    async def scenario() -> None:
        running = asyncio.ensure_future(command.run(Prompt("a", messages=[], fields=row), "http://127.0.0.1:9/v1", ""))
        await until(lambda: started(state))
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    asyncio.run(scenario())
    assert list((state / "containers").iterdir()) == []


@contextlib.contextmanager
def trainer(row: dict[str, Any], state: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in which an agent sleeps."""
    program = f"import sys; sys.path[:] = {sys.path!r}\nfrom test_containers import Verifier, play\n"
    program += f"play({row!r}, 'touch started; sleep 1000', Verifier(network='allow'))"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            assert comes_true(lambda: started(state))
            yield process
        finally:
            process.kill()


def test_a_killed_trainer_leaves_no_container(state: Path) -> None:
    task_in(state / "tasks" / "a", {}, TOML)
    (row,) = rows(folder=str(state / "tasks"), runtime="docker")
    with trainer(row, state) as process:
        process.send_signal(signal.SIGKILL)
        assert comes_true(lambda: not list((state / "containers").iterdir()))


def test_the_relay_leads_from_a_network_namespace_to_the_endpoint() -> None:
    words = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("this system has no user namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server, subprocess.Popen([*words, "sleep", "1000"]) as inside:
        try:
            own = Path("/proc/self/ns/net").readlink()
            assert comes_true(lambda: Path(f"/proc/{inside.pid}/ns/net").readlink() != own)
            threading.Thread(target=lambda: server.accept()[0].sendall(b"from outside"), daemon=True).start()
            port = str(server.getsockname()[1])
            command = [*RELAY_COMMAND, str(inside.pid), port]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as relay:
                assert relay.stdout is not None
                assert relay.stdout.readline() == b"ready\n"
                program = f"import socket; print(socket.create_connection(('127.0.0.1', {port})).recv(99))"
                enter = ["nsenter", "--user", "--net", "--preserve-credentials", "--target", str(inside.pid)]
                assert b"from outside" in subprocess.check_output([*enter, sys.executable, "-c", program])
        finally:
            inside.kill()


@pytest.fixture
def busybox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    """A task whose image is made of busybox alone, since no registry of images is needed for it."""
    program = shutil.which("busybox")
    if program is None or shutil.which("podman") is None or subprocess.run(["ldd", program]).returncode == 0:
        pytest.skip("needs podman and a static busybox: apt-get install podman runc busybox-static")
    if shutil.which("runc") is not None:  # in a container without cgroups of version 2, crun refuses to start
        (tmp_path / "containers.conf").write_text('[engine]\nruntime = "runc"\n')
        monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "containers.conf"))
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    dockerfile = """FROM scratch
COPY busybox /bin/busybox
RUN ["/bin/busybox", "--install", "-s", "/bin"]
ENV PATH=/bin COLORS=3 ROOT=
WORKDIR /srv/app
RUN touch old
"""
    task = task_in(tmp_path / "tasks" / "a", {"environment/Dockerfile": dockerfile, "tests/test.sh": TEST})
    shutil.copy2(program, task.folder / "environment" / "busybox")
    runtime_of.cache_clear()
    return task


@pytest.mark.extra
def test_podman_runs_an_agent_that_reaches_the_endpoint_alone(busybox: Task) -> None:
    (row,) = rows(folder=str(busybox.folder.parent), runtime="podman")
    verifier = Verifier()
    command = verifier.command(
        ["sh", "-c", "wget -qO- $OPENAI_BASE_URL/x; rm old; echo 42 >answer"], verifier.start_agent
    )
    assert command.network == "none"
    received: list[bytes] = []

    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        received.append(connection.recv(4096))
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nfrom outside\n")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, args=[server], daemon=True).start()
        prompt = Prompt("a", messages=[], fields=row)
        result = asyncio.run(command.run(prompt, f"http://127.0.0.1:{server.getsockname()[1]}/v1", "key"))
    assert result.output == "from outside\n"
    assert received[0].startswith(b"GET /v1/x")
    assert asyncio.run(verifier.reward(prompt, str(result.workspace)))[0] == 1
    assert play(row, "true")[0][0] == 0
    marks = subprocess.check_output(["podman", "ps", "-a", "--format", '{{.Label "lightrl-owner"}}'], text=True)
    assert own_mark() not in marks
