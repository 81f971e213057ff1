"""What of a hybrid differs from a model with key-values alone."""

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from transformers import AutoConfig

from benchmarks.families import FAMILIES, family_spec
from lightrl import ModelSpec
from lightrl.models.hybrids import keeps_states, time_step_limits


@pytest.mark.parametrize("family", [*FAMILIES["hybrid"], "mamba"])
def test_hybrids_keep_states(family: str) -> None:
    assert keeps_states(AutoConfig.for_model(family, **FAMILIES["hybrid"].get(family, {})))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v32", "t5", "gpt2"])
def test_models_with_attention_alone_keep_none(family: str) -> None:
    assert not keeps_states(AutoConfig.for_model(family))


@pytest.mark.parametrize("limits", [(0.0, inf), (0.01, 0.1)])
def test_nemotron_h_limits_time_steps_as_its_config_says(limits: tuple[float, float], tmp_path: Path) -> None:
    spec = family_spec("nemotron_h")
    model = replace(spec, config={**(spec.config or {}), "time_step_limit": list(limits)}).load_model()
    expected = None if limits == (0.0, inf) else limits
    assert time_step_limits(model) == expected
    model.save_pretrained(tmp_path)
    assert time_step_limits(ModelSpec(path=str(tmp_path), tokenizer=spec.tokenizer).load_model()) == expected
