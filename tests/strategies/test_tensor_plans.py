"""Decisions on paper: which families, which sizes, which layers on which stage."""

from typing import Any

import pytest
from transformers import AutoConfig

from lightrl.strategies.tensor_plans import check_schedule, check_sizes, layer_kinds, split_layers


def config(model_type: str = "qwen3", **changes: Any) -> Any:
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 4,
    }  # fmt: skip
    return AutoConfig.for_model(model_type, **{**sizes, **changes})


def test_an_unknown_family_is_refused_with_the_list() -> None:
    with pytest.raises(
        ValueError, match=r"model_type='gpt2'.*llama, qwen2, qwen3, mistral, gemma, gemma2, gemma3_text"
    ):
        check_sizes(AutoConfig.for_model("gpt2"), 1, 1, "1F1B", 1)


@pytest.mark.parametrize(
    ("tp", "nearest"), [(3, "Set tp to 2"), (8, "Set tp to 4"), (5, "Set tp to 4")], ids=["three", "eight", "five"]
)
def test_tp_that_does_not_divide_the_heads_is_refused(tp: int, nearest: str) -> None:
    with pytest.raises(ValueError, match=nearest):
        check_sizes(config(), 1, tp, "1F1B", 1)


def test_tp_that_does_not_divide_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size=63.*Set tp to 1"):
        check_sizes(config(vocab_size=63), 1, 2, "1F1B", 1)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"makes 12 stages, but the model only has 8 layers.*at most 4"):
        check_sizes(config(), 6, 1, "Interleaved1F1B", 2)


def test_stages_per_rank_belong_to_the_interleaved_schedule() -> None:
    with pytest.raises(ValueError, match="must be 1 with"):
        check_schedule("1F1B", 2)
    with pytest.raises(ValueError, match="must be at least 2"):
        check_schedule("Interleaved1F1B", 1)


def test_every_layer_is_on_one_stage_in_order() -> None:
    for num_stages in range(1, 9):
        parts = split_layers(config(), num_stages)
        assert [layer for part in parts for layer in part] == list(range(8))
        assert all(parts)


def test_embedding_and_head_count_as_layers() -> None:
    # A layer has 2 · 16 · 4 · (8 + 4) + 3 · 16 · 48 = 3,840 parameters; embedding and head are two layers each.
    sizes = [len(part) for part in split_layers(config(vocab_size=480), 4)]
    assert sizes == [1, 3, 3, 1]


def test_mistrals_window_holds_for_all_layers() -> None:
    assert set(layer_kinds(config("mistral", sliding_window=4))) == {"sliding_attention"}
    assert set(layer_kinds(config("mistral", sliding_window=None))) == {"full_attention"}
