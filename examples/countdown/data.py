"""countdown_rows: the numbers game as rows, generated: reach a target with each number once.

    data:
      class_path: PromptDataModule
      init_args:
        train: {source: examples.countdown.data.countdown_rows, arguments: {num_rows: 20000, num_numbers: 3}}
        validation:
          source: examples.countdown.data.countdown_rows
          split: test
          arguments: {num_rows: 500, num_numbers: 3}
        prompt_column: numbers
        prompt_template: "Use each of the numbers {numbers} once, with + - * /, to make {target}."

The reward is examples.countdown.reward.countdown.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

_MAX_MISSES = 5000  # in a row, then there is hardly a game left


def countdown_rows(
    split: str = "train",
    *,
    num_rows: int = 10_000,
    num_numbers: int = 3,
    max_number: int = 9,
    max_target: int = 99,
    operators: str = "+-*/",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Rows that differ, each with a solution; train and the other splits share no row.

    A game (numbers in any order, target) belongs to the held-out tenth by its hash, so no seed mixes the two.

    Returns:
        `numbers`, text such as `3 5 2`; `target`, a whole number from 1; `answer`, an expression without brackets that
        solves it.

    Raises:
        ValueError: if a setting is out of range, or there are not so many different games.
    """
    if num_numbers < 2 or max_number < 1 or max_target < 1 or num_rows < 1:
        raise ValueError(
            f"num_rows={num_rows}, num_numbers={num_numbers}, max_number={max_number}, max_target={max_target}, "
            "expected at least 1, 2, 1 and 1. Raise what is too low."
        )
    if not operators or set(operators) - set("+-*/"):
        raise ValueError(f"operators={operators!r}, expected some of + - * /. Leave out the others.")
    draw = random.Random(f"{split}/{seed}")
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    num_misses = 0
    while len(rows) < num_rows:
        num_misses += 1
        if num_misses > _MAX_MISSES:
            raise ValueError(
                f"There are hardly more than {len(rows)} different games with {num_numbers} numbers up to {max_number} "
                f"in split {split!r}, expected num_rows={num_rows}. Lower num_rows or raise max_number."
            )
        used = [draw.randint(1, max_number) for _ in range(num_numbers)]
        signs = [draw.choice(operators) for _ in range(num_numbers - 1)]
        value = _value(used, signs)
        if value is None or value.denominator != 1 or not 1 <= value <= max_target:
            continue
        shown = draw.sample(used, len(used))
        game = f"{' '.join(map(str, shown))}={value}"
        if game in seen or _is_held_out(f"{sorted(used)}={value}") == (split == "train"):
            continue
        num_misses = 0
        seen.add(game)
        expression = str(used[0]) + "".join(f"{sign}{number}" for sign, number in zip(signs, used[1:], strict=True))
        rows.append({"numbers": " ".join(map(str, shown)), "target": int(value), "answer": expression})
    return rows


def _value(numbers: Sequence[int], signs: Sequence[str]) -> Fraction | None:
    """Of the expression with the usual precedence; None where it divides by 0."""
    terms = [Fraction(numbers[0])]
    for sign, number in zip(signs, numbers[1:], strict=True):
        if sign == "*":
            terms[-1] *= number
        elif sign == "/":
            if number == 0:
                return None
            terms[-1] /= number
        else:
            terms.append(Fraction(number if sign == "+" else -number))
    return sum(terms, Fraction(0))


def _is_held_out(game: str) -> bool:
    return int(hashlib.sha256(game.encode()).hexdigest(), 16) % 10 == 0
