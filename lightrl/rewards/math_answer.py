r"""math_answer: whether the marked answer of a completion is right, for GSM8K, MATH and multiple choice.

The last marked answer counts: in `\boxed{}` or after `####`; without both, after "the answer is". Where it stands is
the format, a number of its own. Characters of other keyboards are read as ours (`５`, `–5`, `½`, `（1，2）`).

If the reference is a literal number, the answer must be one too: integer, decimal, fraction, mixed number, percentage,
scientific notation or power, compared exactly, as fractions. `19 + 4` is not 23. Letters of a choice and words are
compared as they are; other expressions by math-verify, without its own time limits (they use SIGALRM): the pool's
deadline applies.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import unicodedata
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lightrl.rewards.references import any_answer
from lightrl.trajectory import Trajectory, chat_as_text

_MAX_NUMBER_CHARS = 100
_MAX_EXPRESSION_CHARS = 1000  # longer ones are not answers, and slow to parse

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"(?:(?P<sign>(?<![\w)])-)\s*)?(?:[$€£]\s*(?P<sign_after>-)?)?(?P<digits>{_DIGITS})")
_HASHES = "####"
_BOXED = r"\boxed"
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_BRACED = re.compile(r"\s*\{")
_UNBRACED = re.compile(
    r" *(?=[-+$\\.\d]|[A-Za-z]\b)((?:\\[A-Za-z]+|\{[^{}]*\}|[^\s${}\\])+?)(?=[.,;:!?]?(?:[\s$\\]|$))"
)
_LATEX_SPACING = re.compile(r"\\[,!;:> ]|\\q?quad\b|~|\\(?:left|right|displaystyle)\b")
_LATEX_UNIT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_SPOKEN = re.compile(r"\banswer(?:\s+is\b|\s*:)\s*:?", re.IGNORECASE)
_END_OF_ANSWER = re.compile(r"[.!?](?=[\s*$]|$)|\s(?:because|since)\s")
_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOICE_AND_TEXT = re.compile(r"\(?\s*([A-Ja-j])\s*(?:[).:](.*))?", re.DOTALL)
_OTHER_CHOICE = re.compile(r"(?<![\w(.\\])\(?[A-J][).:](?=\s|$)|\bor\s+\(?[A-J]\)?\W*$", re.IGNORECASE)
_AFTER_BOX = re.compile(r"[\s.$]*(?:\\[)\]])?[\s.$]*")
_ELLIPSIS = re.compile(r"\.\.\.|\\[lc]?dots[a-z]?\b")

# What NFKC leaves, or would tear apart: `1½` and `x²`.
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("‐‑‒–—―−﹣－", "-"),
        **{"。": ".", "、": ",", "⁄": "/", "∕": "/", "×": r"\times ", "·": r"\cdot ", "∙": r"\cdot ", "π": r"\pi "},
        **{"√": r"\sqrt ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm "},
        "°": r"^\circ ",
    }
)
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞↉]")

# A literal number and what may follow it, with `**` for powers.
_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
_POWER = rf"{_DECIMAL}(?:\*\*[-+]?[0-9]{{1,3}})?"
_LITERAL = re.compile(
    r"(?P<sign>[-+])?\s*(?:[$€£¥]\s*(?P<sign_after>-)?)?\s*(?:(?P<whole>[0-9]+)\s+(?=[0-9]+\s*/\s*[0-9]))?"
    rf"(?:(?P<open>\()\s*(?P<inner>-)?)?(?P<above>{_POWER})(?:\s*/\s*(?P<inner_below>-)?(?P<below>{_POWER}))?\s*(?(open)\))"
    r"(?:\*\*(?P<power>[-+]?[0-9]{1,3}))?(?:\s*\*\s*10\*\*(?P<ten>[-+]?[0-9]{1,3}))?"
    r"\s*(?P<percent>%|per ?cent\b)?(?P<unit>(?![0-9]).*)",
    re.DOTALL,
)
# `m` alone is a variable, and a unit only in LaTeX's upright text.
_SYMBOLS = frozenset(
    "mm cm dm km nm in ft yd mi mg kg lb lbs oz ml mL cl cL dl dL kl kL fl hr hrs min ms ns Hz kHz MHz "  # noqa: SIM905
    "GHz Pa kPa kW MW kJ MJ kN eV kV mA mW kcal cal Wh kWh mph kph kmh sq cu cc gal qt pt mol rad deg".split()
)
_UPRIGHT_SYMBOLS = frozenset("msghlLNJWVAKCFt")
_NO_UNITS = frozenset(  # nor their plurals
    "and but nor not plus minus time over divided modulo mod remainder million billion trillion thousand "  # noqa: SIM905
    "hundred dozen half halve third quarter fourth fifth sixth seventh eighth ninth tenth hundredth thousandth one two "
    "three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety zero "
    "negative squared cubed factorial root sin cos tan log exp".split()
)
_HAN = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_NO_HAN_UNIT = re.compile("[万亿兆千百十半或和与又点加减乘除之倍萬億點減]")
_GROUPED = re.compile(r"(?<![0-9,.(])[0-9]{1,3}(?:(?:,[0-9]{3})+(?!,?[0-9])|(?: [0-9]{3})+(?! ?[0-9]|\s*/))")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:([0-9])|\{([^{}]*)\})\s*(?:([0-9])|\{([^{}]*)\})")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*\{?([0-9]+)\}?")
_BASE = re.compile(r"[0-9]\s*_\s*\{?([0-9]+)")
_LAST_UNIT = re.compile(r"(?:\s|\\,)*(?:\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}|\s([A-Za-z]+))(?:\s*\^\{?[23]\}?)?\.?$")
_ASSIGNED = re.compile(r"([^,;<>]*)(?<![<>!:])=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"(?:\$?\\?[A-Za-z]+(?:_\{?\w+\}?)?'?(?:\([^()]*\))?)?")
_BRACKET = re.compile(r"^\s*\\?[(\[{]|\\?[)\]}]\s*$")
_UNEVALUATED = re.compile(r"[0-9]\s*(?:[-+*/]\s*[0-9]+\s*[-+*/]|[-+*]|\\cdot|\\times(?!\s*10\s*\^))\s*[0-9]")


@any_answer
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
    completion = _normalized(trajectory.answer)
    answer = final_answer(completion) or _spoken_answer(completion)
    is_equal = answer is not None and equals(answer.text, reference, is_marked_by=answer.marker)
    has_format = answer is not None and answer.is_final and trajectory.finish_reason == "stop"
    is_accurate = is_equal and (has_format or not require_format)
    is_lenient = is_equal or _last_number_equals(completion, reference)
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
    r"""Finds what the text marks as its answer with `####` or `\boxed{}`, the last of several; None if it marks none.

    After a box, `####` before words with more text below is a heading of Markdown.
    """
    hashes, boxes = text.rfind(_HASHES), [match.span() for match in _BOX.finditer(text)]
    boxed, box_end = boxes[-1] if boxes else (-1, -1)
    if hashes < 0 and boxed < 0:
        return None
    is_only = text.count(_HASHES) + len(boxes) == 1
    if hashes > boxed:
        line, _, after = text[hashes + len(_HASHES) :].partition("\n")
        content, is_number = line.strip(), number(line.strip()) is not None
        if boxed < 0 or is_number or not after.strip():
            return Answer(content, _HASHES, is_only and not after.strip() and is_number)
    inside = _box_inside(text, box_end)
    if inside is None:
        return None
    content = text[inside[0] : inside[1]].strip()
    return Answer(content, _BOXED, is_only and content != "" and _AFTER_BOX.fullmatch(text, inside[2]) is not None)


def _spoken_answer(text: str) -> Answer | None:
    """Finds what follows the last "the answer is", up to the end of its sentence; never in format."""
    last = next(iter(deque(_SPOKEN.finditer(text), maxlen=1)), None)
    if last is None:
        return None
    line = text[last.end() : last.end() + _MAX_EXPRESSION_CHARS].partition("\n")[0]
    return Answer(_END_OF_ANSWER.split(line, maxsplit=1)[0].strip(" \t*_$"), "answer is", is_final=False)


def reference_answer(trajectory: Trajectory) -> str:
    """The part of the prompt's field `answer` that a completion is compared with."""
    fields = trajectory.prompt.fields
    reference = chat_as_text(fields.get("answer"))
    if reference is None or not str(reference).strip():
        raise ValueError(
            f"Prompt {trajectory.prompt.id!r} needs a reference in its field 'answer'; it has {sorted(fields)}. "
            "Set answer_column of the data."
        )
    text = _normalized(str(reference))
    answer = final_answer(text)
    return text.strip() if answer is None else answer.text


def equals(answer: str, reference: str, *, is_marked_by: str = _BOXED) -> bool:
    """Whether two answers mean the same; `50%`, `50` and `0.5` do if one of the two has the percent sign.

    Units of literal numbers, the case of words, and what follows the letter of a choice are not compared. If the
    reference is a literal number, the answer must be one, in a box also the last side of an equation.
    """
    answer, reference = _normalized(answer), _normalized(reference)
    choice, chosen = _CHOICE.fullmatch(_words(reference)), _CHOICE_AND_TEXT.fullmatch(_words(answer))
    if choice is not None and chosen is not None:
        return choice[1] == chosen[1].upper() and not _names_choices(chosen[2] or "")
    if _words(answer) == _words(reference):
        return True
    if _ELLIPSIS.search(answer + reference):
        return False
    (left, right), (given_left, given_right) = _sides(reference), _sides(answer)
    expected = _literal(right) if _VARIABLE.fullmatch(left) else None
    if expected is not None:
        given = None if given_left and is_marked_by == _HASHES else _literal(given_right)
        if given is None or (left and given_left and left != given_left):
            return False
        units = {given[1], expected[1]}  # cm is not km; what is no symbol is not compared
        return bool(given[0] & expected[0]) and (len(units) == 1 or not units <= _SYMBOLS | _UPRIGHT_SYMBOLS)
    if all(text.replace(" ", "").isalpha() for text in (answer, reference)):  # words, or products of two variables
        return len(reference) < 3 and sorted(answer) == sorted(reference)
    bases, other_bases = _BASE.findall(answer), _BASE.findall(reference)
    if max(len(answer), len(reference)) > _MAX_EXPRESSION_CHARS or (bases and other_bases and bases != other_bases):
        return False
    are_literals = all(_literal(item) is not None for item in _BRACKET.sub("", reference).split(","))
    if are_literals and _UNEVALUATED.search(answer):
        return False
    return _verify(answer, reference)


def number(text: str) -> frozenset[Fraction] | None:
    """The values that a literal number may mean, two for a percentage; None if the text is not one literal number.

    It may have a currency sign, up to five words of units, a period, and LaTeX's spacing and dollars around it.
    """
    literal = _literal(_normalized(text))
    return None if literal is None else literal[0]


def _literal(text: str) -> tuple[frozenset[Fraction], str] | None:
    """The values of the literal number that normalized text is, and its unit, "" for none."""
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    plain = _unwrapped(_LATEX_UNIT.sub(r" \1 ", text.replace(r"\$", "$").replace(r"\%", "%").replace("{,}", ",")))
    plain = re.sub(r"\^\s*\{?\\circ\b\s*\}?|\\degree\b|(?<=[0-9])\s*[$€£¥]$", "", _REPEATING.sub(_unrepeated, plain))
    plain = re.sub(r"\^\s*\{?\s*([-+]?[0-9]+)\s*\}?", r"**\1", re.sub(r"\\(?:times|cdot)(?![A-Za-z])", "*", plain))
    plain = _FRACTION.sub(lambda match: f" {match[1] or match[2]}/{match[3] or match[4]}", plain)
    plain = _GROUPED.sub(lambda match: re.sub("[, ]", "", match[0]), plain).strip()
    match = _LITERAL.fullmatch(plain)
    unit = _unit(match["unit"], " ".join(_LATEX_UNIT.findall(text))) if match is not None else None
    if match is None or unit is None:
        return None
    try:
        value = _power(match["above"]) / _power(match["below"] or "1")
        value *= -1 if match["inner"] or match["inner_below"] else 1
        value = Fraction(value ** int(match["power"] or 1)) * Fraction(10) ** int(match["ten"] or 0)
    except ZeroDivisionError:
        return None
    if match["whole"] is not None:
        if value >= 1:
            return None
        value += int(match["whole"])
    value *= -1 if (match["sign"] == "-") != bool(match["sign_after"]) else 1
    return frozenset({value, value / 100} if match["percent"] else {value}), unit


def _power(text: str) -> Fraction:
    base, _, exponent = text.partition("**")
    return Fraction(Fraction(base) ** int(exponent or 1))


def _unit(text: str, upright: str) -> str | None:
    """The unit that this text is, "" for none; None if it may be something else, such as a variable.

    Args:
        upright: the part of it in LaTeX's upright text.
    """
    text = text.strip(" .")
    words = [word.removesuffix(".") for word in re.split(r"\s*/\s*|\s+", re.sub(r"\s*\*\*[23]", "", text)) if word]
    if len(words) > 5 or _NO_HAN_UNIT.search(text):
        return None
    symbols = _SYMBOLS | (_UPRIGHT_SYMBOLS if "/" in text else _UPRIGHT_SYMBOLS & set(upright.split()))
    for word in words:
        is_long = len(word) > 2 and word.lower().removesuffix("s") not in _NO_UNITS
        if not (word.isalpha() and (is_long or _HAN.match(word))) and word not in symbols | {"of"}:
            return None
    return text


def _sides(text: str) -> tuple[str, str]:
    """Both sides of the last `=`; "" and the text if there is none."""
    match = _ASSIGNED.fullmatch(text)
    return ("", text) if match is None else (match[1].strip(), match[2])


def _unrepeated(match: re.Match[str]) -> str:
    r"""`0.1\overline{6}` as the fraction that it is."""
    digits, period = match[1] + match[2], match[3]
    above = int(digits + period) - int(digits or "0")
    return f"{above}/{10 ** len(match[2]) * (10 ** len(period) - 1)}"


def _names_choices(text: str) -> bool:
    """Whether what follows the letter of a choice names another one."""
    words = [word for word in re.split(r"[\s,;:/&().]+", text) if word and word.lower() not in ("or", "and")]
    return _OTHER_CHOICE.search(text) is not None or (words != [] and all(map(_CHOICE.fullmatch, words)))


def _normalized(text: str) -> str:
    """Replaces the characters of other keyboards by those that LaTeX and Python read."""
    if text.isascii():
        return text
    text = _VULGAR_FRACTION.sub(lambda match: f" {match[0]}", text)
    text = _SUPERSCRIPTS.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    return unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)


def _unwrapped(text: str) -> str:
    """Removes LaTeX's spacing, and dollars, asterisks, braces and parentheses around all of it."""
    text = " ".join(_LATEX_SPACING.sub(" ", text).split())
    for opening, closing in (("**", "**"), ("$", "$"), (r"\(", r"\)"), ("(", ")"), ("{", "}")):
        text = text.removesuffix(".") if opening == "$" and text.endswith("$.") else text
        inside = text[len(opening) : -len(closing)]
        is_wrapped = text.startswith(opening) and text.endswith(closing) and inside
        if is_wrapped and not re.search(r"[,()$]" if opening == "(" else re.escape(opening), inside):
            text = inside.strip()
    return text


def _words(text: str) -> str:
    """Removes LaTeX's wrappers of text and the period; also case, if there are words."""
    if len(text) > _MAX_EXPRESSION_CHARS:
        return text
    plain = " ".join(_LATEX_UNIT.sub(r" \1 ", text).strip(" $*").removesuffix(".").strip(" $*").split())
    is_words = re.search(r"[^\W\d_]{3}|\b(?:no|am|pm)\b", plain, re.IGNORECASE) and "\\" not in plain
    return plain.casefold() if is_words else plain


def _last_number_equals(text: str, reference: str) -> bool:
    references = number(reference)
    last = next(iter(deque(_NUMBER.finditer(text), maxlen=1)), None)
    if references is None or last is None or len(last[0]) > _MAX_NUMBER_CHARS:
        return False
    value = Fraction(last["digits"].replace(",", ""))
    return (-value if (last["sign"] == "-") != bool(last["sign_after"]) else value) in references


def _box_inside(text: str, start: int) -> tuple[int, int, int] | None:
    r"""Finds where the content of the box begins and ends, and where the box ends; None if it never does.

    Args:
        start: the end of `\boxed`.
    """
    opening = _BRACED.match(text, start)
    if opening is None:
        word = _UNBRACED.match(text, start)
        return None if word is None else (word.start(1), word.end(1), word.end(1))
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, opening.end() - 1):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return opening.end(), brace.start(), brace.end()
    return None


def _verify(answer: str, reference: str) -> bool:
    from math_verify import verify

    # `strict=True` is its default: sets are not tuples, variables are not interchangeable.
    settings = {"numeric_precision": 100, "allow_set_relation_comp": True, "timeout_seconds": None}
    pairs = itertools.product(_parsed(reference), _parsed(answer))
    return any(verify(expected, given, **settings) and _is_close(expected, given) for expected, given in pairs)


def _is_close(expected: Any, given: Any) -> bool:
    """False for numbers that differ relative to their size; math-verify takes those near 0 for equal."""
    if expected == given or not (getattr(expected, "is_number", False) and getattr(given, "is_number", False)):
        return True
    difference = (expected.doit() - given.doit()).evalf(30)
    return bool(abs(difference) <= abs(expected.doit().evalf(30)) * Fraction(1, 10**12))


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, ...]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    for module in ("parser", "grader"):  # they warn about the missing time limit; the pool has one
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    unit = _LAST_UNIT.search(text)
    if unit is not None and _unit(unit[1] or unit[2], unit[1] or "") is not None:
        text = text[: unit.start()]
    text = re.sub(r"^-?[0-9]{1,3}(?:\{?,\}?[0-9]{3})+(?![0-9,])", lambda match: re.sub("[{},]", "", match[0]), text)
    # A decimal would become a float, which math-verify rounds.
    text = re.sub(
        r"([0-9]*)\.([0-9]+)", lambda match: rf"(\frac{{{match[1]}{match[2]}}}{{{10 ** len(match[2])}}})", text
    )
    # Its own list of units has `m`, and its search for expressions takes any number out of a sentence.
    rules = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    targets = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=rules)]
    return tuple(parse(f"{_BOXED}{{{text}}}", targets, parsing_timeout=None, fallback_mode="no_fallback"))
