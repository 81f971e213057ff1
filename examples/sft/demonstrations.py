"""The quickstart's prompts with answers to imitate; a given fraction of the answers is hasty, and so often wrong."""

import hashlib
from typing import Any

from examples.quickstart.task import LargestDigit
from lightrl import Prompt, SFTDataModule


class Demonstrations(SFTDataModule):
    """Makes demonstrations such as `3719=` and `9`; a hasty one names the first digit, `3`.

    Args:
        batch_size: demonstrations per step.
        hasty_fraction: fraction of hasty answers in the train split; the validation split has none.
        num_validation: maximum number of held-out prompts to validate on.
        kwargs: other arguments to SFTDataModule.
    """

    def __init__(self, batch_size: int, hasty_fraction: float = 0.0, num_validation: int = 2000, **kwargs: Any) -> None:
        super().__init__(train=None, batch_size=batch_size, validation_batch_size=num_validation, **kwargs)
        self.hasty_fraction = hasty_fraction
        self.num_validation = num_validation

    def make_prompts(self, split: str) -> list[Prompt]:
        prompts = LargestDigit(1, self.num_validation).make_prompts(split)
        for prompt in prompts:
            is_hasty = split == "train" and chance(prompt.id) < self.hasty_fraction
            prompt.fields["answer"] = prompt.id[0] if is_hasty else max(prompt.id[:4])
        return prompts


def chance(text: str) -> float:
    """Returns a number in [0, 1) that depends only on the text."""
    return int(hashlib.sha256(f"chance {text}".encode()).hexdigest()[:8], 16) / 2**32
