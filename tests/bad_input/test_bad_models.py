"""Model folders and configs with an error: one message that names the model or the setting, before a run starts."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from bad_input_rows import each, row
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from lightrl.models import ModelSpec
from lightrl.models.model_spec import loading

pytestmark = pytest.mark.bad_input

CONFIG = {
    "model_type": "llama", "vocab_size": 30, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
WEIGHTS = "model.safetensors"


def config_with(**values):
    def change(folder):
        config = json.loads((folder / "config.json").read_text()) | values
        kept = {name: value for name, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def weights_with(changed):
    def change(folder):
        save_file(changed(load_file(folder / WEIGHTS)), folder / WEIGHTS, metadata={"format": "pt"})

    return change


def written(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def cut(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


def emptied(folder, pattern="*"):
    for file in folder.glob(pattern):
        file.unlink()


def norm_of(value, size=8):
    return weights_with(lambda tensors: tensors | {"model.norm.weight": torch.full((size,), value)})


# What is done to the folder of an intact model and its tokenizer.
FOLDERS = [
    row("missing tensors", weights_with(lambda all: {k: v for k, v in all.items() if "1.mlp" not in k}), "lacks 3 weights", "layers.1.mlp", "would be random"),
    row("a config with more layers than the weights", config_with(num_hidden_layers=3), "lacks 9 weights", "layers.2"),
    row("a tensor of another shape", norm_of(1.0, size=9), "cannot be loaded", "config.json"),
    row("a weight with NaN", norm_of(float("nan")), "NaN or infinity in weight 'model.norm.weight'", "intact checkpoint"),
    row("weights cut short", cut, "cannot be loaded", "file not fully covered", "again"),
    row("weights that are a pointer of Git LFS", written(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"), WEIGHTS, "git lfs pull"),
    row("no weights", lambda folder: (folder / WEIGHTS).unlink(), "no file named model.safetensors"),
    row("no config.json", lambda folder: (folder / "config.json").unlink(), "config.json"),
    row("a config.json that is not JSON", written("config.json", b"{"), "config.json' is not a valid JSON file"),
    row("an empty folder", emptied, "cannot be loaded", "a folder with a complete config.json"),
    row("a config without vocab_size", config_with(vocab_size=None), "cannot be loaded", "config.json"),
    row("an unknown family", config_with(model_type="lama"), "model type `lama`"),
    row("no family", config_with(model_type=None), "`model_type` key in its config.json"),
    row("BERT", config_with(model_type="bert"), "is a bert", "left to right", "Qwen3"),
    row("no tokenizer", lambda folder: emptied(folder, "tok*"), "The tokenizer of './model' cannot be loaded", "Set tokenizer"),
    row("a tokenizer.json that is not JSON", written("tokenizer.json", b"{"), "The tokenizer of './model' cannot be loaded"),
]  # fmt: skip

# Configs for random weights.
CONFIGS = [
    row("config: a size with a typing error", {"hiden_size": 64, "hidden_size": None}, "config has 'hiden_size'", "Did you mean hidden_size"),
    row("config: heads that do not divide", {"num_attention_heads": 3}, "(8) is not a multiple of the number of attention heads (3)"),
    row("config: heads that do not share", {"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads=3, got 4"),
    row("config: a word for a size", {"hidden_size": "x"}, "hidden_size", "expected int, got str"),
    row("config: no tokens", {"vocab_size": 0}, "vocab_size >= 1, got 0"),
    row("config: an unknown family", {"model_type": "lama"}, "Unrecognized model identifier: lama", "Fix the config"),
]  # fmt: skip

# Settings of a ModelSpec.
SPECS = [
    row("a folder that is not there", {"path": "./nowhere"}, "Model folder './nowhere' does not exist", "Set path"),
    row("a hub name offline", {"path": "org/nothing"}, "Model 'org/nothing' cannot be loaded", "internet", "hub name, or a folder"),
    row("an unknown dtype", {"path": "./model", "dtype": "float7"}, "dtype must be a torch dtype", "'float7'"),
    row("an unknown attention", {"path": "./model", "attn_implementation": "flsh"}, "Model './model' cannot be loaded", "flsh"),
    *(
        row(f"{name} in options", {"path": "./model", "options": {name: value}}, f"got '{name}'", "Use the model's dtype", "hf download")
        for name, value in {
            "dtype": "auto", "torch_dtype": "bfloat16", "attn_implementation": "eager", "device_map": "auto", "revision": "v2",
            "quantization_config": {}, "token": "hf_x", "rope_theta": 2.0,
        }.items()
    ),
    row("options of random weights", {"config": CONFIG, "tokenizer": "x", "options": {"weights_only": True}}, "with path, got 'weights_only'"),
    row("a tokenizer function with arguments", {"path": "./model", "tokenizer": "json.loads"}, "tokenizer='json.loads'", "without arguments"),
    row("a tokenizer function that is not there", {"path": "./model", "tokenizer": "json.nothing"}, "tokenizer='json.nothing'", "has no 'nothing'"),
    row("a function that makes no tokenizer", {"path": "./model", "tokenizer": "tiny.not_a_tokenizer"}, "'tiny.not_a_tokenizer' must return a Hugging Face tokenizer, got int"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    """An intact model in ./model."""
    monkeypatch.chdir(tmp_path)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).save_pretrained("model")
    tiny.char_tokenizer().save_pretrained("model")


def load(spec):
    made = ModelSpec(**spec)
    return made.load_model(), made.load_tokenizer()


def refused(case, spec):
    with pytest.raises((ValueError, OSError, TypeError)) as caught:
        load(spec)
    case.check(str(caught.value))


def test_the_intact_folder_is_loaded():
    model, tokenizer = load({"path": "./model"})
    assert (model.config.hidden_size, len(tokenizer)) == (8, len(tiny.char_tokenizer()))


@each(FOLDERS)
def test_a_model_folder_is_refused(case):
    case.given(Path("model"))
    refused(case, {"path": "./model"})


@each(CONFIGS)
def test_a_config_for_random_weights_is_refused(case):
    values = {name: value for name, value in (CONFIG | case.given).items() if value is not None}
    refused(case, {"config": values, "tokenizer": "tiny.char_tokenizer"})


@each(SPECS)
def test_a_models_settings_are_refused(case):
    refused(case, case.given)


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()])
def test_too_little_memory_for_a_model_is_no_error_of_its_config(error):
    with pytest.raises(ValueError, match=r"cannot be loaded: .* too little memory: use a smaller model"):
        with loading("A model", "Fix the config."):
            raise error
