import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte, and ChatML's three special tokens."""
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(special + letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    wrapped.chat_template = chat_template
    return wrapped


@pytest.fixture
def plain_tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(CHATML)


@pytest.fixture
def rows() -> list[dict[str, str]]:
    return [{"question": f"{number} + 1?", "answer": f"<<{number}+1>>it is {number + 1}"} for number in range(10)]


@pytest.fixture
def train_file(tmp_path: Path, rows: list[dict[str, str]]) -> str:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
