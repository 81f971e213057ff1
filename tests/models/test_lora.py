"""LoRA: adapters that change nothing at first, merge to what the model computes, and leave a reference behind."""

import json
from dataclasses import replace

import peft
import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from tiny import FAMILIES, random_experience, tiny_model, tiny_spec
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.families import family_spec
from lightrl.models.lora import LoRA
from lightrl.models.model_folder import ModelDescription
from lightrl.models.moe import moe_blocks
from lightrl.models.role import Role
from lightrl.models.tuning import held_tensors, tuning_of, whole_parameters
from lightrl.strategies import LogprobSettings, SingleModel

TOKEN_IDS = torch.tensor([[3, 4, 5, 6]])


def adapted(model, **settings):
    """The model with adapters that are no longer zero."""
    LoRA(rank=2, **settings).add_to(model)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def logits(model):
    with torch.no_grad():
        return model(TOKEN_IDS).logits


def test_fresh_adapters_change_nothing():
    model = tiny_model()
    before = logits(model)
    LoRA(rank=2).add_to(model)
    assert tuning_of(model).keeps_base
    torch.testing.assert_close(logits(model), before)


def test_only_the_adapters_train():
    trained = {name for name, parameter in adapted(tiny_model()).named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_a_plain_model_with_the_merged_weights_computes_the_same(family):
    model = adapted(tiny_model(family))
    merged = dict(whole_parameters(model))
    plain = tiny_model(family)
    assert merged.keys() == dict(plain.named_parameters()).keys()
    different = logits(plain)
    plain.load_state_dict(merged, strict=False)
    assert (different - logits(model)).abs().max() > 0.1
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)


def test_with_adapters_off_the_model_is_the_one_it_came_from():
    model = adapted(tiny_model())
    with tuning_of(model).base_only(model):
        torch.testing.assert_close(logits(model), logits(tiny_model()))
    assert (logits(model) - logits(tiny_model())).abs().max() > 0.1


def test_adapters_and_a_trained_head_are_float32_on_a_bfloat16_base():
    role = Role(tiny_spec(dtype="bfloat16", head="scalar"), lora=LoRA(rank=2))
    model, half = role.load_model(), HalfPrecision("16-true")
    with half.module_init_context():  # another default dtype
        other = half.convert_module(role.load_model())
    trained = [[value for value in one.parameters() if value.requires_grad] for one in (model, other)]
    assert {value.dtype for values in trained for value in values} == {torch.float32}
    assert all(map(torch.equal, *trained))
    assert (model.dtype, other.dtype) == (torch.bfloat16, torch.float16)
    SingleModel(model, LogprobSettings()).measure(random_experience(is_scored=False)).values.sum().backward()
    assert all(value.grad.isfinite().all() for value in trained[0])


@pytest.mark.parametrize(
    "settings",
    [
        *({"init_lora_weights": start} for start in ("pissa", "pissa_niter_2", "olora", "corda", "loftq", "lora_ga")),
        *({name: True} for name in ("use_dora", "use_qalora", "lora_bias", "use_bdlora")),
        {"trainable_token_indices": [1]},
        {"layer_replication": [[0, 1], [0, 1]]},
    ],
    ids=str,
)
def test_adapters_that_would_change_the_policy_without_them_are_refused(tmp_path, settings):
    adapted(tiny_model()).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ValueError, match=rf"must have {min(settings)}=.*Merge the adapter into its model"):
        LoRA(adapter=str(tmp_path)).add_to(tiny_model())


@pytest.mark.filterwarnings("ignore:`init_lora_weights` is 'eva'")  # peft's: without a configuration of it
@pytest.mark.parametrize("start", [True, "gaussian", "eva", "orthogonal"])
def test_a_saved_adapter_is_gone_on_from_and_leaves_the_base_as_it_is_wherever_it_began(tmp_path, start):
    model = adapted(tiny_model())
    model.peft_config["default"].init_lora_weights = start
    model.save_pretrained(tmp_path)
    again = tiny_model()
    LoRA(adapter=str(tmp_path)).add_to(again)
    torch.testing.assert_close(logits(again), logits(model))
    assert any(parameter.requires_grad for parameter in again.parameters())
    with tuning_of(again).base_only(again):
        torch.testing.assert_close(logits(again), logits(tiny_model()))


def test_a_folder_without_adapters_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        LoRA(adapter=str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"rank": 0}, "lora.rank must be >= 1"), ({"alpha": 0}, "lora.alpha must be a finite number above 0")],
)
def test_sizes_that_make_no_adapter_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LoRA(**settings)


def test_an_adapter_of_an_embedding_is_refused():
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**FAMILIES["llama"], "tie_word_embeddings": False})
    )
    with pytest.raises(ValueError, match=r"adapter on 'model\.embed_tokens' \(Embedding\)"):
        LoRA(rank=2, target_modules=("q_proj", "embed_tokens")).add_to(model)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("layer", ["lm_head", "embed_tokens"])
def test_an_adapter_of_a_tied_layer_is_refused(layer):
    with pytest.raises(ValueError, match=f"adapter on '.*{layer}', whose weight is tied"):
        LoRA(target_modules=(layer,)).add_to(tiny_model("llama"))


EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def mixture(family):
    return family_spec(family).load_model()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("parameters", [(), EXPERTS], ids=["all-linear", "experts too"])
def test_the_merged_weights_of_a_mixture_compute_what_its_adapters_do(family, parameters):
    model = adapted(mixture(family), target_parameters=parameters)
    weights = {name.partition(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name}
    assert any("experts" in name.replace("shared_experts", "") for name in weights) == bool(parameters)
    assert not any(name.endswith((".gate", ".router")) for name in weights)
    merged = dict(whole_parameters(model))
    plain = mixture(family)
    assert merged.keys() == held_tensors(plain).keys()
    different = logits(plain)
    plain.load_state_dict(merged)
    assert (different - logits(model)).abs().max() > 0.1
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)


def test_the_share_of_parameters_with_adapters_is_logged(caplog):
    with caplog.at_level("INFO", "lightrl"):
        adapted(mixture("qwen3_moe"))
    assert "LoRA: adapters on 6144 of" in caplog.text


DENSE_FIRST = {"qwen3_moe": {"mlp_only_layers": [0]}}  # DeepSeek-V3 and GLM-4 begin with a dense layer anyway


def export(model, spec, folder):
    folder.mkdir()
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    description = ModelDescription.of(model, Role(spec, lora=tuning_of(model)))
    description.save(trained, folder)
    description.check_added(trained, "these")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
@pytest.mark.parametrize("parameters", [(), EXPERTS], ids=["all-linear", "experts too"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "glm4_moe", "qwen2_moe", "mixtral"])
def test_exported_adapters_are_the_trained_model_to_peft_and_lightrl_with_the_same_gradients(
    family, parameters, tmp_path
):
    spec = family_spec(family)
    spec = replace(spec, config={**spec.config, **DENSE_FIRST.get(family, {})})
    model = adapted(spec.load_model(), alpha=4, target_parameters=parameters)
    export(model, spec, tmp_path / "model")
    base = spec.load_model()
    LoRA(adapter=str(tmp_path / "model")).add_to(base)
    export(base, spec, tmp_path / "again")
    for folder in (tmp_path / "model", tmp_path / "again"):
        plain = spec.load_model().double()
        plain.set_experts_implementation("eager")  # other implementations do not support float64
        read = peft.PeftModel.from_pretrained(plain, folder, is_trainable=True).double()
        torch.testing.assert_close(logits(read).float(), logits(model), rtol=1e-5, atol=1e-5)
        model.zero_grad()
        for each in (model, read):
            each(TOKEN_IDS).logits.log_softmax(-1)[..., 5].sum().backward()
        for name in (name for name, value in model.named_parameters() if value.requires_grad):
            found, exact = (
                each.get_parameter(key).grad for each, key in ((model, name), (read, f"base_model.model.{name}"))
            )
            assert (found - exact).norm() <= 1e-5 * exact.norm(), name
    torch.testing.assert_close(logits(base), logits(model))


def test_adapters_that_peft_would_read_as_another_model_are_refused():
    spec = family_spec("deepseek_v3")
    model = adapted(spec.load_model())
    config = model.peft_config["default"]
    config.target_modules |= {name.removesuffix(".weight") for name in config.target_parameters}
    config.target_parameters = None
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    description = ModelDescription.of(model, Role(spec, lora=tuning_of(model)))
    with pytest.raises(ValueError, match=r"load these as a different model: \d+ of its .* differ.*export --merged"):
        description.check_added(trained, "these")


def test_adapters_of_another_model_are_refused(tmp_path):
    export(adapted(mixture("deepseek_v3"), target_parameters=EXPERTS), family_spec("deepseek_v3"), tmp_path / "model")
    with pytest.raises(ValueError, match="must have adapters for this model's layers"):
        LoRA(adapter=str(tmp_path / "model")).add_to(mixture("qwen3_moe"))


def test_a_parameter_that_the_model_does_not_have_gets_no_adapter():
    with pytest.raises(ValueError, match=r"target_parameters has 'mlp\.experts\.w1'"):
        adapted(mixture("qwen3_moe"), target_parameters=("mlp.experts.down_proj", "mlp.experts.w1"))


def test_ep_refuses_adapters_on_biases_of_experts():
    model = adapted(mixture("gpt_oss"), target_parameters=("mlp.experts.gate_up_proj_bias",))
    with pytest.raises(ValueError, match=r"ep divides 3-D parameters of experts\. Remove 'gate_up_proj_bias'"):
        tuning_of(model).split_experts(next(iter(moe_blocks(model).values())).experts, 0)


def test_adapters_of_experts_are_not_served():
    model = adapted(mixture("qwen3_moe"), target_parameters=EXPERTS)
    with pytest.raises(ValueError, match=r"cannot serve adapters for lora\.target_parameters"):
        tuning_of(model).served_form(model, num_versions=1)
