"""Programs as agents: what they find, what they leave, and that nothing is left running."""

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from agent_cases import PROMPT, TOKENIZER, decode, encode, generate_with, scripted, user
from chat_texts import END, started
from waits import comes_true

from lightrl.engines.fake_engine import FakeEngine
from lightrl.errors import EngineError, RolloutError
from lightrl.rewards.sandbox import GUARD_COMMAND, SYSTEM_PATHS, Limits
from lightrl.rewards.sandbox.guard.guard import _remove_foreign
from lightrl.trajectory import Prompt, Trajectory
from lightrl.workflows.agent_workflow import AgentLimits, AgentWorkflow
from lightrl.workflows.agent_workflow.command import delete_workspace, root_of

ASK = """
import json, os, sys, urllib.request

def ask(text, url=os.environ["OPENAI_BASE_URL"], key=os.environ["OPENAI_API_KEY"]):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    answer = urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers))
    return json.load(answer)["choices"][0]["message"]["content"]
"""
TASK = Prompt("a", messages=[user("6*7?")], fields={"folder": "seven"})


def workflow_of(program: str, *arguments: str, **settings: Any) -> AgentWorkflow:
    command = [sys.executable, "-c", ASK + program, *arguments]
    return AgentWorkflow(TOKENIZER, command=command, **{"agent_timeout_s": 30.0, "max_tokens": 400, **settings})


workspaces: list[str] = []  # of the trajectories that a test has played


def play(workflow: AgentWorkflow, engine: FakeEngine | None = None, prompt: Prompt = TASK) -> Trajectory:
    trajectory = asyncio.run(workflow.run(prompt, generate_with(engine or scripted("42"))))
    workspaces.extend([trajectory.workspace] if trajectory.workspace else [])
    return trajectory


def own_folders() -> list[Path]:
    """The folders of rollouts of this process."""
    return list(Path(tempfile.gettempdir()).glob(f"lightrl-agents-{os.getpid()}-*/*"))


def guards() -> list[psutil.Process]:
    alive = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # ended, and perhaps not awaited yet
            if "rewards/sandbox" in "".join(child.cmdline()):
                alive.append(child)
    return alive


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before, folders = guards(), own_folders()  # of other tests' sandboxes, which have not been collected yet
    yield
    while workspaces:  # as the controller does it when the rewards are there
        delete_workspace(workspaces.pop())
    assert comes_true(lambda: not set(own_folders()) - set(folders))
    assert comes_true(lambda: not [guard for guard in guards() if guard not in before])


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """Tasks of two rows; `seven` has a file, and a link to it."""
    for name in ("six", "seven"):
        (tmp_path / "tasks" / name / "src").mkdir(parents=True)
        (tmp_path / "tasks" / name / "src" / "task.py").write_text(name)
    (tmp_path / "tasks" / "seven" / "link.py").symlink_to("src/task.py")
    return tmp_path / "tasks"


def test_a_program_reads_its_task_asks_the_policy_and_leaves_a_folder(template: Path) -> None:
    program = "open('answer.txt', 'w').write(ask(sys.stdin.read())); print(sorted(os.listdir()), file=sys.stderr)"
    trajectory = play(workflow_of(program, workspace_template=str(template / "{folder}")))
    text = "<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n42<|im_end|>"
    assert decode(list(trajectory.token_ids)) == text
    assert trajectory.agent_output == "['answer.txt', 'link.py', 'src']\n"
    assert trajectory.rewards is None
    assert [Path(str(trajectory.workspace), name).read_text() for name in ("answer.txt", "link.py")] == ["42", "seven"]
    assert (template / "seven" / "src" / "task.py").read_text() == "seven"


@pytest.mark.parametrize(
    ("program", "arguments", "environment"),
    [
        ("ask(sys.argv[1])", ["{task}"], {}),
        ("ask(open(sys.argv[1]).read())", ["{task_file}"], {}),
        ("ask(os.environ['GOAL'])", [], {"GOAL": "{task}"}),
        ("ask(sys.stdin.read(), os.environ['POLICY_URL'] + '/v1', os.environ['ANTHROPIC_API_KEY'])", [],
         {"POLICY_URL": "{root_url}"}),
        ("ask('6*7?' if sys.argv[1:] == ['{\"a\": {b}}', 'seven'] else '')", ["{\"a\": {b}}", "{folder}"], {}),
    ],
    ids=["an argument", "a file", "a variable", "an address of another name", "braces that stay, a column"],
)  # fmt: skip
def test_settings_name_where_a_program_finds_its_task_and_the_policy(
    program: str, arguments: list[str], environment: dict[str, str]
) -> None:
    trajectory = play(workflow_of(program, *arguments, environment=environment))
    assert "user\n6*7?<|im_end|>" in decode(list(trajectory.token_ids))


def test_a_workflow_worker_makes_the_folders_where_the_process_that_computes_rewards_keeps_them() -> None:
    trajectory = play(pickle.loads(pickle.dumps(workflow_of("ask('a')"))))
    assert Path(str(trajectory.workspace)).parents[1] == Path(root_of(os.getpid()))


def test_a_program_sees_no_variable_of_the_run_and_has_its_own_home() -> None:
    program = "ask('a'); print(*sorted(os.environ)); print(os.environ['HOME'] == os.getcwd()[:-4] + 'home')"
    names, *rest = play(workflow_of(program)).agent_output.splitlines()
    assert set(names.split()) - {"LC_CTYPE", "LANG"} == {
        *("OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
        *("HOME", "TMPDIR", "PATH", "NO_PROXY", "USER", "LOGNAME"),
    }
    assert rest == ["True"]


def test_the_endpoint_is_the_only_network_and_the_folder_the_only_place_to_write(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    program = f"""
import socket
with socket.create_server(("127.0.0.1", 0)) as other:  # its own network
    socket.create_connection(other.getsockname()).close()
for place in (("192.0.2.1", 80), ("127.0.0.1", int(sys.argv[1]))):
    try:
        socket.create_connection(place, timeout=5)
        print("reached", place)
    except OSError:
        pass
try:
    open({str(tmp_path / "file")!r}, "w")
    print("wrote")
except OSError:
    pass
ask("a")
"""
    tmp_path.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as server, caplog.at_level(logging.INFO):
        trajectory = play(workflow_of(program, str(server.getsockname()[1])))
    (said, *warnings) = [record.getMessage() for record in caplog.records if "agent_workflow.command" in record.name]
    assert said.startswith("Agents run with these layers of protection: ")
    if "namespaces" in said:
        assert warnings == []
        assert "reached" not in trajectory.agent_output
    else:
        assert "may reach the network" in warnings[0]
    if "landlock" in said:
        assert "wrote" not in trajectory.agent_output


def test_many_programs_at_once_reach_their_own_sessions() -> None:
    def script(prompt: list[int], sampling: Any, sample: int) -> list[int]:
        return [*encode(decode(prompt).partition("user\n")[2].partition("<")[0]), END]

    workflow = workflow_of("print(ask(sys.stdin.read()))")

    async def scenario() -> list[Trajectory]:
        generate = generate_with(started(FakeEngine(script=script)))
        prompts = [Prompt(f"p{number}", messages=[user(f"[{number}]")]) for number in range(4)]
        return await asyncio.gather(*(workflow.run(prompt, generate) for prompt in prompts))

    for number, trajectory in enumerate(asyncio.run(scenario())):
        assert trajectory.agent_output == f"[{number}]\n"
        delete_workspace(str(trajectory.workspace))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("sys.exit('no key')", r"exited: 1\. It printed 'no key\\n'"),
        ("print('hello')", r"without an answer from the policy.* It printed 'hello\\n'"),
        ("ask('a'); os.kill(os.getpid(), 9)", r"exited: -9, perhaps because it reached a limit on memory\."),
        ("ask('a'); 1 / 0", "exited: 1.*ZeroDivisionError"),
        ("print('x' * 10**6); ask('a'); sys.exit(2)", r"exited: 2\. It printed 'x{299}\\n'"),
        ("ask('a', key='another')", "exited: 1.*401"),
    ],
    ids=["exits at once", "never calls", "is killed", "raises", "prints a lot", "has a wrong key"],
)
def test_a_program_that_fails_drops_its_trajectory_with_the_reason(program: str, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        play(workflow_of(program))


def test_the_end_of_long_output_is_kept() -> None:
    trajectory = play(workflow_of("print('x' * 10**6); print(ask('a'))"))
    assert trajectory.agent_output.endswith("x\n42\n")
    assert 1000 < len(trajectory.agent_output) <= 1 << 16


def test_a_program_at_its_deadline_is_killed_with_its_children() -> None:
    program = "import subprocess; subprocess.Popen(['sleep', '97531'], start_new_session=True).wait()"
    with pytest.raises(RolloutError, match=r"did not finish within 0\.5 s"):
        play(workflow_of(program, agent_timeout_s=0.5))
    assert comes_true(lambda: not running("97531"))


def test_children_that_a_program_leaves_are_killed() -> None:
    program = """
import subprocess
ask("a")
for _ in range(3):
    subprocess.Popen(["sleep", "97536"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "97532"])
"""
    play(workflow_of(program))
    assert not running("97532")
    assert not running("97536")


def running(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.NoSuchProcess):
            if mark in (process.info["cmdline"] or []):
                found.append(process)
    return found


def test_a_program_is_killed_when_the_engine_fails() -> None:
    def fail(prompt: list[int], sampling: Any, sample: int) -> list[int]:
        raise EngineError("no server is left")

    program = "import subprocess\ntry:\n    ask('a')\nexcept OSError:\n    subprocess.run(['sleep', '97534'])"
    with pytest.raises(EngineError, match="no server is left"):
        play(workflow_of(program), started(FakeEngine(script=fail)))
    assert comes_true(lambda: not running("97534"))


def test_no_room_for_a_request_is_a_truncated_trajectory() -> None:
    program = "print(ask('a')); open('answer.txt', 'w').write('so far')\nask('x' * 500)"
    trajectory = play(workflow_of(program, truncated_reward=-1.0))
    assert trajectory.is_truncated
    assert (trajectory.rewards or [0.0])[-1] == -1.0
    assert Path(str(trajectory.workspace), "answer.txt").read_text() == "so far"
    assert "42\n" in str(trajectory.agent_output)


def test_a_program_that_fails_after_an_answer_can_have_a_reward() -> None:
    program = "open('answer.txt', 'w').write(ask('a')); sys.exit('bad answer')"
    trajectory = play(workflow_of(program, failed_reward=-0.5))
    assert ((trajectory.rewards or [0.0])[-1], trajectory.is_truncated) == (-0.5, False)
    assert trajectory.agent_output == "bad answer\n"
    assert Path(str(trajectory.workspace), "answer.txt").read_text() == "42"
    for other in ("sys.exit('before an answer')", "ask('a')\nimport time; time.sleep(600)"):
        with pytest.raises(RolloutError, match=r"exited: 1|did not finish"):
            play(workflow_of(other, failed_reward=-0.5, agent_timeout_s=10.0))


@pytest.mark.parametrize("is_refused", [False, True], ids=["after an answer", "after a refused request"])
@pytest.mark.parametrize("reply", [None, {"exit_code": None, "stopped_by": None}], ids=["the guard", "its keeper"])
def test_a_guard_that_dies_is_no_failure_of_the_policy(
    reply: dict[str, Any] | None, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither reward may be trained on."""

    async def asks_and_dies(request: dict[str, Any]) -> dict[str, Any]:
        program = ASK + "ask('a')" + ("; ask('b')" if is_refused else "")
        asking = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, env={**os.environ, **request["environment"]}
        )
        statuses.append(await asking.wait())
        if reply is None:
            raise OSError("the guard died")
        return {"stdout": "", "layers": [], "problem": None, **reply}

    statuses: list[int] = []
    monkeypatch.setattr("lightrl.workflows.agent_workflow.command.run_under_guard", asks_and_dies)
    limits = AgentLimits(requests=1)
    with pytest.raises(RolloutError, match=r"the guard died|exited: None"):
        play(workflow_of("", failed_reward=-0.5, truncated_reward=-0.5, limits=limits))
    assert statuses == [int(is_refused)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"Set either agent \(a function\) or command"),
        ({"command": ["true"], "agent": len}, r"Set either agent \(a function\) or command"),
        ({"command": "claude -p"}, "starts with a program's path or name on PATH, got 'claude -p'"),
        ({"command": []}, r"command must be a list .* got \[\]"),
        ({"command": ["no-such-program"]}, r"command must be a list .* got \['no-such-program'\]"),
        ({"command": ["true"], "workspace_template": "nowhere"}, "workspace_template='nowhere' must be a folder"),
        ({"command": ["true"], "workspace_template": __file__}, "workspace_template=.* must be a folder"),
        ({"agent": len, "workspace_template": "/usr"}, "workspace_template='/usr' has no effect without command"),
        ({"agent": len, "environment": {"A": "b"}}, "environment=.* has no effect without command"),
    ],
)
def test_settings_that_lead_nowhere_are_refused_before_anything_starts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AgentWorkflow(TOKENIZER, **settings)
    with pytest.raises(ValueError, match=message):
        AgentWorkflow.check_settings(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workspace_template": "tasks/{folder}"}, "expands to '.*tasks/seven', which is not a folder"),
        ({"command": ["{folder}/run"]}, r"\{folder\}/run could not be started: there is no such program"),
    ],
)
def test_names_that_a_row_fills_in_badly_drop_its_trajectory(settings: dict[str, Any], message: str) -> None:
    workflow = AgentWorkflow(TOKENIZER, **{"command": [sys.executable, "-c", ""], **settings})
    with pytest.raises(RolloutError, match=message):
        play(workflow)


def test_what_leads_out_of_a_workspace_or_blocks_a_reader_is_gone_before_the_reward_reads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = tmp_path / "key.txt"
    key.write_text("42")
    program = f"""ask('a'); os.makedirs('shut/in'); open('own', 'w').write('mine'); os.link('own', '../home/twin')
for name, target in [('link', {str(key)!r}), ('up', '../../..'), ('shut/in/folder', '/etc'), ('inner', 'own')]:
    os.symlink(target, name)
os.symlink('shut/in/folder/hostname', 'chain'); os.mkfifo('pipe'); os.chmod('shut/in', 0o100)
import socket; socket.socket(socket.AF_UNIX).bind('socket')"""
    with caplog.at_level("WARNING"):
        workspace = Path(str(play(workflow_of(program)).workspace))
    left = sorted(str(path.relative_to(workspace)) for path in workspace.rglob("*"))
    assert left == ["inner", "own", "shut", "shut/in"]
    assert (workspace / "inner").read_text() == "mine"
    assert "6 entries from the agent's folder because" in caplog.text


def test_a_hard_link_to_a_file_of_others_is_no_file_of_a_workspace(tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_text("42")
    (tmp_path / "agent").mkdir()
    os.link(tmp_path / "key.txt", tmp_path / "agent" / "answer.txt")
    assert _remove_foreign(str(tmp_path / "agent")) == ["answer.txt"]
    assert not list((tmp_path / "agent").iterdir())
    assert (tmp_path / "key.txt").read_text() == "42"


@pytest.mark.parametrize("folder", ["../secret", "{absolute}", "linked", ".", "six/../../secret"])
def test_a_template_stays_below_the_fixed_part_of_its_path(folder: str, template: Path) -> None:
    secret = template.parent / "secret"
    secret.mkdir()
    (template / "linked").symlink_to(secret)
    setting = "{folder}" if folder == "{absolute}" else str(template / "{folder}")
    workflow = workflow_of("ask('a')", workspace_template=setting)
    prompt = replace(TASK, fields={"folder": folder.format(absolute=secret)})
    with pytest.raises(RolloutError, match=r"expands to .*, which is outside '"):
        play(workflow, prompt=prompt)


@pytest.mark.parametrize(("task", "cause"), [("x" * 200_000, "Argument list too long"), ("a\0b", "null byte")])
def test_a_task_that_cannot_be_an_argument_says_why_and_can_be_a_file(task: str, cause: str) -> None:
    prompt = replace(TASK, messages=[user(task)])
    with pytest.raises(
        RolloutError, match=rf"could not be started: .*{cause}.*{{task_file}} is a file that contains it"
    ):
        play(workflow_of("ask(sys.argv[1])", "{task}"), prompt=prompt)
    programs = {"ask(str(len(open(sys.argv[1]).read())))": ["{task_file}"], "ask(str(len(sys.stdin.read())))": []}
    for program, arguments in programs.items():
        trajectory = play(workflow_of(program, *arguments), prompt=prompt)
        assert f"user\n{len(task)}<" in decode(list(trajectory.token_ids))


@pytest.fixture
def environment_of_its_own(tmp_path: Path) -> Path:
    """A virtual environment whose Python links to this one, with a module of its own."""
    folder = tmp_path / "tool"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python3").symlink_to(os.path.realpath(sys.executable))
    (folder / "pyvenv.cfg").write_text(f"home = {Path(os.path.realpath(sys.executable)).parent}\n")
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "tool.py").write_text("word = 'from the tool'")
    return folder


@pytest.mark.parametrize("kind", ["absolute", "long", "env", "link"])
def test_a_console_script_finds_the_interpreter_that_its_first_line_names(
    kind: str, environment_of_its_own: Path, tmp_path: Path
) -> None:
    python = environment_of_its_own / "bin" / "python3"
    first = {"long": f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''", "env": "#!/usr/bin/env -S tool-python"}
    script = tmp_path / "scripts" / "mini"
    script.parent.mkdir()
    script.write_text(f"{first.get(kind, f'#!{python}')}\n{ASK}\nimport tool; ask('a'); print(tool.word)")
    script.chmod(0o755)
    (environment_of_its_own / "bin" / "tool-python").symlink_to("python3")
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "mini").symlink_to("../scripts/mini")
        script = tmp_path / "elsewhere" / "mini"
    path = {"PATH": f"{environment_of_its_own / 'bin'}:/usr/bin:/bin"} if kind == "env" else {}
    workflow = AgentWorkflow(TOKENIZER, command=[str(script)], environment=path, max_tokens=400)
    assert play(workflow).agent_output == "from the tool\n"


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("#!/no/such/python\n", 0o755, "/no/such/python, the interpreter in the first line of .*mini, does not exist"),
        ("print(1)\n", 0o755, "mini is not a program and has no #! line"),
        ("#!\n", 0o755, "mini has an empty #! line"),
        ("#!{tmp}/not-executable\n", 0o755, "not-executable, the interpreter in .*, is not executable"),
    ],
)
def test_a_program_that_cannot_run_says_what_and_why(text: str, mode: int, message: str, tmp_path: Path) -> None:
    (tmp_path / "not-executable").write_text("")
    script = tmp_path / "mini"
    script.write_text(text.replace("{tmp}", str(tmp_path)))
    script.chmod(mode)
    with pytest.raises(RolloutError, match=f"could not be started: .*{message}"):
        play(AgentWorkflow(TOKENIZER, command=[str(script)], max_tokens=400))


def test_a_script_of_another_folder_is_named_and_can_be_made_readable(tmp_path: Path) -> None:
    script = tmp_path / "project" / "agent.py"
    script.parent.mkdir()
    (script.parent / "helper.py").write_text("word = 'help'")
    script.write_text(f"{ASK}\nimport helper; ask('a'); print(helper.word)")
    settings: dict[str, Any] = {"command": [sys.executable, "-B", str(script)], "max_tokens": 400}
    with pytest.raises(RolloutError, match=f"It cannot read {script}: add it or its folder to readable"):
        play(AgentWorkflow(TOKENIZER, **settings))
    for mode in (0o755, 0o700):
        script.parent.chmod(mode)
        assert play(AgentWorkflow(TOKENIZER, **settings, readable=[str(script.parent)])).agent_output == "help\n"


def test_a_lone_surrogate_in_a_task_reaches_the_program() -> None:
    program = "ask(str(len(sys.stdin.buffer.read().decode(errors='surrogatepass'))))"
    trajectory = play(workflow_of(program), prompt=replace(TASK, messages=[user("a\ud800b")]))
    assert "user\n3<" in decode(list(trajectory.token_ids))


def test_a_full_disk_drops_the_trajectory_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a small disk")
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "large").write_bytes(b"x" * 100_000)
    try:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        root_of.cache_clear()
        with pytest.raises(RolloutError, match=r"could not be started: .*No space left on device"):
            play(workflow_of("ask('a')", workspace_template=str(tmp_path / "template")))
        assert comes_true(lambda: not list(disk.glob("*/*")))
    finally:
        root_of.cache_clear()
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.extra
def test_a_killed_run_leaves_no_process_and_the_next_one_no_folder(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from test_agent_command import *
play(workflow_of("import subprocess; ask('a'); open('asked', 'w'); subprocess.run(['sleep', '97535'])"))
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for folder in (tmp_path, tmp_path.parent, tmp_path.parents[1]):  # the program's own user goes through them
        folder.chmod(0o755)
    run = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        assert comes_true(lambda: list(tmp_path.glob("*/*/work/asked")))
        assert comes_true(lambda: running("97535"))
        kept = next(tmp_path.glob("lightrl-agents-*"))
        run.send_signal(signal.SIGKILL)
    finally:
        run.kill()
        run.wait()
    assert comes_true(lambda: not running("97535"))
    assert comes_true(lambda: not list(kept.iterdir()))
    code = code.replace("97535", "0")
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_of_tokens_alone_is_a_task_of_its_text() -> None:
    trajectory = play(workflow_of("ask(sys.stdin.read())"), prompt=PROMPT)
    assert f"user\n{decode([5])}<|im_end|>" in decode(list(trajectory.token_ids))


def test_where_namespaces_are_refused_landlock_leaves_the_endpoints_port_alone(tmp_path: Path) -> None:
    if tuple(map(int, os.uname().release.split(".")[:2])) < (6, 7):
        pytest.skip("Landlock bounds TCP from Linux 6.7")
    program = (
        "import socket, sys\nfor port in sys.argv[1:]:\n    try:\n        socket.create_connection(('127.0.0.1', port))"
    )
    program += "\n        print(port)\n    except PermissionError:\n        pass"
    with socket.create_server(("127.0.0.1", 0)) as endpoint, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [server.getsockname()[1] for server in (endpoint, other)]
        request = {
            "command": [sys.executable, "-c", program, *map(str, ports)],
            "environment": {},
            "folder": str(tmp_path / "agent"),
            "template": None,
            "files": {},
            "stdin": "",
            "port": ports[0],
            "layers": ["private_user", "landlock"],
            "readable": [*SYSTEM_PATHS, sys.prefix, sys.base_prefix],
            "unprotected": True,
            "limits": asdict(Limits(memory_mib=1 << 20)),
        }
        for folder in (tmp_path, tmp_path.parent, tmp_path.parents[1]):
            folder.chmod(0o755)
        line = json.dumps(request).encode() + b"\n"
        guard = subprocess.Popen([*GUARD_COMMAND, ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            guard.stdin.write(line)
            guard.stdin.flush()
            reply = json.loads(guard.stdout.readline())
        finally:
            guard.communicate()
    if "landlock" not in reply["layers"]:
        pytest.skip("this system refuses Landlock")
    assert (reply["stdout"], reply["exit_code"]) == (f"{ports[0]}\n", 0)
    assert [path.name for path in sorted((tmp_path / "agent").iterdir())] == ["home", "tmp", "work"]
