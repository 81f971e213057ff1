"""A version folder loads like any Hugging Face folder, and is whole or not there."""

import errno
import json

import pytest
import torch
from checkpoint_cases import tensors_in
from tiny import tiny_model
from transformers import AutoModelForCausalLM, Qwen3Config
from weight_cases import buckets, parameters

from lightrl.errors import WeightSyncError
from lightrl.weights import ServerForm, WeightFolder, bucketed
from lightrl.weights import disk as disk_module

CONFIG = Qwen3Config()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.float8_e4m3fn])
def test_every_tensor_is_read_back_bit_for_bit(tmp_path, dtype):
    named = parameters(dtype)
    read = tensors_in(WeightFolder(tmp_path, CONFIG, form=ServerForm()).write(buckets(named), 3))
    assert read.keys() == named.keys()
    assert all(torch.equal(read[name].view(torch.uint8), named[name].view(torch.uint8)) for name in named)


@pytest.mark.parametrize("family", ["qwen3", "llama"], ids=["own head", "tied head"])
def test_transformers_loads_a_version_and_gives_the_same_logits(tmp_path, family):
    model = tiny_model(family)
    place = WeightFolder(tmp_path, model.config).write(bucketed(model.named_parameters(), 2000), 0)
    assert len(list(place.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
    token_ids = torch.tensor([[3, 4, 5, 6]])
    assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


def test_a_tied_head_is_left_out_where_the_trainer_sends_it(tmp_path):
    folder = WeightFolder(tmp_path, Qwen3Config(tie_word_embeddings=True))
    assert "lm_head.weight" not in tensors_in(folder.write(buckets(parameters()), 0))


def test_floats_are_written_in_the_servers_dtype(tmp_path):
    named = {**parameters(), "steps": torch.tensor([3])}
    place = WeightFolder(tmp_path, CONFIG, form=ServerForm(torch.bfloat16)).write(buckets(named), 0)
    read = tensors_in(place)
    assert torch.equal(read["a.weight"], named["a.weight"].bfloat16())
    assert read["steps"].dtype == torch.int64
    assert json.loads((place / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_newest_versions_are_kept(tmp_path):
    folder = WeightFolder(tmp_path, CONFIG)
    for version in range(4):
        folder.write(buckets(parameters()), version)
    assert folder.versions() == [2, 3]
    assert not list(tmp_path.glob(".*"))


def test_a_version_may_be_written_again_after_a_resume(tmp_path):
    folder = WeightFolder(tmp_path, CONFIG)
    folder.write(buckets(parameters(seed=0)), 5)
    place = folder.write(buckets(parameters(seed=1)), 5)
    assert torch.equal(tensors_in(place)["a.weight"], parameters(seed=1)["a.weight"])


def test_an_older_number_than_those_kept_stays_when_it_was_just_written(tmp_path):
    folder = WeightFolder(tmp_path, CONFIG)
    for version in (7, 8):
        folder.write(buckets(parameters()), version)
    assert folder.write(buckets(parameters()), 3).exists()  # a run that went back to an older checkpoint


def test_a_full_disk_is_said_and_leaves_the_old_version_alone(tmp_path, monkeypatch):
    folder = WeightFolder(tmp_path, CONFIG)
    folder.write(buckets(parameters()), 1)
    write_all, calls = disk_module._write_all, []

    def full(file, data):
        calls.append(len(data))
        if len(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_all(file, data)

    monkeypatch.setattr(disk_module, "_write_all", full)
    with pytest.raises(WeightSyncError, match=r"is full.*version 2.*Free space"):
        folder.write(buckets(parameters()), 2)
    assert [path.name for path in tmp_path.iterdir()] == ["version-00000001"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WeightSyncError, match="Make the folder writable"):
        WeightFolder(tmp_path / "file" / "weights", CONFIG).write(buckets(parameters()), 0)


def test_an_error_of_the_trainer_comes_through_and_leaves_nothing(tmp_path):
    def broken():
        yield next(buckets(parameters()))
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        WeightFolder(tmp_path, CONFIG).write(broken(), 0)
    assert not list(tmp_path.iterdir())


def test_a_name_that_comes_twice_and_a_version_without_parameters_are_refused(tmp_path):
    named = list(parameters().items())
    with pytest.raises(WeightSyncError, match="arrived twice"):
        WeightFolder(tmp_path, CONFIG).write(bucketed(named + named, 160), 0)
    with pytest.raises(WeightSyncError, match="no parameters"):
        WeightFolder(tmp_path, CONFIG).write([], 0)
