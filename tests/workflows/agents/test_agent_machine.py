# ruff: noqa: E501
"""Ordinary commands give an agent what they give outside: the same output, the same errors, the same exit code."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightrl.rewards.sandbox import GUARD_COMMAND, remove_folder
from lightrl.trajectory import Prompt
from lightrl.workflows.agent_workflow import AgentLimits
from lightrl.workflows.agent_workflow.command import AgentCommand

PATH = "/usr/local/bin:/usr/bin:/bin"
PYTHON = shutil.which("python3", path=PATH) or ""

# Writes a wheel of one module, as no package index is to be reached.
WHEEL = """python3 - <<'END'
import zipfile
with zipfile.ZipFile("tiny-1.0-py3-none-any.whl", "w") as wheel:
    wheel.writestr("tiny.py", "word = 'tiny'\\n")
    wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n")
    wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    wheel.writestr("tiny-1.0.dist-info/RECORD", "")
END
"""
GIT = "git init -q -b main . && git config user.name A && git config user.email a@b.c && echo one > f && git add f && "
GIT += "git commit -qm first && "
PIP = "--no-index --no-deps --disable-pip-version-check --root-user-action=ignore -q tiny-1.0-py3-none-any.whl"
SERVER = "python3 -m http.server --bind 127.0.0.1 PORT > log 2>&1 & trap 'kill %1' EXIT; echo served > f; "
SERVER += "curl -s --retry 600 --retry-delay 1 --retry-connrefused http://127.0.0.1:PORT/ > /dev/null; "

# name → the programs that it needs, the command
TABLE = {
    "git commit": ("git", GIT + "git log --format=%s && git status --short && cat .git/HEAD"),
    "git clone": ("git", GIT + "git clone -q . copy && git -C copy log --format=%s"),
    "git diff": ("git", GIT + "echo two >> f && git diff --stat && git stash -q && cat f && git stash pop -q && cat f"),
    "git branch": ("git", GIT + "git switch -qc side && echo x > g && git add g && git commit -qm g && git merge-base main side"
                   " > base && git diff --name-only main"),
    "git config": ("git", "git config --global a.b c && git config a.b && git config --global --list"),
    "tar": ("tar", "mkdir d && echo a > d/f && tar czf d.tgz d && rm -r d && tar xzvf d.tgz && cat d/f"),
    "tar through a pipe": ("tar", "mkdir d e && echo a > d/f && tar cf - d | tar xf - -C e && cat e/d/f"),
    "make": ("make", r"printf 'all: a\na:\n\techo made > a\n' > Makefile && make && make && cat a"),
    "gcc": ("gcc", "echo 'int main(void) { return 7; }' > a.c && gcc -o a a.c; ./a"),
    "g++": ("g++", "printf '#include <iostream>\nint main() { std::cout << 7; }' > a.cc && g++ -o a a.cc && ./a"),
    "a local wheel": ("python3 pip3", WHEEL + f"python3 -m pip install --target lib {PIP} && PYTHONPATH=lib python3 -c"
                      " 'import tiny; print(tiny.word)'"),
    "python -m venv": ("python3 pip3", WHEEL + f"python3 -m venv v && v/bin/python -m pip install {PIP} &&"
                       " v/bin/python -c 'import tiny; print(tiny.word)'"),
    "unittest": ("python3", "printf 'import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertTrue(0)\n'"
                 " > test_a.py && python3 -m unittest 2>&1 | sed '/^Ran/d'"),
    "python's user": ("python3", "python3 -c 'import getpass, os, pwd; me = pwd.getpwuid(os.getuid()); print(me.pw_name =="
                      " getpass.getuser(), os.path.expanduser(\"~\") == os.environ[\"HOME\"])'"),
    "python's semaphores": ("python3", "python3 -c 'import multiprocessing as m; print(m.Pool(2).map(abs, [-1, -2]))'"),
    "python's temporary files": ("python3", "python3 -c 'import tempfile as t; f = t.NamedTemporaryFile(); print(f.write(b\"a\"))'"),
    "python's sqlite": ("python3", "python3 -c 'import sqlite3; print(sqlite3.connect(\"a.db\").execute(\"select 7\").fetchall())'"),
    "python's mimetypes": ("python3", "python3 -c 'import mimetypes; print(mimetypes.guess_type(\"a.docx\"))'"),
    "python's certificates": ("python3", "python3 -c 'import ssl; print(len(ssl.create_default_context().get_ca_certs()) > 0)'"),
    "node's user": ("node", "node -e 'const os = require(\"os\"); console.log(os.userInfo().username.length > 0,"
                    " os.userInfo().homedir == os.homedir() || process.getuid() == 0, os.tmpdir())'"),
    "node's files": ("node", "node -e 'const fs = require(\"fs\"); fs.writeFileSync(\"a\", \"b\"); console.log(fs.readdirSync(\".\"))'"),
    "node's server": ("node", "node -e 'const h = require(\"http\"); const s = h.createServer((q, r) => r.end(\"hi\"));"
                      " s.listen(0, \"127.0.0.1\", () => h.get({port: s.address().port, host: \"127.0.0.1\"}, r =>"
                      " r.on(\"data\", d => { console.log(String(d)); process.exit() })))'"),
    "npm": ("npm", "export npm_config_update_notifier=false; npm init -y > /dev/null && npm pkg get version"),
    "tmux": ("tmux", "t='tmux -L lightrl'; $t new -d 'echo ran > f; tmux -L lightrl wait -S made; sleep 600' && $t wait made &&"
             " cat f && $t kill-server"),
    "sqlite": ("sqlite3", "sqlite3 a.db 'create table t(a); insert into t values (7); select * from t'"),
    "a login shell": ("bash", "PATH=$PATH bash -lc 'echo hi; pwd | wc -l'"),
    "an interactive shell": ("bash script", "script -qec \"bash -ic 'echo hi'\" /dev/null | tr -d '\\r' | tail -1"),
    "whoami": ("whoami id", "test \"$(whoami)\" = \"$(id -un)\" && getent passwd \"$(whoami)\" | cut -d: -f3 | grep -cx \"$(id -u)\""),
    "a fixed path in /tmp": ("cat", "echo a > /tmp/lightrl-fixed && cat /tmp/lightrl-fixed && rm /tmp/lightrl-fixed && test -k /tmp"),
    "mktemp": ("mktemp", "f=$(mktemp) && echo a > $f && cat $f && rm $f; mktemp -d -p /var/tmp | wc -l"),
    "names of hosts": ("getent", "getent hosts localhost | wc -l; getent hosts \"$(hostname)\" | wc -l"),
    "modes": ("stat", "mkdir d && echo a > f && ln -s f l && stat -c '%n %A %F' d f l"),
    "process substitution": ("bash", "diff <(printf 'a\n') <(printf 'b\n')"),
    "gzip and xz": ("gzip xz", "seq 1000 > f && gzip -k f && gunzip -c f.gz | cmp - f && xz -k f && xz -dc f.xz | tail -1"),
    "perl": ("perl", "perl -MFile::Temp=tempfile -e 'my ($f, $n) = tempfile(); print -e $n ? \"made\\n\" : \"no\\n\"'"),
    "curl of a local server": ("python3 curl", SERVER + "curl -sS http://127.0.0.1:PORT/f"),
    "openssl": ("openssl", "openssl version -d && openssl rand 8 | wc -c && printf a | openssl sha256"),
    "ssh-keygen": ("ssh-keygen", "ssh-keygen -q -t ed25519 -N '' -f key -C me && cut -d' ' -f3 key.pub"),
    "time zones": ("date", "date -u -d @0 && TZ=Europe/Berlin date -d @0 && date -d @0 +%Z"),
    "signals": ("bash", "sleep 600 & kill $! ; wait $!; echo $?; trap 'echo caught' TERM; kill $$; timeout 0.1 sleep 600"),
    "processes": ("ps", "sleep 600 & ps -o comm= -p $! ; kill $!"),
    "locks": ("flock", "flock -n f true && flock f sh -c 'flock -n f true || echo locked'"),
    "file": ("file", "echo a > f && file f && file -L --mime-type /bin/sh | grep -c executable"),
    "devices": ("head", "head -c 3 /dev/zero | wc -c; echo a > /dev/null; echo a > /dev/full; echo a > /dev/stderr"),
}  # fmt: skip
# What an agent has not where namespaces are refused: a name and a host's name, a /tmp, shared memory, other processes.
NEEDS_VIEW = {"python's user", "node's user", "tmux", "whoami", "a fixed path in /tmp", "mktemp", "python's semaphores",
              "processes", "names of hosts", "ssh-keygen", "node's server", "curl of a local server"}  # fmt: skip
SLOW = {"a local wheel", "python -m venv", "npm", "g++", "node's files"}  # as fast as this machine's processor

# Runs the table in the current folder; prints the results.
RUN = """
import json, os, subprocess, sys
folder, results = os.getcwd(), {}
for name, command in json.loads(open(sys.argv[1]).read()).items():
    os.makedirs(name.replace("/", " "))
    os.chdir(name.replace("/", " "))
    done = subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    texts = [text.replace(os.getcwd(), "HERE").replace(os.environ["HOME"], "HOME") for text in (done.stdout, done.stderr)]
    results[name] = [done.returncode, *texts]
    os.chdir(folder)
open("results.json", "w").write(json.dumps(results))
"""


def installed() -> dict[str, str]:
    """The commands whose programs are there; each server gets a port of its own."""
    found = {name: command for name, (programs, command) in TABLE.items() if not missing(programs)}
    return {name: command.replace("PORT", str(20000 + os.getpid() % 20000)) for name, command in found.items()}


def missing(programs: str) -> list[str]:
    return [program for program in programs.split() if shutil.which(program, path=PATH) is None]


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("outside")
    (folder / "home").mkdir()
    (folder / "table.json").write_text(json.dumps(installed()))
    environment = {"PATH": PATH, "HOME": str(folder / "home"), "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
    subprocess.run([PYTHON, "-c", RUN, "table.json"], cwd=folder, env=environment, check=True, umask=0o022)
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


def run_inside(
    become: Sequence[str] = (), layers: list[str] | None = None, left_out: Collection[str] = ()
) -> dict[str, Any]:
    """Runs the table as an agent; returns the guard's reply with the results."""
    commands = {name: command for name, command in installed().items() if name not in left_out}
    root = Path(tempfile.mkdtemp(prefix="lightrl-table-"))
    try:
        root.chmod(0o777)
        (root / "template").mkdir()
        (root / "template" / "table.json").write_text(json.dumps(commands))
        words = [PYTHON, "-c", RUN, "table.json"]
        command = AgentCommand(words, str(root / "template"), {"PATH": PATH}, (), "none", AgentLimits(), 600.0, str)
        prompt = Prompt("a", messages=[{"role": "user", "content": "task"}])
        request = command.request_of(f"{root}/agent/work", prompt, "http://127.0.0.1:40001/v1", "key")
        request["layers"] = layers or request["layers"]
        guard = [*become, PYTHON, *GUARD_COMMAND[1:], "lightrl-sandbox-"]
        with subprocess.Popen(guard, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
            running.stdin.write(json.dumps(request) + "\n")
            running.stdin.flush()  # open until the reply, as the guard ends with it
            reply: dict[str, Any] = json.loads(running.stdout.readline())
        assert (reply["exit_code"], reply["problem"]) == (0, None), reply
        reply["results"] = json.loads((root / "agent" / "work" / "results.json").read_text())
        return reply
    finally:
        remove_folder(str(root))


@pytest.fixture(scope="module")
def inside() -> dict[str, Any]:
    reply = run_inside()
    if "view" not in reply["layers"]:
        pytest.skip(f"this system refuses mounts: {reply['layers']}")
    return reply


@pytest.mark.parametrize("name", TABLE)
def test_a_command_gives_the_same_inside_and_outside(
    name: str, inside: dict[str, Any], outside: dict[str, Any]
) -> None:
    if lacking := missing(TABLE[name][0]):
        pytest.skip(f"{', '.join(lacking)} is not installed")
    assert inside["results"][name] == outside[name]


def test_an_ordinary_user_has_the_same_machine(outside: dict[str, Any]) -> None:
    become = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    able = (
        os.getuid() == 0
        and shutil.which("setpriv")
        and subprocess.run([*become, "unshare", "-Urm", "true"], check=False)
    )
    if not able or able.returncode != 0:
        pytest.skip("this process is no root, or its users may make no namespaces")
    reply = run_inside(become, left_out=SLOW)
    if "view" not in reply["layers"]:
        pytest.skip(f"this system refuses mounts: {reply['layers']}")
    assert reply["results"] == {name: result for name, result in outside.items() if name in reply["results"]}


def test_without_namespaces_only_what_needs_them_is_missing(outside: dict[str, Any]) -> None:
    reply = run_inside(layers=["private_user", "landlock"], left_out=SLOW | NEEDS_VIEW)
    assert reply["results"] == {name: result for name, result in outside.items() if name in reply["results"]}
