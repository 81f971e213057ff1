"""Rows and rewards for two tasks that a pretrained model with 135 M parameters sometimes solves.

A reward is 1 only for a completion that ends by itself, so the model must also learn to be brief.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from lightrl.trajectory import Trajectory

Item = TypeVar("Item")
_NOUNS = (Path(__file__).parent / "nouns.txt").read_text().split()


def sums(split: str = "train", *, max_number: int = 20) -> list[dict[str, str]]:
    """Asks for the sum of each pair of numbers from 1 to `max_number`; a fifth of the pairs is held out."""
    pairs = [(a, b) for a in range(1, max_number + 1) for b in range(1, max_number + 1)]
    return [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in _split(pairs, split)]


def questions(split: str = "train") -> list[dict[str, str]]:
    """Asks for one question about each noun; the field `answer` is the noun. A fifth of the nouns is held out."""
    return [{"question": f"Ask one question about a {noun}.", "answer": noun} for noun in _split(_NOUNS, split)]


def last_number(trajectory: Trajectory) -> dict[str, float]:
    """Returns 1 if the last number in the completion is the answer; expressions are not evaluated."""
    is_right = trajectory.finish_reason == "stop" and ends_in(trajectory.answer, trajectory.prompt.fields["answer"])
    return {"reward": float(is_right), "accuracy": float(is_right)}


def ends_in(completion: str, answer: str) -> bool:
    """Returns whether the answer is the last number of the completion."""
    return re.findall(r"\d+", completion)[-1:] == [answer]


def one_question(trajectory: Trajectory) -> dict[str, float]:
    """Returns 1 if the completion is a single sentence that ends in a question mark and contains the noun."""
    text = trajectory.answer.strip()
    is_one = re.fullmatch(r"[A-Z][\w ,'’-]+\?", text) is not None
    has_noun = re.search(rf"\b{trajectory.prompt.fields['answer']}", text, re.IGNORECASE) is not None
    is_right = trajectory.finish_reason == "stop" and is_one and has_noun
    return {"reward": float(is_right), "accuracy": float(is_right)}


def _split(items: Sequence[Item], split: str) -> list[Item]:
    shuffled = random.Random(0).sample(items, len(items))
    num_held_out = len(items) // 5
    return shuffled[num_held_out:] if split == "train" else shuffled[:num_held_out]
