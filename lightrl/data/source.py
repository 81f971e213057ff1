"""Where a trainer's prompts come from: the data module's stream, or a user's own loaders and batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightrl.data.chat import ChatRenderer, render_prompts
from lightrl.data.loader import prompt_from, wrap_train_loader
from lightrl.data.stream import PromptStream
from lightrl.trajectory import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prompt_source(
    trainer: Any, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int | None, seed: int
) -> PromptStream:
    """The prompts of a fit, by position; with `overfit_batches` the first ones, again and again.

    Args:
        trainer: attached to its data.
        tokenizer: the policy's.
        max_prompt_tokens: the longest prompt allowed; None allows any.
        seed: of the order, for a loader of the user's that shuffles.

    Raises:
        ValueError: if the train loader cannot be read by position.
    """
    datamodule: Any = getattr(trainer, "datamodule", None)
    stream: PromptStream | None = getattr(datamodule, "prompt_stream", None)
    trainer.fit_loop.setup_data()
    if stream is None:
        stream = wrap_train_loader(trainer.train_dataloader, tokenizer, max_prompt_tokens=max_prompt_tokens, seed=seed)
    if getattr(trainer, "overfit_batches", 0) > 0:
        return stream.first(int(trainer.num_training_batches) * stream.batch_size)
    return stream


def prompts_of(
    batch: Any, tokenizer: PreTrainedTokenizerBase, *, name: str, max_prompt_tokens: int | None
) -> list[Prompt]:
    """The prompts of a validation, test or predict batch: prompts as they are, rows of a user's loader rendered.

    Args:
        batch: a sequence of prompts, strings or dicts, or a dict of columns as torch's default collate makes it.
        tokenizer: the policy's.
        name: prefix of the ids of prompts that have none.
        max_prompt_tokens: the longest prompt allowed; None allows any.
    """
    items: Sequence[Any] = batch
    if isinstance(batch, Mapping):
        items = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    prompts = [item if isinstance(item, Prompt) else prompt_from(item, index, name) for index, item in enumerate(items)]
    if all(prompt.token_ids is not None for prompt in prompts):
        return prompts
    return render_prompts(
        prompts,
        ChatRenderer(tokenizer),
        max_tokens=max_prompt_tokens,
        overflow="error",
        where=lambda index: f"Item {index} of batch {name}",
    )
