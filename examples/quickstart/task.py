"""The quickstart's task: name the largest of four digits. Tokenizer and prompts are generated.

For the prompt `3719=` the only right completion is `9` and the end token. A hash of the prompt selects the 1,980 of
10,000 that are held out, so no seed can mix them with train prompts. Always answering `9` is right for 33 % of them.
"""

import hashlib
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightrl import Prompt, PromptDataModule

VOCABULARY = ["<pad>", "<eos>", "<unk>", *"0123456789="]


def tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per character."""
    model = models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, unk_token="<unk>")
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=32
    )


class LargestDigit(PromptDataModule):
    """Prompts of four digits, split by their hash.

    Args:
        batch_size: prompts per iteration; each becomes a group.
        num_validation: maximum number of held-out prompts to validate on.
        kwargs: other arguments to PromptDataModule, such as `seed`.
    """

    def __init__(self, batch_size: int, num_validation: int = 2000, **kwargs: Any) -> None:
        super().__init__(train=None, batch_size=batch_size, validation_batch_size=num_validation, **kwargs)
        self.num_validation = num_validation

    def make_prompts(self, split: str) -> list[Prompt]:
        texts = [f"{number:04d}=" for number in range(10_000)]
        if split == "train":
            texts = [text for text in texts if not is_held_out(text)]
        else:
            texts = sorted((text for text in texts if is_held_out(text)), key=digest)[: self.num_validation]
        return [
            Prompt(
                id=text,
                token_ids=[VOCABULARY.index(character) for character in text],
                fields={"answer_ids": [VOCABULARY.index(max(text[:4])), VOCABULARY.index("<eos>")]},
            )
            for text in texts
        ]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def is_held_out(text: str) -> bool:
    return int(digest(text), 16) % 10 < 2
