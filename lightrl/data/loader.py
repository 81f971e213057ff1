"""A user's own sized DataLoader as a PromptStream: its dataset's items become prompts, its sampler says whether to
shuffle, its batch size is the number of prompts per iteration. The loader itself is never iterated.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightrl.data.chat import ChatRenderer, render_prompts
from lightrl.data.stream import EpochLoader, PromptBatch, PromptStream, prompt_batches
from lightrl.trajectory import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def wrap_train_loader(
    loader: object, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int | None = None, seed: int = 0
) -> PromptStream:
    """The prompts of a DataLoader by position.

    Args:
        loader: a DataLoader over a map-style dataset whose items are Prompts, strings (the user's turn), or dicts with
            `messages`, `token_ids` or `prompt`, an optional `id`, and any other fields for the reward.
        tokenizer: the policy's.
        max_prompt_tokens: the longest prompt allowed; None allows any.
        seed: of the order, if the loader shuffles.

    Raises:
        ValueError: if the loader is not sized, draws in another way than in order or shuffled, or an item is no prompt.
    """
    checked = _checked(loader)
    prompts = _prompts(checked, "train", tokenizer, max_prompt_tokens)
    shuffle = isinstance(checked.sampler, RandomSampler)
    assert checked.batch_size is not None
    return PromptStream(prompts, batch_size=checked.batch_size, seed=seed, shuffle=shuffle)


def wrap_validation_loader(
    loader: object,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int | None = None,
    split: str = "validation",
) -> EpochLoader[PromptBatch]:
    """The prompts of a DataLoader as lists of prompts, in the order of its dataset; see `wrap_train_loader`."""
    checked = _checked(loader)
    assert checked.batch_size is not None
    return prompt_batches(_prompts(checked, split, tokenizer, max_prompt_tokens), checked.batch_size)


def _checked(loader: object) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"The loader is a {type(loader).__name__}, expected a torch DataLoader over a map-style dataset. "
            "Wrap the data in one, or use PromptDataModule."
        )
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise ValueError(
            f"The loader's dataset, a {type(dataset).__name__}, is not sized and addressable, expected __len__ and "
            "__getitem__: prompts are read by position and resume relies on it. Use a map-style dataset."
        )
    if loader.batch_size is None:
        raise ValueError(
            "The loader has no batch_size (batch_sampler or batch_size=None was given), expected the number of prompts "
            "per iteration. Give the DataLoader batch_size= and shuffle=."
        )
    sampler = loader.sampler
    is_plain = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset)
    )
    if not is_plain:
        raise ValueError(
            f"The loader draws with a {type(sampler).__name__}, expected each prompt once per epoch, in order or "
            "shuffled. Give the DataLoader shuffle= instead of sampler=, and the wanted rows as its dataset."
        )
    return loader


def _prompts(
    loader: DataLoader[Any], split: str, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int | None
) -> list[Prompt]:
    dataset: Any = loader.dataset
    return render_prompts(
        [prompt_from(dataset[index], index, split) for index in range(len(dataset))],
        ChatRenderer(tokenizer),
        max_tokens=max_prompt_tokens,
        overflow="error",
        where=lambda index: f"Item {index} of the {split} loader",
    )


def prompt_from(item: object, index: int, split: str) -> Prompt:
    """One item of a user's dataset as a Prompt; one without an id gets `<split>-<index>`.

    Raises:
        ValueError: if the item is no prompt.
    """
    name = f"{split}-{index}"
    if isinstance(item, Prompt):
        return item
    if isinstance(item, str):
        return Prompt(id=name, messages=[{"role": "user", "content": item}], fields={"prompt": item})
    if isinstance(item, dict) and item.keys() & {"messages", "token_ids", "prompt"}:
        fields = {key: value for key, value in item.items() if key not in ("id", "messages", "token_ids")}
        messages, token_ids = item.get("messages"), item.get("token_ids")
        if messages is None and token_ids is None:
            messages = [{"role": "user", "content": str(item["prompt"])}]
        return Prompt(
            id=str(item.get("id", name)),
            messages=messages,
            token_ids=None if token_ids is None else [int(token_id) for token_id in token_ids],
            fields=fields,
        )
    keys = f" with keys {sorted(item)}" if isinstance(item, dict) else ""
    raise ValueError(
        f"Item {index} of the {split} loader is a {type(item).__name__}{keys}, expected a Prompt, a string, or a dict "
        "with messages, token_ids or prompt. Change the dataset's __getitem__."
    )
