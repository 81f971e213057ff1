"""A policy of a few thousand parameters with one token per character, and settings of a silent trainer."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightrl.models import ModelSpec

LETTERS = ["<pad>", "<eos>", "<unk>", *"0123456789=+- "]  # token id → text

# For `lightrl.Trainer(max_steps=2, **QUIET)`: writes nothing.
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip

# Weights of this size make peaked distributions, in which a wrong mask or shift shows.
TINY_CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": len(LETTERS), "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "max_position_embeddings": 64, "initializer_range": 0.4, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of `LETTERS`."""
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(LETTERS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )


def tiny_policy(**options: Any) -> ModelSpec:
    """A Qwen3 policy with random weights, the same each time; `options` are ModelSpec's."""
    return ModelSpec(**{"config": TINY_CONFIG, "tokenizer": "lightrl.testing.char_tokenizer", "seed": 0, **options})
