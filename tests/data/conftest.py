from pathlib import Path

import pytest
from byte_tokens import byte_tokenizer
from data_cases import write_rows
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_chatml_tokens(**settings: str) -> PreTrainedTokenizerFast:
    tokens = {"pad_token": "<|pad|>", "eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    return byte_tokenizer("<|pad|>", "<|im_start|>", "<|im_end|>", **tokens, **settings)


@pytest.fixture
def plain_tokenizer() -> PreTrainedTokenizerFast:
    return with_chatml_tokens()


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    return with_chatml_tokens(chat_template=CHATML)


@pytest.fixture
def rows() -> list[dict[str, str]]:
    return [{"question": f"{number} + 1?", "answer": f"<<{number}+1>>it is {number + 1}"} for number in range(10)]


@pytest.fixture
def train_file(tmp_path: Path, rows: list[dict[str, str]]) -> str:
    return write_rows(tmp_path / "train.jsonl", rows)
