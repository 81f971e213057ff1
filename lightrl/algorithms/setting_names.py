"""What an equation says of its argument `cap`, said of the setting `importance_cap` that the user typed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def setting_names(**names: str) -> Iterator[None]:
    """Inside, a refusal (ValueError) names settings in the place of the equation's arguments.

    Args:
        names: the setting's by the argument's. Each word of a message that is an argument's name is replaced.

    Example:
        with setting_names(mean="advantage_mean", std="advantage_std"):
            group_advantages(rewards, group_ids, mean=self.advantage_mean, std=self.advantage_std)
    """
    try:
        yield
    except ValueError as error:
        words = rf"\b({'|'.join(map(re.escape, names))})\b"
        error.args = (re.sub(words, lambda found: names[found[0]], str(error)),)
        raise
