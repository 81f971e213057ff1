"""lightrl serve: what a command line and configurations mean, which model is served, and servers in the foreground."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import forked
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from lightrl.commands.config_layers import UsageError
from lightrl.commands.serve import parse, parse_policy, serve, serve_policy, served_folder, usage
from lightrl.engines.servers.registry import Registry
from lightrl.errors import EngineError
from lightrl.models import ModelSpec, Role
from lightrl.models.model_folder import ModelDescription
from lightrl.testing import TINY_CONFIG, tiny_policy

POLICY = {"config": {"model_type": "qwen3"}, "tokenizer": "tiny.char_tokenizer"}


@pytest.fixture
def fake_python(tmp_path):
    """In place of an environment with SGLang: its server starts at once, or ends if there is a file `refuse`."""
    path, server = tmp_path / "python", f"{sys.executable} {Path(__file__).parents[1]}/engines/small_server.py"
    path.write_text(f'#!/bin/sh\n[ ! -e {tmp_path}/refuse ] || set -- dies "$@"\nexec {server} "$@"\n')
    path.chmod(0o700)
    return path


@pytest.fixture
def tiny_folder(tmp_path):
    """A model with weights, its own end token and no tokenizer."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    config = Qwen3Config(vocab_size=11, num_key_value_heads=1, eos_token_id=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def write(path, text):
    path.write_text(text)
    return str(path)


def test_policy_and_engine_come_from_the_runs_configuration_and_flags_win(tmp_path):
    run = write(tmp_path / "run.yaml", json.dumps({"model": {"init_args": {"policy": POLICY}}}))
    engine = {"class_path": "SGLangEngine", "init_args": {"servers": 2, "tp": 4, "server_args": {"dtype": "a", "x": 1}}}
    engine["init_args"]["timeouts"] = {"startup_s": 7}
    fleet = write(tmp_path / "fleet.yaml", json.dumps({"trainer": {"engine": engine}}))
    flags = ["--tp", "1", "--server_args.dtype", "float32", "--server_args.enable_metrics", "--server_args.a-b=0.5"]
    assert parse(["--config", run, "--model", "m/m"])["model"].path == "m/m"
    found = parse(["--config", run, "--config", fleet, *flags, "--devices", "0,3"])
    assert found["model"] == ModelSpec(**POLICY)
    assert (found["servers"], found["tp"], found["devices"]) == (2, 1, "0,3")
    assert found["startup_timeout_s"] == 7
    assert found["server_args"] == {"dtype": "float32", "x": 1, "enable_metrics": True, "a-b": 0.5}


def engine_file(path, class_path, **server_args):
    engine = {"class_path": class_path, "init_args": {"server_args": server_args}} if server_args else class_path
    return ["--config", write(path, json.dumps({"trainer": {"engine": engine}}))]


@pytest.mark.parametrize("policy", ["some/model", {"path": "some/model"}])
def test_a_later_config_adds_to_the_policy_as_in_a_run(policy, tmp_path):
    layers = [{"model": {"init_args": {"policy": value}}} for value in (policy, {"dtype": "bfloat16"})]
    files = [f"--config={write(tmp_path / str(number), json.dumps(layer))}" for number, layer in enumerate(layers)]
    assert parse(files)["model"] == ModelSpec("some/model", dtype="bfloat16")


def test_a_later_config_adds_to_the_engine_as_in_a_run(tmp_path):
    first = {"class_path": "VLLMEngine", "init_args": {"tp": 2, "server_args": {"seed": 3}}}
    layers = [{"trainer": {"engine": engine}} for engine in (first, {"init_args": {"tp": 4}})]
    files = [f"--config={write(tmp_path / str(number), json.dumps(layer))}" for number, layer in enumerate(layers)]
    found = parse(["--model", "m/m", *files])
    assert (found["engine"], found["tp"], found["server_args"]) == ("vllm", 4, {"seed": 3})


def test_an_engine_that_is_only_named_is_the_kind_of_the_servers(tmp_path):
    for name in ("VLLMEngine", "lightrl.engines.VLLMEngine"):
        assert parse(["--model", "m/m", *engine_file(tmp_path / "run.yaml", name)])["engine"] == "vllm"
    with pytest.raises(ValueError, match=r"must be SGLangEngine or VLLMEngine, but .*run\.yaml has LocalEngine"):
        parse(["--model", "m/m", *engine_file(tmp_path / "run.yaml", "LocalEngine")])


def test_vllm_is_ready_for_nccl_if_the_run_sends_weights_by_it(tmp_path):
    engine = {"class_path": "VLLMEngine", "init_args": {"transport": "distributed", "server_args": {"seed": 3}}}
    found = parse(
        ["--model", "m/m", "--config", write(tmp_path / "run.yaml", json.dumps({"trainer": {"engine": engine}}))]
    )
    assert found["server_args"] == {"weight_transfer_config": {"backend": "nccl"}, "seed": 3}


def test_arguments_of_the_other_kind_of_server_are_left_out_and_named(tmp_path, caplog):
    sglang = engine_file(tmp_path / "sglang.yaml", "SGLangEngine", mem_fraction_static=0.7, dtype="float32")
    vllm = engine_file(tmp_path / "vllm.yaml", "VLLMEngine", gpu_memory_utilization=0.8)
    flags = ["--engine", "vllm", "--server_args.seed", "3"]
    found = parse(["--model", "m/m", *sglang, *flags])
    assert (found["engine"], found["server_args"]) == ("vllm", {"seed": 3})
    assert "server_args for sglang, because the servers run vllm: mem_fraction_static, dtype." in caplog.text
    caplog.clear()
    found = parse(["--model", "m/m", *vllm, *sglang])
    assert (found["engine"], found["server_args"]) == ("sglang", {"mem_fraction_static": 0.7, "dtype": "float32"})
    assert "server_args for vllm, because the servers run sglang: gpu_memory_utilization." in caplog.text


@pytest.mark.parametrize(("kind", "name"), [("sglang", "SGLangEngine"), ("vllm", "VLLMEngine")])
def test_what_is_printed_is_for_the_kind_of_the_servers(kind, name, tmp_path):
    receivers = SimpleNamespace(urls=["http://0.0.0.0:7"])
    text = usage([SimpleNamespace(port=5, log_file=tmp_path / "log")], receivers, "t", "0.0.0.0", None, kind)
    assert f"lightrl fit --config run.yaml --trainer.engine {name}\n" in text
    assert ("require no token" in text) == (kind == "vllm")


def test_no_model_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs a model"):
        parse([])
    with pytest.raises(UsageError, match=r"none\.yaml does not exist\. .* has no \.yaml or \.yml file\.$"):
        parse(["--config", str(tmp_path / "none.yaml")])


def test_an_unknown_flag_and_a_wrong_value_are_named():
    with pytest.raises(UsageError, match=r"(?s)mem_fraction_static.*own arguments start with --server_args\."):
        parse(["--model", "m/m", "--mem_fraction_static", "0.5"])
    with pytest.raises(UsageError, match="servers"):
        parse(["--model", "m/m", "--servers", "many"])


def test_a_served_folder_has_the_weights_and_no_end_token(tiny_folder, tmp_path):
    spec = ModelSpec.of(str(tiny_folder))
    folder = served_folder(spec, spec.load_config(), tmp_path / "served")
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] is None
    assert (folder / "model.safetensors").resolve() == (tiny_folder / "model.safetensors").resolve()
    assert not (folder / "generation_config.json").exists()
    assert (folder / "tokenizer.json").exists()


def test_a_server_in_block_fp8_starts_from_a_quantized_config_without_weights(fake_python, tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 32}
    config, ended = {**TINY_CONFIG, **sizes, "num_attention_heads": 4}, threading.Event()
    configs = []

    def say(text):
        line = (tmp_path / "server-0.log").read_text()
        configs.append(json.loads((Path(line.partition("--model-path ")[2].split()[0]) / "config.json").read_text()))
        ended.set()

    args = {"quantization": "fp8"}
    spec = ModelSpec(config=config, tokenizer="tiny.char_tokenizer")
    serve(spec, sglang_python=str(fake_python), server_args=args, until=ended, write=say, log_folder=tmp_path)
    assert configs[0]["quantization_config"]["weight_block_size"] == [128, 128]
    assert "--load-format dummy" in (tmp_path / "server-0.log").read_text()


@pytest.mark.parametrize(
    ("engine", "args", "is_dummy"),
    [("sglang", {"quantization": "fp8"}, True), ("sglang", {"quantization": None}, False), ("sglang", {}, False),
     ("vllm", {"quantization": "fp8"}, False)],
)  # fmt: skip
def test_servers_have_the_models_weights_unless_they_are_quantized_here(engine, args, is_dummy, tmp_path, monkeypatch):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 32}
    Qwen3Config(**{**TINY_CONFIG, **sizes, "num_attention_heads": 4}).save_pretrained(tmp_path / "model")

    def made(*_, args, **__):
        assert args.get("load_format") == ("dummy" if is_dummy else None)
        raise EngineError("made")

    monkeypatch.setattr("lightrl.commands.serve.make_servers", made)
    with pytest.raises(EngineError, match="made"):
        serve(ModelSpec.of(str(tmp_path / "model")), engine=engine, server_args=args)


def test_servers_run_until_the_end_and_their_addresses_are_printed(fake_python, tiny_folder, tmp_path):
    said, ended = [], threading.Event()

    def say(text):
        said.append(text)
        ended.set()

    spec = ModelSpec.of(str(tiny_folder))
    serve(spec, servers=2, sglang_python=str(fake_python), token="t", until=ended, write=say, log_folder=tmp_path)
    lines = said[0].splitlines()
    addresses = next(line for line in lines if "LIGHTRL_SERVER_ADDRS=" in line).partition("=")[2].split(",")
    assert len({address.rpartition(":")[2] for address in addresses}) == 2
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert any(line.startswith("  export LIGHTRL_RECEIVER_ADDRS=127.0.0.1:") for line in lines)
    assert "  export LIGHTRL_SERVER_TOKEN=t" in lines
    assert "--random-seed 1" in (tmp_path / "server-1.log").read_text()


def test_registered_servers_are_announced_and_leave_when_a_run_has_let_them_go(fake_python, tiny_folder, tmp_path):
    registry, ended, said = Registry(tmp_path / "servers"), threading.Event(), []

    def let_go():
        while found := registry.read():
            said.extend(found)
            for url, entry in found.items():
                assert entry.receiver
                if entry.is_leaving:
                    registry.release(url)

    def end(text):
        assert f"LIGHTRL_SERVER_ADDRS=file://{registry.folder}" in text
        threads.append(threading.Thread(target=let_go))
        threads[0].start()
        ended.set()

    threads = []
    spec = ModelSpec.of(str(tiny_folder))
    registry.read()  # what comes from now on is new
    serve(spec, sglang_python=str(fake_python), register=registry.folder, until=ended, write=end, log_folder=tmp_path)
    threads[0].join(600)
    assert not registry.read()
    assert len(set(said)) == 1


@pytest.mark.parametrize("folder", [None, pytest.param("servers", marks=pytest.mark.extra)], ids=["", "registered"])
def test_a_server_that_does_not_start_ends_the_command_with_its_last_words(fake_python, tiny_folder, tmp_path, folder):
    (tmp_path / "refuse").touch()
    register = folder and tmp_path / folder
    with pytest.raises(EngineError, match=r"(?s)server 0 ended.*no room for 7 GiB"):
        serve(ModelSpec.of(str(tiny_folder)), sglang_python=str(fake_python), register=register)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.extra)], ids=["Ctrl-C", "SIGTERM"]
)
def test_ctrl_c_and_sigterm_end_the_servers(fake_python, tiny_folder, number):
    command = [sys.executable, "-m", "lightrl", "serve", "--model", str(tiny_folder)]
    process = subprocess.Popen(
        [*command, "--sglang_python", str(fake_python)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests may ignore it
    )
    try:
        lines = []
        while not lines or "Ctrl-C" not in lines[-1]:
            lines.append(process.stdout.readline())
            assert lines[-1], "it ended"
        family = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, number)
        assert process.wait(600) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert len(family) >= 2
    assert not psutil.wait_procs(family, 600)[1]


def test_without_sglang_it_says_how_to_get_it(tiny_folder, tmp_path):
    done = forked.run(
        [sys.executable, "-m", "lightrl", "serve", "--model", str(tiny_folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "LIGHTRL_SGLANG_CACHE": str(tmp_path), "LIGHTRL_SGLANG_PYTHON": ""},
    )
    assert done.returncode == 2
    assert "No Python with SGLang was found" in done.stderr
    assert "python scripts/sglang_cpu/build.py" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(Path(tmp_path).glob("sglang-cpu*"))


def test_a_token_comes_from_a_file_or_the_environment_and_not_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTRL_SERVER_TOKEN", "of-environment")
    assert parse(["--model", "m/m"])["token"] == "of-environment"
    (tmp_path / "token").write_text("of-file\n")
    assert parse(["--model", "m/m", "--token_file", str(tmp_path / "token")])["token"] == "of-file"
    for option in (["--token", "t"], ["--token=t"]):
        with pytest.raises(UsageError, match="All users on this machine can read a command line"):
            parse(["--model", "m/m", *option])
    (tmp_path / "token").write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        parse(["--model", "m/m", "--token_file", str(tmp_path / "token")])


class Served:
    """What `serve_policy` printed, asked of a thread that waits for its first line."""

    def __init__(self) -> None:
        self.text, self.is_ready, self.until = "", threading.Event(), threading.Event()

    def write(self, text: str) -> None:
        self.text += text
        self.is_ready.set()


@pytest.mark.parametrize("source", ["folder", "checkpoint", "config"])
def test_a_policy_is_served_from_an_export_a_checkpoint_or_a_config(source, tmp_path):
    spec = tiny_policy()
    model, path = spec.load_model(), tmp_path / "exported"
    spec.load_tokenizer().save_pretrained(path)
    if source == "config":
        policy = {"config": TINY_CONFIG, "tokenizer": str(path), "seed": 0}
        path = Path(write(tmp_path / "run.yaml", json.dumps({"model": {"init_args": {"policy": policy}}})))
    elif source == "folder":
        model.save_pretrained(path)
    else:
        described = ModelDescription.of(model, Role(ModelSpec(config=TINY_CONFIG, tokenizer=str(path))))
        state = {f"policy.{name}": value for name, value in model.state_dict().items()}
        path = tmp_path / "a.ckpt"
        models = {"policy": dataclasses.asdict(described)}
        torch.save({"pytorch-lightning_version": "2.6.0", "state_dict": state, "models": models}, path)
    served = Served()
    thread = threading.Thread(
        target=serve_policy, args=(str(path),), kwargs={"token": "t", "until": served.until, "write": served.write}
    )
    thread.start()
    try:
        assert served.is_ready.wait(600)
        url = served.text.partition("OPENAI_BASE_URL=")[2].split()[0]
        body = {"model": "policy", "prompt": [3, 4, 5], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), {"Authorization": "Bearer t"})
        with urllib.request.urlopen(request) as answer:
            logprobs = json.loads(answer.read())["choices"][0]["logprobs"]["token_logprobs"]
    finally:
        served.until.set()
        thread.join()
    rows = model(torch.tensor([[3, 4, 5]])).logits[0].detach().log_softmax(-1)
    expected = [float(rows[0, 4]), float(rows[1, 5]), float(rows[2].max())]
    assert logprobs[0] is None
    assert logprobs[1:] == pytest.approx(expected, abs=1e-5)


def test_the_flags_of_a_policy_and_what_is_none(tmp_path):
    (tmp_path / "token").write_text("of-file\n")
    found = parse_policy(["--policy", "a.ckpt", "--port", "8000", "--token_file", str(tmp_path / "token")])
    assert found == {"policy": "a.ckpt", "host": "127.0.0.1", "port": 8000, "token": "of-file"}
    with pytest.raises(UsageError, match="must have model"):
        serve_policy(write(tmp_path / "empty.yaml", "{}"))
