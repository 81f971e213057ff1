"""ServerProcess and its keeper with real processes: readiness, restarts, and nothing that outlives its trainer."""

import asyncio
import contextlib
import errno
import json
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import psutil
import pytest
import torch
from transformers import GPT2Config, Qwen3Config
from waits import comes_true, is_gone, until

from lightrl.concurrency.owner import own_mark
from lightrl.engines import FakeEngine, LocalEngine, SGLangEngine
from lightrl.engines.servers.processes.command import devices_of_servers, flags, gpus_of_servers, visible
from lightrl.engines.servers.processes.keeper import end_all, keep, restart, start_all
from lightrl.engines.servers.processes.process import HeldPort, RestartPolicy, ServerProcess, write_model_folder
from lightrl.engines.sglang.command import SGLangProcess
from lightrl.errors import EngineError, EngineTimeout
from lightrl.weights.block_fp8 import quantized_config

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="other systems hold no port for somebody else")
SMALL_SERVER = str(Path(__file__).with_name("small_server.py"))


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    made: list[ServerProcess] = []

    def make(*words: str, **settings: Any) -> ServerProcess:
        name = f"server {len(made)}"
        server = ServerProcess(
            [sys.executable, SMALL_SERVER, "--port", "{port}", *words],
            **{
                "name": name,
                "log_file": tmp_path / f"{name}.log",
                "startup_timeout_s": 600,
                "stop_timeout_s": 5,
                **settings,
            },
        )
        made.append(server)
        return server

    yield make
    for server in made:
        server.stop(grace_s=0)


def ready(server: ServerProcess) -> ServerProcess:
    server.start()
    server.wait_ready()
    return server


def ask(server: ServerProcess) -> dict[str, Any]:
    return answer_of(server.url, server.token)


def answer_of(url: str, token: str) -> dict[str, Any]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.loads(answer.read())


def test_a_server_is_ready_after_the_wait_gone_after_the_stop_and_may_start_again(small_server):
    server = small_server()
    assert not server.is_alive()
    for _ in range(2):
        pid = ask(ready(server))["pid"]
        assert server.is_alive()
        with pytest.raises(RuntimeError, match="is already running"):
            server.start()
        server.stop()
        server.stop()
        assert is_gone(pid)
        assert not server.is_ready()


@pytest.mark.parametrize(
    ("words", "is_hanging", "grace_s"),
    [
        pytest.param(("stubborn",), False, 0.3, id="ignores SIGTERM"),
        pytest.param(("child",), False, 5, id="has a child that ignores it"),
        pytest.param((), True, 0.3, id="hangs"),
        pytest.param(("stubborn", "child"), False, 0, id="at once"),
    ],
)
def test_nothing_outlives_a_stop(small_server, words, is_hanging, grace_s):
    server = ready(small_server(*words))
    answer = ask(server)
    if is_hanging:
        os.kill(answer["pid"], signal.SIGSTOP)
        assert server.is_alive()
        assert not server.answers(within_s=0.3)
    server.stop(grace_s=grace_s)
    assert is_gone(answer["pid"])
    assert answer["child"] is None or is_gone(answer["child"])


def test_a_server_that_dies_says_command_log_and_last_words_but_not_the_token(small_server):
    server = small_server("dies")
    server.start()
    with pytest.raises(EngineError) as caught:
        server.wait_ready()
    message = str(caught.value)
    assert "server 0 ended (exit code 1)" in message
    assert "small_server.py" in message
    assert str(server.log_file) in message
    assert "no room for 7 GiB of weights, token <token>" in message
    assert server.token not in message


def test_a_server_that_is_not_ready_in_time_is_named(small_server):
    server = small_server("never_ready", startup_timeout_s=5.0)
    server.start()
    with pytest.raises(
        EngineTimeout, match=r"(?s)server 0 at http://127.0.0.1:\d+ was not ready.*engine.timeouts.startup_s.*listening"
    ):
        server.wait_ready()
    assert server.answers()


def test_a_program_that_is_not_there_is_an_error_with_its_name(tmp_path):
    server = ServerProcess(["/nowhere/sglang", "{port}"], log_file=tmp_path / "log")
    server.start()
    with pytest.raises(EngineError, match=r"(?s)exit code 127.*No such file or directory: '/nowhere/sglang'"):
        server.wait_ready()
    server.stop()


@ON_LINUX
def test_nobody_else_gets_the_port_of_a_server_that_is_starting(small_server):
    server = small_server("late")
    server.start()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((server.host, server.port))
    server.wait_ready()
    assert ask(server)["pid"]
    server.stop()
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # there were connections
        other.bind((server.host, server.port))
        other.listen()


@ON_LINUX
def test_a_held_port_is_given_to_no_outgoing_connection() -> None:
    held, found = set(), set()
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as server:
        for port in range(32768, 60999, 140):  # Linux gives the even ones to connections
            with contextlib.suppress(EngineError):
                held.add(stack.enter_context(contextlib.closing(HeldPort("127.0.0.1", port))).number)
        for _ in range(5_000):
            with socket.create_connection(server.getsockname()) as client:
                found.add(client.getsockname()[1])
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves nothing behind
                server.accept()[0].close()
    assert len(held) > 100
    assert not held & found


def test_a_port_at_which_another_server_answers_is_refused_at_once(small_server):
    other = ready(small_server())
    server = small_server(port=other.port)
    with pytest.raises(EngineError, match=rf"No server can listen at 127.0.0.1:{other.port}: .*Set host to"):
        server.start()
    assert not server.is_alive()


def test_a_port_is_kept_from_the_first_start_on_where_zero_was_given(small_server):
    kept, new = small_server(port=0), small_server()
    urls = []
    for _ in range(2):
        for server in (kept, new):
            ready(server)
            urls.append(server.url)
            os.kill(ask(server)["pid"], signal.SIGKILL)
            assert comes_true(lambda server=server: not server.is_alive())
            server.stop()
    assert urls[0] == urls[2]
    assert urls[1] != urls[3]


_TRAINER = """
import os, signal, sys, time
from lightrl.engines.servers.processes.process import ServerProcess
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
how, log = sys.argv[1:3]
server = ServerProcess(sys.argv[3:], log_file=log, stop_timeout_s=1)
server.start()
server.wait_ready()
if how == "forked":
    if os.fork() == 0:  # holds the pipe open
        time.sleep(30)
        os._exit(0)
sys.stdout.write(f"{server.url} {server.token} {server.pid}\\n")
sys.stdout.flush()
if how == "raises":
    raise RuntimeError("the trainer's own")
if how == "exits":
    sys.exit(0)
time.sleep(60)
"""
_ENDS = {"kill -9": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT, "forked": signal.SIGKILL}


@pytest.mark.parametrize(
    "how",
    [
        "kill -9",
        "raises",
        *(pytest.param(how, marks=pytest.mark.extra) for how in ("SIGTERM", "Ctrl-C", "forked", "exits")),
    ],
)
def test_no_process_of_a_server_outlives_its_trainer(how, tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(_TRAINER)
    server = [sys.executable, SMALL_SERVER, "--port", "{port}", "stubborn", "child"]
    command = [sys.executable, str(script), how, str(tmp_path / "log"), *server]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    trainer = forked.Popen(command, **pipes, text=True, start_new_session=True)
    url, token, watch = trainer.stdout.readline().split()
    answer = answer_of(url, token)
    if how in _ENDS:
        trainer.send_signal(_ENDS[how])
    trainer.wait(600)
    try:
        assert comes_true(lambda: is_gone(answer["pid"]) and is_gone(answer["child"]) and is_gone(int(watch)))
    finally:
        if how == "forked":
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.stdout.close()


def test_a_server_dies_with_the_process_that_watches_it(small_server):
    server = ready(small_server())
    pid = ask(server)["pid"]
    os.kill(server.pid, signal.SIGKILL)
    assert comes_true(lambda: is_gone(pid))
    assert not server.is_alive()


def test_each_server_has_a_token_of_its_own_unless_given(small_server):
    first, second, third = small_server(), small_server(), small_server(token="mine")
    assert len({first.token, second.token}) == 2
    assert re.fullmatch("[0-9a-f]{64}", first.token)
    assert third.token == "mine"


def test_a_token_that_sglang_takes_for_an_option_is_refused(small_server):
    with pytest.raises(ValueError, match=r"starts with '-', so SGLang would take it for an option"):
        small_server(token="-mine")


def test_the_token_is_in_no_command_line_and_in_files_of_this_user_only(tmp_path, monkeypatch):
    folder = write_model_folder(Qwen3Config(), tmp_path / "model")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    server = SGLangProcess(folder, python="/bin/cat", token="very-secret", log_file=tmp_path / "log")
    server.start()
    command_lines = [" ".join(psutil.Process(server.pid).cmdline())]
    written = list(tmp_path.glob("*.yaml"))
    assert "very-secret" not in " ".join(command_lines)
    modes = [stat.S_IMODE(file.stat().st_mode) for file in (*written, tmp_path / "log")]
    server.stop(grace_s=0)
    assert set(modes) == {0o600}
    assert not list(tmp_path.glob("*.yaml"))


def test_the_log_of_a_gone_run_is_cleared_a_day_later_and_its_token_at_once(tmp_path, monkeypatch, small_server):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = f"1-1-{own_mark().rpartition('-')[2]}"  # process 1 started at another time
    old, new = (tmp_path / f"lightrl-server-{gone}-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (0, 0))
    (tmp_path / f"lightrl-secrets-{gone}-a.yaml").touch()
    server = small_server(log_file=None)
    server.start()
    server.stop(grace_s=0)
    assert not old.exists()
    assert new.exists()
    assert server.log_file.parent.name.startswith(f"lightrl-server-{own_mark()}-")
    assert not list(tmp_path.glob("lightrl-secrets-*"))


def test_arguments_keep_sglangs_names():
    args = {
        "tp_size": 2,
        "mem-fraction-static": 0.6,
        "enable_metrics": True,
        "disable_radix_cache": False,
        "lora_paths": ["a", "b"],
    }
    assert flags({**args, "dtype": None, "model_loader_extra_config": {"a": 1}}) == [
        *("--tp-size", "2", "--mem-fraction-static", "0.6", "--enable-metrics", "--lora-paths", "a", "b"),
        *("--model-loader-extra-config", '{"a": 1}'),
    ]


Served = Callable[..., SGLangProcess]


@pytest.fixture
def served(tmp_path: Path) -> Served:
    """Makes a server, which is not started, of a model without a context length."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.symlink_to(sys.executable)

    def make(folder: str = "m", *, is_cpu: bool = False, **args: Any) -> SGLangProcess:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        if is_cpu:
            (tmp_path / "lightrl-sglang-cpu.json").touch()
        return SGLangProcess(tmp_path / folder, python=str(python), port=7, args=args)

    return make


def test_no_shell_reads_an_argument(served, tmp_path):
    line = served("a folder; touch x", served_model_name="$(touch y)").command_line("s.yaml")
    assert line[line.index("--model-path") + 1] == str(tmp_path / "a folder; touch x")
    assert line[line.index("--served-model-name") + 1] == "$(touch y)"


def test_given_arguments_win_over_lightrls_defaults(served, tmp_path):
    assert "--device" not in served("plain").command_line("s.yaml")
    line = " ".join(served(is_cpu=True, dtype="bfloat16", **{"sampling-defaults": "model"}).command_line("s.yaml"))
    assert f"-m lightrl_sglang_cpu.launch --model-path {tmp_path / 'm'} --host 127.0.0.1 --port 7" in line
    assert "--config s.yaml" in line
    assert "--dtype bfloat16" in line
    assert "float32" not in line
    assert line.count("--sampling-defaults") == 1


@pytest.mark.parametrize("name", ["api_key", "admin-api-key", "--port", "host", "model_path", "config"])
def test_what_lightrl_sets_is_refused_among_the_arguments(name, served):
    with pytest.raises(ValueError, match=r"which lightrl sets\. Remove it"):
        served(**{name: "x"})


def test_each_server_gets_its_own_devices():
    assert devices_of_servers(2, 2, [0, 1, 2, 3, 4]) == [["0", "1"], ["2", "3"]]
    assert devices_of_servers(3, 1, []) == [[], [], []]
    with pytest.raises(ValueError, match="need 6 devices, but there are 2"):
        devices_of_servers(3, 2, [0, 1])


def test_a_server_sees_its_devices_and_variables_but_not_the_trainers_packages(small_server, served, monkeypatch):
    monkeypatch.setenv("SGLANG_ANYTHING", "1")
    found = ask(ready(small_server(devices=[4, 5])))["environment"]
    assert (found["CUDA_VISIBLE_DEVICES"], found["SGLANG_ANYTHING"]) == ("4,5", "1")
    monkeypatch.setenv("PYTHONPATH", "/trainers/own")
    environment = served().environment()
    assert "PYTHONPATH" not in environment
    assert environment["SGLANG_FORCE_STREAM_INTERVAL"] == "1"


def test_a_server_does_not_get_the_trainers_secrets_nor_send_codes_to_a_terminal(served, tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "LIGHTRL_SERVER_TOKEN"):
        monkeypatch.setenv(name, "s3cret")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    environment = served().environment()
    assert "s3cret" not in environment.values()
    assert environment["TOKENIZERS_PARALLELISM"] == "false"
    server = ServerProcess(["true"], log_file=tmp_path / "log")
    (tmp_path / "log").write_text("one\n\x1b[2Jtwo")
    assert server.last_output().endswith("Last output:\none\n\\x1b[2Jtwo")


def test_the_variable_and_the_argument_win_over_the_environment_built_for_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTRL_SGLANG_CACHE", str(tmp_path))
    monkeypatch.setenv("LIGHTRL_SGLANG_PYTHON", sys.executable)
    (tmp_path / "sglang-cpu/bin").mkdir(parents=True)
    (tmp_path / "sglang-cpu/bin/python").symlink_to(sys.executable)
    (tmp_path / "sglang-cpu/lightrl-sglang-cpu.json").touch()
    assert SGLangProcess.find_python() == (sys.executable, False)
    with pytest.raises(ValueError, match="sglang_python=/nowhere/python is not a program"):
        SGLangProcess.find_python("/nowhere/python")


def test_a_folder_without_a_model_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ValueError, match=r"has no config.json.*write_model_folder"):
        SGLangProcess(tmp_path, python=sys.executable)


@pytest.mark.parametrize("config", [Qwen3Config(eos_token_id=1), GPT2Config(eos_token_id=3)], ids=["Qwen3", "GPT2"])
def test_a_model_folder_has_architecture_and_tokenizer_but_no_end_token(config, tmp_path):
    folder = write_model_folder(config, tmp_path / "model")
    written = json.loads((folder / "config.json").read_text())
    assert written["eos_token_id"] is None
    assert written["architectures"] in (["Qwen3ForCausalLM"], ["GPT2LMHeadModel"])
    assert {file.name for file in folder.iterdir()} == {"config.json", "tokenizer.json", "tokenizer_config.json"}


def test_the_context_includes_what_sglang_reserves(tmp_path):
    folder = write_model_folder(Qwen3Config(max_position_embeddings=256), tmp_path)
    assert SGLangProcess(folder, python=sys.executable).args["context_length"] == 264
    given = SGLangProcess(folder, python=sys.executable, args={"context-length": 100})
    assert given.args["context_length"] == 100


async def kept_until(is_true: Callable[[], object], *processes: ServerProcess, hang_s: float = 60.0) -> list[str]:
    """Keeps processes until it is true or one is given up; why they are given up."""
    for process in processes:
        process.policy.backoff_s = 0.05
    keeping = [asyncio.ensure_future(keep(process, hang_s=hang_s)) for process in processes]
    await until(lambda: is_true() or any(task.done() for task in keeping))
    given_up = [task.result() for task in keeping if task.done()]
    for task in keeping:
        task.cancel()
    await asyncio.gather(*keeping, return_exceptions=True)
    return given_up


def is_back(process: ServerProcess, old_pid: int) -> Callable[[], bool]:
    """Whether another process than before is ready."""
    return lambda: process.is_ready() and ask(process)["pid"] != old_pid


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("kill -9", r"its process ended \(signal SIGKILL\)"),
        pytest.param("SIGSTOP", "it has not answered for", marks=pytest.mark.extra),
    ],
)
def test_a_server_that_is_lost_is_replaced_and_the_others_stay(how, reason, small_server, caplog):
    servers = [small_server(), small_server()]
    start_all(servers)
    urls, pids = [server.url for server in servers], [ask(server)["pid"] for server in servers]
    os.kill(pids[1], signal.SIGKILL if how == "kill -9" else signal.SIGSTOP)
    hang_s = 2.0 if how == "SIGSTOP" else 60.0
    assert asyncio.run(kept_until(is_back(servers[1], pids[1]), *servers, hang_s=hang_s)) == []
    assert any(re.search(rf"server 1 at {urls[1]} is lost: {reason}", message) for message in caplog.messages)
    assert servers[0].url == urls[0]
    assert servers[1].url != urls[1]
    assert ask(servers[0])["pid"] == pids[0]
    assert is_gone(pids[1])


@pytest.mark.parametrize(
    "error",
    [
        EngineError("did not take the weights"),
        OSError(errno.EAGAIN, "no more processes"),
        pytest.param(MemoryError(), marks=pytest.mark.extra),
    ],
    ids=["no weights", "EAGAIN", "MemoryError"],
)
def test_a_server_that_cannot_be_used_after_a_restart_is_tried_again(error, small_server, caplog):
    server = ready(small_server())
    server.policy.backoff_s = 0.05
    failures = [error, error]

    async def give_weights() -> None:
        if failures:
            raise failures.pop()

    assert asyncio.run(restart(server, "on purpose", give_weights)) is None
    said = [message for message in caplog.messages if "server 0 could not be restarted" in message]
    assert len(said) == 2
    assert str(error) in said[0]
    assert server.is_ready()


def test_a_restart_that_the_machine_cannot_do_now_is_tried_again(small_server, monkeypatch, caplog):
    server = ready(small_server())
    server.policy.backoff_s = 0.05
    start, failures = server.start, [OSError(errno.ENOSPC, "no space")]

    def start_later() -> None:
        if failures:
            raise failures.pop()
        start()

    monkeypatch.setattr(server, "start", start_later)
    assert asyncio.run(restart(server, "on purpose")) is None
    assert [message for message in caplog.messages if "OSError: [Errno 28] no space" in message]


def test_a_server_that_keeps_dying_is_given_up_with_its_last_words(small_server):
    server = small_server("dies_after_1")
    start_all([server])
    server.policy.max_restarts = 2

    async def give_weights() -> None:
        raise EngineError("did not take the weights")

    server.policy.backoff_s = 0.05
    message = asyncio.run(restart(server, "its process ended", give_weights))
    assert "after 2 restarts in a row. Last reason: did not take the weights" in message
    assert str(server.log_file) in message


def test_a_server_that_does_not_start_ends_the_others(small_server):
    servers = [small_server("never_ready"), small_server("dies")]
    with pytest.raises(EngineError, match=r"server 1 ended \(exit code 1\)"):
        start_all(servers)
    assert not any(server.is_alive() for server in servers)


def test_a_stop_during_a_restart_leaves_nothing(small_server):
    server = ready(small_server())
    server.policy.backoff_s = 0.3

    async def scenario() -> str | None:
        restarting = asyncio.ensure_future(restart(server, "on purpose"))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(end_all, [server], 0.0)
        return await restarting

    server.policy.max_restarts = 1
    message = asyncio.run(scenario())
    assert not server.is_alive()
    assert "it is being stopped" in str(message)


def test_restarts_are_bounded_back_off_and_are_forgotten_after_a_long_run():
    policy = RestartPolicy(max_restarts=3, backoff_s=1.0, stable_s=600)
    assert [policy.delay_s(5) for _ in range(4)] == [1.0, 2.0, 4.0, None]
    assert policy.delay_s(600) == 1.0
    assert RestartPolicy(max_restarts=0).delay_s(10_000) is None


@pytest.mark.parametrize(("capability", "given"), [((8, 0), None), ((8, 9), {}), ((9, 0), {}), ((10, 3), "triton")])
def test_block_fp8_gets_kernels_that_take_new_weights(capability, given, tmp_path, monkeypatch):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    folder = write_model_folder(quantized_config(Qwen3Config(**sizes, head_dim=32)), tmp_path / "model")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if given is None:
        with pytest.raises(ValueError, match=r"compute capability 8\.9 or higher, .* this GPU has 8\.0\. Omit"):
            SGLangProcess(folder, python=sys.executable)
        return
    args = SGLangProcess(folder, python=sys.executable).args
    names = ("fp8_gemm_backend", "moe_runner_backend")
    assert {name: args[name] for name in names if name in args} == dict.fromkeys(names if given else (), given)


CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("num", "trainer", "placement", "expected"),
    [(2, [0, 1], "separate", [2, 3]), (2, [2], "separate", [0, 1]), (1, [2, 3], "colocated", [2])],
    ids=["next to the trainer's", "around them", "on the trainer's"],
)
def test_servers_get_gpus_that_fit_their_placement(num: int, trainer: Any, placement: Any, expected: Any):
    assert gpus_of_servers(num, available=4, trainer=trainer, placement=placement) == expected


def test_servers_without_a_gpu_on_the_machine_are_given_none() -> None:
    assert gpus_of_servers(2, available=0, trainer=[], placement="separate") is None


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("separate", r"need 3 GPUs .* besides the trainer's \[0, 1\], but only 2 of 4 .*to colocated"),
        ("colocated", r"need 3 GPUs .* of the trainer, but only 2 of 4 .*to separate"),
    ],
)
def test_gpus_that_do_not_suffice_are_refused(placement: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpus_of_servers(3, available=4, trainer=[0, 1], placement=placement)


def test_a_server_gets_the_device_names_that_this_process_got(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, GPU-a,7")
    assert visible([1, 2]) == ["GPU-a", "7"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible([1, 2]) == ["1", "2"]


def test_a_local_engine_decodes_on_the_trainers_gpu_unless_device_is_set(caplog: pytest.LogCaptureFixture) -> None:
    assert LocalEngine().place([CPU]) == "on cpu"
    assert LocalEngine().place([GPU]) == "on cuda:1"
    assert LocalEngine(device="cpu").place([GPU]) == "on cpu"
    assert LocalEngine().place([torch.device("mps")]) == "on cpu"
    assert "its sampler needs float64, which mps lacks" in caplog.text


def test_the_place_of_servers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FakeEngine().place([CPU]) == ""
    assert SGLangEngine(urls=["http://host:1"]).place([GPU]) == "on servers that run elsewhere"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert SGLangEngine(servers=2).place([CPU]) == "2 servers with tp=1 on the CPU, separate"
    planned = SGLangEngine(servers=1).place([GPU])
    assert planned == "1 server with tp=1 on GPUs (this machine has none), separate"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    text = SGLangEngine(servers=1, tp=2).place([torch.device("cuda", 0), GPU])
    assert text == "1 server with tp=2 on cuda:2, cuda:3, separate"
