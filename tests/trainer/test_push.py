"""lightrl export --push: the real huggingface_hub against a hub on loopback, which keeps what it is sent."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from tiny_run import CONFIG, POLICY, TinyGRPO, train, weights
from transformers import AutoModelForCausalLM

from lightrl import ModelSpec
from lightrl.commands.export import Hub, write_card
from lightrl.commands.main import main

TOKEN = "hf_of_this_test"


class _Hub(BaseHTTPRequestHandler):
    """The routes that `create_repo` and `upload_folder` ask for; files are in the server's `files`, by path."""

    server: Any
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self._answer(200, {"url": f"{self.server.url}/me/digits"})
        elif "/preupload/" in self.path:
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del self.server.files[line["value"]["path"]]
            self._answer(200, {"commitUrl": f"{self.server.url}/me/digits/commit/1", "commitOid": "1", "success": True})
        else:
            self._answer(200, {})

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif "/tree/" in self.path:
            sizes = {path: len(content) for path, content in self.server.files.items()}
            self._answer(200, [{"type": "file", "path": path, "size": sizes[path], "oid": "0"} for path in sizes])
        else:
            self._answer(200, {"id": "me/digits", "sha": "0", "siblings": []})

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, content: Any) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.url, server.created, server.files = f"http://127.0.0.1:{server.server_address[1]}", [], {}
    monkeypatch.setattr(constants, "ENDPOINT", server.url)  # read from HF_ENDPOINT at its import
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def made_run(folder: Path) -> Path:
    """A run's folder as the command leaves it, without weights; returns its checkpoint."""
    model = {"class_path": "GRPO", "init_args": {"lr": 0.001, "reward": "digits.right", "judge": {"api_key": "sk-1"}}}
    arguments = {"storage_options": {"key": "sk-1"}, "max_new_tokens": 5}
    train = {"source": "rows.jsonl", "split": "a|b", "arguments": arguments}
    data = {"class_path": "PromptDataModule", "init_args": {"train": train}}
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed_everything": 3, "model": model, "data": data}))
    (folder / "metrics.csv").write_text(
        "step,val/accuracy_fraction,rollout/reward\n0,0.25,\n0,,0.1\n9,0.75,\n19,0.5,0.6\n"
    )
    (folder / "learning_curve.png").write_bytes(b"an image")
    (folder / "checkpoints").mkdir()
    return folder / "checkpoints" / "last.ckpt"


def test_the_card_has_the_runs_settings_curve_data_and_versions(tmp_path: Path) -> None:
    checkpoint, export = made_run(tmp_path), tmp_path / "export"
    export.mkdir()
    write_card(export, repo="me/digits", checkpoint=checkpoint, role="policy", base="Qwen/Qwen3-0.6B")
    _, head, card = (export / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "tags": ["lightrl", "reinforcement-learning"],
        "base_model": "Qwen/Qwen3-0.6B",
    }
    assert "| val/accuracy_fraction | 0.25 (iteration 0) | 0.75 (iteration 9) | 0.5 (iteration 19) |" in card
    assert "| rollout/reward | 0.1 (iteration 0) | 0.6 (iteration 19) | 0.6 (iteration 19) |" in card
    assert "![the run's curve](learning_curve.png)" in card
    assert (export / "learning_curve.png").read_bytes() == b"an image"
    assert "| data.train.source | rows.jsonl |\n| data.train.split | a\\|b |" in card.partition("## Settings")[0]
    assert "| model.lr | 0.001 |" in card
    assert "| model.judge.api_key | (not shown) |" in card
    assert "| data.train.arguments.storage_options.key | (not shown) |" in card
    assert "| data.train.arguments.max_new_tokens | 5 |" in card
    assert "sk-1" not in card
    assert "| lightrl |" in card.partition("## Package versions")[2]


def test_a_checkpoint_apart_from_its_run_gets_a_card_without_settings(tmp_path: Path, caplog: Any) -> None:
    write_card(
        tmp_path,
        repo="me/digits",
        checkpoint=tmp_path / "a" / "b" / "c" / "d" / "moved.ckpt",
        role="policy",
        base="runs/sft/x",
    )
    assert "## Settings" not in (tmp_path / "README.md").read_text()
    assert "base_model" not in (tmp_path / "README.md").read_text()
    assert "no config.yaml above" in caplog.text


def test_a_folder_is_pushed_to_a_private_repository(hub: Any, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("card")
    (tmp_path / "config.json").write_text("{}")
    Hub("me/digits").upload(tmp_path, "exported")
    assert [(one["name"], one["visibility"]) for one in hub.created] == [("digits", "private")]
    assert hub.files == {"README.md": b"card", "config.json": b"{}"}


def test_a_second_push_leaves_no_model_files_of_the_first(hub: Any, tmp_path: Path) -> None:
    pushes = (("adapter_config.json", "adapter_model.safetensors", "notes.md"), ("model.safetensors", "config.json"),
              ("model.safetensors.index.json", "model-00001-of-00002.safetensors"))  # fmt: skip
    for number, names in enumerate(pushes):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in names:
            (folder / name).write_text(f"{name} {number}")
        Hub("me/digits").upload(folder, "exported")
        assert {name for name in hub.files if "model" in name or "adapter" in name} == {
            name for name in names if "model" in name or "adapter" in name
        }
    assert {"notes.md", "config.json"} <= hub.files.keys()


@pytest.mark.bad_input
def test_a_token_that_the_hub_refuses_is_one_message(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ValueError, match=r"HTTP status 401: .*Log in with a token that may write there") as caught:
        Hub("me/digits")
    assert hub.url in str(caught.value)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("offline", "repo", "says"),
    [
        (True, "me/digits", "HF_HUB_OFFLINE is set"),
        (False, "me/two/parts", "must be a repository such as"),
        (False, "me/digits", "does not answer"),
    ],
)
def test_a_hub_out_of_reach_and_a_wrong_name_are_one_message(
    offline: bool, repo: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ValueError, match=says):
        Hub(repo)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, dict[str, torch.Tensor]]]:
    """Checkpoints of one run after one, two and three iterations, each with the weights in it."""
    folder, made = tmp_path_factory.mktemp("three"), []

    class Saving(TinyGRPO):
        def on_train_batch_end(self, *_: Any) -> None:
            path = folder / f"{self.trainer.global_step}.ckpt"
            self.trainer.save_checkpoint(path)
            made.append((path, weights(self)))

    train(folder, Saving())
    return made


@pytest.mark.parametrize(
    ("options", "shares"),
    [([], (1 / 3, 1 / 3, 1 / 3)), (["--decay", "0.75"], (0.5625, 0.1875, 0.25)), (["--decay", "0"], (0, 0, 1))],
)
def test_several_checkpoints_are_exported_as_their_average(three, options, shares, tmp_path: Path) -> None:
    command = ["export", *(str(path) for path, _ in three), "--to", str(tmp_path / "average")]
    assert main([*command, "--tokenizer", "tiny_run.tokenizer", *options]) == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "average").state_dict()
    for name, value in exported.items():
        expected = sum(share * tensors[name].double() for share, (_, tensors) in zip(shares, three, strict=True))
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-7)


def test_checkpoints_of_two_models_are_not_averaged(three, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = ModelSpec(config=CONFIG | {"intermediate_size": 24}, tokenizer=POLICY.tokenizer)
    train(tmp_path, TinyGRPO(other), max_steps=1).save_checkpoint(tmp_path / "other.ckpt")
    command = ["export", str(tmp_path / "other.ckpt"), str(three[0][0]), "--to", str(tmp_path / "average")]
    assert main([*command, "--tokenizer", "tiny_run.tokenizer"]) == 2
    assert "cannot be averaged: they do not have the same policy" in capsys.readouterr().err


@pytest.mark.extra
def test_the_command_exports_and_pushes_a_whole_run(hub: Any, tmp_path: Path) -> None:
    checkpoint = made_run(tmp_path)
    train(tmp_path / "trainer", max_steps=1).save_checkpoint(checkpoint)
    command = [sys.executable, "-m", "lightrl", "export", str(checkpoint), "--to", str(tmp_path / "export")]
    command += ["--push", "me/digits", "--run_code_of_checkpoint"]
    modules = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parent)])
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "PYTHONPATH": modules}
    wrong = subprocess.run(command, env={**environment, "HF_TOKEN": "x"}, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "HTTP status 401" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert not (tmp_path / "export").exists()
    done = subprocess.run(command, env={**environment, "HF_TOKEN": TOKEN}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"README.md", "config.json", "model.safetensors", "learning_curve.png"} <= hub.files.keys()
    assert hub.files["model.safetensors"] == (tmp_path / "export" / "model.safetensors").read_bytes()
