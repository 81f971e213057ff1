"""The form of checkpoints: names and layouts of a folder, sent one parameter at a time, and read by parts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from benchmarks.families import TOKENIZER, family_spec, make_folder
from lightrl.models import LoRA, ModelSpec, Role, conversion
from lightrl.models.conversion import SEMI_PRIVATE, as_in_checkpoint, checkpoint_tensors, load_parts, semi_private
from lightrl.models.tuning import held_tensors, tuning_of, whole_parameters
from lightrl.strategies.empty_model import allocate, empty_model


def saved(folder):
    tensors = {}
    for file in Path(folder).glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def read(spec, **role):
    model = empty_model(Role(spec, **role))
    allocate(model, torch.device("cpu"))
    for parameter in model.parameters():  # what memory holds before a weight is read
        parameter.data.fill_(torch.nan)
    load_parts(model, spec, device=torch.device("cpu"))
    return model


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "granitemoe", "qwen2_5_vl"])
@pytest.mark.parametrize("is_loaded", [False, True], ids=["fresh", "loaded"])
def test_tensors_sent_one_by_one_are_those_of_the_folder(family, is_loaded, tmp_path):
    model = make_folder(family, str(tmp_path)).load_model()
    if not is_loaded:
        fresh = type(model)(model.config)
        fresh.load_state_dict(model.state_dict())
        model = fresh
    sent = {}
    for name, tensor in held_tensors(model).items():
        sent |= checkpoint_tensors(model, name, tensor)
    expected = saved(tmp_path)
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], expected[name]) for name in sent)


def test_fused_experts_leave_with_a_name_for_each_without_a_copy_of_each():
    model = family_spec("qwen3_moe").load_model()
    prefix = "model.layers.0.mlp.experts"
    storages = {}
    for part, names in {"down_proj": ["down_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}.items():
        fused = model.get_parameter(f"{prefix}.{part}")
        tensors = checkpoint_tensors(model, f"{prefix}.{part}", fused)
        assert tensors.keys() == {f"{prefix}.{expert}.{name}.weight" for expert in range(4) for name in names}
        assert torch.equal(tensors[f"{prefix}.3.{names[-1]}.weight"], fused[3, -fused.shape[1] // len(names) :])
        storages[part] = {value.untyped_storage().data_ptr() for value in tensors.values()}
    assert storages["down_proj"] == {model.get_parameter(f"{prefix}.down_proj").data_ptr()}  # views
    assert len(storages["gate_up_proj"]) == 2  # each part is copied once, and its experts are views


def test_merged_adapters_leave_under_the_names_of_the_checkpoint_each_time(tmp_path):
    spec = make_folder("qwen3_moe", str(tmp_path))
    lora = LoRA(rank=2, target_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
    model = Role(spec, lora=lora).load_model()
    held = held_tensors(model)
    for name in filter(lora.adds, held):
        held[name].data.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    plain = spec.load_model()
    plain.load_state_dict(dict(whole_parameters(model)))
    plain.save_pretrained(tmp_path)
    expected = saved(tmp_path)
    for _ in range(2):
        sent = dict(as_in_checkpoint(model, whole_parameters(model)))
        assert sent.keys() == expected.keys()
        assert all(torch.equal(sent[name], expected[name]) for name in sent)


def test_parameters_that_a_checkpoint_joins_are_not_sent_apart():
    spec = family_spec("qwen3")
    model = replace(spec, config={**spec.config, "model_type": "hrm_text"}).load_model()
    message = r"HrmTextForCausalLM cannot be sent .*mlp.up_proj.weight'\] in one tensor, 'mlp.gate_up_proj.weight'"
    with pytest.raises(ValueError, match=message):
        checkpoint_tensors(model, "model.norm.weight", torch.ones(2))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "gemma3", "qwen3_vl_moe"])
def test_a_model_read_by_parts_equals_the_loaded_one(family, tmp_path):
    spec = make_folder(family, str(tmp_path))
    expected = held_tensors(spec.load_model())
    model = read(spec)
    tensors = held_tensors(model)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (family == "gemma3")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_weights_are_read_below_their_adapters(tmp_path):
    spec = make_folder("qwen3_moe", str(tmp_path))
    model = read(spec, lora=LoRA(rank=2, target_parameters=("experts.gate_up_proj", "experts.down_proj")))
    tuning = tuning_of(model)
    expected = held_tensors(spec.load_model())
    own = {name: value for name, value in held_tensors(model).items() if not tuning.adds(name)}
    assert all(torch.equal(value, expected[tuning.base_name(name)]) for name, value in own.items())
    assert not any(value.requires_grad for value in own.values())


def test_a_scalar_head_that_the_folder_lacks_returns_zero(tmp_path):
    make_folder("qwen3", str(tmp_path))
    model = read(ModelSpec(path=str(tmp_path), head="scalar", tokenizer=TOKENIZER))
    assert not model.score.weight.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda weight: weight.fill_(torch.nan), "NaN or infinity in weight 'model.norm.weight'", id="NaN"),
        pytest.param(lambda weight: weight[:5].clone(), r"'model.norm.weight' .* has shape \(5,\)", id="shape"),
        pytest.param(None, "lacks 1 weights that its config needs, for example 'model.norm.weight'", id="missing"),
    ],
)
def test_a_damaged_weight_is_refused_by_name(change, message, tmp_path):
    spec = make_folder("qwen3", str(tmp_path))
    tensors = saved(tmp_path)
    weight = tensors.pop("model.norm.weight")
    if change is not None:
        tensors["model.norm.weight"] = change(weight)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        read(spec)


@pytest.mark.parametrize("part", [None, "text_config"])
def test_a_quantized_checkpoint_is_refused_before_its_weights_are_read(part, tmp_path):
    spec = make_folder("qwen3" if part is None else "gemma3", str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    (config if part is None else config[part])["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"is quantized.* Use its unquantized checkpoint, or dequantize"):
        empty_model(Role(spec))


def tied_folder(folder, change):
    """A folder whose config ties the head, and whose file has one too, so changed."""
    spec = make_folder("qwen3", str(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = saved(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + change
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return spec


def read_part(spec):
    """The last stage of a pipeline: the head alone."""
    model = empty_model(Role(spec))
    model.base_model.embed_tokens = None
    allocate(model, torch.device("cpu"))
    load_parts(
        model, spec, device=torch.device("cpu"), renamed={"lm_head.weight": "embed_tokens.weight"}, is_whole=False
    )
    return model


@pytest.mark.parametrize("load", [read, read_part])
def test_a_tied_head_with_values_of_its_own_is_refused(load, tmp_path):
    head = load(tied_folder(tmp_path, 0)).get_output_embeddings()
    assert torch.equal(head.weight, saved(tmp_path)["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match=r"their values differ\. Set tie_word_embeddings to false"):
        load(tied_folder(tmp_path, 1))


@pytest.mark.parametrize("load", [read, read_part])
def test_a_tied_head_in_another_dtype_and_another_tower_change_nothing(load, tmp_path):
    spec = tied_folder(tmp_path, 0)
    tensors = saved(tmp_path)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].bfloat16().float()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].bfloat16()
    if load is read_part:
        tensors["audio.embed_tokens.weight"] = torch.zeros(3, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load(spec).get_output_embeddings().weight, tensors["model.embed_tokens.weight"])


def test_the_head_of_a_part_is_read_from_an_embedding_without_prefix_or_reported(tmp_path):
    spec = tied_folder(tmp_path, 0)
    tensors = {
        name.removeprefix("model."): value for name, value in saved(tmp_path).items() if name != "lm_head.weight"
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(read_part(spec).lm_head.weight, tensors.pop("embed_tokens.weight"))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights that its config needs, for example 'lm_head\.weight'"):
        read_part(spec)


def test_each_shard_of_a_split_checkpoint_is_read(tmp_path):
    spec = make_folder("qwen3_moe", str(tmp_path))
    AutoModelForCausalLM.from_pretrained(tmp_path).save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model.safetensors").unlink()
    assert len(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]) > 20
    expected = held_tensors(spec.load_model())
    assert all(torch.equal(value, expected[name]) for name, value in held_tensors(read(spec)).items())


def test_a_rank_without_experts_counts_as_many_tensors_as_the_others(tmp_path):
    spec, counted = make_folder("qwen3_moe", str(tmp_path)), []
    dist.init_process_group("fake", store=dist.HashStore(), rank=4, world_size=5)
    try:
        model = empty_model(Role(spec))
        fully_shard(model, mesh=init_device_mesh("cpu", (5,)))
        allocate(model, torch.device("cpu"))
        load_parts(model, spec, device=torch.device("cpu"), on_tensor=lambda: counted.append(1))
        assert model.get_parameter("model.layers.0.mlp.experts.down_proj").to_local().numel() == 0
    finally:
        dist.destroy_process_group()
    assert len(counted) == len(saved(tmp_path))


def test_all_that_is_used_of_transformers_beyond_its_interface_exists():
    for names in SEMI_PRIVATE.values():
        for name in names:
            assert callable(semi_private(name))


def test_an_older_transformers_is_named_in_the_error(monkeypatch):
    monkeypatch.setitem(conversion.SEMI_PRIVATE, "transformers.conversion_mapping", ("gone",))
    with pytest.raises(ImportError, match=r"needs transformers.conversion_mapping.gone of transformers >= 5.23"):
        semi_private("gone")
