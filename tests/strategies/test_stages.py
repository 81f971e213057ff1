"""Stages of a model in one process: handing hidden states on changes no bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_tensor_plans import IN_STAGES, config
from tiny import random_experience
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightrl.strategies import LogprobSettings
from lightrl.strategies.parallel_3d.stages import Feed, Stage
from lightrl.strategies.parallel_3d.tensor_plans import LogitTransform

ONE_RANK: Any = SimpleNamespace(size=lambda: 1)
DEFAULT = {"qwen3", "gemma3_text", "granite", "glm4", "qwen3_5_text"}


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in DEFAULT else [pytest.mark.extra]) for family in IN_STAGES]
)
def test_the_stages_of_a_model_compute_its_hidden_states_to_the_bit(family: str) -> None:
    model = AutoModelForCausalLM.from_config(config(family, hidden_size=32, initializer_range=0.2)).eval()
    normed: list[Tensor] = []
    model.base_model.norm.register_forward_hook(lambda _, inputs, output: normed.append(output))
    settings = LogprobSettings()
    feed = Feed.of(random_experience(), settings, 0, multiple=1, is_packed=False)
    hidden = None
    with torch.no_grad():
        model(input_ids=feed.token_ids, use_cache=False)
        for layers in (range(3), range(3, 4), range(4, 8)):
            stage = Stage(model, layers, is_last=layers.stop == 8, tp=ONE_RANK, logits=LogitTransform())
            hidden = stage(hidden, feed, settings)
    whole, chained = normed
    assert torch.equal(whole, chained)
    assert whole.std() > 0
