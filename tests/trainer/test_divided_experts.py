"""Experts divided over ranks against one process: the same updates and files; divided_experts_run.py trains."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from divided_experts_run import CLIP, train
from lightning.pytorch.plugins.precision import MixedPrecision
from moe_cases import adapters_of_experts, moe_spec
from rank_scripts import ROUNDING, run
from safetensors.torch import load_file
from tiny_run import POLICY, TinyGRPO
from transformers import AutoModelForCausalLM

from lightrl import SFT, FSDP2Strategy, ModelSpec, Role, RoleMesh
from lightrl.commands.export import export_checkpoint
from lightrl.strategies import check_strategy

SCRIPT = Path(__file__).with_name("divided_experts_run.py")
FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss"]
ADAPTED = ["qwen3_moe, adapters", "gpt_oss, adapters"]  # of linear layers and of experts
SLICED = ["qwen3_moe", "mixtral", "glm4_moe"]  # with transformers' plan for tensor parallelism
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The folder of a family's runs, which are started once for all tests: those of the first family in all layouts."""

    @cache
    def started(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        save(family.removesuffix(", adapters"), folder, has_adapters=family in ADAPTED)
        if family in SLICED:
            (folder / "sliced").touch()
        run(SCRIPT, folder, "long" if family == FAMILIES[0] else "short")
        return folder

    return started


def save(family: str, folder: Path, *, has_adapters: bool) -> None:
    model = moe_spec(family, vocab_size=9).load_model()
    model.save_pretrained(folder / "model")
    if has_adapters:
        adapters_of_experts(model, folder / "adapter")


def assert_same(found: Path, expected: Path) -> None:
    """Updates and exported models are equal but for rounding; a resumed run has the last updates alone."""
    updates, references = (torch.load(f"{path}.updates") for path in (found, expected))
    assert references[0]["grad_norm"] > CLIP
    for update, reference in zip(updates, references[-len(updates) :], strict=True):
        assert update == pytest.approx(reference, rel=ROUNDING, abs=ROUNDING)
    tensors, others = (load_file(next(path.glob("*.safetensors"))) for path in (found, expected))
    assert tensors.keys() == others.keys()
    for name, value in others.items():
        assert (tensors[name] - value).abs().max() <= ROUNDING * value.abs().max(), name


each_layout = pytest.mark.parametrize(
    ("family", "layout"),
    [
        (family, layout)
        for family in FAMILIES + ADAPTED
        for layout in ("four", "stages", *["slices"] * (family in SLICED))
    ],
)


@pytest.mark.extra
@each_layout
def test_four_ranks_learn_what_one_process_learns(family: str, layout: str, folders: Folders) -> None:
    folder = folders(family)
    assert_same(folder / layout, folder / "one")


@pytest.mark.extra
@each_layout
def test_a_model_that_ranks_read_and_do_not_change_is_exported_bit_for_bit(
    family: str, layout: str, folders: Folders
) -> None:
    untrained = "untrained" if layout == "four" else f"untrained {layout}"
    model = "adapter" if family in ADAPTED else "model"
    exported, read = (next((folders(family) / name).glob("*.safetensors")) for name in (untrained, model))
    assert exported.read_bytes() == read.read_bytes()


def test_adapters_of_experts_are_trained_resumed_and_read_by_peft_as_in_one_process(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path, has_adapters=True)
    run(SCRIPT, tmp_path, "two")
    assert_same(tmp_path / "two", tmp_path / "one")
    assert_same(tmp_path / "two, then divided", tmp_path / "one")
    saved, merged = tmp_path / "two saved" / "step=2.ckpt", tmp_path / "merged"
    export_checkpoint(saved, merged, tokenizer=POLICY.tokenizer, merged=True)
    base, adapted, whole = (logits(tmp_path / name) for name in ("model", "two", "merged"))
    assert (adapted - base).abs().max() > 0.1
    torch.testing.assert_close(whole, adapted, rtol=1e-5, atol=1e-5)


def logits(folder: Path) -> torch.Tensor:
    """Of transformers' model, or of peft's if the folder has adapters, in float64."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.set_experts_implementation("eager")  # other implementations do not support float64
    found: torch.Tensor = model(torch.tensor([[3, 4, 5, 6]])).logits.detach()
    return found


@pytest.mark.extra
@pytest.mark.parametrize(
    ("run", "reference"),
    [
        *[("four, native", "one, native"), ("four, replayed", "one, replayed"), ("replicas", "one")],
        *[("shared rows", "one"), ("kept", "one"), ("four, then another ep", "one"), ("four, then replicas", "one")],
        *[("four, then shared rows", "one"), ("shared rows, then none", "one"), ("four, then none", "one")],
        ("plain, then ep", "one"),
        ("stages, replayed", "one, replayed"),
        ("slices, replayed", "one, replayed"),
        ("stages, shared rows", "one"),
        ("stages, then none", "one"),
        ("slices, then none", "one"),
        ("stages, shared rows, then none", "one"),
        ("four, then stages", "one"),
        ("stages, then slices", "one"),
    ],
)
def test_ranks_in_other_layouts_learn_and_resume_the_same(run: str, reference: str, folders: Folders) -> None:
    folder = folders(FAMILIES[0])
    assert_same(folder / run, folder / reference)


@pytest.mark.extra
def test_a_checkpoint_of_divided_experts_continues_in_one_process_and_is_exported(
    folders: Folders, tmp_path: Path
) -> None:
    folder = folders(FAMILIES[0])
    train(folder, "then one", ckpt_path=folder / "four saved" / "step=1.ckpt")
    assert_same(folder / "then one", folder / "one")
    export_checkpoint(folder / "four saved" / "step=2.ckpt", tmp_path / "model", tokenizer=POLICY.tokenizer)
    exported, trained = (load_file(path / "model.safetensors") for path in (tmp_path / "model", folder / "four"))
    assert exported.keys() == trained.keys()
    assert all(torch.equal(value, trained[name]) for name, value in exported.items())


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        (moe_spec(), {"ep": 4, "num_replicas": 2}, "ep=4 must divide the 2 ranks of a replica. Set it to 2"),
        (moe_spec(num_experts=6), {"ep": 4}, "ep=4 must divide the 6 experts of the policy. Set it to 2"),
        (POLICY, {"ep": 2}, "ep=2 divides experts, but no model in this run has any"),
        (moe_spec("llama4_text"), {"ep": 2}, "no plan to divide the experts of model_type 'llama4_text'"),
        (moe_spec(), {"ep": 2, "compile_layers": True}, "does not support compile_layers=true yet"),
        (moe_spec(), {"ep": 2, "offload_to_cpu": ["parameters"]}, "does not support parameters in offload_to_cpu yet"),
        (Role(moe_spec(), mesh=RoleMesh(0, 2)), {"ep": 2}, "does not support the mesh of a role yet"),
    ],
    ids=["ranks", "experts", "dense", "family", "compiled", "offloaded", "mesh"],
)
def test_what_cannot_be_divided_is_refused(policy: ModelSpec | Role, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_strategy(on_four_ranks(**settings), TinyGRPO(policy))


def test_supervised_training_of_a_dense_model_is_refused() -> None:
    with pytest.raises(ValueError, match="no model in this run has any"):
        check_strategy(on_four_ranks(ep=2), SFT(POLICY, lr=1e-3))


def test_float16_is_refused_with_divided_experts() -> None:
    strategy = on_four_ranks(ep=2)
    strategy.precision_plugin = MixedPrecision("16-mixed", "cpu")
    with pytest.raises(ValueError, match=r"does not support trainer\.precision='16-mixed' yet"):
        check_strategy(strategy, TinyGRPO(moe_spec()))


def on_four_ranks(**settings: Any) -> FSDP2Strategy:
    strategy = FSDP2Strategy(**settings)
    strategy.parallel_devices = [torch.device("cpu")] * 4
    return strategy
