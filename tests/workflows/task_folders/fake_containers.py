"""A program that stands for docker or podman: containers are folders, and programs in them not contained.

`FAKE_CONTAINERS` is its state: `calls` has its command lines, `images` and `containers` what they made. In a container,
paths like /tests are below the variable `ROOT`.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

STATE = Path(os.environ["FAKE_CONTAINERS"])
PATHS = re.compile(r"(?<![\w./])/(tests|logs|app|solution|tmp/lightrl-agents-[\w-]+)\b")


def end(folder: Path) -> None:
    for file in folder.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(file.stem), signal.SIGKILL)


def start(name: str) -> None:
    (STATE / "containers" / name / "root" / "app").mkdir(parents=True)


def execute(name: str, cwd: str, words: list[str]) -> int:
    folder = STATE / "containers" / name
    root = str(folder / "root")
    inside = [word if number == 0 else PATHS.sub(rf"{root}/\1", word) for number, word in enumerate(words)]
    with (folder / f"{os.getpid()}.out").open("w+b") as out:  # what the program leaves running does not hold our output
        program = subprocess.Popen(
            inside, cwd=root + cwd, env={"PATH": "/usr/bin:/bin", "ROOT": root}, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
        (folder / f"{program.pid}.pid").touch()
        code = program.wait()
        out.seek(0)
        shutil.copyfileobj(out, sys.stdout.buffer)
    return code


def main(words: list[str]) -> int:
    with (STATE / "calls").open("a") as calls:
        calls.write(" ".join(words) + "\n")
    if words[:2] == ["image", "inspect"]:
        return 0 if (STATE / "images" / words[2].replace("/", "_")).exists() else 1
    if words[0] in ("build", "pull"):
        (STATE / "images" / (words[2] if words[0] == "build" else words[1]).replace("/", "_")).touch()
    elif words[0] == "info":
        sys.stdout.write(("Cgroup Driver: none\n rootless", "cgroupVersion: v1\nrootless: true")["podman" in __file__])
    elif words[0] == "run":
        start(words[words.index("--name") + 1])
    elif words[0] == "exec":
        words = [word for word in words[1:] if word != "--interactive"]
        cwd, words = (words[1], words[2:]) if words[0] == "--workdir" else ("/", words)
        return execute(words[0], cwd, words[1:])
    elif words[:2] == ["cp", "-"]:
        name, _, path = words[2].partition(":")
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
            tar.extractall(f"{STATE}/containers/{name}/root{path}", filter="fully_trusted")
    elif words[0] == "cp":
        name, _, path = words[1].partition(":")
        if (
            made := Path(f"{STATE}/containers/{name}/root{path}/archive.tar")
        ).exists():  # as a broken program may write
            sys.stdout.buffer.write(made.read_bytes())
            return 0
        with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
            tar.add(f"{STATE}/containers/{name}/root{path}", Path(path).name)
    elif words[0] == "inspect":  # the size of what a container wrote
        files = (STATE / "containers" / words[-1]).glob("root/app/endless")
        sys.stdout.write(str(sum(file.stat().st_size for file in files)))
    elif words[0] in ("kill", "rm"):
        end(STATE / "containers" / words[-1])
        if words[0] == "rm":
            shutil.rmtree(STATE / "containers" / words[-1], ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
