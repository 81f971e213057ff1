"""models/moe.py: the experts and routers of transformers' families."""

import pytest
from moe_cases import EACH_FAMILY, moe_model
from tiny import tiny_model
from torch import nn

from lightrl.models.moe import moe_blocks, num_experts, router_of


def test_a_dense_model_has_no_blocks():
    assert moe_blocks(tiny_model()) == {}


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_each_block_has_a_router_of_its_four_experts(family):
    blocks = moe_blocks(moe_model(family))
    assert len(blocks) in (1, 2)  # of two layers the first may be dense
    for block in blocks.values():
        assert isinstance(router_of(block), nn.Module)
        assert num_experts(block) == 4


def test_a_block_without_a_known_router_is_refused():
    block = nn.Module()
    block.experts = nn.Linear(2, 4)
    with pytest.raises(ValueError, match="neither a gate nor a router"):
        router_of(block)
    block.gate = nn.LayerNorm(2)
    with pytest.raises(ValueError, match="has no matrix"):
        num_experts(block)
