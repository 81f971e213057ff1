"""The hostile programs of tests/rewards/test_sandbox.py as agents in a task's environment, in each runtime.

A few always run, in the sandbox of this machine; the others, and all in containers, are extras.
"""

import asyncio
import os
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from test_containers import BUSYBOX, use_runtime
from test_sandbox import (  # noqa: F401  # they run here with this module's `sandbox` and `namespaced`
    test_a_daemon_does_not_outlive_the_program,
    test_a_fork_bomb_stays_below_its_bound_and_dies,
    test_a_process_may_have_any_name,
    test_a_program_that_takes_too_much_is_stopped,
    test_files_outside_its_folder_cannot_be_changed,
    test_folders_within_folders_do_not_harm_the_guard,
    test_huge_files_and_many_files_are_refused,
    test_no_memory_is_held_outside_of_the_bound_for_all_processes,
    test_processor_time_is_bounded_apart_from_the_wall_clock,
    test_shared_memory_counts_where_there_is_a_cgroup_and_is_refused_elsewhere,
    test_signals_reach_nobody_outside,
    test_the_network_is_closed,
    test_the_next_run_finds_nothing_of_the_last,
    test_threads_count_as_processes,
)
from test_task_folders import URL, task_in

from lightrl.rewards.sandbox import Limits, Run, remove_folder
from lightrl.trajectory import Prompt
from lightrl.workflows.task_folders import Verifier, rows

ALWAYS = ("daemon", "files_outside", "network", "signals")
NOT_OF_AGENTS = {"prints": "an agent may print without end", "processor_time": "its deadline bounds it"}
NOT_OF_CONTAINERS = {"another thread": "the kernel kills one process at a time; those that fit go on"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "runtime" in metafunc.fixturenames:
        always = any(name in metafunc.function.__name__ for name in ALWAYS)
        runtimes = [pytest.param("local", marks=() if always else pytest.mark.extra)]
        runtimes += [pytest.param(name, marks=pytest.mark.extra) for name in ("podman", "docker")]
        metafunc.parametrize("runtime", runtimes, scope="module")


class InTask:
    """Runs a program as an agent in a task's environment; it is like a LocalSandbox."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.prompt = Prompt("a", messages=[], fields=row)
        self.verifier = Verifier()

    def run(self, program: str, stdin: str, limits: Limits, **others: int) -> Run:
        command = self.verifier.command([sys.executable, "-I", "-B"], self.verifier.start_agent)
        request = command.request_of(f"{command.root}/{secrets.token_hex(8)}/work", self.prompt, URL, "")
        request["command"] += ["-X", "utf8", "-X", "int_max_str_digits=0", f"{request['folder']}/program.py"]
        request["limits"] |= asdict(limits) | others
        request |= {"files": {"program.py": program}, "stdin": stdin, "layers": [*request["layers"], "cgroup"]}
        try:
            reply = asyncio.run(self.verifier.start_agent(request, self.prompt))
        except OSError as error:
            assert re.search("cannot be (checked|copied)", str(error))  # noqa: PT017  # it drops the trajectory
            return Run("", str(error), None, None, 0.0, 0.0)
        finally:
            remove_folder(request["folder"])
        output, stopped_by, code = reply["stdout"], reply["stopped_by"], reply["exit_code"]
        is_out_of_memory = code == 1 and output.rstrip().rpartition("\n")[2].startswith("MemoryError")
        layers = {*reply["layers"], *(["cgroup"] if "container" in reply["layers"] else [])}
        if is_out_of_memory or (code == 128 + 9 and "container" in layers):  # only the kernel kills there
            stopped_by = "memory"
        return Run(output, output, code, stopped_by, 0.0, reply.get("cpu_s", 0.0), frozenset(layers))


@pytest.fixture(scope="module")
def made(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InTask]:
    folder = tmp_path_factory.mktemp(runtime)
    dockerfile = "FROM python:3.12\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        if runtime != "local":
            busybox = use_runtime(runtime, folder, patch)
            context = folder / "tasks" / "a" / "environment"
            context.mkdir(parents=True)
            shutil.copy2(busybox, context / "busybox")
            copy_system_libraries(context / "root")
            dockerfile = f"{BUSYBOX}ENV PATH=/bin\nCOPY root /\n"
        dockerfile += "WORKDIR /srv-of-task\nCOPY program.py .\n"
        task_in(folder / "tasks" / "a", {"environment/Dockerfile": dockerfile, "environment/program.py": ""})
        (row,) = rows(folder=str(folder / "tasks"), runtime=runtime)
        yield InTask(row)


def copy_system_libraries(target: Path) -> None:
    """Copies what this Python, which the container mounts, needs of the system."""
    modules = Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")
    found = subprocess.run(["ldd", sys.executable, *modules], capture_output=True, text=True).stdout
    for path in sorted(set(re.findall(r"^(?:.* => |\s+)(/(?:usr/)?lib\S+) \(0x", found, re.MULTILINE))):
        (target / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(os.path.realpath(path), target / path.lstrip("/"))


@pytest.fixture
def sandbox(made: InTask, runtime: str, request: pytest.FixtureRequest) -> InTask:
    """Replaces the fixture of the imported tests."""
    reasons = NOT_OF_AGENTS | (NOT_OF_CONTAINERS if runtime != "local" else {})
    for name, reason in reasons.items():
        if name in request.node.name:
            pytest.skip(reason)
    return made


@pytest.fixture
def namespaced(sandbox: InTask) -> InTask:
    return sandbox


WRITE = "import time\nfor n in range(300): open(f'{n}', 'wb').write(b'x' * (1 << 20))\ntime.sleep(600)"
ENDLESS = {"talks": ("while True: print('x' * 1000)", 5, "time", 64 << 10), "writes files": (WRITE, 600, "disk", 0)}


@pytest.mark.parametrize(("program", "wall_s", "cause", "num_bytes"), ENDLESS.values(), ids=ENDLESS)
def test_an_agent_that_writes_without_end_is_stopped(program, wall_s, cause, num_bytes, sandbox: InTask) -> None:
    result = sandbox.run(program, "", Limits(wall_s=wall_s, output_kib=64), disk_mib=40)
    assert (result.stopped_by, len(result.stdout)) == (cause, num_bytes)


def test_an_agent_sees_neither_the_trainer_nor_the_users_of_the_machine(
    sandbox: InTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    key.write_text("do-not-tell")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    monkeypatch.setenv("LIGHTRL_TEST_SECRET", "do-not-tell")
    program = f"""
import glob, os
print(sorted(os.environ))
for path in (*glob.glob("/proc/[0-9]*/environ"), "/proc/{os.getpid()}/environ", "/etc/shadow", {str(key)!r}):
    try:
        print(open(path, "rb").read())
    except OSError:
        print("no")
print("end")
"""
    output = sandbox.run(program, "", Limits(wall_s=600)).stdout
    assert "do-not-tell" not in output
    assert output.endswith("no\nno\nend\n")
