"""countdown_rows generates rows of a game: reach a target number, using each given number once.

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
from typing import Any

from examples.countdown.reward import value_of
from lightrl.checks.bounds import check_bounds

_MAX_MISSES = 5000  # after this many misses in a row, hardly any new games are left


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
    """Generates distinct rows that have a solution; the train split shares no game with the other splits.

    The hash of a game (target, and numbers in any order) decides whether it is in the held-out tenth, so the splits
    never overlap, whatever the seed.

    Returns:
        `numbers`, text such as `3 5 2`; `target`, an integer >= 1; `answer`, an expression without parentheses that
        reaches the target.

    Raises:
        ValueError: if a setting is out of range, or there are too few distinct games.
    """
    check_bounds(1, num_rows=num_rows, max_number=max_number, max_target=max_target)
    check_bounds(2, num_numbers=num_numbers)
    if not operators or set(operators) - set("+-*/"):
        raise ValueError(f"operators must be some of + - * /, got {operators!r}.")
    draw = random.Random(f"{split}/{seed}")
    rows: list[dict[str, Any]] = []
    games: set[str] = set()
    num_misses = 0
    while len(rows) < num_rows:
        num_misses += 1
        if num_misses > _MAX_MISSES:
            raise ValueError(
                f"num_rows={num_rows} is too many: split {split!r} has hardly more than {len(rows)} distinct games of "
                f"{num_numbers} numbers up to {max_number}. Lower num_rows or increase max_number."
            )
        used = [draw.randint(1, max_number) for _ in range(num_numbers)]
        signs = [draw.choice(operators) for _ in range(num_numbers - 1)]
        expression = str(used[0]) + "".join(f"{sign}{number}" for sign, number in zip(signs, used[1:], strict=True))
        value = value_of(expression)
        if value is None or value.denominator != 1 or not 1 <= value <= max_target:
            continue
        shown = draw.sample(used, len(used))
        game = f"{' '.join(map(str, shown))}={value}"
        if game in games or _is_held_out(f"{sorted(used)}={value}") == (split == "train"):
            continue
        num_misses = 0
        games.add(game)
        rows.append({"numbers": " ".join(map(str, shown)), "target": int(value), "answer": expression})
    return rows


def _is_held_out(game: str) -> bool:
    return int(hashlib.sha256(game.encode()).hexdigest(), 16) % 10 == 0
