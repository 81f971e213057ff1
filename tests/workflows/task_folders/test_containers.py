"""Tasks in containers: by a fake command-line program, and, as an extra, by the real docker and podman."""

import asyncio
import contextlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_task_folders import play, task_in
from waits import comes_true, until

from lightrl.concurrency.owner import own_mark
from lightrl.errors import RolloutError
from lightrl.rewards.sandbox import RELAY_COMMAND
from lightrl.trajectory import Prompt
from lightrl.workflows.agent_workflow import AgentLimits
from lightrl.workflows.task_folders import Verifier, rows, runtime_of

TEST = """#!/bin/sh
[ "$(cat answer)" = 42 ] && [ ! -e old ] && [ ! -L link ] && [ -L own ] && reward=1 || reward=0
echo "{\\"reward\\": $reward, \\"colors\\": $COLORS}" > "$ROOT/logs/verifier/reward.json"
"""
BUSYBOX = 'FROM scratch\nCOPY busybox /bin/busybox\nRUN ["/bin/busybox", "--install", "-s", "/bin"]\n'
TOML = '[environment]\nmemory_mb = 256\ndocker_image = "made/elsewhere"\n[environment.env]\nCOLORS = "3"\n'


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake program, by each name, first on PATH; returns its state."""
    (tmp_path / "bin").mkdir()
    for name in ("docker", "podman"):
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


WORK = "echo 42 >answer; rm -f old; ln -s answer own"
DEEP = "deep=$(printf 'd/%.0s' $(seq 150)); mkdir -p $deep; echo 42 >$deep/a; ln -s $deep/a answer; ln -s answer own"


@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_an_agent_and_its_tests_run_in_two_containers_that_are_removed(runtime, state, caplog, monkeypatch):
    task = task_in(state / "tasks" / "a", {"tests/test.sh": TEST}, TOML)
    task_in(state / "tasks" / "b", {"tests/test.sh": TEST}, TOML)
    monkeypatch.setitem(rows.__globals__, "_PROGRESS_S", -1.0)  # report each environment
    with caplog.at_level("INFO", "lightrl"):
        (row, _) = rows(folder=str(state / "tasks"), runtime=runtime)
    assert "Prepared 1 of 1 task environments." in caplog.text
    assert caplog.text.count(f"Without root, {runtime} limits memory and processes only with cgroups v2 and") == 1
    (pull,) = calls(state, "pull")  # both tasks have the same environment
    assert str(task.image) in pull
    agent = f"[ ! -e /tests ] && cat; {WORK}; ln -s /etc/passwd link; (sleep 1000; echo 1 >answer) &"
    (reward, metrics), output = play(row, agent, Verifier(network="allow"))
    assert (reward, metrics) == (1, {"colors": 3, "tests_without_reward": 0}), output
    assert play(row, "true", Verifier(network="allow"))[0][0] == 0
    assert list((state / "containers").iterdir()) == []
    (start, *_) = calls(state, "run")
    assert "--memory 256" in start
    assert "--log-driver none" in start  # else an agent can fill the disk by writing to /proc/1/fd/1
    assert "--volume" not in start  # the image has the program, and its own Python
    assert "COLORS=3" not in (state / "calls").read_text()  # other users can see arguments


@pytest.mark.parametrize(
    "agent",
    [
        pytest.param(f"{WORK}; cd ..; rm -r app", id="removes its folder"),
        pytest.param(f"{WORK}; cd ..; mv app old; ln -s old app", id="makes its folder a link"),
        pytest.param("echo 42 >real; ln -s real own; ln -s $ROOT/app/real answer", id="leaves links with full paths"),
        pytest.param(DEEP, id="nests folders"),
    ],
)
def test_what_cannot_be_copied_earns_nothing(agent: str, state: Path, caplog: pytest.LogCaptureFixture) -> None:
    task_in(state / "tasks" / "a", {"tests/test.sh": TEST}, TOML)
    (row,) = rows(folder=str(state / "tasks"), runtime="docker")
    assert play(row, agent, Verifier(network="allow"))[0][0] == 0
    assert list((state / "containers").iterdir()) == []
    assert ("nested folders" in caplog.text) == (agent == DEEP)


def test_a_path_that_the_agent_chose_does_not_hide_that_a_copy_failed(state: Path) -> None:
    task_in(state / "tasks" / "a", {"tests/test.sh": TEST}, TOML)
    (row,) = rows(folder=str(state / "tasks"), runtime="docker")
    with tarfile.open(state / "a.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("app/no such file" + "x" * 300))
    with pytest.raises(RolloutError, match=r"cannot be copied: .*File name too long"):
        play(row, f"cp {state}/a.tar archive.tar", Verifier(network="allow"))


def test_a_hard_link_to_a_link_is_not_copied(state: Path) -> None:
    task_in(state / "tasks" / "a", {"tests/test.sh": TEST}, TOML)
    (row,) = rows(folder=str(state / "tasks"), runtime="docker")
    with tarfile.open(state / "a.tar", "w") as tar:
        kinds = {"app": tarfile.DIRTYPE, "app/link": tarfile.SYMTYPE, "app/old": tarfile.LNKTYPE}
        for name, kind in {**kinds, "app/answer": tarfile.REGTYPE, "app/own": tarfile.LNKTYPE}.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = kind, 0o755
            entry.linkname = {"app/link": "/etc/passwd", "app/old": "app/link", "app/own": "app/answer"}.get(name, "")
            data = b"42" if kind == tarfile.REGTYPE else b""
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    task_in(state / "tasks" / "a", {"tests/test.sh": TEST.replace("-L own", "own -ef answer")}, TOML)
    assert play(row, f"cp {state}/a.tar archive.tar", Verifier(network="allow"))[0][0] == 1


def test_only_readable_paths_are_mounted_and_none_in_the_working_directory(state: Path) -> None:
    task_in(state / "tasks" / "a", {}, TOML.replace("memory_mb = 256", f'workdir = "{state}"'))
    (row,) = rows(folder=str(state / "tasks"), runtime="docker")
    with pytest.raises(RolloutError, match="would be mounted in the task's working directory"):
        play(row, "true", Verifier(network="allow", readable=[str(state / "tasks")]))
    task_in(state / "tasks" / "b", {}, TOML)
    (_, row) = rows(folder=str(state / "tasks"), runtime="docker")
    play(row, "true", Verifier(network="allow", readable=[str(state / "tasks")]))
    (start, _) = calls(state, "run")
    assert re.findall("--volume [^ ]+", start) == [f"--volume {state}/tasks:{state}/tasks:ro"]


def test_what_an_agent_prints_and_leaves_is_bounded(state: Path) -> None:
    task_in(state / "tasks" / "a", {"tests/test.sh": TEST}, TOML)
    (row,) = rows(folder=str(state / "tasks"), runtime="docker")
    verifier = Verifier(network="allow", limits=AgentLimits(disk_mib=1))
    (reward, _), output = play(row, f"yes | head -c 1000000; {WORK}; echo end", verifier)
    assert reward == 1
    assert len(output) == 64 << 10
    assert output.endswith("y\nend\n")
    with pytest.raises(RolloutError, match=r"more than limits.disk_mib \(1 MiB\)"):
        play(row, "head -c 3000000 /dev/zero >big", verifier)
    with pytest.raises(RolloutError, match=r"stopped by its disk limit \(limits.disk_mib=1\)"):
        play(row, "head -c 3000000 /dev/zero >endless; sleep 1000", verifier)


def test_a_dockerfile_is_built_once(state: Path) -> None:
    task = task_in(state / "tasks" / "a", {})
    for _ in range(2):
        list(rows(folder=str(state / "tasks"), runtime="docker"))
    (build,) = calls(state, "build")
    assert build == f"build -t localhost/lightrl-task:{task.digest} {task.folder}/environment"


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
def trainer(row: dict[str, Any], agent: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in which an agent runs."""
    program = f"import sys; sys.path[:] = {sys.path!r}\nfrom test_containers import Verifier, play\n"
    program += f"play({row!r}, {agent!r}, Verifier(network='allow'), shell='sh')"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_killed_trainer_leaves_no_container(state: Path) -> None:
    task_in(state / "tasks" / "a", {}, TOML)
    (row,) = rows(folder=str(state / "tasks"), runtime="docker")
    with trainer(row, "touch started; sleep 1000") as process:
        assert comes_true(lambda: started(state))
        process.send_signal(signal.SIGKILL)
        assert comes_true(lambda: not list((state / "containers").iterdir()))


def test_a_container_that_cannot_start_drops_the_trajectory(state: Path) -> None:
    task_in(state / "tasks" / "a", {}, TOML)
    (row,) = rows(folder=str(state / "tasks"), runtime="docker")
    (state / "containers").rmdir()
    (state / "containers").touch()
    with pytest.raises(RolloutError, match=r"(?s)docker cannot start a container: .*NotADirectoryError"):
        play(row, "true", Verifier(network="allow"))


def answer(server: socket.socket, data: bytes) -> None:
    with server.accept()[0] as connection:
        connection.sendall(data)


def test_the_relay_leads_from_a_network_namespace_to_the_endpoint() -> None:
    words = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("this system has no user namespaces")
    with socket.create_server(("127.0.0.1", 0)) as server, subprocess.Popen([*words, "sleep", "1000"]) as inside:
        try:
            own = Path("/proc/self/ns/net").readlink()
            assert comes_true(lambda: Path(f"/proc/{inside.pid}/ns/net").readlink() != own)
            threading.Thread(target=answer, args=[server, b"from outside"], daemon=True).start()
            port = str(server.getsockname()[1])
            command = [*RELAY_COMMAND, str(inside.pid), port]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as relay:
                assert relay.stdout.readline() == b"ready\n"
                program = f"import socket; print(socket.create_connection(('127.0.0.1', {port})).recv(99))"
                enter = ["nsenter", "--user", "--net", "--preserve-credentials", "--target", str(inside.pid)]
                assert b"from outside" in subprocess.check_output([*enter, sys.executable, "-c", program])
        finally:
            inside.kill()


@pytest.mark.extra
def test_sandboxes_of_a_service_run_an_agent_that_reaches_the_endpoint(tmp_path: Path) -> None:
    pytest.importorskip("swerex", reason="needs the package swe-rex: pip install swe-rex aiohttp")
    if os.getuid() != 0:
        pytest.skip("its server on this machine needs root")
    task_in(tmp_path / "tasks" / "a", {})
    (row,) = rows(folder=str(tmp_path / "tasks"), runtime="examples.agent.rex_sandboxes.OwnSandboxes")
    agent = "import os, socket, urllib.parse as u; url = u.urlsplit(os.environ['OPENAI_BASE_URL']); "
    agent += "print(socket.create_connection((url.hostname, url.port)).recv(9).decode())"
    verifier = Verifier(network="allow")
    command = verifier.command(["sh", "-c", f'python3 -c "{agent}" | tee answer'], verifier.start_agent)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, args=[server, b"42"], daemon=True).start()
        prompt = Prompt("a", messages=[], fields=row)
        result = asyncio.run(command.run(prompt, f"http://127.0.0.1:{server.getsockname()[1]}/v1", "key"))
    assert result.output == "42\n"
    assert asyncio.run(verifier.reward(prompt, str(result.workspace)))[0] == 1
    assert not Path("/app").exists()
    with pytest.raises(RolloutError, match="stopped by its time limit"):
        play({**row, "agent_timeout_s": 1}, "sleep 1000", verifier)


def use_runtime(name: str, folder: Path, patch: pytest.MonkeyPatch) -> str:
    """Prepares the real runtime, and skips the test if it is missing; returns busybox, which makes an image."""
    program = shutil.which("busybox")
    if program is None or subprocess.run(["ldd", program], capture_output=True).returncode == 0:
        pytest.skip("needs a static busybox: apt-get install busybox-static")
    if shutil.which("runc") is not None:  # in a container without cgroups of version 2, crun refuses to start
        (folder / "containers.conf").write_text('[engine]\nruntime = "runc"\n')
        patch.setenv("CONTAINERS_CONF", str(folder / "containers.conf"))
    patch.setenv("BUILDAH_ISOLATION", "chroot")
    runtime_of.cache_clear()
    if missing := runtime_of(name).missing():
        pytest.skip(missing)
    return program


@pytest.fixture(params=["podman", "docker"])
def busybox(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The row of a task whose image is made of busybox alone, since no registry of images is needed for it."""
    program = use_runtime(request.param, tmp_path, monkeypatch)
    dockerfile = f"{BUSYBOX}ENV PATH=/bin COLORS=3 ROOT=\nWORKDIR /srv/app\nRUN touch old\n"
    task = task_in(tmp_path / "tasks" / "a", {"environment/Dockerfile": dockerfile, "tests/test.sh": TEST})
    shutil.copy2(program, task.folder / "environment" / "busybox")
    (row,) = rows(folder=str(tmp_path / "tasks"), runtime=request.param)
    return row


def of_process(row: dict[str, Any], mark: str) -> bool:
    """Whether a process with this mark, or its start, has containers."""
    labels = subprocess.check_output([row["runtime"], "ps", "-a", "--format", "{{.Labels}}"], text=True)
    return re.search(rf"lightrl-owner[=:]{mark}", labels) is not None


@pytest.mark.extra
def test_a_real_container_reaches_the_endpoint_alone_and_its_tests_count(busybox: dict[str, Any]) -> None:
    verifier = Verifier()
    agent = f"wget -qO- $OPENAI_BASE_URL/x; {WORK}; ln -s /etc/passwd link; ls /proc/sys/net/ipv4/conf"
    command = verifier.command(["sh", "-c", agent], verifier.start_agent)
    assert command.network == "none"
    with socket.create_server(("127.0.0.1", 0)) as server:
        response = b"HTTP/1.0 200 OK\r\n\r\nfrom outside\n"
        threading.Thread(target=answer, args=[server, response], daemon=True).start()
        prompt = Prompt("a", messages=[], fields=busybox)
        result = asyncio.run(command.run(prompt, f"http://127.0.0.1:{server.getsockname()[1]}/v1", "key"))
    assert result.output == "from outside\nall\ndefault\nlo\n"
    assert asyncio.run(verifier.reward(prompt, str(result.workspace)))[0] == 1
    assert not of_process(busybox, own_mark())


@pytest.mark.extra
@pytest.mark.parametrize(
    "agent",
    [
        pytest.param("true", id="does nothing"),
        pytest.param("mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt", id="writes the reward"),
        pytest.param("(while true; do echo 1 >/logs/verifier/reward.txt; done) &", id="leaves a process"),
        pytest.param("mkdir /tests; echo 'echo 1 >/logs/verifier/reward.txt' >/tests/test.sh", id="brings tests"),
        pytest.param("cp /bin/busybox /bin/new; rm /bin/cat; echo 'echo 42' >/bin/cat", id="replaces programs"),
        pytest.param(f"{WORK}; cd ..; mv app old; ln -s old app", id="makes its folder a link"),
        pytest.param("mkdir -p $(printf 'd/%.0s' $(seq 1500))", id="nests folders"),
    ],
)
def test_an_attack_in_a_real_container_earns_nothing(agent: str, busybox: dict[str, Any]) -> None:
    (reward, _), output = play(busybox, f"{agent}\necho attacked $?", shell="sh")
    assert output.endswith("attacked 0\n")
    assert reward == 0
    assert not of_process(busybox, own_mark())


@pytest.mark.extra
def test_a_killed_trainer_leaves_no_real_container(busybox: dict[str, Any]) -> None:
    with trainer(busybox, "touch started; sleep 1000") as process:
        assert comes_true(lambda: of_process(busybox, f"{process.pid}-"))
        process.send_signal(signal.SIGKILL)
        assert comes_true(lambda: not of_process(busybox, f"{process.pid}-"))
