"""Model folders: whole or absent; transformers loads scalar heads without a word, SGLang finds the bias it wants."""

import logging
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import FAMILIES, random_experience, tiny_model, tiny_spec
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from lightrl.checks import files
from lightrl.models import LoRA, ModelSpec, model_folder
from lightrl.models.model_folder import replaced_folder, save_model
from lightrl.models.model_spec import check_files
from lightrl.strategies import LogprobSettings, SingleModel


@pytest.mark.parametrize(("family", "has_bias"), [("qwen2", True), ("qwen3", True), ("llama", False)])
def test_a_bias_of_zero_lies_next_to_the_heads_that_have_one_in_sglang(
    family: str, has_bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = ModelSpec(config=FAMILIES[family], tokenizer="tiny.char_tokenizer", seed=1, head="scalar")
    model = spec.load_model()
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    save_model(model, tmp_path)
    tensors = {name: value for path in tmp_path.glob("*.safetensors") for name, value in load_file(path).items()}
    assert ("score.bias" in tensors) == has_bias
    if has_bias:
        assert tensors["score.bias"].tolist() == [0.0]

    monkeypatch.setattr(transformers_logging.get_logger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert caplog.text == ""

    loaded = ModelSpec(path=str(tmp_path), tokenizer="tiny.char_tokenizer", head="scalar").load_model()
    experience = random_experience()
    outputs = [next(iter(SingleModel(one, LogprobSettings()).forward([experience]))) for one in (loaded, model)]
    actual, expected = (output.values for output in outputs)
    torch.testing.assert_close(actual, expected)  # products round by where the weights lie in memory
    assert expected.any()


def test_a_full_disk_is_said_in_words_and_leaves_the_earlier_export(tmp_path: Path) -> None:
    def save(to: Path) -> None:
        with replaced_folder(to) as folder:
            (folder / "config.json").symlink_to("/dev/full")  # which accepts nothing
            (folder / "config.json").write_text("{}")

    to = tmp_path / "export"
    to.mkdir()
    (to / "config.json").write_text("{}")
    message = rf"^The model could not be exported to {to}: the disk that holds '{tmp_path}' is full .*An export needs"
    with pytest.raises(OSError, match=message) as caught:
        save(to)
    assert caught.value.__suppress_context__
    assert (to / "config.json").read_text() == "{}"
    assert list(tmp_path.iterdir()) == [to]


# Each step of an export, as (module, function): it is killed before the step.
STEPS = [("model_folder", "sync_files"), ("model_folder", "publish"), ("files", "_swap"), ("files", "remove_path")]


def export(place: Path, text: str) -> None:
    with replaced_folder(place) as folder:
        (folder / "config.json").write_text(text)


def killed_export(place: Path, module: str, function: str) -> None:
    """Exports in a child, which kills itself when it comes to the step."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        return
    try:
        home = {"files": files, "model_folder": model_folder}[module]
        vars(home)[function] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        export(place, "new")
    finally:
        os._exit(1)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # the child only exports
@pytest.mark.parametrize(("module", "function"), STEPS, ids=[function for _, function in STEPS])
def test_an_export_killed_at_any_step_is_whole_and_the_next_one_clears_the_rest(
    module: str, function: str, tmp_path: Path
) -> None:
    place = tmp_path / "export"
    export(place, "old")
    killed_export(place, module, function)
    assert (place / "config.json").read_text() == ("new" if function == "remove_path" else "old")
    export(place, "newest")
    assert (place / "config.json").read_text() == "newest"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize("role", ["model", "scalar head"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_an_exported_file_with_one_other_bit_is_refused_by_name(name: str, role: str, tmp_path: Path) -> None:
    place = tmp_path / "export"
    with replaced_folder(place) as folder:
        tiny_spec().load_model().save_pretrained(folder)
    content = bytearray((place / name).read_bytes())
    content[-9] ^= 1
    (place / name).write_bytes(content)
    spec = ModelSpec(path=str(place), head="scalar" if role == "scalar head" else "vocabulary")
    with pytest.raises(ValueError, match=rf"{name}' has changed.*delete its line in "):
        spec.load_model()


def test_an_exported_adapter_with_one_other_bit_is_refused(tmp_path: Path) -> None:
    place, model = tmp_path / "export", tiny_model()
    lora = LoRA(rank=2)
    lora.add_to(model)
    with replaced_folder(place) as folder:
        lora.save(dict(model.named_parameters()), lora.saved_config(model, None), folder)
    content = bytearray((place / "adapter_model.safetensors").read_bytes())
    content[-9] ^= 1
    (place / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"adapter_model.safetensors' has changed"):
        LoRA(adapter=str(place)).add_to(tiny_model())


def test_an_exported_file_that_was_changed_on_purpose_is_taken_after_its_line_is_deleted(tmp_path: Path) -> None:
    export(tmp_path / "export", "old")
    (tmp_path / "export" / "config.json").write_text("new")
    sums = tmp_path / "export" / "sha256sums.txt"
    with pytest.raises(ValueError, match=r"config\.json"):
        check_files(tmp_path / "export")
    sums.write_text("")
    check_files(tmp_path / "export")


def test_without_exchanging_renames_the_next_export_gives_the_old_folder_its_name_back(tmp_path: Path) -> None:
    place = tmp_path / "export"
    export(place, "old")
    place.rename(place.with_name("export.replaced"))  # killed between two renames
    files.restore(place)
    assert (place / "config.json").read_text() == "old"


def test_weights_that_an_earlier_export_left_are_refused(tmp_path: Path) -> None:
    export(tmp_path / "export", "new")
    (tmp_path / "export" / "model.safetensors").write_bytes(b"old")  # which transformers prefers to an index
    with pytest.raises(ValueError, match=r"model\.safetensors' is not in sha256sums\.txt: they come from two saves"):
        check_files(tmp_path / "export")
