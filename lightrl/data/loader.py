"""The trainer's prompts, from a data module's stream or from a user's loaders and batches.

A user's train DataLoader becomes a PromptStream: its dataset's items are the prompts, its sampler decides whether they
are shuffled, and its batch size is the number of prompts per iteration. The loader itself is never iterated. An
iterable dataset is read in order; if it has `state_dict` and `load_state_dict`, a resume does not read earlier items.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from transformers import PreTrainedTokenizerBase

from lightrl.data.chat import ChatRenderer, read_messages
from lightrl.data.mixture import DataSource
from lightrl.data.stream import IndexedRows, LocatedRow, PromptStream, RowPrompts, SourceRows, without_errors
from lightrl.data.streamed import StreamedRows, shards_of
from lightrl.trajectory import Prompt


def prompt_source(
    trainer: Any, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int | None, seed: int
) -> PromptStream:
    """Returns the stream of prompts for a fit; with `overfit_batches`, the stream repeats the first prompts.

    `seed` determines the order if a user's loader shuffles. Raises ValueError as `wrap_train_loader` does.
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
    """Returns the prompts in a validation, test or predict batch; renders rows from a user's loader.

    Args:
        batch: a sequence of prompts, strings or dicts, or a dict of columns, as torch's default collate returns it.
        name: prefix for the ids of prompts without an id.
    """
    items: Sequence[Any] = batch
    if isinstance(batch, Mapping):
        items = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    prompts = [prompt_from(item, index, name) for index, item in enumerate(items)]
    if all(prompt.token_ids is not None for prompt in prompts):
        return prompts
    renderer = ChatRenderer(tokenizer, max_tokens=max_prompt_tokens)
    rendered = without_errors(renderer.rendered(prompts, lambda index: f"Item {index} of batch {name}"))
    return [prompt for prompt in rendered if prompt is not None]


def wrap_train_loader(
    loader: object, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int | None = None, seed: int = 0
) -> PromptStream:
    """Returns the prompts from a DataLoader as a stream.

    Args:
        loader: a DataLoader over a map-style or an iterable dataset whose items are Prompts, strings (the user's turn),
            or dicts with `messages`, `token_ids` or `prompt`, an optional `id`, and other fields for the reward.
        seed: determines the order if the loader shuffles.

    Raises:
        ValueError: if the sampler is neither sequential nor random, or an item is not a prompt.
    """
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"The train loader must be a torch DataLoader over a map-style dataset, got a {type(loader).__name__}. "
            "Wrap the data in one, or use PromptDataModule."
        )
    if loader.batch_size is None:
        raise ValueError(
            "The loader has no batch_size, which is the number of prompts per iteration. Set batch_size and shuffle "
            "on the DataLoader, not batch_sampler."
        )
    dataset: Any = loader.dataset
    source = DataSource(type(dataset).__name__)
    is_iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    rows: SourceRows
    if is_iterable:
        # A copy, because Lightning iterates over the dataset to count iterations.
        rows = StreamedRows(source, "train", shards_of(lambda: copy.deepcopy(dataset)), seed=0, shuffle=False)
    else:
        _check_map_style(loader)
        items = [dataset[index] for index in range(len(dataset))]  # read once: it may be random or not thread-safe
        rows = IndexedRows(source, "train", items, name_row=lambda index: f"Item {index} of the train loader")

    def prompt_of(located: LocatedRow) -> Prompt:
        return prompt_from(located.row, located.prompt_id.removeprefix("train-"), "train")

    render = ChatRenderer(tokenizer, max_tokens=max_prompt_tokens).rendered
    prompts = RowPrompts([rows], prompt_of, render, seed, isinstance(loader.sampler, RandomSampler))
    return PromptStream(prompts if is_iterable else prompts.check(), batch_size=loader.batch_size)


def _check_map_style(loader: DataLoader[Any]) -> None:
    """Raises ValueError for a dataset without a length, or a sampler that is neither sequential nor random."""
    dataset = loader.dataset
    if not isinstance(dataset, Sized):
        raise ValueError(
            f"The loader's dataset, a {type(dataset).__name__}, must have __len__ and __getitem__, because prompts are "
            "read by position. Add __len__, or use an iterable dataset."
        )
    sampler = loader.sampler
    is_plain = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == len(dataset)
    )
    if not is_plain:
        raise ValueError(
            f"The loader uses a {type(sampler).__name__}, but each prompt must appear once per epoch, in order or "
            "shuffled. Set shuffle on the DataLoader instead of sampler, and select rows in its dataset."
        )


def prompt_from(item: object, index: int | str, split: str) -> Prompt:
    """Makes a Prompt from a dataset's item, by default with id `<split>-<index>`; raises ValueError for other items."""
    name = f"{split}-{index}"
    if isinstance(item, Prompt):
        return item
    if isinstance(item, str):
        return Prompt(id=name, messages=[{"role": "user", "content": item}], fields={"prompt": item})
    if isinstance(item, dict) and item.keys() & {"messages", "token_ids", "prompt"}:
        fields = {key: value for key, value in item.items() if key not in ("id", "messages", "token_ids")}
        token_ids, column = item.get("token_ids"), "prompt" if item.get("messages") is None else "messages"
        messages = None
        if column == "messages" or token_ids is None:
            where = f"Item {index} of the {split} loader"
            messages = read_messages(item.get(column), "user", column=column, where=where)
        return Prompt(
            id=str(item.get("id", name)),
            messages=messages,
            token_ids=None if token_ids is None else [int(token_id) for token_id in token_ids],
            fields=fields,
        )
    keys = f" with keys {sorted(item)}" if isinstance(item, dict) else ""
    raise ValueError(
        f"Item {index} of the {split} loader must be a Prompt, a string, or a dict with messages, token_ids or prompt; "
        f"got a {type(item).__name__}{keys}. Change the dataset's __getitem__."
    )
