"""Rows of the examples here."""

from typing import Any


def digits(split: str, *, copies: int = 8) -> list[dict[str, Any]]:
    """A row for each secret digit, with the same prompt; `copies` of each in training."""
    return [
        {"question": ":", "secret": secret} for _ in range(copies if split == "train" else 1) for secret in range(10)
    ]
