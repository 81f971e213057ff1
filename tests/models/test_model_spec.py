import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, char_tokenizer, tiny_model, tiny_spec
from transformers import LlamaConfig, Phi3Config

from lightrl.models import ModelSpec, context_tokens
from lightrl.models.model_spec import check_outputs

CONFIG = FAMILIES["qwen3"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of path .* got path=None, config=None and url=None"),
        ({"path": "a/b", "config": CONFIG}, "A model needs exactly one of path"),
        ({"config": CONFIG}, "with a config also needs a tokenizer"),
        ({"config": {"hidden_size": 8}, "tokenizer": "x"}, r"config needs model_type, .* got \['hidden_size'\]"),
        ({"path": "/tmp/no/such/model"}, "Model folder '/tmp/no/such/model' does not exist"),
    ],
    ids=["neither", "both", "no tokenizer", "no model type", "no absolute folder"],
)
def test_a_spec_that_cannot_load_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSpec(**fields)


@pytest.mark.parametrize("settings", [{"output_router_logits": True}, {"return_dict": False}], ids=str)
@pytest.mark.parametrize("where", ["config", "the text model's config"])
def test_a_config_that_asks_for_other_outputs_is_refused_by_the_settings_name(where: str, settings: Any) -> None:
    changes = settings if where == "config" else {"model_type": "llama4", "text_config": settings}
    spec = tiny_spec(config={"model_type": "qwen3_moe", **changes})
    with pytest.raises(ValueError, match=r"has (output_router_logits=true|return_dict=false), (which requests|but)"):
        check_outputs(spec.load_config(), "The policy")


def test_a_hub_name_is_not_taken_for_a_folder() -> None:
    assert ModelSpec.of("Qwen/Qwen3-0.6B").path == "Qwen/Qwen3-0.6B"
    assert ModelSpec.of("gpt2").path == "gpt2"


def test_random_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (tiny_spec(seed=seed).load_model() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    head = [model.get_output_embeddings().weight for model in (first, again, other)]
    assert torch.equal(head[0], head[1])
    assert not torch.equal(head[0], head[2])


def test_a_device_context_changes_neither_place_nor_weights() -> None:
    spec = tiny_spec(seed=1)
    with torch.device("meta"):  # as Lightning's own device while it makes the model
        model = spec.load_model()
    expected = dict(spec.load_model().named_parameters())
    assert all(torch.equal(value, expected[name]) for name, value in model.named_parameters())


def test_without_a_seed_the_weights_are_those_of_seed_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    actual, expected = tiny_spec(seed=None).load_model(), tiny_spec(seed=7).load_model()
    assert torch.equal(actual.get_output_embeddings().weight, expected.get_output_embeddings().weight)


def test_models_are_in_evaluation_mode_and_float32_by_default() -> None:
    assert not tiny_spec().load_model().training
    assert tiny_spec().load_model().dtype == torch.float32
    assert tiny_spec(dtype="bfloat16").load_model().dtype == torch.bfloat16


def test_a_config_is_not_changed_by_loading() -> None:
    before = dict(CONFIG)
    tiny_spec().load_config()
    assert before == CONFIG


def test_random_weights_have_no_end_token_that_the_config_does_not_name() -> None:
    """Llama's default is 2, which in this tokenizer is <unk>."""
    config = {name: value for name, value in FAMILIES["llama"].items() if name != "eos_token_id"}
    model = ModelSpec(config=config, tokenizer="tiny.char_tokenizer").load_model()
    assert model.config.eos_token_id is None
    assert model.generation_config.eos_token_id is None


def test_a_folder_gives_its_weights_and_its_tokenizer(tmp_path: Path) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    char_tokenizer().save_pretrained(tmp_path)
    spec = ModelSpec.of(str(tmp_path))
    loaded = spec.load_model().state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
    assert spec.load_tokenizer().encode("12") == char_tokenizer().encode("12")
    assert spec.load_config().vocab_size == CONFIG["vocab_size"]


@pytest.mark.parametrize("head", ["vocabulary", "scalar"])
def test_a_folder_that_lacks_a_weight_of_the_body_is_refused_by_its_name(head: str, tmp_path: Path) -> None:
    model = tiny_model()
    tensors = {name: value for name, value in model.state_dict().items() if name != "model.norm.weight"}
    model.save_pretrained(tmp_path, state_dict=tensors)
    spec = ModelSpec(path=str(tmp_path), head=head, options={"use_safetensors": True})
    message = rf"Model '{tmp_path}' lacks 1 weights that its config needs, for example 'model\.norm\.weight'"
    with pytest.raises(ValueError, match=message):
        spec.load_model()


def test_a_scalar_head_that_the_folder_lacks_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_model().save_pretrained(tmp_path)
    with caplog.at_level("INFO", logger="lightrl"):
        ModelSpec(path=str(tmp_path), head="scalar").load_model()
    assert f"Model '{tmp_path}' has no scalar head, so a new one starts at 0." in caplog.messages


@pytest.mark.parametrize("given", ["tiny.char_tokenizer", char_tokenizer, char_tokenizer(), lambda: char_tokenizer()])
def test_a_tokenizer_or_what_makes_one_is_loaded_in_any_process(given: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = (ModelSpec(config=CONFIG, tokenizer=given) for _ in range(2))
    assert first == second
    loaded = ModelSpec(**json.loads(json.dumps(asdict(first)))).load_tokenizer()
    assert (loaded.eos_token, loaded.encode("12")) == ("<eos>", char_tokenizer().encode("12"))


@pytest.mark.parametrize("given", [3, lambda: 3], ids=["number", "function"])
def test_another_object_is_no_tokenizer(given: Any) -> None:
    with pytest.raises(TypeError, match="must return a Hugging Face tokenizer, got int"):
        ModelSpec(config=CONFIG, tokenizer=given)


def test_an_import_that_fails_inside_the_module_is_not_swallowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_tokenizer.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        ModelSpec(config=CONFIG, tokenizer="broken_tokenizer.make").load_tokenizer()


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        pytest.param(LlamaConfig, {}, 64, id="without rope"),
        pytest.param(
            LlamaConfig, {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 16}}, 16, id="in its rope"
        ),
        pytest.param(
            Phi3Config, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 24}, 24, id="beside its rope"
        ),
        pytest.param(
            LlamaConfig, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, 64, id="yarn"
        ),
    ],
)
def test_longrope_ends_at_its_original_length_whose_factors_all_rows_have(
    kind: Any, changes: dict[str, Any], expected: int
) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
    assert context_tokens(kind(vocab_size=32, **sizes, **changes)) == expected


@pytest.mark.parametrize("settings", [{"path": ""}, {"url": ""}, {"config": {"model_type": "qwen3"}, "tokenizer": ""}])
def test_an_empty_name_is_no_model_and_no_tokenizer(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        ModelSpec(**settings)
