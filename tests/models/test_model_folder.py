"""Model folders: whole or absent; transformers loads scalar heads without a word, SGLang finds the bias it wants."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import FAMILIES, random_experience
from transformers import AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

from lightrl.models import ModelSpec
from lightrl.models.model_folder import replaced_folder, save_model
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
    assert actual is not None
    assert expected is not None
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
    message = rf"^The model could not be exported to {to}: the disk of '{tmp_path}' is full .*An export needs .* Free"
    with pytest.raises(OSError, match=message) as caught:
        save(to)
    assert caught.value.__suppress_context__
    assert (to / "config.json").read_text() == "{}"
    assert list(tmp_path.iterdir()) == [to]
