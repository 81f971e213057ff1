"""Preference pairs for the quickstart's task: the right digit is chosen, a wrong one rejected."""

from typing import Any

from examples.quickstart.task import LargestDigit
from examples.sft.demonstrations import chance
from lightrl import PreferenceDataModule, Prompt


class DigitPairs(PreferenceDataModule):
    """Makes pairs such as `3719=` with `9` chosen and another digit of the prompt rejected.

    Args:
        batch_size: pairs per step.
        num_validation: maximum number of held-out prompts to validate on.
        kwargs: other arguments to PreferenceDataModule.
    """

    def __init__(self, batch_size: int, num_validation: int = 2000, **kwargs: Any) -> None:
        super().__init__(train=None, batch_size=batch_size, validation_batch_size=num_validation, **kwargs)
        self.num_validation = num_validation

    def make_prompts(self, split: str) -> list[Prompt]:
        prompts = LargestDigit(1, self.num_validation).make_prompts(split)
        for prompt in prompts:
            prompt.fields.update(chosen=max(prompt.id[:4]), rejected=wrong_digit(prompt.id))
        return prompts


def wrong_digit(prompt: str) -> str:
    """Returns a random digit of the prompt below the largest; if all are equal, the largest - 1 (9 for 0)."""
    largest = max(prompt[:4])
    others = [digit for digit in prompt[:4] if digit != largest]
    return others[int(chance(prompt + "?") * len(others))] if others else str((int(largest) + 9) % 10)
