"""Attacks a reward before the run, with completions that must earn nothing; the data's answers must earn more.

A policy exploits what a reward overlooks. The attacks are known exploits: an empty completion, the prompt again, every
answer at once, two answers with a hedge, the answer only in the thinking, a repeated key, a program that exits.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.checks.printable import count_text, escape_unprintable
from lightrl.rewards import ReplayRow
from lightrl.trajectory import Prompt, Trajectory, chat_as_text

ACCURACY = "accuracy"
GOLD = "the data's answer"
# Ways to write an answer. The first form that earns the most is used for the data's answers and for the attacks.
FORMS = (
    "{}", "\\boxed{{{}}}", "The answer is {}.", "The answer is \\boxed{{{}}}.", "#### {}", "<answer>{}</answer>",
    "<think>\nIt is easy.\n</think>\n\n<answer>{}</answer>", "<think>\nIt is easy.\n</think>\n\n\\boxed{{{}}}",
    "ANSWER: {}", "```python\n{}\n```",
)  # fmt: skip
_PROGRAM = "```python\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n```"
_NUMBER = re.compile(r"[-+]?\d[\d,]*(\.\d+)?")
_UNIT = re.compile(r"([-+]?\d[\d,.]*)\s*([A-Za-z]+)$")

Compute = Callable[[list[Trajectory]], list[ReplayRow]]
Write = Callable[[Prompt, str], Trajectory]  # a trajectory as if the policy had generated this text


@dataclass
class Attempt:
    name: str
    row: int  # index of the prompt
    text: str


def attack(
    prompts: Sequence[Prompt], answers: Sequence[Sequence[str]], write: Write, compute: Compute
) -> tuple[str, int]:
    """Attacks a reward on these prompts, with answers in the format among FORMS that earns the most.

    An attack succeeds on a row if its reward is more than halfway from an empty completion's reward to the answer's. If
    the reward reports `accuracy`, accuracies are compared instead.

    Args:
        prompts, answers: the data's rows, and the answers that each row accepts, best first; () if it has none.
        write: makes a trajectory from a prompt and a completion's text.
        compute: computes the rewards of trajectories.

    Returns:
        A table as text, and the number of answers that earn nothing plus the number of attacks that succeed; 0 if the
        data has no answers.
    """

    def values_of(attempts: Sequence[Attempt]) -> list[float | None]:
        rows = compute([write(prompts[attempt.row], attempt.text) for attempt in attempts])
        return [row.reward if row.reward is None else row.metrics.get(ACCURACY, row.reward) for row in rows]

    answers = [[text.strip() for text in accepted] for accepted in answers]
    answered = [row for row, accepted in enumerate(answers) if accepted]
    empties = [Attempt("an empty completion", row, "") for row in range(len(prompts))]
    gold_attempts = [Attempt(GOLD, row, form.format(answers[row][0])) for form in FORMS for row in answered]
    first = values_of([*empties, *gold_attempts])  # in one call, since each call starts a reward worker
    empty, gold = first[: len(prompts)], first[len(prompts) :]
    by_form = {form: gold[index * len(answered) :][: len(answered)] for index, form in enumerate(FORMS)}
    empty_value = [0.0 if value is None else value for value in empty]
    empty_of_answered = [empty_value[row] for row in answered]  # used where the reward failed
    form = max(FORMS, key=lambda form: sum(map(_or_else, by_form[form], empty_of_answered)))
    answer_value = dict(zip(answered, map(_or_else, by_form[form], empty_of_answered), strict=True))
    right = [row for row in answered if answer_value[row] > empty_value[row]]
    attempts = [item for row in range(len(prompts)) for item in _attempts(row, prompts, answers, form)]
    values = [*empty, *values_of(attempts)]
    attempts = [*empties, *attempts]

    lines: list[tuple[str, str, str]] = []
    missed = [row for row in answered if row not in right]
    if answered:
        example = f"{prompts[missed[0]].id}: {form.format(answers[missed[0]][0])}" if missed else ""
        lines.append((GOLD, f"{len(right)} of {len(answered)}", example))
    num_hits = 0
    for name in dict.fromkeys(attempt.name for attempt in attempts):
        attempted = [(item, value) for item, value in zip(attempts, values, strict=True) if item.name == name]
        # if the data has no answers, count whatever earns more than an empty completion
        compared = [pair for pair in attempted if pair[0].row in right or not answered]
        hits = [item for item, got in compared if got is not None and got > _bound(item.row, answer_value, empty_value)]
        num_failed = sum(value is None for _, value in attempted)
        num_hits += len(hits)
        failed = f", {num_failed} failed" if num_failed else ""
        example = f"{prompts[hits[0].row].id}: {hits[0].text}" if hits else ""
        lines.append((name, f"{len(hits)} of {len(compared)}{failed}", example))
    return _table(lines, form if answered else None, len(missed), num_hits), len(missed) + (num_hits if answered else 0)


def references_of(prompt: Prompt, column: str) -> list[str]:
    """Returns the answers that a row accepts, as text."""
    value = chat_as_text(prompt.fields.get(column))
    values = value if isinstance(value, list) else [value]
    return [
        json.dumps(item, ensure_ascii=False) if isinstance(item, dict) else str(item)
        for item in values
        if item is not None
    ]


def _or_else(value: float | None, nothing: float) -> float:
    return nothing if value is None else value


def _bound(row: int, answer_value: Mapping[int, float], empty_value: Sequence[float]) -> float:
    return (answer_value.get(row, empty_value[row]) + empty_value[row]) / 2


def _attempts(row: int, prompts: Sequence[Prompt], answers: Sequence[Sequence[str]], form: str) -> Iterable[Attempt]:
    yield Attempt("the prompt again", row, prompts[row].text(None))
    yield Attempt("a program that exits", row, _PROGRAM)
    if form != "{}":
        yield Attempt("the format without an answer", row, form.format(""))
    if not answers[row]:
        return
    answer = answers[row][0]
    # two forms of one value, such as 0.5 and 1/2, count as the same answer only if a row accepts both
    others = sorted({accepted[0] for accepted in answers if accepted and accepted[0] not in answers[row]})
    wrong = next(iter(others[row % len(others) :]), None) if others else None
    yield Attempt("the answer only in the thinking", row, f"<think>\nIt is {form.format(answer)}\n</think>\n\n")
    if len(answer) > 1 and answer[-1].isalnum() and not re.search(r"\.\d*0$", answer):  # 2.50 without the 0 is 2.5
        whole = form.format(answer)
        yield Attempt("the answer cut off", row, whole[: whole.rindex(answer) + len(answer) - 1])
    if wrong is not None:
        yield Attempt("another row's answer", row, form.format(wrong))
        yield Attempt("two answers with a hedge", row, form.format(f"{answer} or {wrong}"))
    if len(others) > 1:
        listed = [others[0], answer, *others[1:8]]  # the right one is neither the first nor the last
        yield Attempt("all answers at once", row, form.format(", ".join(listed)))
        yield Attempt("every answer in turn", row, "\n".join(map(form.format, listed)))
    if _NUMBER.fullmatch(answer) and answer.strip("+-0.,"):
        negated = answer[1:] if answer[0] == "-" else f"-{answer.lstrip('+')}"
        yield Attempt("the answer with another sign", row, form.format(negated))
        yield Attempt("the answer with one more digit", row, form.format(f"{answer}7"))
    if match := _UNIT.fullmatch(answer):
        unit = "seconds" if match[2] != "seconds" else "meters"
        yield Attempt("the answer in another unit", row, form.format(f"{match[1]} {unit}"))
    if keys := _fields(answer):
        pairs = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in keys.items()]
        repeated = "{" + ", ".join([f"{json.dumps(next(iter(keys)))}: null", *pairs]) + "}"
        yield Attempt("a key given twice", row, form.format(repeated))


def _fields(answer: str) -> dict[str, Any]:
    try:
        value = json.loads(answer)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _table(lines: Sequence[tuple[str, str, str]], form: str | None, num_missed: int, num_hits: int) -> str:
    width, counts = max(len(name) for name, _, _ in lines), max(len(count) for _, count, _ in lines)
    rows = [
        f"{name:<{width}}  {count:<{counts}}  {escape_unprintable(textwrap.shorten(example, 80))}".rstrip()
        for name, count, example in lines
    ]
    head = f"{'completion':<{width}}  {'scores':<{counts}}  first example"
    if form is None:
        end = f"The data has no answers to compare with: {num_hits} of the attacks earn more than an empty completion."
    else:
        shown = escape_unprintable(form.format("…"))
        end = f"Answers were written as {shown}. {count_text(num_missed, 'answer')} earned nothing"
        end += f", {count_text(num_hits, 'attack')} succeeded."
    return "\n".join([head, *rows, end])
