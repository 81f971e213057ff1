"""A run saved by some processes goes on in any other number of them, optimizer included, and can be exported."""

import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import PeftModel
from rank_scripts import ROUNDING, finished, left_by, run
from resharded_run import ADAPTED, EXPORTS, ON_BODY, SPEC, TinyPPO, train
from safetensors.torch import load_file
from tiny_run import Digits, make_trainer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightrl.commands.export import export_checkpoint

SCRIPT = Path(__file__).with_name("resharded_run.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resharded")


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, Any]:
    run(SCRIPT, folder, "2")
    return dict(left_by(1, folder)[0])


@pytest.fixture(scope="module")
def four(folder: Path, two: dict[str, Any]) -> dict[str, Any]:
    run(SCRIPT, folder, "4")
    return dict(left_by(1, folder)[0])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, never interrupted."""
    return train(tmp_path_factory.mktemp("alone"), "alone")


@pytest.fixture(scope="module")
def alone_on_body(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train(tmp_path_factory.mktemp("alone_on_body"), "alone", settings=ON_BODY)


def assert_same_updates(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for update, reference in zip(found, expected, strict=True):
        assert update == pytest.approx(reference, rel=ROUNDING, abs=ROUNDING)


@pytest.mark.extra
@pytest.mark.parametrize("name", ["split otherwise", "split, then sharded", "two ranks, then four"])
def test_a_run_continues_in_another_topology(name: str, four: dict[str, Any], alone: dict[str, Any]) -> None:
    assert_same_updates(four[name]["updates"], alone["updates"][4:])


@pytest.mark.extra
@pytest.mark.parametrize("name", ["on the body otherwise", "on the body, then sharded"])
def test_a_head_on_the_body_and_a_moving_reference_continue_in_another_topology(name, four, alone_on_body):
    assert_same_updates(four[name]["updates"], alone_on_body["updates"][4:])


@pytest.mark.extra
def test_a_head_on_the_body_and_a_moving_reference_continue_in_one_process(four, alone_on_body, folder, tmp_path):
    assert_same_updates(four["on the body"]["updates"], alone_on_body["updates"])
    found = train(tmp_path, "one", settings=ON_BODY, ckpt_path=folder / "on the body" / "step=2.ckpt")
    assert_same_updates(found["updates"], alone_on_body["updates"][4:])


@pytest.mark.parametrize("saved", ["two ranks", pytest.param("split", marks=pytest.mark.extra)])
def test_a_run_of_several_processes_continues_in_one(saved, alone, folder, tmp_path, request):
    request.getfixturevalue("two" if saved == "two ranks" else "four")
    found = train(tmp_path, "one", ckpt_path=folder / saved / "step=2.ckpt")
    assert_same_updates(found["updates"], alone["updates"][4:])
    for name, weight in alone["weights"].items():
        assert (found["weights"][name] - weight).abs().max() <= ROUNDING * weight.abs().max(), name


def test_a_run_that_offloads_continues_one_that_does_not_with_the_same_numbers_to_the_bit(two: dict[str, Any]) -> None:
    assert two["two ranks, then offloaded"]["updates"] == two["two ranks"]["updates"][4:]


def test_adapters_of_two_ranks_continue_in_one_process(two: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    found = train(tmp_path, "one", settings=ADAPTED, ckpt_path=folder / "adapters" / "step=2.ckpt")
    assert_same_updates(found["updates"], two["adapters"]["updates"][4:])


@pytest.mark.parametrize(
    "saved", ["two ranks", *(pytest.param(name, marks=pytest.mark.extra) for name in ("split", "on the body"))]
)
@pytest.mark.parametrize(
    ("role", "kind"), [("policy", AutoModelForCausalLM), ("critic", AutoModelForSequenceClassification)]
)
def test_the_command_exports_what_the_run_did(saved, role, kind, folder, tmp_path, request):
    request.getfixturevalue("two" if saved == "two ranks" else "four")
    export_checkpoint(folder / saved / "step=4.ckpt", tmp_path / "model", role=role, tokenizer=SPEC.tokenizer)
    paths = tmp_path / "model", folder / f"{saved} {role}"
    first, second = (kind.from_pretrained(path).state_dict() for path in paths)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
@pytest.mark.parametrize("saved", ["adapters", "adapters in stages"])
def test_ranks_export_every_adapter_and_merge_as_peft_does(saved: str, two: Any, folder: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
    loaded = PeftModel.from_pretrained(base, folder / f"{saved} policy")
    names = {name.replace(".default", "") for name, _ in loaded.named_parameters() if ".lora_" in name}
    assert load_file(folder / f"{saved} policy" / "adapter_model.safetensors").keys() == names
    assert len(names) == 2 * 7 * 2  # A and B of the linear layers of two layers
    merged = AutoModelForCausalLM.from_pretrained(folder / f"{saved} merged policy").state_dict()
    for name, value in loaded.merge_and_unload().state_dict().items():
        assert (merged[name] - value).abs().max() <= ROUNDING * value.abs().max(), name
    for kind, settings in EXPORTS.items():
        export_checkpoint(folder / saved / "step=4.ckpt", tmp_path / kind, tokenizer=SPEC.tokenizer, **settings)
        for file in (tmp_path / kind).glob("*.safetensors"):
            found, expected = load_file(folder / f"{saved} {kind}" / file.name), load_file(file)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_two_ranks_refuse_the_checkpoint_of_another_model(two: dict[str, Any]) -> None:
    said = two["another model"]
    assert "step=2.ckpt does not fit this configuration: its weights differ: 12 of a different shape" in said
    assert "mlp.gate_proj.weight [16, 16] instead of [24, 16]" in said


def test_fast_dev_run_on_two_ranks_finds_what_a_checkpoint_cannot_keep(two: dict[str, Any]) -> None:
    whole, refused = two["dry runs"]
    assert whole == ""
    assert "because of checkpoint['callbacks']['SavesAnObject']['seen']" in refused


def test_a_half_written_folder_is_no_checkpoint(two: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    saved = folder / "two ranks" / "step=2.ckpt"
    (tmp_path / "half.ckpt").mkdir()
    (tmp_path / "half.ckpt" / "meta.pt").write_bytes((saved / "meta.pt").read_bytes())
    with pytest.raises(ValueError, match=r"lacks meta\.pt or \.metadata"):
        train(tmp_path, "one", ckpt_path=tmp_path / "half.ckpt")


@pytest.mark.parametrize("form", [pytest.param("file", marks=pytest.mark.extra), "folder"])
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(form: str, tmp_path: Path) -> None:
    done = finished(SCRIPT, tmp_path, "1", form)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert len(list(tmp_path.glob("last.ckpt.*part"))) == 1
    assert (tmp_path / "last.ckpt").is_dir() == (form == "folder")
    module = TinyPPO()
    save = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=100)
    trainer = make_trainer(tmp_path, max_steps=2, callbacks=[save], enable_checkpointing=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ModelCheckpoint has other settings
        trainer.fit(module, datamodule=Digits(), ckpt_path="last")
    assert len(module.updates) == 2  # of the second iteration, the first is in the checkpoint
