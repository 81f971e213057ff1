r"""math_answer: whether the marked answer of a completion is right, for GSM8K, MATH and multiple choice.

The last marked answer counts: in `\boxed{}` or after `####`; without both, after "the answer is". Where it stands is
the format, a number of its own. Plain numbers are compared exactly, as fractions; letters of a choice and words as they
are; other expressions by math-verify, without its own time limits (they use SIGALRM): the pool's deadline applies.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lightrl.trajectory import Trajectory

_MAX_NUMBER_CHARS = 100
_MAX_EXPRESSION_CHARS = 1000  # longer ones are not answers, and slow to parse

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"(?:(?P<sign>(?<![\w)])[-+−])\s*)?(?:[$€£]\s*(?P<sign_after>[-−])?)?(?P<digits>{_DIGITS})")
_ANSWER_NUMBER = re.compile(
    rf"{_NUMBER.pattern}(?P<exponent>[eE][-+]?[0-9]{{1,2}})?(?:\s*/\s*(?P<divisor>[0-9]+))?\s*(?P<percent>%?)\s*(?:[^\W\d_][^\W\d_./²³]*[./²³]?\s*){{0,4}}\.?"
)
_HASHES = "####"
_BOXED = r"\boxed"
_LATEX_SPACING = re.compile(r"\\[,!;: ]|~|\{,\}")
_LATEX_UNIT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}")
_SPOKEN = re.compile(r"\banswer(?:\s+is\b|\s*:)\s*:?", re.IGNORECASE)
_END_OF_ANSWER = re.compile(r"[.!?](?=[\s*$]|$)|\s(?:because|since)\s")
_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOICE_AND_TEXT = re.compile(r"\(?\s*([A-Ja-j])\s*(?:[).:].*)?")
_AFTER_BOX = re.compile(r"[\s.$]*(?:\\[)\]])?[\s.$]*")


def math_answer(
    trajectory: Trajectory, *, format_reward: float = 0.1, require_format: bool = False
) -> dict[str, float | str | None]:
    r"""Whether the completion's last marked answer equals the reference.

    Args:
        trajectory: its prompt has the field `answer`: a number, an expression, a letter or words, or a solution that
            ends with it after `####` or in `\boxed{}`.
        format_reward: the reward of a wrong answer in the format, so that a policy that is never right has something to
            learn.
        require_format: give reward and accuracy only to answers in the format, as if others were missing.

    Returns:
        `accuracy`: 1 if the last marked answer equals the reference;
        `format`: 1 if exactly one answer is marked by `####` (a number) or `\boxed{}`, nothing comes after it, and the
        completion ended with its stop token;
        `lenient_accuracy`: 1 also if the last number of the completion equals the reference;
        `reward`: 1 if accurate, else `format_reward` if in format, else 0; `extracted`, the marked answer.

    Raises:
        ValueError: if the prompt has no reference.
    """
    reference = reference_answer(trajectory)
    answer = final_answer(trajectory.completion) or _spoken_answer(trajectory.completion)
    is_equal = answer is not None and equals(answer.text, reference, is_marked_by=answer.marker)
    has_format = answer is not None and answer.is_final and trajectory.finish_reason == "stop"
    is_accurate = is_equal and (has_format or not require_format)
    is_lenient = is_equal or _last_number_equals(trajectory.completion, reference)
    return {
        "reward": 1.0 if is_accurate else format_reward if has_format else 0.0,
        "accuracy": float(is_accurate),
        "lenient_accuracy": float(is_lenient),
        "format": float(has_format),
        "extracted": None if answer is None else answer.text,
    }


@dataclass(frozen=True)
class Answer:
    """The last marked answer of a text."""

    text: str
    marker: str  # `####`, `\boxed` or `answer is`
    is_final: bool  # the only one, and nothing comes after it


def final_answer(text: str) -> Answer | None:
    r"""What the text marks as its answer with `####` or `\boxed{}`, the last of several; None if it marks none.

    After a box, `####` before words with more text below is a heading of Markdown.
    """
    hashes, boxed = text.rfind(_HASHES), text.rfind(_BOXED)
    if hashes < 0 and boxed < 0:
        return None
    is_only = text.count(_HASHES) + text.count(_BOXED) == 1
    if hashes > boxed:
        line, _, after = text[hashes + len(_HASHES) :].partition("\n")
        content, is_number = line.strip(), number(line.strip()) is not None
        if boxed < 0 or is_number or not after.strip():
            return Answer(content, _HASHES, is_only and not after.strip() and is_number)
    inside = _braced(text, boxed + len(_BOXED))
    if inside is None:
        return None
    content = text[slice(*inside)].strip()
    return Answer(content, _BOXED, is_only and content != "" and _AFTER_BOX.fullmatch(text, inside[1] + 1) is not None)


def _spoken_answer(text: str) -> Answer | None:
    """What follows the last "the answer is", up to the end of its sentence; never in format."""
    last = next(iter(deque(_SPOKEN.finditer(text), maxlen=1)), None)
    if last is None:
        return None
    line = text[last.end() : last.end() + _MAX_EXPRESSION_CHARS].partition("\n")[0]
    return Answer(_END_OF_ANSWER.split(line, maxsplit=1)[0].strip(" \t*_$"), "answer is", is_final=False)


def reference_answer(trajectory: Trajectory) -> str:
    """The part of the prompt's field `answer` that a completion is compared with."""
    fields = trajectory.prompt.fields
    if fields.get("answer") is None or not str(fields["answer"]).strip():
        raise ValueError(
            f"Prompt {trajectory.prompt.id!r} needs a reference in its field 'answer'; it has {sorted(fields)}. "
            "Set answer_column of the data."
        )
    text = str(fields["answer"])
    answer = final_answer(text)
    return text.strip() if answer is None else answer.text


def equals(answer: str, reference: str, *, is_marked_by: str = _BOXED) -> bool:
    """Whether two answers mean the same; `50%`, `50` and `0.5` do if one of the two has the percent sign.

    Units of plain numbers, the case of words, and what follows the letter of a choice are not compared. If the
    reference is a number, the answer after `####` must be one too; in a box it may be an expression.
    """
    values, references = number(answer), number(reference)
    if values is not None and references is not None:
        return bool(values & references)
    choices = _CHOICE.fullmatch(_words(reference)), _CHOICE_AND_TEXT.fullmatch(_words(answer))
    if choices[0] is not None and choices[1] is not None:
        return choices[0][1] == choices[1][1].upper()
    if _words(answer) == _words(reference):
        return True
    if references is not None and is_marked_by == _HASHES:
        return False
    if references is not None and not re.search(r"[0-9\\]", answer):  # words only
        return False
    if max(len(answer), len(reference)) > _MAX_EXPRESSION_CHARS:
        return False
    return answer == reference or _verify(answer, reference)


def number(text: str) -> frozenset[Fraction] | None:
    """The values that a plain number may mean, two for a percentage; None if the text is not one plain number.

    It may have a currency sign, up to four words of units, a period, and LaTeX's spacing and dollars around it.
    """
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    plain = _LATEX_SPACING.sub(lambda match: "," if match[0] == "{,}" else "", text)
    plain = _LATEX_UNIT.sub(r" \1 ", plain).replace(r"\$", "$").replace(r"\%", "%").strip(" \t*")
    if plain.startswith("$") and plain.endswith("$") and len(plain) > 2:
        plain = plain[1:-1]
    match = _ANSWER_NUMBER.fullmatch(plain.strip())
    if match is None:
        return None
    value = _value(match) * Fraction(f"1{match['exponent'] or ''}")
    if match["divisor"] is not None:
        if int(match["divisor"]) == 0:
            return None
        value /= int(match["divisor"])
    return frozenset({value, value / 100}) if match["percent"] else frozenset({value})


def _words(text: str) -> str:
    """Without LaTeX's wrappers of text and the period; without case, if there are words."""
    if len(text) > _MAX_EXPRESSION_CHARS:
        return text
    plain = " ".join(_LATEX_UNIT.sub(r" \1 ", text).strip(" .$*").split())
    return plain.casefold() if re.search(r"[^\W\d_]{2}", plain) and "\\" not in plain else plain


def _last_number_equals(text: str, reference: str) -> bool:
    references = number(reference)
    last = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    if references is None or last is None or len(last[0]) > _MAX_NUMBER_CHARS:
        return False
    return _value(last) in references


def _value(match: re.Match[str]) -> Fraction:
    value = Fraction(match["digits"].replace(",", ""))
    is_negative = (match["sign"] in ("-", "−")) != bool(match["sign_after"])
    return -value if is_negative else value


def _braced(text: str, start: int) -> tuple[int, int] | None:
    """Where the inside of the braces that open at `start` begins and ends; None if they never close."""
    opening = re.compile(r"\s*\{").match(text, start)
    if opening is None:
        return None
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, opening.end() - 1):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return opening.end(), brace.start()
    return None


def _verify(answer: str, reference: str) -> bool:
    from math_verify import verify

    # `strict=True` is its default: sets are not tuples, variables are not interchangeable.
    return bool(verify(list(_parsed(reference)), list(_parsed(answer)), timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, ...]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    for module in ("parser", "grader"):  # they warn about the missing time limit; the pool has one
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return tuple(parse(f"{_BOXED}{{{text}}}", targets, parsing_timeout=None))
