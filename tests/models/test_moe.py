"""models/moe.py: the experts and routers of transformers' families."""

import pytest
from torch import nn

from lightrl import ModelSpec
from lightrl.models.moe import moe_blocks, num_experts, router_of

_TINY = dict(
    vocab_size=17, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=32, eos_token_id=1, pad_token_id=None, bos_token_id=None,
)  # fmt: skip


def _model(model_type: str, **config: object) -> nn.Module:
    return ModelSpec(
        config={"model_type": model_type, **_TINY, **config}, tokenizer="lightrl.testing.char_tokenizer", seed=0
    ).load_model()


def test_a_dense_model_has_no_blocks():
    assert moe_blocks(_model("qwen3")) == {}


@pytest.mark.parametrize(
    ("model_type", "config", "names", "router"),
    [
        pytest.param(
            "qwen3_moe",
            dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
            ["model.layers.0.mlp", "model.layers.1.mlp"],
            "gate",
            id="each layer",
        ),
        pytest.param(
            "gpt_oss",
            dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
            ["model.layers.0.mlp", "model.layers.1.mlp"],
            "router",
            id="a router by another name",
        ),
        pytest.param(
            "dots1",
            dict(
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=8,
                n_shared_experts=1,
                first_k_dense_replace=1,
                n_group=1,
                topk_group=1,
            ),  # fmt: skip
            ["model.layers.1.mlp"],
            "gate",
            id="a dense layer first",
        ),
    ],
)
def test_blocks_are_found_with_their_routers_and_experts(model_type, config, names, router):
    blocks = moe_blocks(_model(model_type, **config))
    assert list(blocks) == names
    for block in blocks.values():
        assert router_of(block) is getattr(block, router) and num_experts(block) == 4


def test_a_block_without_a_known_router_is_refused():
    block = nn.Module()
    block.experts = nn.Linear(2, 4)
    with pytest.raises(ValueError, match="neither a gate nor a router"):
        router_of(block)
