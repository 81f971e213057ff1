"""References that rewards compare completions with: lists of accepted answers, and a check before the run."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from numbers import Number
from typing import Any

from lightrl.checks.user_code import function_of
from lightrl.rewards.parts import RewardPart, bound, parts_of
from lightrl.rewards.reward_result import RewardFunction, is_async
from lightrl.trajectory import Prompt, Trajectory, chat_as_text

Compared = dict[str, float | str | None]


def any_answer(function: Callable[..., Compared]) -> Callable[..., Compared]:
    """Allows the prompt's `answer` field, the reference, to be a list of accepted answers; the best result counts.

    Tuples, sets and NumPy arrays count as lists.

    Raises:
        ValueError: if no completion can equal the reference: it is an empty list, or neither text nor a finite number.
    """

    @functools.wraps(function)
    def best(trajectory: Trajectory, **arguments: Any) -> Compared:
        prompt = trajectory.prompt
        reference = chat_as_text(prompt.fields.get("answer"))
        listed = reference.tolist() if hasattr(reference, "tolist") else reference
        answers = [*map(chat_as_text, listed)] if isinstance(listed, list | tuple | Set) else [listed]
        if not answers or not all(map(_is_comparable, answers)):
            raise ValueError(
                f"Prompt {prompt.id!r} has a reference that no completion can equal: {reference!r:.200}. Its 'answer' "
                "field must be text, a number, or a list of these. To select a value in an object, use its path: "
                "columns: {answer: reward_model.ground_truth}."
            )
        if answers[0] is reference:
            return function(trajectory, **arguments)
        results = []
        for answer in answers:
            one = copy.copy(trajectory)
            one.prompt = replace(prompt, fields={**prompt.fields, "answer": answer})
            results.append(function(one, **arguments))
        return max(results, key=lambda result: (result["reward"], result["lenient_accuracy"]))

    return best


def _is_comparable(answer: object) -> bool:
    """Whether an answer is text, a finite number, or None, which the reward function itself refuses."""
    is_number = isinstance(answer, Number) and str(answer).lower() not in ("nan", "inf", "-inf")
    return answer is None or is_number or (isinstance(answer, str) and answer.strip().lower() != "nan")


class ReferenceCheck:
    """Calls a reward's built-in functions on a completion without an answer, which is cheap.

    A prompt that lacks a field is thus refused at the start, not dropped in each iteration. Users' functions are not
    called, since they may be slow or have side effects.
    """

    def __init__(self, reward: object) -> None:
        self.columns: set[str] = set()  # the columns that the functions have read so far
        is_lightrls = str(getattr(reward, "__module__", "")).startswith("lightrl.")
        self._functions: list[RewardFunction] = [reward] if callable(reward) and is_lightrls else []
        if isinstance(reward, str | RewardPart | Sequence):
            lightrl_parts = [part for part in parts_of(reward) if part.path.startswith("lightrl.")]
            self._functions = [bound(part, function_of(part.path, "reward")) for part in lightrl_parts]

    def __call__(self, prompt: Prompt) -> None:
        """Raises ValueError if a function cannot compute rewards for this prompt; adds the columns that were read."""
        for function in self._functions:
            row = _ReadFields(prompt.fields)
            unanswered = replace(prompt, fields=row)
            called: Any = function(
                Trajectory.of_text(unanswered, "<think>", finish_reason="length", columns={"rewards": []})
            )
            if is_async(function):
                with contextlib.suppress(StopIteration):  # the call finishes without waiting
                    called.send(None)
            self.columns |= row.read


class _ReadFields(dict[str, Any]):
    """A row that records which columns are read."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__(row)
        self.read: set[str] = set()

    def __getitem__(self, column: str) -> Any:
        self.read.add(column)
        return super().__getitem__(column)

    def get(self, column: str, default: Any = None) -> Any:
        self.read.add(column)
        return super().get(column, default)
