"""Rows for the examples in this folder."""

from typing import Any


def digits(split: str, *, copies: int = 8) -> list[dict[str, Any]]:
    """Returns one row for each secret digit (`copies` in the train split), all with the same prompt."""
    return [
        {"question": ":", "secret": secret} for _ in range(copies if split == "train" else 1) for secret in range(10)
    ]
