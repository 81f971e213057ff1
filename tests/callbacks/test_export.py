import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_run import ScriptedModule, ScriptedTrainer, batches
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightrl.callbacks.export import HuggingFaceExport
from lightrl.testing import make_groups


class Module(ScriptedModule):
    """Has a policy of a few hundred parameters, whose weights move in each iteration."""

    def __init__(self, *, fails_at: int | None = None, error: type[BaseException] = RuntimeError) -> None:
        super().__init__(lambda _: make_groups([[1.0, 0.0]]))
        config = LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, eos_token_id=1
        )
        self.policy = LlamaForCausalLM(config)
        self.policy.generation_config.max_new_tokens = 5
        words = {"<eos>": 1, "<unk>": 0, "nine": 2}
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), eos_token="<eos>"
        )
        self.fails_at = fails_at
        self.error = error

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fails_at:
            raise self.error("on request")
        return self.policy(torch.tensor([[1, 2, 3]])).logits.square().sum()


def fit(module: Module, export: HuggingFaceExport, num_iterations: int = 2, **settings: Any) -> None:
    flags = {"callbacks": [export], "max_steps": num_iterations, "enable_progress_bar": False}
    ScriptedTrainer(**flags, **settings).fit(module, batches(num_iterations))


def weights_at(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return tensors


def assert_same_weights(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_from_pretrained_gives_the_trained_tensors_bit_for_bit_and_the_tokenizer(tmp_path: Path) -> None:
    module, folder = Module(), tmp_path / "models" / "digits"
    fit(module, HuggingFaceExport(str(folder)))
    assert_same_weights(weights_at(folder), module.policy.state_dict())
    read = AutoTokenizer.from_pretrained(folder)
    assert (read.eos_token, read.convert_ids_to_tokens([0, 1, 2])) == ("<eos>", ["<unk>", "<eos>", "nine"])
    assert json.loads((folder / "generation_config.json").read_text())["max_new_tokens"] == 5
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"  # as transformers 4 knows it; 5: TokenizersBackend


def test_an_earlier_export_is_replaced_and_nothing_else_is_left_behind(tmp_path: Path) -> None:
    fit(Module(), HuggingFaceExport(str(tmp_path / "digits")))
    (tmp_path / "digits" / "model-00002-of-00002.safetensors").write_text("a shard of a larger model")
    module = Module()
    fit(module, HuggingFaceExport(str(tmp_path / "digits")))
    assert_same_weights(weights_at(tmp_path / "digits"), module.policy.state_dict())
    assert not (tmp_path / "digits" / "model-00002-of-00002.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_a_plain_name_is_a_folder_in_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fit(Module(), HuggingFaceExport(), default_root_dir=tmp_path / "run")
    fit(Module(), HuggingFaceExport("models/digits"))
    assert weights_at(tmp_path / "run" / "exported").keys() == weights_at(tmp_path / "models" / "digits").keys()


def test_every_n_iterations_exports_while_the_run_continues(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="on request"):
        fit(Module(fails_at=2), HuggingFaceExport(str(tmp_path / "digits"), every_n_iterations=2), num_iterations=4)
    assert weights_at(tmp_path / "digits")


def test_an_export_that_fails_leaves_the_earlier_one_and_no_half_folder(tmp_path: Path) -> None:
    first, second = Module(), Module()
    fit(first, HuggingFaceExport(str(tmp_path / "digits")))
    second.tokenizer = object()  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        fit(second, HuggingFaceExport(str(tmp_path / "digits")))
    assert_same_weights(weights_at(tmp_path / "digits"), first.policy.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]


def test_fast_dev_run_exports_nothing(tmp_path: Path) -> None:
    fit(Module(), HuggingFaceExport(str(tmp_path / "digits")), fast_dev_run=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["notes.md"], id="no export"),
        pytest.param(["config.json", "README.md"], id="a repository with a README"),
        pytest.param(["metrics.json"], id="files that look like one, but no config"),
    ],
)
def test_a_folder_with_something_else_in_it_is_refused_before_training(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="must be empty or an earlier export"):
        fit(Module(), HuggingFaceExport(str(tmp_path)))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def test_the_folder_that_the_policy_comes_from_is_refused(tmp_path: Path) -> None:
    fit(Module(), HuggingFaceExport(str(tmp_path / "base")))
    module = Module()
    module.policy = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="the policy is loaded from that folder"):
        fit(module, HuggingFaceExport(str(tmp_path / "base")))


def test_a_module_without_a_policy_is_refused(tmp_path: Path) -> None:
    trainer = ScriptedTrainer(callbacks=[HuggingFaceExport(str(tmp_path / "digits"))], max_steps=1)
    with pytest.raises(TypeError, match="needs a Hugging Face model"):
        trainer.fit(ScriptedModule(lambda _: make_groups([[1.0]])), batches(1))
