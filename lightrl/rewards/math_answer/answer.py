r"""math_answer: checks a completion's marked answer, for GSM8K, MATH and multiple choice.

The last answer in `\boxed{}` or after `####` counts; if there is neither, the one after "the answer is". The `format`
metric says whether the answer is marked correctly. Unicode variants are read as ASCII (`５`, `–5`, `½`, `（1，2）`).

If the reference is a literal number, the answer must also be one: integer, decimal, fraction, mixed number, percentage,
scientific notation or power, compared exactly, as fractions. `19 + 4` does not count as 23. Choice letters and words
are compared literally; expressions.py compares other expressions.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from lightrl.rewards.math_answer.units import Unit, unit_of
from lightrl.rewards.references import any_answer
from lightrl.trajectory import Trajectory, chat_as_text

_MAX_NUMBER_CHARS = 100
_MAX_NUMBER_BITS = 100_000
_MAX_EXPRESSION_CHARS = 1000  # longer texts are not answers, and would be slow to parse

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
_LATEX_UNIT = re.compile(r"\\(?:(?:text|math)(?:rm|bf|it)?|mbox|operatorname|emph)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_UNIT_FRACTION = re.compile(
    r"\\[dt]?frac\s*\{(\s*(?:\\(?:text|mathrm)\s*\{[^{}]*\}|[A-Za-z]{2})[^{}]*)\}"
    r"\s*\{(\s*(?:\\(?:text|mathrm)|[A-Za-z])(?:[^{}]|\{[^{}]*\})*)\}"
)
_SPOKEN = re.compile(r"\banswer(?:\s+is\b|\s*:)\s*:?", re.IGNORECASE)
_END_OF_ANSWER = re.compile(r"[.!?](?=[\s*$]|$)|\s(?:because|since)\s")
_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOICES = re.compile(r"\(?[A-J]\)?(?:\s*[,;&]+\s*\(?[A-J]\)?)+|[A-J]{2,}")
_CHOICE_AND_TEXT = re.compile(r"\(?\s*([A-Ja-j])\s*(?:[).:](.*))?", re.DOTALL)
_OTHER_CHOICE = re.compile(r"(?<![\w(.\\])\(?[A-J][).:](?=\s|$)|\bor\s+\(?[A-J]\)?\W*$", re.IGNORECASE)
_AFTER_BOX = re.compile(r"[\s.$]*(?:\\[)\]])?[\s.$]*")
_ELLIPSIS = re.compile(r"\.\.\.|\\[lc]?dots[a-z]?\b")

# Characters that NFKC does not convert, or would convert wrongly.
_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("‐‑‒–—―−﹣－", "-"),
        **{"。": ".", "、": ",", "⁄": "/", "∕": "/", "×": r"\times ", "·": r"\cdot ", "∙": r"\cdot ", "π": r"\pi "},
        **{"√": r"\sqrt ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm "},
        **{"°": r"^\circ ", "∅": r"\emptyset ", "→": r"\to ", "≡": r"\equiv ", "∠": r"\angle ", "≠": r"\ne "},
        **dict.fromkeys("⟨〈〈", r"\langle "),
        **dict.fromkeys("⟩〉〉", r"\rangle "),
        **dict.fromkeys("’′", "'"),
        **{"∩": r"\cap ", "△": r"\triangle ", "¬": r"\neg ", "∧": r"\land ", "∨": r"\lor "},
        **{letter: rf"\mathbb{{{name}}} " for letter, name in zip("ℝℕℤℚℂ", "RNZQC", strict=True)},
    }
)
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞↉]")

# A literal number and the percent sign or unit after it, with `**` for powers.
_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?"
_POWER = rf"{_DECIMAL}(?:\*\*[-+]?[0-9]{{1,3}})?"
_LITERAL = re.compile(
    r"(?P<sign>[-+])?\s*(?:(?P<currency>[$€£¥\u20a0-\u20cf]|USD |Rs\.? )\s*(?P<sign_after>-)?)?\s*"
    r"(?:(?P<whole>[0-9]+)\s+(?=[0-9]+\s*/\s*[0-9]))?"
    rf"(?:(?P<open>\()\s*(?P<inner>-)?)?(?P<above>{_POWER})(?:\s*/\s*(?P<inner_below>-)?(?P<below>{_POWER}))?"
    r"\s*(?(open)\))"
    r"(?:\*\*(?P<power>[-+]?[0-9]{1,3}))?(?:\s*\*\s*10\*\*(?P<ten>[-+]?[0-9]{1,3}))?"
    r"\s*(?P<percent>%|per ?cent\b)?(?P<unit>(?![0-9]).*)",
    re.DOTALL,
)
_GROUPED = re.compile(
    r"(?<![0-9,.(])(?:[0-9]{1,3}(?:(?:,[0-9]{3})+(?!,?[0-9])|(?: [0-9]{3})+(?! ?[0-9]|\s*/))"
    r"|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3}(?!,?[0-9]))"  # 1,00,000 in India
)
_FRACTION = re.compile(r"\\(?:[dtc]?|nice|s)frac" + 2 * r"\s*(?:([0-9])|\{([^{}A-Za-z]*)\})")
_BASE_WORDS = {"two": 2, "three": 3, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "sixteen": 16}
_PIECE = "[^{}]"  # a piece of a formula: a character, or pieces in braces
for _ in range(6):
    _PIECE = rf"(?:[^{{}}]|\{{{_PIECE}*\}})"


def _rows(match: re.Match[str]) -> str:
    r"""Joins the lines of `\begin{cases} x=1 \\ y=2 \end{cases}` with commas; keeps them if they have columns."""
    body = re.sub(r"&\s*(?=[=<>]|\\[lg]eq?(?![A-Za-z]))", "", match["rows"])
    return match[0] if "&" in body else ", ".join(row.strip(" ,;") for row in body.split("\\\\") if row.strip())


def _repeating_decimal(match: re.Match[str]) -> str:
    r"""Converts a repeating decimal such as `0.1\overline{6}` to a fraction."""
    digits, period = match[1] + match[2], "".join(match[at] or "" for at in range(3, 8))
    above = int(digits + period) - int(digits or "0")
    return rf"\frac{{{above}}}{{{10 ** len(match[2]) * (10 ** len(period) - 1)}}}"


# Replaces equivalent notations with a single one: pattern → replacement, in this order.
_NOTATIONS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    # size, font, color and space
    (r"\\(?:(?:text)?color|[hv]space\*?|[hv]?phantom)\s*\{[^{}]*\}|\\hfill?(?![A-Za-z])", " "),
    (r"\\(?:tiny|scriptsize|footnotesize|small|normalsize|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])", " "),
    (
        r"\\(?:rm|bf|it|sf|tt|(?:text|script)style|(?:math)?strut|underline|ensuremath|boxed|fbox|bm|boldsymbol)(?![A-Za-z])",
        " ",
    ),
    (r"\\(?:text|(?:text|math)(?:rm|bf|it|sf|tt|normal))(?![A-Za-z]|\s*\{)", " "),
    # numbers
    (r"\{,\}", ","),
    (
        r"(?<=1)st\b|(?<=2)nd\b|(?<=3)rd\b|(?<=[0-9])th\b|(?<=[0-9])\s*\^\s*\{\s*(?:st|nd|rd|th)\s*\}"
        r"|(?<=[0-9])\s*(?:\^\s*)?\{?\s*\\(?:text|mathrm)\s*\{(?:st|nd|rd|th)\}\s*\}?",
        "",
    ),
    (
        r"(?<![0-9])([0-9]*)\.([0-9]*)(?:\\(?:overline|bar)\s*\{?([0-9]+)\}?|\(([0-9]+)\)"
        r"|\\dot\s*\{?([0-9])\}?(?:([0-9]*)\\dot\s*\{?([0-9])\}?)?)",
        _repeating_decimal,
    ),
    (r"(?<=_)\s*\{?\s*(?:\\text\s*\{)?([a-z]{3,7})\b\}*", lambda match: str(_BASE_WORDS.get(match[1], match[0]))),
    (r"(?i)([0-9])(?:\s|\\text\s*\{)*([ap])\.?m\b\.?\}?", r"\1 \2m"),
    # formulas
    (rf"(?:\{{|^)({_PIECE}*?)\\over(?![A-Za-z])({_PIECE}*?)(?:\}}|$)", r"\\frac{\1}{\2}"),
    (rf"(?:\{{|^)({_PIECE}*?)\\choose(?![A-Za-z])({_PIECE}*?)(?:\}}|$)", r"\\binom{\1}{\2}"),
    (r"\\(?:Bbb\s*|(?=[RNZQC](?![A-Za-z])))\{?([RNZQC])\}?", r"\\mathbb{\1}"),
    (r"-(?=\s*(?:\\left\s*)?\\\{)", r"\\setminus "),
    (r"(^|[=,(+-]\s*)<([^<>=]+,[^<>=]+)>", r"\1\\langle \2\\rangle "),
    (r"^\s*\\\{\s*([a-z])\s*(?::|\||\\mid)([^:|]*(?:[<>=]|\\[lgn]eq?(?![A-Za-z])).*)\\\}\s*$", r"\2"),
    (
        r"\\left\s*\\\{\s*\\begin\s*\{array\}\s*\{[clr ]*\}(.*)\\end\s*\{array\}\s*\\right\s*\.",
        r"\\begin{cases}\1\\end{cases}",
    ),
    (r"\\begin\s*\{(cases|aligned|align\*?|gathered)\}(?P<rows>(?:(?!\\begin|\\end).)*)\\end\s*\{\1\}", _rows),
    (r"\^\s*\{((?:\s*\\prime)+)\s*\}", r"\1"),
    (r"\^?\s*\\prime(?![A-Za-z])", "'"),
    (r"""^([-0-9.,/$\s]*[0-9])(?:''|")(\s*\$?)$""", r"\1 inches\2"),
    (r"^([-0-9.,/$\s]*[0-9])'(\s*\$?)$", r"\1 feet\2"),
]
_COMPILED_NOTATIONS = [(re.compile(pattern, re.DOTALL), replacement) for pattern, replacement in _NOTATIONS]
_RATIO = re.compile(r"(?<=[0-9])\s*(?:\s|\\text\s*\{)\s*to\b\s*\}?\s*(?=[0-9])")
_VARIABLE = re.compile(r"(?:\$?\\?[A-Za-z]+(?:_\{?\w+\}?)?'?(?:\([^()]*\))?)?")
_LAST_UNIT = re.compile(
    rf"((?:(?:{_LATEX_SPACING.pattern}|\s|\\cdot|/)*(?:{_LATEX_UNIT.pattern}|\^\s*\{{?\s*\\circ\s*\}}?|\s[A-Za-z]{{2,}})(?:\s*\^\s*\{{?-?[0-9]\}}?)?)+)\.?$"
)
_ANGLE = re.compile("sin|cos|tan|cot|sec|csc")
_TIME = re.compile(r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?")


@any_answer
def math_answer(
    trajectory: Trajectory, *, format_reward: float = 0.1, require_format: bool = False
) -> dict[str, float | str | None]:
    r"""Checks whether the completion's last marked answer equals the reference.

    Args:
        trajectory: its prompt needs an `answer` field: a number, an expression, a letter or words, or a solution that
            ends with one of these after `####` or in `\boxed{}`.
        format_reward: reward of a wrong answer in the right format, from which a policy that is never right can learn.
        require_format: whether an answer that is not in the right format counts as wrong.

    Returns:
        `accuracy`: 1 if the last marked answer equals the reference;
        `format`: 1 if exactly one answer is marked by `####` (a number) or `\boxed{}`, nothing comes after it, and the
        completion ended with its stop token;
        `lenient_accuracy`: also 1 if the last number in the completion equals the reference;
        `reward`: 1 if accurate, else `format_reward` if `format` is 1, else 0; `extracted`, the marked answer.

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
    is_final: bool  # whether it is the only marked answer, and nothing comes after it


def final_answer(text: str) -> Answer | None:
    r"""Returns the last answer that the text marks with `####` or `\boxed{}`; None if it marks none.

    If a box comes first, a later line `#### words` with text below it is a Markdown heading, not an answer.
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
    """Returns the text after the last "the answer is", up to the end of the sentence; it never has the right format."""
    last = next(iter(deque(_SPOKEN.finditer(text), maxlen=1)), None)
    if last is None:
        return None
    line = text[last.end() : last.end() + _MAX_EXPRESSION_CHARS].partition("\n")[0]
    return Answer(_END_OF_ANSWER.split(line, maxsplit=1)[0].strip(" \t*_$"), "answer is", is_final=False)


def reference_answer(trajectory: Trajectory) -> str:
    """Returns the part of the prompt's `answer` field that a completion is compared with."""
    fields = trajectory.prompt.fields
    reference = chat_as_text(fields.get("answer"))
    text = "" if reference is None else _normalized(str(reference)).strip()
    answer = final_answer(text)
    if not (text if answer is None else answer.text):
        raise ValueError(
            f"Prompt {trajectory.prompt.id!r} needs a reference in its 'answer' field; it has {sorted(fields)}. "
            "Set answer_column in the data."
        )
    return text if answer is None else answer.text


def equals(answer: str, reference: str, *, is_marked_by: str = _BOXED) -> bool:
    """Returns whether two answers have the same meaning. `50%` equals both `50` and `0.5`.

    Missing units, the case of words, and text after a choice letter are ignored. If the reference is a literal number,
    the answer must also be one; in a box it may be the last side of an equation.
    """
    answer, reference = _normalized(answer), _normalized(reference)
    if max(len(answer), len(reference)) <= _MAX_EXPRESSION_CHARS:
        answer, reference = _in_one_notation(answer), _in_one_notation(reference)
        if ":" in answer + reference:  # otherwise `3 to 5` may be a range
            answer, reference = _RATIO.sub(":", answer), _RATIO.sub(":", reference)
    words, expected_words = _words(answer), _words(reference)
    choice, chosen = _CHOICE.fullmatch(expected_words), _CHOICE_AND_TEXT.fullmatch(words)
    if choice is not None and chosen is not None:
        return choice[1] == chosen[1].upper() and not _names_choices(chosen[2] or "")
    if words == expected_words or max(len(answer), len(reference)) > _MAX_EXPRESSION_CHARS:
        return words == expected_words
    if _ELLIPSIS.search(answer + reference) or (_TIME.fullmatch(words) and _TIME.fullmatch(expected_words)):
        return False
    choices = [
        text.replace(" and ", ",").upper() if " and " in text or text.isalpha() else text
        for text in (words, expected_words)
    ]
    are_tuples = all(re.fullmatch(r"\([^()]*\)", text) for text in choices)
    if all(map(_CHOICES.fullmatch, choices)) and not "".join(choices).isalpha() and not are_tuples:  # `A, C` is `AC`
        return sorted(re.findall("[A-J]", choices[0])) == sorted(re.findall("[A-J]", choices[1]))
    left, expected = _side_and_number(reference)
    if expected is not None and _VARIABLE.fullmatch(left):
        given_left, given = _side_and_number(answer)
        if given is None or (given_left and is_marked_by == _HASHES) or (left and given_left and left != given_left):
            return False
        return bool(given[0] & expected[0]) and _units_agree(given[1], expected[1])
    if all(text.replace(" ", "").isalpha() for text in (answer, reference)):  # words, or products of two variables
        answer, reference = answer.replace(" ", ""), reference.replace(" ", "")
        return len(reference) < 3 and reference.islower() and sorted(answer) == sorted(reference)
    from lightrl.rewards.math_answer.expressions import equal_expressions  # SymPy takes half a second

    (answer, unit), (reference, expected_unit) = _without_unit(answer), _without_unit(reference)
    return _units_agree(unit, expected_unit) and equal_expressions(answer, reference)


def _units_agree(unit: Unit, other: Unit) -> bool:
    return not unit or not other or unit == other


def _side_and_number(text: str) -> tuple[str, tuple[frozenset[Fraction], Unit] | None]:
    """Returns "x" and 6 for `x = 6` or `6 = x`, and "" and 6 for `6`; for other text or `5 = 6` the number is None."""
    left, equals_sign, right = text.rpartition("=")
    literal = _literal(right)
    if literal is None and equals_sign and (value := _literal(left)) and _VARIABLE.fullmatch(right.strip()):
        return right.strip(), value  # `5 = x`
    if not equals_sign or literal is None:
        return left.strip(), literal
    from lightrl.rewards.math_answer.expressions import last_side, tokens

    sides = last_side(tokens(f"{left} = {min(literal[0])}"))
    return left.strip(), literal if sides is not None and sides[0] else None


def _without_unit(text: str) -> tuple[str, Unit]:
    """Splits a known unit off the end of the text."""
    match = _LAST_UNIT.search(text[-_MAX_NUMBER_CHARS:])
    unit = None if match is None else unit_of(_plain(match[1]))
    is_argument = match is not None and "circ" in match[1] and _ANGLE.search(text)  # `\sin 30^\circ`
    if match is None or is_argument or not (unit or (unit is not None and "unit" in match[1])):  # `square units`
        return text, frozenset()
    return text[: len(text) - len(match[0])], unit


def number(text: str) -> frozenset[Fraction] | None:
    """Returns the values that a literal number may mean, two for a percentage; None if the text is not one number.

    It may have a currency sign, up to five words of units, a period, and LaTeX spacing and dollar signs around it.
    """
    literal = _literal(_normalized(text))
    return None if literal is None else literal[0]


def _literal(text: str) -> tuple[frozenset[Fraction], Unit] | None:
    """Returns the values and the unit of a number, given as normalized text; None for other text. See _LITERAL."""
    if len(text) > _MAX_NUMBER_CHARS:
        return None
    plain = _FRACTION.sub(lambda match: f" {match[1] or match[2]}/{match[3] or match[4]}", _plain(text))
    plain = _GROUPED.sub(lambda match: re.sub("[, ]", "", match[0]), _unwrapped(plain)).strip()
    match = _LITERAL.fullmatch(plain)
    if match is None:
        return None
    is_plain = not match["unit"].startswith(("*", "/")) and (
        "/" in match["unit"] or plain[match.start("unit") - 1] == " "
    )
    is_upright = is_plain or _LATEX_UNIT.search(text) is not None
    unit = unit_of(f"{match['unit']} {match['currency'] or ''}".replace("USD", "$"), letters=is_upright)
    if unit is None:
        return None
    try:
        value = _power(match["above"]) / _power(match["below"] or "1")  # above and below a fraction bar
        value *= -1 if match["inner"] or match["inner_below"] else 1  # `(-2/3)`, `(2/-3)`
        value = _raised(value, int(match["power"] or 1)) * Fraction(10) ** int(match["ten"] or 0)
    except ArithmeticError:
        return None
    if match["whole"] is not None:
        if value >= 1:  # `2 5/3` is not a mixed number
            return None
        value += int(match["whole"])
    value *= -1 if (match["sign"] == "-") != bool(match["sign_after"]) else 1  # `-$5`, `$-5`
    return frozenset({value, value / 100} if match["percent"] else {value}), unit  # 50% may mean 50 or 0.5


def _power(text: str) -> Fraction:
    base, _, exponent = text.partition("**")
    return _raised(Fraction(base), int(exponent or 1))


def _raised(base: Fraction, exponent: int) -> Fraction:
    if max(base.numerator.bit_length(), base.denominator.bit_length()) * abs(exponent) > _MAX_NUMBER_BITS:
        raise ArithmeticError("too large")
    return Fraction(base**exponent)


def _plain(text: str) -> str:
    r"""Replaces LaTeX in units, powers and currencies with plain text: `m\cdot s^{-2}` with `m * s**-2`."""
    text = re.sub(r"\\mu(?![A-Za-z])\s*(\\(?:text|mathrm)\s*\{)?", lambda match: f"{match[1] or ''}u", text)
    text = _UNIT_FRACTION.sub(r" \1/(\2)", text)
    text = _LATEX_UNIT.sub(r" \1 ", _LATEX_SPACING.sub(" ", text.replace(r"\$", "$").replace(r"\%", "%")))
    text = re.sub(r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)", "*", text)
    text = re.sub(r"\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])", " deg ", text)
    text = re.sub(r"([kMm]?)\s*\\Omega(?![A-Za-z])|Ω", r" \1ohm", re.sub(r"\bdeg\s+([CF])\b", r"deg\1", text))
    text = re.sub(r"\^\s*[{(]?\s*([-+]?[0-9]+)\s*[})]?", r"**\1", text)
    return re.sub(r"\\(?:times|cdot)(?![A-Za-z])", "*", text)


def _in_one_notation(text: str) -> str:
    for pattern, replacement in _COMPILED_NOTATIONS:
        text = pattern.sub(replacement, text)
    return text


def _names_choices(text: str) -> bool:
    """Returns whether the text after a choice letter names another choice."""
    words = [word for word in re.split(r"[\s,;:/&().]+", text) if word and word.lower() not in ("or", "and")]
    return _OTHER_CHOICE.search(text) is not None or (words != [] and all(map(_CHOICE.fullmatch, words)))


def _normalized(text: str) -> str:
    """Replaces Unicode variants of characters with the characters that LaTeX and Python read."""
    if text.isascii():
        return text
    text = _VULGAR_FRACTION.sub(lambda match: f" {match[0]}", text)
    text = _SUPERSCRIPTS.sub(lambda match: f"^{{{unicodedata.normalize('NFKC', match[0])}}}", text)
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    return re.sub(r"\d", lambda match: str(unicodedata.decimal(match[0])), text)  # ४२


def _unwrapped(text: str) -> str:
    """Removes LaTeX spacing, and dollar signs, asterisks, braces and parentheses around the whole text."""
    text = " ".join(_LATEX_SPACING.sub(" ", text).split())
    for opening, closing in (("**", "**"), ("$", "$"), (r"\(", r"\)"), ("(", ")"), ("{", "}")):
        text = text.removesuffix(".") if opening == "$" and text.endswith("$.") else text
        inside = text[len(opening) : -len(closing)]
        is_wrapped = text.startswith(opening) and text.endswith(closing) and inside
        if is_wrapped and not re.search(r"[,()$]" if opening == "(" else re.escape(opening), inside):
            text = inside.strip()
    return text


def _words(text: str) -> str:
    """Removes LaTeX's text commands and the final period; if there are words, converts to lowercase."""
    if len(text) > _MAX_EXPRESSION_CHARS:
        return text
    plain = " ".join(_LATEX_UNIT.sub(r" \1 ", text).strip(" $*").removesuffix(".").strip(" $*").split())
    plain = re.sub(r"^(?:option|choice|answer)\b[\s:]*(?=\(?[A-J])", "", plain, flags=re.IGNORECASE)
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
    r"""Returns where a box's content begins and ends, and where the box ends; None if the box is not closed.

    Args:
        start: the end of `\boxed`.
    """
    opening = _BRACED.match(text, start)
    if opening is None:
        word = _UNBRACED.match(text, start)
        return None if word is None else (word.start(1), word.end(1), word.end(1))
    depth = 0
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, opening.end() - 1):  # `\{` is a character
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return opening.end(), brace.start(), brace.end()
    return None
