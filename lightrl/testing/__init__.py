"""Helpers for testing your own code: a policy of a few thousand parameters, and made-up trajectories and groups.

`tiny_policy` has one token per character (`char_tokenizer`); `QUIET` has settings for a silent trainer.
`lightrl.FakeEngine` is the engine for these tests; docs/test-your-code.md shows how to use them. This package may
import everything up to engines; nothing in lightrl imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightrl.models import ModelSpec
from lightrl.trajectory import Group, JsonMapping, JsonObject, Prompt, Trajectory

__all__ = ["QUIET", "char_tokenizer", "make_groups", "make_trajectory", "tiny_policy"]

LETTERS = ["<pad>", "<eos>", "<unk>", *"0123456789=+- "]  # token id → text

# A trainer with these settings writes nothing: `lightrl.Trainer(max_steps=2, **QUIET)`.
QUIET: JsonObject = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip

# Weights of this size produce peaked distributions, which reveal a wrong mask or shift.
TINY_CONFIG: JsonObject = {
    "model_type": "qwen3", "vocab_size": len(LETTERS), "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "max_position_embeddings": 64, "initializer_range": 0.4, "tie_word_embeddings": False,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


def char_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per character of `LETTERS`."""
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(LETTERS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )


def tiny_policy(**options: Any) -> ModelSpec:
    """Returns a Qwen3 policy with the same random weights each time; `options` are arguments to ModelSpec."""
    return ModelSpec(**{"config": TINY_CONFIG, "tokenizer": "lightrl.testing.char_tokenizer", "seed": 0, **options})


def make_trajectory(
    completion: str = "9",
    *,
    reward: float | None = None,
    fields: JsonMapping | None = None,
    group_id: int = 0,
    sample: int = 0,
    prompt_ids: Sequence[int] = (3, 7, 10),
    completion_ids: Sequence[int] = (9, 1),
    versions: Sequence[int] | None = None,
    **others: Any,
) -> Trajectory:
    """Makes a one-turn trajectory. `versions` has one weight version per completion token; by default all are 0."""
    num = len(completion_ids)
    return Trajectory(
        prompt=Prompt(id=f"prompt-{group_id}", token_ids=list(prompt_ids), fields=dict(fields or {})),
        group_id=group_id,
        sample=sample,
        token_ids=[*prompt_ids, *completion_ids],
        loss_mask=[False] * len(prompt_ids) + [True] * num,
        behavior_logprobs=[0.0] * len(prompt_ids) + [-0.1 - index / 3 for index in range(num)],
        weight_versions=[-1] * len(prompt_ids) + list(versions if versions is not None else [0] * num),
        completion_ids=list(completion_ids),
        completion=completion,
        reward=reward,
        **others,
    )


def make_groups(rewards: Sequence[Sequence[float]], **settings: Any) -> list[Group]:
    """Makes one group per row of rewards; `settings` are arguments to `make_trajectory`."""
    groups = []
    for group_id, row in enumerate(rewards):
        trajectories = [
            make_trajectory(
                **{"reward": reward, "group_id": group_id, "sample": i, "completion_ids": (9, i + 1), **settings}
            )
            for i, reward in enumerate(row)
        ]
        groups.append(Group(id=group_id, prompt=trajectories[0].prompt, trajectories=trajectories))
    return groups
