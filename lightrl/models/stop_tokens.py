"""Stop tokens: a completion ends at any id that the model, its tokenizer, its chat template or the user names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lightrl.models.chat_template import ChatTemplate
from lightrl.trajectory import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def stop_token_ids(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> dict[str, list[int]]:
    """Source of stop tokens → their ids."""
    sources: dict[str, list[int]] = {"sampling": list(sampling.stop_token_ids)}
    generation_config = getattr(policy, "generation_config", None)
    for name, value in (
        ("generation config", getattr(generation_config, "eos_token_id", None)),
        ("model config", getattr(policy.config, "eos_token_id", None)),
        ("tokenizer", tokenizer.eos_token_id),
        ("turn end", ChatTemplate(tokenizer).turn_end()),
    ):
        if value is not None:
            sources[name] = [int(item) for item in (value if isinstance(value, Sequence) else [value])]
    return {name: ids for name, ids in sources.items() if ids}


def with_stop_tokens(sampling: Sampling, sources: dict[str, list[int]]) -> Sampling:
    """`sampling` with the ids of `stop_token_ids` added."""
    ids = {token_id for ids in sources.values() for token_id in ids}
    return replace(sampling, stop_token_ids=tuple(sorted(ids | set(sampling.stop_token_ids))))
