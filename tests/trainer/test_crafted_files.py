"""A checkpoint or a model folder from a stranger runs no code: each file here would, with the stock loader."""

import importlib
import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tiny_run import CONFIG, POLICY, Digits, TinyGRPO, make_trainer, train
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lightrl.commands.export import export_checkpoint
from lightrl.commands.main import main
from lightrl.models import LoRA, ModelSpec
from lightrl.strategies import AtomicCheckpointIO, read_tensors

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Runs:
    """Unpickling it creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of one process."""
    folder = tmp_path_factory.mktemp("run")
    train(folder, max_steps=1).save_checkpoint(folder / "run.ckpt")
    return folder / "run.ckpt"


def as_folder(file: Path, folder: Path, **values: Any) -> Path:
    """The checkpoint in the form of several processes, with values beside its weights."""
    rest = torch.load(file, weights_only=True)
    state = {"state_dict": rest.pop("state_dict"), "optimizer_0": values or {"lr": 1.0}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.state_dict_saver.save(state, checkpoint_id=folder, no_dist=True)
    torch.save(rest, folder / "meta.pt")
    return folder


def with_crafted_metadata(file: Path, folder: Path, marker: Path) -> Path:
    as_folder(file, folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data["more"] = Runs(marker)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def with_crafted_value(file: Path, folder: Path, marker: Path) -> Path:
    return as_folder(file, folder, lr=Runs(marker))


def with_crafted_rest(file: Path, folder: Path, marker: Path) -> Path:
    as_folder(file, folder)
    torch.save({**torch.load(file, weights_only=True), "more": Runs(marker)}, folder / "meta.pt")
    return folder


def crafted_file(file: Path, folder: Path, marker: Path) -> Path:
    folder.mkdir()
    torch.save({**torch.load(file, weights_only=True), "more": Runs(marker)}, folder / "one.ckpt")
    return folder / "one.ckpt"


def load_value_as_torch_does(folder: Path) -> None:
    dcp.state_dict_loader.load({"optimizer_0": {"lr": None}}, checkpoint_id=folder, no_dist=True)


Crafter = Callable[[Path, Path, Path], Path]
PICKLES: dict[str, tuple[Crafter, Callable[[Path], Any]]] = {
    ".metadata": (with_crafted_metadata, lambda path: FileSystemReader(path).read_metadata()),
    "a value beside the weights": (with_crafted_value, load_value_as_torch_does),
    "meta.pt": (with_crafted_rest, lambda path: torch.load(path / "meta.pt", weights_only=False)),
    "a file": (crafted_file, lambda path: torch.load(path, weights_only=False)),
}


def resume(path: Path, folder: Path) -> None:
    make_trainer(folder, max_steps=2).fit(TinyGRPO(), datamodule=Digits(), ckpt_path=path)


def export(path: Path, folder: Path) -> None:
    export_checkpoint(path, folder / "model", tokenizer=POLICY.tokenizer)


@pytest.mark.parametrize("load", [resume, export])
@pytest.mark.parametrize("name", PICKLES)
def test_a_crafted_pickle_runs_with_the_stock_loader_and_not_with_ours(name, load, file, tmp_path):
    craft, load_as_torch_does = PICKLES[name]
    marker = tmp_path / "it ran".replace(" ", "_")
    path = craft(file, tmp_path / "crafted", marker)
    if load is export and name == "a value beside the weights":
        load(path, tmp_path)  # which reads weights only
    else:
        with pytest.raises(Exception, match=r"posix\.system") as raised:
            load(path, tmp_path)
        assert "will likely succeed" not in str(raised.value)  # torch's advice to read the file all the same
    assert not marker.exists()
    load_as_torch_does(path)
    assert marker.exists()


@pytest.mark.bad_input
def test_metadata_can_neither_change_a_class_nor_lead_out_of_the_folder(file: Path, tmp_path: Path) -> None:
    folder = as_folder(file, tmp_path / "crafted")
    honest = (folder / ".metadata").read_bytes()
    assert read_tensors(folder, "state_dict.").keys() == torch.load(file, weights_only=True)["state_dict"].keys()

    # Opcodes: the class itself, then the two halves of a state (None, {"version": 1}), then BUILD.
    module = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (folder / ".metadata").write_bytes(module + b"(N(S'version'\nI1\ndtb.")
    with pytest.raises(ValueError, match="changes the class Metadata"):
        read_tensors(folder, "state_dict.")
    assert Metadata.version is None

    metadata = pickle.loads(honest)
    for place in metadata.storage_data.values():
        place.relative_path = "../run.ckpt"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"names the file '\.\./run\.ckpt', which is not in the folder"):
        read_tensors(folder, "state_dict.")


@pytest.mark.bad_input
@pytest.mark.parametrize("content", [b"", b"\x80", b"garbage", pickle.dumps(1), pickle.dumps([[]] * 3), b"(" * 99999])
def test_damaged_metadata_is_one_error(content: bytes, file: Path, tmp_path: Path) -> None:
    folder = as_folder(file, tmp_path / "damaged")
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"\.metadata' is not what torch.distributed.checkpoint writes"):
        AtomicCheckpointIO().load_checkpoint(folder)


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module beside the checkpoint whose import leaves a file; returns that file."""
    marker = tmp_path / "imported"
    (tmp_path / "of_a_stranger.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\nmake = Model = print\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield marker  # type: ignore[misc]
    sys.modules.pop("of_a_stranger", None)


BASE = json.dumps({"path": "a/b", "trust_remote_code": True})
NAMES = {
    "a class": ({"model_class": "of_a_stranger.Model"}, "the class of_a_stranger.Model"),
    "a class of code from the hub": ({"model_class": "transformers_modules.a.b.Model"}, "the class transformers_modul"),
    "a tokenizer": ({"tokenizer": "of_a_stranger.make"}, "the tokenizer function of_a_stranger.make"),
    "remote code": ({"base": BASE}, "trust_remote_code"),
    "options": ({"base": json.dumps({"path": "a/b", "options": {"weights_only": False}})}, "options for from_pretr"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", NAMES)
def test_what_a_checkpoint_names_is_not_imported(name: str, file: Path, tmp_path: Path, stranger: Path) -> None:
    changes, message = NAMES[name]
    saved = torch.load(file, weights_only=True)
    saved["models"]["policy"].update({"tokenizer": None} | changes)
    torch.save(saved, tmp_path / "crafted.ckpt")
    with pytest.raises(ValueError, match=f"names code that an export would run: {message}"):
        export_checkpoint(tmp_path / "crafted.ckpt", tmp_path / "model")
    assert not stranger.exists()


def test_a_user_may_let_an_export_run_the_code_that_a_checkpoint_names(file, tmp_path, stranger, capsys):
    export = ["export", str(file), "--to", str(tmp_path / "model")]
    assert main(export) == 2
    assert "pass --run_code_of_checkpoint" in capsys.readouterr().err
    assert main([*export, "--run_code_of_checkpoint"]) == 0
    importlib.import_module("of_a_stranger")
    assert stranger.exists()  # so that the tests above can fail


def test_a_checkpoint_does_not_set_the_configuration_of_the_command(file, tmp_path, capsys):
    saved = torch.load(file, weights_only=True)
    saved["hyper_parameters"] = {"_class_path": "GRPO", "reward": "os.system"}
    torch.save(saved, tmp_path / "crafted.ckpt")
    settings = ["--data.class_path=tiny_run.Digits", f"--trainer.default_root_dir={tmp_path}"]
    assert main(["test", *settings, "--ckpt_path", str(tmp_path / "crafted.ckpt")]) == 2
    assert "model" in capsys.readouterr().err  # it is missing: the checkpoint's is not taken


def folder_of_a_stranger(folder: Path, marker: Path) -> Path:
    """A model folder with code of its own, for model and tokenizer."""
    ModelSpec(config=CONFIG, tokenizer=POLICY.tokenizer, seed=0).load_model().save_pretrained(folder)
    POLICY.load_tokenizer().save_pretrained(folder)
    (folder / "code.py").write_text(
        "from pathlib import Path\n"
        "from transformers import PretrainedConfig, Qwen3ForCausalLM, PreTrainedTokenizerFast\n"
        f"Path({str(marker)!r}).touch()\n"
        "class Config(PretrainedConfig):\n    model_type = 'strange'\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.bad_input
@pytest.mark.parametrize("part", ["model", "tokenizer"])
def test_a_model_folder_does_not_run_its_code(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    marker = tmp_path / "ran"
    folder = folder_of_a_stranger(tmp_path / "model", marker)
    spec = ModelSpec(path=str(folder))
    with pytest.raises(ValueError, match="trust_remote_code"):
        spec.load_model() if part == "model" else spec.load_tokenizer()
    assert not marker.exists()
    kind = AutoModelForCausalLM if part == "model" else AutoTokenizer
    with pytest.raises(Exception, match=r"(?i)model|tokenizer"):  # after it has run
        kind.from_pretrained(folder, trust_remote_code=True)
    assert marker.exists()


@pytest.mark.bad_input
def test_a_model_folder_does_not_load_a_pickle_or_kernels(tmp_path: Path) -> None:
    marker, folder = tmp_path / "ran", tmp_path / "model"
    POLICY.load_config().save_pretrained(folder)
    torch.save({"lm_head.weight": Runs(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        ModelSpec(path=str(folder)).load_model()
    assert not marker.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert marker.exists()

    config = json.loads((folder / "config.json").read_text()) | {"attn_implementation": "stranger/kernel"}
    (folder / "config.json").write_text(json.dumps(config))
    assert AutoConfig.from_pretrained(folder)._attn_implementation == "stranger/kernel"
    with pytest.raises(ValueError, match="names attention code on the hub, 'stranger/kernel'"):
        ModelSpec(path=str(folder)).load_model()


def test_an_export_names_the_roles_that_are_there_and_leaves_a_folder_with_other_things_alone(file, tmp_path, capsys):
    with pytest.raises(ValueError, match=r"no role 'critic'. Set --role to one of \['policy'\]"):
        export_checkpoint(file, tmp_path / "model", role="critic")
    (tmp_path / "thesis.tex").write_text("text")
    assert main(["export", str(file), "--to", str(tmp_path)]) == 2
    assert "contains 'thesis.tex'" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.bad_input
def test_an_adapter_folder_does_not_name_a_module_to_import(tmp_path: Path) -> None:
    settings = {"peft_type": "LORA", "r": 2, "megatron_config": {"a": 1}, "megatron_core": "of_a_stranger"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="must have megatron_config=None"):
        LoRA(adapter=str(tmp_path)).add_to(POLICY.load_model())
