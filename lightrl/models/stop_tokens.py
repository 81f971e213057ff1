"""Stop tokens: a completion ends at any id that the model, its tokenizer, its chat template or the user names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from lightrl.trajectory import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def stop_token_ids(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> dict[str, list[int]]:
    """Where each stop token comes from → its ids."""
    sources: dict[str, list[int]] = {"sampling": list(sampling.stop_token_ids)}
    generation_config = getattr(policy, "generation_config", None)
    for name, value in (
        ("generation config", getattr(generation_config, "eos_token_id", None)),
        ("model config", getattr(policy.config, "eos_token_id", None)),
        ("tokenizer", tokenizer.eos_token_id),
        ("turn end", _turn_end(tokenizer)),
    ):
        if value is not None:
            sources[name] = [int(item) for item in (value if isinstance(value, Sequence) else [value])]
    return {name: ids for name, ids in sources.items() if ids}


def with_stop_tokens(sampling: Sampling, sources: dict[str, list[int]]) -> Sampling:
    """`sampling` with the ids of `stop_token_ids` added."""
    ids = {token_id for ids in sources.values() for token_id in ids}
    return replace(sampling, stop_token_ids=tuple(sorted(ids | set(sampling.stop_token_ids))))


def _turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes after the assistant's message."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    message = "lightrl"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": message}], tokenize=False
    )
    after = text[text.rindex(message) + len(message) :].lstrip() if message in text else ""
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    special = sorted({*map(str, tokenizer.all_special_tokens), *added}, key=len, reverse=True)
    end = next((token for token in special if after.startswith(token)), None)
    return None if end is None else int(tokenizer.convert_tokens_to_ids(end))
