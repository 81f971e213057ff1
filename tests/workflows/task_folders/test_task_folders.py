"""Tasks in this machine's sandbox: what is read, what an agent finds, and that only its work earns a reward."""

import asyncio
import inspect
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightrl.data.mixture import DataSource
from lightrl.data.rows import check_source, read_rows
from lightrl.errors import RolloutError
from lightrl.rewards.sandbox import remove_folder
from lightrl.trajectory import Prompt
from lightrl.workflows.agent_workflow import AgentFailed, AgentLimits, AgentWorkflow
from lightrl.workflows.task_folders import TaskFolder, TaskWorkflow, Verifier, rows
from lightrl.workflows.task_folders.runtime import Json, Machine, Runtime, runtime_of
from lightrl.workflows.task_folders.verifier import remove_misleading, reward_in
from lightrl.workflows.task_folders.workflow import AgentSettings

URL = "http://127.0.0.1:9/v1"
TEST = """#!/bin/sh
[ "$(cat answer)" = 42 ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
"""
PYTEST = """#!/bin/bash
[ -e evil.py ] || export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
cp --remove-destination /tests/test_answer.py .
{python} -m pytest -q -p no:cacheprovider test_answer.py && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
"""
# The tested program is another process, which cannot change the tests'.
TEST_ANSWER = """
import subprocess, sys
def test_answer():
    assert subprocess.check_output([sys.executable, "-I", "/app/program.py"]) == b"42\\n"
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def task_in(folder: Path, files: dict[str, str], toml: str = "") -> TaskFolder:
    """A task with these files; what is not named is a small default."""
    defaults = {"instruction.md": "Write 42 to answer.\n", "task.toml": toml, "tests/test.sh": TEST}
    defaults["environment/Dockerfile"] = "FROM python:3.12\nWORKDIR /app\n"
    for name, text in {**defaults, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return TaskFolder(folder)


def play(
    fields: Json, agent: str, verifier: Verifier | None = None, template: str | None = None, shell: str = "bash"
) -> tuple[Any, str]:
    """The reward and metrics of a shell script as the agent, and its output."""
    verifier = verifier or Verifier()
    prompt = Prompt("a", messages=[], fields=fields)
    command = verifier.command([shell, "-c", agent], verifier.start_agent)
    command.template = template
    try:
        result = asyncio.run(command.run(prompt, URL, ""))
    except AgentFailed as error:
        result = error.result
    try:
        return asyncio.run(verifier.reward(prompt, result.workspace)), result.output
    finally:
        remove_folder(str(Path(result.workspace).parent))


def play_task(task: TaskFolder, agent: str, **settings: Any) -> tuple[Any, str]:
    return play({"task_folder": str(task.folder), "runtime": "local"}, agent, **settings)


def test_a_folder_of_tasks_is_a_source_of_prompts(tmp_path: Path) -> None:
    task_in(tmp_path / "tasks" / "b", {"instruction.md": "Do b.\n"}, "[agent]\ntimeout_sec = 5\n")
    task_in(tmp_path / "tasks" / "a", {})
    source = DataSource(str(tmp_path / "tasks"), arguments={"runtime": "local"})
    check_source(source)
    made = list(read_rows(source.source, arguments=source.arguments))
    timeouts = [(row["question"], row.get("agent_timeout_s")) for row in made]
    assert timeouts == [("Write 42 to answer.", None), ("Do b.", 5)]  # None: the workflow's
    assert [Path(row["task_folder"]).name for row in made] == ["a", "b"]


def test_the_environment_has_what_its_dockerfile_makes(tmp_path: Path) -> None:
    dockerfile = r"""# A comment
FROM debian:12 AS base
ENV COLOR=red SHADE="dark red"
ENV OLD style
ENV PATH=/app/bin:$PATH
ARG OF_BUILD=1
WORKDIR /data/in
COPY one two* ./
COPY --chmod=644 folder /app/folder/
RUN apt-get update && apt-get install -y bash \
    && echo $COLOR > made
WORKDIR /app
COPY ["one", "three"]
USER nobody
"""
    files = {f"environment/{name}": name for name in ("one", "two-a", "two-b", "folder/inner")}
    files["environment/Dockerfile"] = dockerfile
    task = task_in(tmp_path / "task", files, '[environment.env]\nMORE = "1"\n')
    agent = "pwd; cat three folder/inner; ls /data/in; cat /data/in/made; echo $SHADE,$OLD,$MORE$OF_BUILD; "
    agent += "echo ${PATH%%:*}; ls /tests; echo 42 >answer"
    (reward, metrics), output = play_task(task, agent)
    assert output.split("\n")[:5] == ["/app", "onefolder/innermade", "one", "two-a", "two-b"]
    assert "red\ndark red,style,1\n/app/bin\n" in output
    assert "cannot access '/tests'" in output
    assert (reward, metrics) == (1, {"tests_without_reward": 0})


def test_rewards_in_json_are_metrics_and_a_bad_reward_is_0(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "reward.json").write_text('{"reward": 0.5, "style": 1, "ok": true}')
    assert reward_in(tmp_path) == (0.5, {"style": 1, "ok": 1})
    (tmp_path / "reward.json").write_text('{"style": 1, "speed": 0}')
    assert reward_in(tmp_path) == (0.5, {"style": 1, "speed": 0})
    too_many = json.dumps(dict.fromkeys(map(str, range(101)), 1))
    for text in ("NaN", '{"reward": "1"}', "{}", "[1]", too_many, "[" * 100_000):
        (tmp_path / "reward.json").write_text(text)
        with pytest.raises((ValueError, RecursionError), match=r"reward\.json|recursion"):
            reward_in(tmp_path)
    (tmp_path / "reward.txt").write_text("1")
    with pytest.raises(ValueError, match="both"):
        reward_in(tmp_path)
    (tmp_path / "reward.txt").unlink()
    (tmp_path / "reward.json").unlink()
    (tmp_path / "secret").write_text("1")
    (tmp_path / "reward.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match=r"reward\.txt"):
        reward_in(tmp_path)
    task = task_in(tmp_path / "task", {"tests/test.sh": "echo broken; exit 3"})
    with caplog.at_level(logging.WARNING):
        assert play_task(task, "true")[0] == (0, {"tests_without_reward": 1})
    assert "broken" in caplog.text


HOSTILE = {
    "writes the reward": "mkdir -p /logs/verifier; echo 1 | tee /logs/verifier/reward.txt /logs/verifier/reward.json",
    "leaves a process that rewrites the reward": """
        (trap '' HUP TERM; while true; do echo 1 >/logs/verifier/reward.txt; done) & setsid -f bash -c '
        while true; do for each in /tmp/lightrl-*/*/work/logs/verifier; do echo 1 >$each/reward.txt; done; done'""",
    "brings tests of its own": "mkdir -p ../tests tests; echo 'echo 1 >/logs/verifier/reward.txt' | tee tests/test.sh",
    "replaces pytest": """
        mkdir -p pytest _pytest; echo 'raise SystemExit(0)' | tee pytest.py pytest/__main__.py pytest/__init__.py""",
    "replaces modules that the task mentions": """
        mkdir re json; for each in re json; do echo 'import os; os._exit(0)' >$each/__init__.py; done""",
    "brings a plugin": r"""
        mkdir evil-1.0.dist-info; cd evil-1.0.dist-info; echo 'import os; os._exit(0)' >../evil.py
        printf 'Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n' >METADATA
        printf '[pytest11]\nevil = evil\n' >entry_points.txt""",
    "writes the rewards when it is tested": r"""
        echo 'print(41)' >>program.py
        for each in txt json; do echo "open('/logs/verifier/reward.$each', 'w').write('1')" >>program.py; done""",
    "replaces a module of Python": "echo 'import os; os._exit(0)' | tee json.py ast.py inspect.py shutil.py",
    "writes conftest.py and settings": r"""
        printf '[pytest]\naddopts = -p evil\n' | tee pytest.ini tox.ini
        echo 'import os; os._exit(0)' | tee conftest.py evil.py""",
    "writes sitecustomize.py": r"""
        at=$(python3 -c 'import site; print(site.getusersitepackages())'); mkdir -p $at
        for each in . $at; do echo 'import os; os._exit(0)' | tee $each/{site,user}customize.py $each/evil.pth; done""",
    "links the rewards' folder to its own": """
        echo 1 >reward.txt; rm -rf "$REAL"/logs /logs/verifier; ln -s /app "$REAL"/logs; ln -s /app /logs/verifier
        mkdir -p logs; ln -s /app logs/verifier""",
    "ends the tests' process": "echo 'import os; os._exit(0)' >program.py",
    "makes its folder a link to the tests": 'cd /; mv "$REAL"/app "$REAL"/old; ln -s /tests "$REAL"/app',
    "makes its folder a link to a user's": 'cd /; mv "$REAL"/app "$REAL"/old; ln -s "$OF_USER" "$REAL"/app',
}  # fmt: skip


def test_an_environment_opens_nothing_else_of_this_machine(tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    agent = f"for each in {here} {tmp_path}/task/tests/test.sh /etc/shadow; do cat $each && echo opened; done"
    agent += f"; REAL=$(dirname $HOME); cat $REAL/root{here} && echo opened; [ -e $REAL/root ] && echo opened"
    agent += f"; for each in / {here.parent} {Path.home()} {tmp_path}; do ls $each && echo opened; done"
    agent += f"; for each in /x /usr/x {here.parent}/x {tmp_path}/x; do touch $each && echo opened; done; echo ended"
    _, output = play_task(task_in(tmp_path / "task", {}), agent)
    assert "ended" in output
    assert "opened" not in output


@pytest.fixture(scope="module")
def hostile_task(tmp_path_factory: pytest.TempPathFactory) -> TaskFolder:
    folder = tmp_path_factory.mktemp("hostile")
    dockerfile = "FROM python:3.12\nWORKDIR /app\nCOPY program.py .\n"
    files = {"environment/program.py": "print(41)\n", "environment/Dockerfile": dockerfile}
    files |= {"tests/test.sh": PYTEST.format(python=sys.executable), "tests/test_answer.py": TEST_ANSWER}
    files["instruction.md"] = "Let program.py print 42. Do not re-read it as json: write it.\n"
    return task_in(folder / "task", files)


@pytest.mark.parametrize("agent", HOSTILE.values(), ids=HOSTILE)
def test_an_agent_that_attacks_the_tests_earns_nothing(agent: str, hostile_task: TaskFolder, tmp_path: Path) -> None:
    of_user = [tmp_path / name for name in ("json.py", "conftest.py")]
    for file in of_user:
        file.touch()
    (reward, _), output = play_task(hostile_task, f"REAL=$(dirname $HOME)/work; OF_USER={tmp_path}\n{agent}")
    assert reward == 0, output
    assert all(file.exists() for file in of_user)


def test_only_the_working_directory_of_an_agent_is_its_work(tmp_path: Path) -> None:
    dockerfile = "FROM python:3.12\nWORKDIR /app/src\nCOPY program.py .\nCOPY program.py ../original.py\n"
    files = {"environment/program.py": "print(41)\n", "environment/Dockerfile": dockerfile}
    files |= {"tests/test_answer.py": TEST_ANSWER.replace("/app/", "/app/src/")}
    task = task_in(tmp_path / "task", {**files, "tests/test.sh": PYTEST.format(python=sys.executable)})
    attack = "cd ..; printf '[pytest]\\naddopts = --co\\n' >pytest.ini; echo 'import os; os._exit(0)' >conftest.py"
    assert play_task(task, attack)[0][0] == 0
    test = "#!/bin/sh\n[ -e ../original.py ] && [ -L link ] && [ ! -e ../new ] && [ ! -e old ] && echo 1"
    task_in(tmp_path / "task", {**files, "tests/test.sh": f"{test} >/logs/verifier/reward.txt"})
    assert play_task(task, "rm ../original.py program.py; ln -s a link; touch ../new")[0][0] == 1


def test_the_work_of_an_honest_agent_earns_the_reward(hostile_task: TaskFolder) -> None:
    (reward, _), output = play_task(hostile_task, "sed -i s/41/42/ program.py; ln -s /app/program.py link")
    assert reward == 1, output


def test_only_new_files_that_mislead_tests_are_removed(tmp_path: Path) -> None:
    hidden = "ast.py json.cpython-312-x86_64-linux-gnu.so re/__init__.pyc yaml/__init__.py helpers/__init__.py "
    hidden += "a/b/tox.ini unit/json.py a/__pycache__/x.pyc evil.egg-info/entry_points.txt a/evil.pth"
    work = "calendar.py a/json.py json/data.txt conftest.txt unit/test_a.py setup.cfg email/__init__.py "
    work += "inner/__init__.py"
    for name in f"{hidden} {work}".split():
        (tmp_path / "app" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "app" / name).touch()
    (tmp_path / "app" / "queue").symlink_to("a")
    for name in ("", "helpers", "helpers/inner"):
        (tmp_path / "tests" / name).mkdir(exist_ok=True)
        (tmp_path / "tests" / name / "__init__.py").touch()
    text = "Write calendar.py and the package email/, as in to_ast.py; return json."
    remove_misleading(tmp_path / "app", {"setup.cfg"}, tmp_path / "tests", text)
    left = [path for path in (tmp_path / "app").rglob("*") if not path.is_dir()]
    assert sorted(str(path.relative_to(tmp_path / "app")) for path in left) == sorted(work.split())


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository with a bug, and a hidden test that fails."""
    folder = tmp_path_factory.mktemp("swe")
    (folder / "repos" / "sums" / "tests").mkdir(parents=True)
    (folder / "repos" / "sums" / "sums.py").write_text("def add(left, right):\n    return left - right\n")
    (folder / "repos" / "sums" / "conftest.py").write_text("")  # so that tests import the repository's modules
    (folder / "repos" / "sums" / "tests" / "test_sums.py").write_text("def test_old(): pass\n")
    (folder / "hidden" / "sums" / "tests").mkdir(parents=True)
    text = "from sums import add\ndef test_old(): pass\ndef test_add(): assert add(1, 2) == 3\n"
    (folder / "hidden" / "sums" / "tests" / "test_sums.py").write_text(text)
    git = ["git", "-C", str(folder / "repos" / "sums"), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "a bug"]):
        subprocess.run([*git, *words], check=True)
    return folder


PATCH = r"""git apply <<'END'
--- a/sums.py
+++ b/sums.py
@@ -1,2 +1,2 @@
 def add(left, right):
-    return left - right
+    return left + right
END
git diff --stat"""
VERIFY_CASES = {
    "no work": ("true", 0, 0.5),
    "the patch": (PATCH, 1, 1),
    "a conftest.py that skips": ("echo 'collect_ignore = [\"tests\"]' >conftest.py", 0, 0.5),
    "a conftest.py that ends the tests": ("echo 'import os; os._exit(0)' | tee {.,tests}/conftest.py", 0, 0.5),
    "settings": ("printf '[pytest]\\naddopts = --co\\n' >pytest.ini", 0, 0.5),
    "a module that ends the tests": ("echo 'import os; os._exit(0)' >sums.py", 0, 0),
    "links in place of the tests": ("rm -r tests; ln -s ../home tests", 0, 0.5),
}  # fmt: skip


@pytest.mark.parametrize(("agent", "reward", "passed"), VERIFY_CASES.values(), ids=VERIFY_CASES)
def test_a_command_verifies_work_with_hidden_tests(agent: str, reward: float, passed: float, repository: Path) -> None:
    template = str(repository / "repos" / "{name}")
    settings: dict[str, Any] = {"template": template, "hidden": str(repository / "hidden" / "{name}")}
    words = ["env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    verifier = Verifier([*words, "tests"], **settings)
    outcome, output = play({"name": "sums"}, agent, verifier, template)
    assert outcome == (reward, {"tests_passed_fraction": passed}), output


def test_tests_that_never_end_earn_nothing(tmp_path: Path) -> None:
    task = task_in(tmp_path / "task", {"tests/test.sh": "sleep 1000"}, "[verifier]\ntimeout_sec = 1\n")
    assert play_task(task, "true")[0] == (0, {"tests_without_reward": 1})
    assert play({}, "true", Verifier(["sleep", "1000"], timeout_s=1))[0] == (0, {})


def test_tests_that_a_limit_ends_earn_nothing_and_long_output_is_no_limit(tmp_path: Path) -> None:
    reward = "echo 1 >/logs/verifier/reward.txt"
    fill = "for each in 1 2 3; do head -c 900000 /dev/zero >$each; done; sleep 1000"
    verifier = Verifier(limits=AgentLimits(disk_mib=1))
    task = task_in(tmp_path / "task", {"tests/test.sh": f"{reward}; {fill}"})
    assert play_task(task, "true", verifier=verifier)[0] == (0, {"tests_without_reward": 1})
    task_in(tmp_path / "task", {"tests/test.sh": f"{reward}; yes | head -c 900000; yes | head -c 900000 >&2"})
    assert play_task(task, "true", verifier=verifier)[0] == (1, {"tests_without_reward": 0})


def test_a_row_without_a_task_or_a_folder_drops_its_trajectory(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="no column `task_folder`"):
        play({}, "true")
    verifier = Verifier(["true"], hidden=f"{repository}/hidden/{{name}}")
    for name in ("missing", "../repos"):
        with pytest.raises(RolloutError, match="hidden="):
            play({"name": name}, "true", verifier)
    (tmp_path / "work").symlink_to(repository)  # in place of the agent's folder
    with pytest.raises(RolloutError, match="replaced its folder with a link"):
        asyncio.run(verifier.reward(Prompt("a", messages=[], fields={"name": "sums"}), str(tmp_path / "work")))
    assert (repository / "repos" / "sums" / "conftest.py").exists()


class Elsewhere(Runtime):
    """A service's sandboxes: here the local ones, with a note of what ran."""

    ran: list[list[str]] = []  # noqa: RUF012

    def missing(self) -> str | None:
        return None

    def build(self, task: TaskFolder) -> str:
        return runtime_of("local").build(task)

    async def run(self, machine: Machine, request: Json) -> Json:
        self.ran.append(request["command"])
        return await runtime_of("local").run(machine, request)


def test_a_class_by_its_path_is_a_runtime(tmp_path: Path) -> None:
    task = task_in(tmp_path / "tasks" / "a", {})
    (row,) = rows(folder=str(task.folder.parent), runtime=f"{__name__}.Elsewhere")
    assert play(row, "echo 42 >answer")[0][0] == 1
    assert [Path(command[0]).name for command in Elsewhere.ran] == ["bash", "sh"]


class Counting(Elsewhere):
    """Counts the tests that run at once."""

    running = most = 0

    async def run(self, machine: Machine, request: Json) -> Json:
        Counting.running += machine.left is not None
        Counting.most = max(Counting.most, Counting.running)
        try:
            return await super().run(machine, request)
        finally:
            Counting.running -= machine.left is not None


def test_a_limited_number_of_tests_run_at_once(tmp_path: Path) -> None:
    task_in(tmp_path / "tasks" / "a", {"tests/test.sh": "sleep 0.3; echo 1 >/logs/verifier/reward.txt"})
    (row,) = rows(folder=str(tmp_path / "tasks"), runtime=f"{__name__}.Counting")
    (tmp_path / "work" / "app").mkdir(parents=True)
    prompt = Prompt("a", messages=[], fields=row)
    verifier = Verifier(max_tests=1)

    async def scenario() -> list[Any]:
        return await asyncio.gather(*(verifier.reward(prompt, str(tmp_path / "work")) for _ in range(2)))

    for _ in range(2):  # each in an event loop of its own
        assert [reward for reward, _ in asyncio.run(scenario())] == [1, 1]
        assert Counting.most == 1


class Broken(Elsewhere):
    def build(self, task: TaskFolder) -> str:
        raise OSError("the disk is full")


WITHOUT = "FROM a\nWORKDIR /app\n"


@pytest.mark.parametrize(
    ("dockerfile", "workdir"),
    [
        pytest.param("FROM a\nWORKDIR /x\nFROM b\nWORKDIR y", "/y", id="another stage"),
        pytest.param("FROM a AS Base\nWORKDIR /x\nFROM --platform=c base AS d\nWORKDIR y", "/x/y", id="from a stage"),
        pytest.param("FROM a\nWORKDIR\t/x\nRUN <<EOF\nfrom os import *\nWORKDIR /y\nEOF", "/x", id="a heredoc"),
        pytest.param("FROM a\nRUN echo $((1<<2)) <<<b\nWORKDIR '/x'", "/x", id="no heredoc"),
    ],
)
def test_the_working_directory_is_that_of_the_last_stage(dockerfile: str, workdir: str, tmp_path: Path) -> None:
    task = task_in(tmp_path, {"environment/Dockerfile": dockerfile})
    assert task.workdir == workdir
    assert task.problem is None


def test_a_working_directory_that_only_task_toml_names_is_made(tmp_path: Path) -> None:
    task = task_in(tmp_path / "task", {}, '[environment]\nworkdir = "/app/sub"\n')
    assert play_task(task, "pwd; echo 42 >answer") == ((1, {"tests_without_reward": 0}), "/app/sub\n")


@pytest.mark.parametrize(
    ("dockerfile", "toml", "runtime", "message"),
    [
        pytest.param(WITHOUT, "", "podmann", "one of local, docker, podman or", id="no such runtime"),
        pytest.param(WITHOUT, "", "os.getpid", "must be a subclass", id="a function"),
        pytest.param(WITHOUT, "", "docker", r"^2 tasks in .*'docker': docker is not installed", id="missing"),
        pytest.param(WITHOUT, "[[steps]]\n", "local", "1 of 2 tasks .*several", id="steps"),
        pytest.param(f"{WITHOUT}COPY x /etc/y", "", "local", "has /etc", id="a folder of this machine"),
        pytest.param(f"{WITHOUT}RUN echo so; false", "", "local", "RUN echo so; false failed", id="a step fails"),
        pytest.param(f"{WITHOUT}RUN apt-get install -y no-such", "", "local", "failed", id="a package is missing"),
        pytest.param(f"{WITHOUT}FROM b\nWORKDIR /c", "", "local", "stages", id="stages"),
        pytest.param("FROM a\nENV A=/b\nWORKDIR $A", "", "local", "workdir in task.toml", id="WORKDIR with a variable"),
        pytest.param(f"{WITHOUT}COPY x $A/", "", "local", r"COPY x \$A/", id="COPY with a variable"),
        pytest.param(f"{WITHOUT}COPY x", "", "local", "no target", id="COPY without a target"),
        pytest.param(f"{WITHOUT}RUN cat <<EOF\nx\nEOF", "", "local", "heredoc", id="a heredoc"),
        pytest.param("FROM a\nWORKDIR /tmp/x", "", "local", "below /tmp or /var", id="below /tmp"),
        pytest.param(WITHOUT, "", f"{__name__}.Broken", "the disk is full", id="OSError"),
        pytest.param(f"{WITHOUT}ENV", "", "local", "ENV has no arguments", id="no arguments"),
        pytest.param(WITHOUT, "[environment]\ngpus = 1\n", "local", "needs GPUs", id="gpus"),
        pytest.param(WITHOUT, "[agent\n", "local", r"task\.toml cannot be read", id="toml"),
        pytest.param(WITHOUT, '[agent]\ntimeout_sec = "x"\n', "local", r"agent\.timeout_sec has the wrong", id="type"),
        pytest.param(WITHOUT, '[environment]\ndocker_image = "-v/:/host"\n', "local", "like an option", id="option"),
        pytest.param(WITHOUT, '[verifier.env]\nA = "${UNSET_A}"\n', "local", "UNSET_A.*is not set", id="variable"),
    ],
)
def test_tasks_that_cannot_run_are_refused_at_the_start_with_their_number(
    dockerfile: str, toml: str, runtime: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # without docker
    task_in(tmp_path / "tasks" / "a", {})
    task_in(tmp_path / "tasks" / "b", {"environment/Dockerfile": dockerfile}, toml)
    with pytest.raises(ValueError, match=message):
        list(rows(folder=str(tmp_path / "tasks"), runtime=runtime))


def test_tasks_that_cannot_run_can_be_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task_in(tmp_path / "a", {})
    task_in(tmp_path / "b", {}, "[environment]\ngpus = 1\n")
    with caplog.at_level(logging.WARNING):
        (row,) = rows(folder=str(tmp_path), bad_tasks="drop")
    assert Path(row["task_folder"]).name == "a"
    assert "1 of 2 tasks" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verify": ["no-such-program"]}, "verify must"),
        ({"verify": ["true"], "hidden": "/no/such"}, "hidden="),
        ({"hidden": "/tmp"}, "hidden"),
        ({"verify": ["true"], "verify_timeout_s": 0}, "verify_timeout_s"),
        ({"agent": "a.b"}, "agent"),
    ],
)
def test_settings_that_lead_nowhere_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        TaskWorkflow.check_settings(command=["true"], **settings)


def test_variables_come_from_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_in(tmp_path, {}, '[verifier.env]\nA = "${KEY}"\nB = "${OTHER:-b}"\nC = 1\n')
    with pytest.raises(ValueError, match=r"KEY.*is not set"):
        task.environment("verifier")
    monkeypatch.setenv("KEY", "k")
    assert json.dumps(task.environment("verifier")) == '{"A": "k", "B": "b", "C": "1"}'


def test_values_of_this_process_reach_neither_the_log_nor_an_agents_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KEY", "qrstuvwxyz")
    monkeypatch.setenv("OTHER", "QRSTUVWXYZ")
    monkeypatch.setenv("SHORT", "1")  # is not hidden
    toml = '[verifier.env]\nA = "a ${KEY}"\n[environment.env]\nB = "${OTHER:-b}"\nC = "${SHORT}"\n'
    # The end of the output that is logged starts inside a secret.
    test = "echo $A >/logs/verifier/reward.txt; for each in $(seq 30); do printf '%s.' $A $B; done; exit 3"
    task = task_in(tmp_path, {"tests/test.sh": test}, toml)
    with caplog.at_level(logging.WARNING):
        (reward, _), output = play_task(task, "echo $A,$B,$C")
    assert (reward, output) == (0, ",${OTHER},1\n")
    assert "a.${KEY}.${OTHER}." in caplog.text
    monkeypatch.setenv("MINE", "sk-" + "0123456789" * 5)
    monkeypatch.setattr("lightrl.workflows.task_folders.verifier._OF_TESTS", {"OWN": "{env:MINE}"})
    agent = "printf %s $OWN; head -c 65496 /dev/zero | tr '\\0' x"  # the guard keeps its last 64 KiB
    assert set(play_task(task, agent)[1]) == {"x"}

    async def quote(*_: object) -> Json:
        raise OSError("`run --env B=QRSTUVWXYZ` fails")

    monkeypatch.setattr(type(runtime_of("local")), "run", quote)
    with pytest.raises(RolloutError, match=r"B=\$\{OTHER\}` fails") as failed:
        play_task(task, "true")
    assert "xyz" not in f"{caplog.text} {failed.value.__cause__!r}".lower()


def test_the_settings_that_a_checker_sees_are_those_of_an_agent_workflow() -> None:
    arguments = {*inspect.signature(AgentWorkflow).parameters} - {"tokenizer", "agent", "command"}
    assert {*AgentSettings.__annotations__} == arguments
