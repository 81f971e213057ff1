r"""countdown rewards an expression that reaches the target and uses each number once.

The expression is in the last `<answer>...</answer>`, otherwise after `####` or in `\boxed{}`, otherwise in the last
line of the completion. An `=` and the text after it are ignored, because models often write `2*3+4 = 10`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from fractions import Fraction

from lightrl.rewards.math_answer import final_answer
from lightrl.trajectory import Trajectory

_MAX_CHARS = 200
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_EXPRESSION = re.compile(r"[0-9+\-*/() ]+")
_SIGNS = {r"\times": "*", r"\cdot": "*", r"\div": "/", "×": "*", "·": "*", "÷": "/", "−": "-", "$": ""}


def countdown(trajectory: Trajectory, *, format_reward: float = 0.1) -> dict[str, float | str]:
    """Rewards an expression that uses each number once and equals the target.

    Args:
        trajectory: its prompt has the fields `numbers` (text such as `3 5 2`, or a list) and `target`.
        format_reward: the reward of an expression that uses each number once but misses the target.

    Returns:
        `reward`; `accuracy`: 1 if the target is reached; `format`: 1 if each number is used once; `extracted`: the
        expression. A completion that was cut off has accuracy and format 0.

    Raises:
        ValueError: if the prompt lacks these fields.
    """
    numbers, target = _game(trajectory)
    expression = extracted_expression(trajectory.answer)
    value = value_of(expression) if trajectory.finish_reason == "stop" else None
    has_format = value is not None and Counter(map(int, re.findall(r"\d+", expression))) == Counter(numbers)
    is_accurate = has_format and value == target
    return {
        "reward": 1.0 if is_accurate else format_reward if has_format else 0.0,
        "accuracy": float(is_accurate),
        "format": float(has_format),
        "extracted": expression,
    }


def extracted_expression(completion: str) -> str:
    """Returns the final expression in the completion; the module docstring says where it looks."""
    tagged = _ANSWER_TAG.findall(completion)
    marked = final_answer(completion)
    lines = completion.strip().splitlines() or [""]
    text = str(tagged[-1]) if tagged else marked.text if marked is not None else lines[-1]
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    return text.partition("=")[0].strip()


def value_of(expression: str) -> Fraction | None:
    """Evaluates integers, + - * / and parentheses exactly; returns None for anything else, or a division by 0."""
    if len(expression) > _MAX_CHARS or not _EXPRESSION.fullmatch(expression) or "**" in expression:
        return None
    try:
        return _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Fraction | None:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp):  # a unary sign would make a different number
        return None
    left, right = _value(node.left), _value(node.right)
    if left is None or right is None:
        return None
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    return left / right if isinstance(node.op, ast.Div) else None


def _game(trajectory: Trajectory) -> tuple[list[int], Fraction]:
    fields = trajectory.prompt.fields
    try:
        numbers, target = fields["numbers"], Fraction(str(fields["target"]))
        integers = [int(item) for item in (re.findall(r"\d+", numbers) if isinstance(numbers, str) else numbers)]
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(
            f"Prompt {trajectory.prompt.id!r} needs the fields 'numbers' (text or a list of integers) and 'target' (a "
            f"number), got {sorted(fields)}. Map the data's columns with DataSource.columns."
        ) from error
    if not integers:
        raise ValueError(f"Prompt {trajectory.prompt.id!r} has no number in its field 'numbers'.")
    return integers, target
