import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler
from transformers import PreTrainedTokenizerFast

from lightrl.data import prompts_of, wrap_train_loader
from lightrl.trajectory import Prompt


class Items(Dataset):
    def __init__(self, items: list) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> object:
        return self.items[index]


class Endless(IterableDataset):
    def __iter__(self):
        yield from ("hi", "hello")


ITEMS = Items(
    [
        Prompt(id="mine", token_ids=[5], fields={"answer": "a"}),
        "hi",
        {"id": 7, "messages": [{"role": "user", "content": "hi"}], "answer": "b"},
        {"prompt": "hi", "answer": "c"},
        {"token_ids": torch.tensor([4, 5]), "answer": "d"},
    ]
)


def test_items_become_prompts_with_ids_tokens_and_fields(plain_tokenizer: PreTrainedTokenizerFast):
    stream = wrap_train_loader(DataLoader(ITEMS, batch_size=2), plain_tokenizer)
    prompts = [stream[position] for position in range(5)]
    hi = plain_tokenizer("hi").input_ids
    assert [prompt.id for prompt in prompts] == ["mine", "train-1", "7", "train-3", "train-4"]
    assert [prompt.token_ids for prompt in prompts] == [[5], hi, hi, hi, [4, 5]]
    assert [prompt.fields.get("answer") for prompt in prompts] == ["a", None, "b", "c", "d"]
    assert stream.batch_size == 2
    assert stream.num_iterations == 2


def test_each_item_of_a_dataset_is_read_once_in_the_main_thread(plain_tokenizer: PreTrainedTokenizerFast):
    class Counting(Items):
        def __getitem__(self, index: int) -> str:
            calls.append(threading.current_thread())
            return f"item {index}, call {len(calls)}"

    calls: list[threading.Thread] = []
    stream = wrap_train_loader(DataLoader(Counting(["a", "b"]), batch_size=2), plain_tokenizer)
    thread = threading.Thread(target=stream.prepare, args=(0, 4))
    thread.start()
    thread.join()
    assert [stream[position].fields["prompt"] for position in range(4)] == ["item 0, call 1", "item 1, call 2"] * 2
    assert calls == [threading.main_thread()] * 2


def test_a_shuffling_loader_gives_a_shuffling_stream(plain_tokenizer: PreTrainedTokenizerFast):
    assert wrap_train_loader(DataLoader(ITEMS, batch_size=2, shuffle=True), plain_tokenizer).prompts.shuffle
    assert not wrap_train_loader(DataLoader(ITEMS, batch_size=2), plain_tokenizer).prompts.shuffle


def test_an_iterable_dataset_is_read_in_order_over_and_over(plain_tokenizer: PreTrainedTokenizerFast):
    stream = wrap_train_loader(DataLoader(Endless(), batch_size=2), plain_tokenizer)
    assert [stream[position].id for position in (4, 0, 1, 2)] == ["train-0", "train-0", "train-1", "train-0"]
    assert stream[1].messages == [{"role": "user", "content": "hello"}]
    assert stream.num_iterations is None


def test_a_batch_of_items_becomes_rendered_prompts(plain_tokenizer: PreTrainedTokenizerFast):
    items = [ITEMS[index] for index in range(3)]
    prompts = prompts_of(items, plain_tokenizer, name="validation-0", max_prompt_tokens=8)
    assert [prompt.id for prompt in prompts] == ["mine", "validation-0-1", "7"]
    assert all(prompt.token_ids for prompt in prompts)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        pytest.param(DataLoader(Endless(), batch_size=None), r"no batch_size", id="iterable without batch size"),
        pytest.param([["hi"]], r"must be a torch DataLoader over a map-style dataset, got a list", id="no loader"),
        pytest.param(DataLoader(ITEMS, batch_size=None), r"no batch_size", id="no batch size"),
        pytest.param(
            DataLoader(ITEMS, sampler=WeightedRandomSampler([1.0] * 5, 5)),
            r"uses a WeightedRandomSampler, but each prompt must appear once",
            id="another sampler",
        ),
        pytest.param(DataLoader(Items([3, 4])), r"Item 0 of the train loader must be .* got a int", id="no prompt"),
        pytest.param(
            DataLoader(Items([{"question": "hi"}])),
            r"got a dict with keys \['question'\]",
            id="a dict without a prompt",
        ),
        pytest.param(
            DataLoader(Items(["hi", "hello there"])),
            r"Item 1 of the train loader .* has 11 prompt tokens, but at most 8 fit",
            id="too long",
        ),
    ],
)
def test_a_loader_that_is_no_source_of_prompts_is_refused(
    loader: object, message: str, plain_tokenizer: PreTrainedTokenizerFast
):
    with pytest.raises(ValueError, match=message):
        wrap_train_loader(loader, plain_tokenizer, max_prompt_tokens=8)


@pytest.mark.parametrize("column", ["prompt", "messages"])
def test_a_chat_with_parts_is_read_from_either_key(column: str, chat_tokenizer: PreTrainedTokenizerFast):
    chat = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    prompt = wrap_train_loader(DataLoader(Items([{column: chat}]), batch_size=1), chat_tokenizer)[0]
    assert chat_tokenizer.decode(prompt.token_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_prompt_that_is_neither_text_nor_a_chat_is_refused(chat_tokenizer: PreTrainedTokenizerFast):
    loader = DataLoader(Items([{"prompt": {"text": "hi"}}]), batch_size=1)
    with pytest.raises(
        ValueError, match=r"Item 0 of the train loader: 'prompt' must be text or a list of chat messages"
    ):
        wrap_train_loader(loader, chat_tokenizer)
