"""Costs on paper against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from benchmarks.plan import best_3d_cost, best_fsdp2_cost
from lightrl.strategies.costs import (
    Machine,
    Work,
    fsdp2_cost,
    num_parameters,
    parallel_3d_cost,
)


def config(**changes: Any) -> Any:
    sizes = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "tie_word_embeddings": False,
    }
    return AutoConfig.for_model("qwen3", **{**sizes, **changes})


# A layer: 4 · 64 · 64 + 3 · 64 · 128 = 40,960; embedding and head 32,768 each: 393,216 parameters.
WORK = Work(tokens=8000, microbatch_tokens=1000)


def test_parameters_are_those_of_the_model() -> None:
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_config(config())
    norms = sum(value.numel() for name, value in made.named_parameters() if "norm" in name)
    assert num_parameters(config()) == 393_216 == sum(value.numel() for value in made.parameters()) - norms


def test_fsdp2_shares_the_state_and_gathers_each_microbatch_twice() -> None:
    cost = fsdp2_cost(config(), 4, WORK, Machine())
    assert cost.num_microbatches == 2
    assert cost.state_bytes == 16 * 393_216 / 4
    assert cost.sent_bytes == pytest.approx((2 * 2 * 2 + 4) * 393_216 * 3 / 4)


def test_a_pipeline_divides_layers_and_is_idle_at_its_ends() -> None:
    cost = parallel_3d_cost(config(), 2, 1, 1, WORK, Machine())
    assert cost.num_microbatches == 8
    assert cost.bubble_fraction == pytest.approx(1 / 9)
    assert cost.state_bytes == 16 * (4 * 40_960 + 32_768)
    assert cost.sent_bytes == pytest.approx(8 * 2 * 2 * 1000 * 64)  # each microbatch, forward and back, in bfloat16


def test_without_a_pipeline_layers_are_gathered_again_for_each_microbatch() -> None:
    cost = parallel_3d_cost(config(), 1, 2, 1, WORK, Machine())
    assert cost.num_microbatches == 4
    assert cost.sent_bytes == (8 * 393_216 + 4 * 4 * 8 * 40_960) / 2  # as benchmarks.parallel counts it
    assert cost.gathered_bytes == 4 * 393_216 + 8 * (2 * 40_960 + 2 * 32_768)


def test_the_best_split_fits_the_memory_where_one_does() -> None:
    tight = Machine(memory_bytes=3e6)
    assert parallel_3d_cost(config(), 1, 8, 1, WORK, tight).memory_bytes > tight.memory_bytes
    assert best_3d_cost(config(), 8, WORK, tight).memory_bytes <= tight.memory_bytes


def test_fsdp2_reduces_every_microbatch_where_whole_gradients_do_not_fit() -> None:
    default = fsdp2_cost(config(), 4, WORK, Machine())
    tight = Machine(memory_bytes=default.memory_bytes - 1)
    chosen = best_fsdp2_cost(config(), 4, WORK, tight)
    assert best_fsdp2_cost(config(), 4, WORK, Machine()) == default
    assert default.gathered_bytes - chosen.gathered_bytes == 4 * 393_216
    assert chosen.sent_bytes - default.sent_bytes == 4 * 393_216 * 3 / 4  # two microbatches: one more reduce
