"""Decisions without memory: which families, which sizes, which layers on which stage."""

import re
from typing import Any

import pytest
from moe_cases import moe_spec
from transformers import AutoConfig

from lightrl.strategies.parallel_3d.tensor_plans import (
    LogitTransform,
    check_model,
    check_schedule,
    check_sizes,
    split_layers,
)


def config(model_type: str = "qwen3", **changes: Any) -> Any:
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 4, "pad_token_id": 0,
    }  # fmt: skip
    return AutoConfig.for_model(model_type, **{**sizes, **changes})


# Families with slices and stages; nemotron and nanochat have no plan for stages, the last ones none for slices.
SPLIT = [
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "cwm", "ernie4_5",
    "granite", "helium", "hyperclovax", "iquestcoder", "ministral", "ministral3", "olmo", "seed_oss", "smollm3",
    "vaultgemma", "exaone4", "arcee", "jais2", "starcoder2",
]  # fmt: skip
IN_SLICES, IN_STAGES = [*SPLIT, "nemotron", "nanochat"], [*SPLIT, "glm", "glm4", "olmo2", "olmo3", "apertus"]
IN_STAGES += ["qwen3_5_text", "olmo_hybrid"]  # hybrids
SLICED_MIXTURES = ["qwen3_moe", "mixtral", "glm4_moe", "qwen2_moe", "ernie4_5_moe", "dots1"]
STAGED_MIXTURES = [*SLICED_MIXTURES, "deepseek_v3", "gpt_oss", "deepseek_v2", "glm4_moe_lite", "minimax_m2"]


@pytest.mark.parametrize("family", [*IN_SLICES, *IN_STAGES[len(SPLIT) :]])
def test_a_family_with_a_plan_can_be_split(family: str) -> None:
    made = config(family)
    for pp, tp in [(1, 2)] * (family in IN_SLICES) + [(2, 1)] * (family in IN_STAGES):
        check_sizes(made, pp, tp, "1F1B", 1)
        check_model(made, tp)


@pytest.mark.parametrize("family", STAGED_MIXTURES)
def test_a_mixture_with_a_plan_can_be_split(family: str) -> None:
    made = moe_spec(family).load_config()
    check_model(made, 1)
    check_sizes(made, 2, 1, "1F1B", 1)
    if family in SLICED_MIXTURES:
        check_model(made, 2)
        check_sizes(made, 1, 2, "1F1B", 1)


def test_a_head_may_scale_or_cap_its_logits() -> None:
    assert check_model(config("cohere", logit_scale=0.25), 2) == LogitTransform(scale=0.25)
    assert check_model(config("gemma2", final_logit_softcapping=20.0), 1) == LogitTransform(cap=20.0)
    assert check_model(config("qwen3"), 1) == LogitTransform()


@pytest.mark.parametrize(
    ("family", "pp", "tp", "reason"),
    [
        ("gpt2", 2, 1, "no plan for its stages' embed_tokens, layers and norm"),
        ("gpt2", 1, 2, "no plan for its tensor parallelism"),
        ("gpt2", 1, 1, "its body is not just embed_tokens, layers and norm"),
        ("nemotron", 2, 1, "no plan for its stages' embed_tokens, layers and norm"),
        ("deepseek_v3", 1, 2, "no part of self_attn.q_a_proj (Linear) can be computed separately"),
        ("gpt_oss", 1, 2, "no plan for its tensor parallelism"),
        ("llama4_text", 2, 1, "no plan for its stages' embed_tokens, layers and norm"),
        ("glm_moe_dsa", 2, 1, "it is a mixture of experts with states or sparse attention"),
        ("qwen3_next", 2, 1, "it is a mixture of experts with states or sparse attention"),
        ("phi3", 1, 2, "its plan has colwise_gather_output for layers.*.self_attn.qkv_proj"),
        ("olmo2", 1, 2, "its plan has colwise_gather_output"),
        ("apertus", 1, 2, "no part of mlp.act_fn (XIELUActivation) can be computed separately"),
        ("gemma4_unified_text", 2, 1, "its layers differ in size"),
        ("minicpm3", 2, 1, "it changes hidden states between its last layer and its head"),
        ("phi", 1, 2, "its body is not just embed_tokens, layers and norm"),
    ],
)
def test_another_family_is_refused_with_the_reason(family: str, pp: int, tp: int, reason: str) -> None:
    made = config(family, **{"num_key_value_heads": 8, "layer_types": None} if family == "minicpm3" else {})
    message = f"cannot split model_type='{family}': .*{re.escape(reason)}.*Use FSDP2Strategy"
    with pytest.raises(ValueError, match=message):  # noqa: PT012  # either may refuse
        check_sizes(made, pp, tp, "1F1B", 1)
        check_model(made, tp)


def test_a_rotary_embedding_by_length_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match="rotary embedding depends on the number of tokens"):
        check_model(config("llama", rope_parameters=rope), 1)


@pytest.mark.parametrize(
    ("tp", "nearest"), [(3, "Set tp to 2"), (8, "Set tp to 4"), (5, "Set tp to 4")], ids=["three", "eight", "five"]
)
def test_tp_that_does_not_divide_the_heads_is_refused(tp: int, nearest: str) -> None:
    with pytest.raises(ValueError, match=nearest):
        check_sizes(config(), 1, tp, "1F1B", 1)


def test_tp_need_not_divide_the_vocabulary_but_each_rank_needs_a_token() -> None:
    check_sizes(config(vocab_size=10), 1, 4, "1F1B", 1)  # 3, 3, 3 and 1
    with pytest.raises(ValueError, match=r"tp=4 leaves the last rank no token of vocab_size=9"):
        check_sizes(config(vocab_size=9), 1, 4, "1F1B", 1)


def test_stages_that_fit_neither_the_layers_nor_the_schedule_are_refused() -> None:
    with pytest.raises(ValueError, match=r"makes 12 stages, but the model only has 8 layers.*at most 4"):
        check_sizes(config(), 6, 1, "Interleaved1F1B", 2)
    with pytest.raises(ValueError, match="must be 1 with"):
        check_schedule("1F1B", 2)
    with pytest.raises(ValueError, match="must be at least 2"):
        check_schedule("Interleaved1F1B", 1)


def test_every_layer_is_on_one_stage_in_order() -> None:
    for num_stages in range(1, 9):
        parts = split_layers(config(), num_stages, 3840)
        assert [layer for part in parts for layer in part] == list(range(8))
        assert all(parts)


def test_embedding_and_head_count_as_layers() -> None:
    # A layer has 2 · 16 · 4 · (8 + 4) + 3 · 16 · 48 = 3,840 parameters; embedding and head are two layers each.
    assert [len(part) for part in split_layers(config(vocab_size=480), 4, 3840)] == [1, 3, 3, 1]
