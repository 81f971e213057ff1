"""models/moe.py and expert_parallel.py: the experts and routers of transformers' families, and how they are divided."""

import pytest
from moe_cases import EACH_FAMILY, VOCABULARY, moe_model, moe_spec
from tiny import tiny_model, tiny_spec
from torch import nn
from transformers import PreTrainedModel

from benchmarks.trajectories import make_experience
from lightrl.models.expert_parallel import num_split_experts
from lightrl.models.moe import moe_blocks, num_experts, router_of
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.strategies.precision import set_expert_precision


def test_a_dense_model_has_no_blocks():
    assert moe_blocks(tiny_model()) == {}


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_each_block_has_a_router_of_its_four_experts(family):
    blocks = moe_blocks(moe_model(family))
    assert len(blocks) in (1, 2)  # of two layers the first may be dense
    for block in blocks.values():
        assert isinstance(router_of(block), nn.Module)
        assert num_experts(block) == 4


def test_experts_without_a_known_router_are_no_block():
    block = nn.Module()
    block.experts = nn.Linear(2, 4)
    assert moe_blocks(block) == {}
    set_expert_precision(block)
    block.gate = nn.LayerNorm(2)
    assert moe_blocks(block) == {"": block}
    with pytest.raises(ValueError, match="has no matrix"):
        num_experts(block)


def test_a_family_whose_attention_has_experts_is_computed_as_a_dense_one():
    model = moe_model("granitemoe", model_type="jetmoe", kv_channels=8, num_attention_heads=None)
    assert any(hasattr(module, "experts") for module in model.modules())
    (outputs,) = SingleModel(model, LogprobSettings()).forward([make_experience(1, (3, 2), VOCABULARY)])
    assert outputs.logprobs.isfinite().all()


WITHOUT_PLAN = {"llama4_text", "gemma4_text"}


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_the_experts_of_a_family_are_counted_or_refused(family):
    config = moe_spec(family).load_config()
    if family in WITHOUT_PLAN:
        with pytest.raises(
            ValueError, match=f"transformers has no plan to divide the experts of model_type '{family}'"
        ):
            num_split_experts(config)
    else:
        assert num_split_experts(config) == 4


def test_a_dense_model_has_no_experts_to_divide():
    assert num_split_experts(tiny_spec().load_config()) == 0


def test_transformers_has_the_plans_that_are_read():
    assert isinstance(PreTrainedModel.ep_plan, property)
    assert callable(PreTrainedModel._expand_parallel_plan)
