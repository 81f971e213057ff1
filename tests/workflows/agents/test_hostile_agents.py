"""Hostile programs as agents: what readable, /tmp, the named user, the proxy and secrets open, and nothing more."""

import asyncio
import contextlib
import ctypes
import errno
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest

from lightrl.errors import RolloutError
from lightrl.rewards.sandbox.guard import network
from lightrl.rewards.sandbox.guard.network import Proxy, split_host
from lightrl.trajectory import Prompt
from lightrl.workflows.agent_workflow import AgentLimits
from lightrl.workflows.agent_workflow.command import (
    AgentCommand,
    AgentFailed,
    check_command,
    delete_workspace,
    run_under_guard,
)

TASK = Prompt("a", messages=[{"role": "user", "content": "6*7?"}])
TRY = """
import ctypes, os, socket, subprocess, sys
def attempt(name, action):
    try:
        print(name, "done", action())
    except Exception as error:
        print(name, "no")
"""


def command_of(program: str, *arguments: str, **settings: Any) -> AgentCommand:
    values: dict[str, Any] = {"readable": (), "network": "none", "limits": AgentLimits(), "environment": {}, **settings}
    words = [sys.executable, "-c", TRY + program, *arguments]
    return AgentCommand(words, None, timeout_s=600.0, decode=str, **values)


def run(command: AgentCommand, prompt: Prompt = TASK) -> str:
    with socket.create_server(("127.0.0.1", 0)) as endpoint:
        url = f"http://127.0.0.1:{endpoint.getsockname()[1]}/v1"
        try:
            result = asyncio.run(command.run(prompt, url, "key"))
        except AgentFailed as error:
            delete_workspace(error.result.workspace)
            raise
    delete_workspace(result.workspace)
    return result.output


def run_in_view(program: str, *arguments: str, **settings: Any) -> str:
    command = command_of(program, *arguments, **settings)
    output = run(command)
    if "view" not in (command.layers or []) or "landlock" not in (command.layers or []):
        pytest.skip(f"this system has no view or no Landlock: {command.layers}")
    return output


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """A readable folder `open` beside a key, with links to it and to the system's files."""
    (tmp_path / "key").write_text("secret")
    (tmp_path / "open" / "in").mkdir(parents=True)
    (tmp_path / "open" / "file").write_text("public")
    for name, target in {"link": "../key", "shadow": "/etc/shadow", "up": "..", "in/root": "/"}.items():
        (tmp_path / "open" / name).symlink_to(target)
    yield tmp_path
    for folder in (tmp_path, tmp_path / "open"):
        folder.chmod(0o700)


@pytest.mark.parametrize("mode", [0o755, 0o700], ids=["public", "of this user alone"])
def test_a_readable_folder_opens_neither_what_its_links_lead_to_nor_what_is_beside_it(folders: Path, mode: int) -> None:
    folders.chmod(mode)
    program = f"""
os.chdir({str(folders / "open")!r})
attempt("file", lambda: open("file").read())
for path in ("link", "shadow", "up/key", "in/root/etc/shadow", "../key", {str(folders / "key")!r}, "/etc/shadow"):
    attempt(path, lambda: open(path, "rb").read())
attempt("write", lambda: open("new", "w"))
attempt("change", lambda: open("file", "a"))
attempt("remove", lambda: os.remove("file"))
attempt("link out", lambda: os.link("file", os.environ["TMPDIR"] + "/file"))
attempt("mode", lambda: os.chmod("file", 0o777))
"""
    output = run_in_view(program, readable=[str(folders / "open")]).splitlines()
    assert output[0] == "file done public"
    assert [line.rpartition(" ")[2] for line in output[1:]] == ["no"] * 12
    assert (folders / "open" / "file").read_text() == "public"


def test_a_file_handle_opens_no_file_that_a_path_does_not(folders: Path) -> None:
    libc, num_bytes = ctypes.CDLL(None, use_errno=True), 128
    handle = ctypes.create_string_buffer(num_bytes.to_bytes(4, sys.byteorder), 8 + num_bytes)
    path = os.fsencode(folders / "key")
    if libc.name_to_handle_at(-100, path, handle, ctypes.byref(ctypes.c_int()), 0) != 0:
        pytest.skip("this file system has no handles")
    folders.chmod(0o700)  # so that the program, whose readable folder lies in it, gets the right to read all files
    program = f"""
libc, handle = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer({handle.raw!r})
for folder in (".", "/usr", "/tmp", {str(folders / "open")!r}):
    number = os.open(folder, os.O_RDONLY)
    attempt(folder, lambda: os.read(libc.open_by_handle_at(number, handle, os.O_RDONLY), 100))
"""
    output = run_in_view(program, readable=[str(folders / "open")]).splitlines()
    assert [line.rpartition(" ")[2] for line in output] == ["no"] * 4


def test_the_tmp_of_an_agent_is_its_own(folders: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="lightrl-test-", dir="/tmp") as shared:
        Path(shared).chmod(0o777)
        Path(shared, "key").write_text("secret")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{shared}/socket")
            server.listen()
            Path(shared, "socket").chmod(0o777)
            program = f"""
attempt("read", lambda: open({shared + "/key"!r}).read())
attempt("connect", lambda: socket.socket(socket.AF_UNIX).connect({shared + "/socket"!r}))
attempt("list", lambda: {Path(shared).name!r} in os.listdir("/tmp") or 1 / 0)
os.makedirs({shared!r})
os.symlink({str(folders / "key")!r}, {shared + "/link"!r})
open({shared + "/mine"!r}, "w").write("agent")
attempt("follow", lambda: open({shared + "/link"!r}).read())
"""
            output = run_in_view(program)
        assert output.split() == ["read", "no", "connect", "no", "list", "no", "follow", "no"]
        assert sorted(path.name for path in Path(shared).iterdir()) == ["key", "socket"]


def test_a_script_in_tmp_opens_no_other_file_there() -> None:
    with tempfile.TemporaryDirectory(prefix="lightrl-test-", dir="/tmp") as folder:
        key, script = Path(f"{folder}.key"), Path(f"{folder}.py")
        try:
            key.write_text("secret")
            program = f"attempt('read', lambda: open({str(key)!r}).read())\nopen({str(key)!r}, 'w').write('mine')\n"
            script.write_text(f"#!{sys.executable}\n{TRY}\n{program}attempt('change', lambda: open(__file__, 'a'))")
            script.chmod(0o777)
            command = AgentCommand([str(script)], None, {}, (), "none", AgentLimits(), 600.0, str)
            output = run(command)
            if "view" not in (command.layers or []):
                pytest.skip(f"this system has no view: {command.layers}")
            assert output.split() == ["read", "no", "change", "no"]
            assert key.read_text() == "secret"
        finally:
            key.unlink()
            script.unlink()


def test_a_folder_moved_while_an_agent_is_in_it_leads_nowhere() -> None:
    program = """
work = os.getcwd()
os.makedirs("/tmp/a/b")
os.chdir("/tmp/a/b")
os.rename(work + "/../tmp/a", work + "/a")  # through the folder's other mount: the current folder leaves /tmp's
attempt("shadow", lambda: open("../../../../../../../../../../../../etc/shadow").read())
attempt("list", lambda: [name for name in os.listdir("../../../..") if "lightrl" in name][0])
"""
    assert run_in_view(program).split() == ["shadow", "no", "list", "no"]


def test_a_strict_umask_of_the_trainer_closes_neither_etc_nor_a_readable_folder() -> None:
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("this system has no python3 that every user may read")
    program = (
        TRY
        + """
import pwd
attempt("name", lambda: pwd.getpwuid(os.getuid()).pw_name == os.environ["USER"])
attempt("file", lambda: open(sys.argv[1]).read())
open("new", "w")
attempt("mode", lambda: oct(os.stat("new").st_mode))
"""
    )
    with tempfile.TemporaryDirectory(prefix="lightrl-test-", dir="/tmp") as folder:
        file = Path(folder, "a", "b", "file")  # where every user may read it
        file.parent.mkdir(parents=True)
        file.write_text("public")
        for path in (*file.parents[:3], file):
            path.chmod(0o755)
        words = [python, "-c", program, str(file)]
        environment = {"PATH": "/usr/bin:/bin"}
        command = AgentCommand(words, None, environment, [str(file.parent)], "none", AgentLimits(), 600.0, str)
        before = os.umask(0o077)
        try:
            output = run(command)
        finally:
            os.umask(before)
    if "view" not in (command.layers or []):
        pytest.skip(f"this system has no view: {command.layers}")
    assert output.splitlines() == ["name done True", "file done public", "mode done 0o100644"]


def test_the_named_user_stays_without_rights() -> None:
    program = """
attempt("passwd", lambda: open("/etc/passwd", "a"))
attempt("replace", lambda: os.rename("/etc/passwd", "/etc/old"))
attempt("root", lambda: os.setuid(0))
attempt("su", lambda: subprocess.run(["su", "-c", "id"], check=True, capture_output=True, stdin=subprocess.DEVNULL))
open("shell", "wb").write(open("/bin/sh", "rb").read())
os.chmod("shell", 0o4777)
attempt("setuid", lambda: 0 / (b"uid=0(" in subprocess.run(["./shell", "-pc", "id"], capture_output=True).stdout))
libc = ctypes.CDLL(None, use_errno=True)
libc.unshare(0x10000000 | 0x00020000)  # a user and a mount namespace, in which it has all capabilities
for path in (b"/tmp", b"/etc", b"/run", b"/dev/shm"):
    attempt("unmount", lambda: 1 / (libc.umount2(path, 2) == 0))
attempt("remount", lambda: 1 / (libc.mount(b"", b"/etc", None, 0x1020, b"") == 0))
attempt("mount", lambda: 1 / (libc.mount(b"none", b"/tmp", b"tmpfs", 0, b"") == 0))
attempt("shadow", lambda: open("/etc/shadow").read())
"""
    assert set(run_in_view(program).split()[1::2]) == {"no"}


@contextlib.contextmanager
def a_server(answer: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi") -> Iterator[tuple[int, list[bytes]]]:
    """Answers each connection on a port of 127.0.0.1, and keeps what it received."""
    received: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    received.append(connection.recv(1 << 16))
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1], received
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


REQUESTS = """
import json
port, other = sys.argv[1:]
proxy = os.environ["HTTP_PROXY"].rpartition(":")[2]
def ask(text, then=""):
    with socket.create_connection(("127.0.0.1", int(proxy))) as connection:
        connection.sendall(text.replace("PORT", port).replace("OTHER", other).encode("latin-1"))
        answer = connection.makefile("rb")
        status = answer.readline().decode().split()
        if then and status[1] == "200":
            while answer.readline().strip():
                pass
            connection.sendall(then.encode())
            status += [answer.readline().decode().strip()]
        return status[1:2] + status[4:]
get = "GET http://localhost:%s/ HTTP/1.1\\r\\nHost: elsewhere\\r\\n\\r\\n"
print(ask("CONNECT localhost:PORT HTTP/1.1\\r\\n\\r\\n", "GET / HTTP/1.1\\r\\n\\r\\n"))
print(ask(get % "PORT"))
for refused in (
    get % "OTHER", "CONNECT localhost:OTHER HTTP/1.1\\r\\n\\r\\n", "CONNECT 127.0.0.1:PORT HTTP/1.1\\r\\n\\r\\n",
    "CONNECT [::1]:PORT HTTP/1.1\\r\\n\\r\\n", "CONNECT 2130706433:PORT HTTP/1.1\\r\\n\\r\\n",
    "CONNECT localhost@127.0.0.1:OTHER HTTP/1.1\\r\\n\\r\\n",
    "GET http://localhost:PORT@127.0.0.1:OTHER/ HTTP/1.1\\r\\n\\r\\n",
    "GET file:///etc/shadow HTTP/1.1\\r\\n\\r\\n", "GET / HTTP/1.1\\r\\nHost: localhost:PORT\\r\\n\\r\\n",
    "CONNECT localhost:99999 HTTP/1.1\\r\\n\\r\\n", "CONNECT localhost HTTP/1.1\\r\\n\\r\\n", "nonsense\\r\\n\\r\\n",
    "CONNECT localhost.elsewhere:PORT HTTP/1.1\\r\\n\\r\\n", "CONNECT xlocalhost:PORT HTTP/1.1\\r\\n\\r\\n",
):
    print(ask(refused))
for target in (("127.0.0.1", int(other)), ("127.0.0.1", int(port)), ("192.0.2.1", 80)):
    attempt("direct", lambda: socket.create_connection(target, timeout=5))
attempt("name", lambda: socket.getaddrinfo("example.com", 80))
"""


def test_the_proxy_reaches_the_allowed_host_and_port_and_nothing_else() -> None:
    with a_server() as (port, received), a_server() as (other, untouched):
        output = run_in_view(REQUESTS, str(port), str(other), network=[f"localhost:{port}"])
        tunnel, plain, *lines = output.splitlines()
        assert (tunnel, plain) == ("['200', 'HTTP/1.1 200 OK']", "['200']")
        assert [line[:6] for line in lines[:14]] == ["['403'"] * 14
        assert lines[14:] == ["direct no", "direct no", "direct no", "name no"]
    assert untouched == []
    assert received[1] == f"GET / HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\r\n".encode()


def test_a_program_that_knows_only_the_usual_variables_uses_the_proxy() -> None:
    with a_server() as (port, _):
        program = "import urllib.request; print(urllib.request.urlopen(sys.argv[1]).read())"
        settings = {"network": [f"localhost:{port}"], "environment": {"no_proxy": "127.0.0.1"}}
        assert run_in_view(program, f"http://localhost:{port}/a", **settings) == "b'hi'\n"


def test_names_of_hosts_match_as_wholes_and_an_own_address_only_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = Proxy(["*.example.com", "pypi.org", "[::1]:8000"])
    for host, port in [("example.com", 443), ("aexample.com", 443), ("a.example.com", 22), ("pypi.org.evil", 80)]:
        with pytest.raises(PermissionError, match="not among the hosts"):
            proxy.connect(host, port)
    for address in ("127.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1", "0.0.0.0", "fe80::1"):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, found=address, **__: [(0, 0, 0, "", (found, 443))])
        with pytest.raises(PermissionError, match="resolves to this machine or a link-local address"):
            proxy.connect("a.example.com", 443)
    for text in ("http://pypi.org", "a b", "user@pypi.org", "pypi.org/simple", "", "*", "pypi.org:port"):
        with pytest.raises(ValueError, match=r"is not a host|port"):
            split_host(text)


def test_the_relay_outlives_a_lack_of_descriptors_and_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_server() as (port, _), socket.create_server(("127.0.0.1", 0)) as listener:
        problems = iter([OSError(errno.EMFILE, "too many open files"), None, None, SystemExit()])

        class Short:
            def accept(self) -> tuple[socket.socket, Any]:
                if (problem := next(problems)) is not None:
                    raise problem
                return listener.accept()

        class NoThread(threading.Thread):
            def start(self) -> None:
                monkeypatch.undo()
                raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading, "Thread", NoThread)

        def serve() -> None:
            with contextlib.suppress(SystemExit):
                network.serve(cast("socket.socket", Short()), lambda _: socket.create_connection(("127.0.0.1", port)))

        serving = Thread(target=serve)
        serving.start()
        for answer in (b"", b"HTTP/1.1 200 OK"):  # the first finds no thread
            with socket.create_connection(listener.getsockname()) as client:
                client.sendall(b"GET")
                client.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(15) == answer
        serving.join()


def test_the_connections_of_a_relay_fit_the_usual_limit_of_descriptors() -> None:
    num_listeners, num_of_connection, usual_limit = 2, 2, 1024
    assert num_listeners * num_of_connection * network.MAX_CONNECTIONS < usual_limit - 100


def test_hosts_are_refused_where_nothing_keeps_the_program_from_others() -> None:
    command = command_of("print('ran')", network=["pypi.org"])
    request = command.request_of(f"{tempfile.mkdtemp()}/agent/work", TASK, "http://127.0.0.1:40001/v1", "key")
    request["layers"] = ["private_user", "landlock"]
    with pytest.raises(OSError, match=r"network=\['pypi.org'\] needs a network namespace, which this system refuses"):
        asyncio.run(run_under_guard(request))


def test_with_allow_a_program_reaches_what_this_machine_reaches() -> None:
    with a_server() as (port, _):
        program = "import urllib.request; print(urllib.request.urlopen(sys.argv[1]).read())"
        assert run_in_view(program, f"http://127.0.0.1:{port}/", network="allow") == "b'hi'\n"


def test_a_secret_reaches_the_program_and_neither_its_output_nor_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTRL_TEST_KEY", "sk-0123456789abcdef")
    monkeypatch.setenv("LIGHTRL_TEST_OTHER", "not-asked-for")
    settings = {
        "environment": {"KEY": "{env:LIGHTRL_TEST_KEY}", "ROW": "{column}", "TEXT": "Bearer {env:LIGHTRL_TEST_KEY}"}
    }
    row = Prompt("a", messages=TASK.messages, fields={"column": "{env:LIGHTRL_TEST_OTHER}"})
    program = "print(len(os.environ['KEY']), os.environ['TEXT'], os.environ['ROW'])"
    output = run(command_of(program, **settings), row)
    assert output == "19 Bearer {env:LIGHTRL_TEST_KEY} {env:LIGHTRL_TEST_OTHER}\n"
    with pytest.raises(RolloutError) as failed:
        run(command_of("sys.exit(os.environ['KEY'])", **settings), row)
    assert "sk-0123" not in f"{failed.value!r} {failed.value.__cause__!r}"
    long = run(command_of("print('x' + os.environ['KEY'] * 5000, end='')", **settings), row)
    assert "0123456789abcdef" not in long.replace("{env:LIGHTRL_TEST_KEY}", "")
    assert "sk-0123" not in repr(command_of(program, **settings))


@pytest.mark.parametrize("num_filled", range(1, 40, 3))
def test_output_that_begins_within_a_secret_shows_no_part_of_it(
    num_filled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "sk-" + "0123456789" * 4
    monkeypatch.setenv("LIGHTRL_TEST_KEY", secret)
    command = command_of("", environment={"KEY": "{env:LIGHTRL_TEST_KEY}"})
    printed = secret * 5 + "x" * ((64 << 10) - 5 * len(secret) + num_filled)  # the guard keeps its last 64 KiB
    shown = command.without_secrets(printed[-(64 << 10) :])
    assert set(shown.replace("{env:LIGHTRL_TEST_KEY}", "")) == {"x"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"command": ["true", "{env:HOME}"]}, "other users can see it. Pass it in environment instead"),
        ({"environment": {"A": "{env:LIGHTRL_NO_SUCH}"}}, "environment has A: .*LIGHTRL_NO_SUCH is not set"),
        ({"readable": ["/no/such"]}, "readable must name existing files or folders, .* got '/no/such'"),
        ({"readable": ["/"]}, "readable must name existing files .* got '/'"),
        ({"readable": ["/usr/../tmp"]}, "readable must name existing files .* got '/usr/../tmp'"),
        ({"readable": ["~"]}, "readable has '~', which exposes your home folder. Name only"),
        ({"readable": ["~/../me/."]}, "which exposes your home folder"),
        ({"readable": ["~/.."]}, "which exposes your home folder"),
        ({"network": "some"}, "network must be none, allow or a list of hosts, got 'some'"),
        (
            {"network": ["https://pypi.org"]},
            "network must be none, allow or a list of hosts: 'https://pypi.org' is not a",
        ),
    ],
)
def test_settings_that_open_too_much_or_cannot_work_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "homes" / "me" / "code").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "homes" / "me")
    monkeypatch.setenv("HOME", str(tmp_path / "link"))
    values = {"command": ["true"], "template": None, "environment": {}, "readable": (), "network": "none", **settings}
    with pytest.raises(ValueError, match=message):
        check_command(**values)
    check_command(**{**values, "command": ["true"], "environment": {}, "readable": ["~/code"], "network": "none"})


@pytest.mark.parametrize(
    ("program", "limits", "message"),
    [
        ("data = bytearray(400 << 20)\nimport time; time.sleep(600)", {"memory_mib": 150},
         r"was stopped by its memory limit \(limits.memory_mib=150\)"),
        ("import time\nfor n in range(40): open(str(n), 'wb').write(bytes(1 << 20))\ntime.sleep(600)", {"disk_mib": 20},
         r"was stopped by its disk limit \(limits.disk_mib=20\)"),
        ("import time\nfiles = []\nfor n in range(40):\n    files.append(open('f', 'wb', 0)); os.unlink('f')\n"
         "    files[-1].write(bytes(1 << 20))\ntime.sleep(600)", {"disk_mib": 20}, "was stopped by its disk limit"),
        ("for n in range(150): os.mkdir('x' * 200); os.chdir('x' * 200)\nimport time; time.sleep(600)",
         {"disk_mib": 20}, "was stopped by its disk limit"),
        ("os.truncate(os.open('f', os.O_CREAT | os.O_RDWR), 30 << 20)", {"disk_mib": 20},  # takes no space on the disk
         "because a file reached limits.disk_mib=20"),
        ("for n in range(100):\n    if os.fork() == 0:\n        import time; time.sleep(600)", {"processes": 30},
         r"limits.processes=30"),
    ],
    ids=["memory", "files", "deleted files", "files too deep to be seen", "one file", "processes"],
)  # fmt: skip
def test_an_agent_beyond_a_limit_is_stopped_by_name(program: str, limits: dict[str, int], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        run(command_of(program, limits=AgentLimits(**limits)))


@pytest.mark.parametrize(("name", "is_program"), [("bin", False), (".", True), (".local/bin", True)])
def test_a_home_that_is_a_link_stays_closed(
    name: str, is_program: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, link = tmp_path / "disk" / "me", tmp_path / "me"
    (home / name).mkdir(parents=True)
    for keys in (".ssh", ".local/share"):
        (home / keys).mkdir(parents=True)
        (home / keys / "key").write_text("secret")
    link.symlink_to(home)
    script = link / name / "agent"
    script.write_text(
        f"#!{sys.executable}\n{TRY}"
        f"for path in ({str(home)!r}, {str(link)!r}):\n"
        "    for key in ('.ssh', '.local/share'):\n"
        "        attempt('read', lambda: open(f'{path}/{key}/key').read())\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("HOME", str(link))
    monkeypatch.setenv("PATH", f"{link / name}{os.pathsep}{os.environ['PATH']}")
    text = ["agent"] if is_program else [sys.executable, "-c", script.read_text()]
    command = AgentCommand(text, None, {}, (), "none", AgentLimits(), 600.0, str)
    assert run(command).split() == ["read", "no"] * 4
    request = command.request_of(f"{tmp_path}/agent/work", TASK, "http://127.0.0.1:1/v1", "key")
    opened = {os.path.realpath(path) for path in (*request["readable"], *request["needed"])}
    assert opened.isdisjoint({str(home), str(home / ".local")})
