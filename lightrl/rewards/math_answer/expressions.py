r"""Decides whether two mathematical texts are equal, by their values or, if those cannot be read, by their tokens.

    r"\dfrac{1}{2} x"  ─ tokens ─►  \frac 1 2 x  ─ _Reader ─►  its values where x is 2.71…, 0.58…, -1.32…, 3.40…

Spellings of one symbol (`\leq`, `\le`) are one token. A text that the reader cannot read to its end, such as
`\triangle ABC` or `f'(x)`, equals only texts with the same tokens. Expressions are equal if their values agree at
four random points. Adjacent capital letters do not commute. Nothing is simplified or solved, and the sizes of texts
and numbers are bounded, so that no comparison takes long.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy
from sympy.core.function import AppliedUndef

Tokens = tuple[str, ...]

_MAX_CHARS = 1000
_MAX_DEPTH = 30
_MAX_LOG = 800  # natural logarithm of a power; must be below that of `1 / _ZERO`
_MAX_FACTORIAL = 300
_DIGITS = 500
_ZERO = sympy.Rational(1, 10**400)
_NUM_POINTS = 4

_GREEK = frozenset(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "  # noqa: SIM905
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell hbar".split()
)
_ANGLES = ("sin", "cos", "tan", "cot", "sec", "csc")
_FUNCTIONS = {name: name for name in (*_ANGLES, "sinh", "cosh", "tanh", "ln", "exp", "log")}
_FUNCTIONS |= {f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan")}
_FUNCTIONS |= {"abs": "Abs", "floor": "floor", "ceil": "ceiling"}
_CALLS = {*"fghFGHO", r"\max", r"\min", r"\gcd", r"\lcm", r"\Re", r"\Im", r"\arg", r"\det"}
_CONSTANTS = {"e": sympy.E, "i": sympy.I, r"\pi": sympy.pi, r"\infty": sympy.oo}
_FONT = re.compile(
    r"\\(?:text|math|operatorname|mbox|emph)(?:rm|bf|it|sf|tt|normal|up|cal)?\*?\s*\{([^{}]*)\}"
    r"|\\ce\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_ARRAY = re.compile(
    r"(?:\\left\s*)?[(\[]\s*\\begin\s*\{array\}\s*\{[clr]*\}((?:(?!\\begin).)*?)\\end\s*\{array\}\s*(?:\\right\s*)?[)\]]"
)
_SENTENCE = re.compile(r"(?<![A-Za-z\\])(?:[A-Za-z]{2,}\s+[A-Za-z]|[A-Za-z]\s+[A-Za-z]{2})")
_TOKEN = re.compile(
    r"\\(?:begin|end)\s*\{[a-z]+\*?\}|\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\*\*|<=>|[<>!]=|[-=]>"
    r"|(?<![A-Za-z\\])(?:arc(?=sin|cos|tan))?(?:sqrt|pi|infty|or|and|mod|sinh?|cosh?|tanh?|cot|sec|csc|ln|log|exp|abs|max|min|gcd|lcm)"
    r"(?![A-Za-z])|[A-Za-z]|\S",
    re.DOTALL,
)
_SPELLINGS = {
    spelling: name
    for name, spellings in {
        "": r"\, \! \; \: \> \left \right \big \Big \bigl \bigr \displaystyle \limits \( \) $",
        r"\frac": r"\dfrac \tfrac \cfrac \nicefrac \sfrac", r"\binom": r"\dbinom \tbinom", r"\bar": r"\overline",
        r"\le": r"\leq \leqslant <=", r"\ge": r"\geq \geqslant >=", r"\ne": r"\neq !=", r"\emptyset": r"\varnothing ∅",
        "|": r"\lvert \rvert \vert", r"\|": r"\lVert \rVert \Vert", r"\{": r"\lbrace", r"\}": r"\rbrace",
        "(": r"\langle \lparen", ")": r"\rangle \rparen", r"\to": r"\rightarrow \longrightarrow ->", "^": "**",
        r"\land": r"\wedge ∧", r"\lor": r"\vee ∨", r"\neg": r"\lnot ¬", r"\Rightarrow": r"\implies \Longrightarrow =>",
        r"\Leftrightarrow": r"\iff <=>", ":": r"\colon", "/": r"\div", r"\setminus": r"\backslash \smallsetminus",
        ",": r"\quad \qquad ;", "%": r"\%", "T": r"\top \intercal", r"\pmod": r"\mod \bmod",
    }.items()
    for spelling in spellings.split()
} | {"\\ ": ""}  # fmt: skip
_ENDS = re.compile(r"(\\angle|\\bar \{) ([A-Z]) ((?:(?<=\\angle . )[A-Z] )?)([A-Z])(?! [A-Z])")  # BA is AB; CBA is ABC
_MIRRORED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}
_RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\ne", r"\in")
_SEPARATORS = (",", r"\or", r"\and")
_NO_FACTORS = {*_RELATIONS, *_SEPARATORS, "", *"[)]}:!^_%&+-*/", r"\}", "\\\\", r"\pm", r"\mp", r"\cdot", r"\times"} | {
    r"\cup", r"\cap", r"\setminus", r"\degree", r"\rfloor", r"\rceil",
    r"\end{pmatrix}", r"\end{bmatrix}", r"\end{cases}",
}  # fmt: skip
_CLAIMS = (
    *(*_RELATIONS, *_SEPARATORS, r"\approx", r"\to", r"\Rightarrow", r"\Leftrightarrow", r"\sim", r"\equiv"),
    *(r"\not", r"\neg"),  # `\not=`
)
_INDEX = re.compile(r"(?<=(?<![A-Za-z\\])[A-Za-z])\s*_\s*(?:[0-9]|\{[0-9]\})(?=\s*=)")
_NAME = re.compile(
    r"\\?[A-Za-z]+(?: _ (?:\S|\{[^{}]*\}))?(?: ')*(?: \^ \{ - 1 \})?(?: \( [^()=]* \))?"
    r"|\\frac (?:\{ )?(?:d|\\partial) .*"
)


class UnreadableError(Exception):
    """A token does not fit the grammar, or a number is too large."""


_ERRORS = (UnreadableError, ArithmeticError, ValueError, TypeError, AttributeError, NotImplementedError, RecursionError)


def equal_expressions(answer: str, reference: str) -> bool:
    """Returns whether both texts or their values are equal; `y` in `y = 2x` is compared only if both have a name."""
    if max(len(answer), len(reference)) > _MAX_CHARS:
        return False
    given, expected = tokens(answer), tokens(reference)
    if _is_same(given, expected) or _are_same_named(given, expected):
        return True
    if (_INDEX.search(answer) is None) == (_INDEX.search(reference) is None):
        return False
    return equal_expressions(_INDEX.sub("", answer), _INDEX.sub("", reference))  # only one has indices: `x_1=1` for `1`


def _are_same_named(given: Tokens, expected: Tokens) -> bool:
    """Compares the values that two texts name, and the names if both have one."""
    value, expected_value = _without_names(given, are_names=False), _without_names(expected, are_names=True)
    if value is None or expected_value is None or (value[0] and expected_value[0] and value[0] != expected_value[0]):
        return False
    return _is_same(value[1], expected_value[1])


def _is_same(given: Tokens, expected: Tokens) -> bool:
    """Returns whether tokens or values are equal; `given` must not leave more calculations undone than `expected`."""
    if _letters(given) == _letters(expected):
        return True
    reading, expected_reading = _read(given), _read(expected)
    if reading is None or expected_reading is None or reading[1] > expected_reading[1]:
        return False
    try:
        return _is_equal(reading[0], expected_reading[0])
    except _ERRORS:
        return False


@functools.lru_cache(maxsize=1024)
def tokens(text: str) -> Tokens:
    """Splits a text into tokens with unified spelling, without spaces and without braces around a single token."""
    text = _FONT.sub(_without_font, text)
    text = re.sub(r"\^\s*\{?\s*\\circ(?![A-Za-z])\s*\}?", r"\\degree ", text)  # `90^\circ`
    text = re.sub(r"(\\\\)\s*\[[^\]]*\]", r"\1", text)  # `\\[2pt]`
    text = _ARRAY.sub(r"\\begin{pmatrix}\1\\end{pmatrix}", text)  # all matrices get one spelling
    text = re.sub(r"(\\(?:[dtc]?frac|nicefrac|sfrac|sqrt|binom))\s*([0-9])", r"\1{\2}", text)  # `\frac12`
    text = re.sub(r"(\\(?:[dtc]?frac|nicefrac|sfrac|binom)\s*\{[^{}]*\})\s*([0-9])", r"\1{\2}", text)
    if _SENTENCE.search(text):  # words are not products of variables
        text = re.sub(r"(?<![A-Za-z\\])[A-Za-z]{2,}", r"\\\g<0> ", text)
    result: list[str] = []
    for token in _TOKEN.findall(text):
        name = unicodedata.name(token, "") if not token.isascii() else ""
        if name.startswith("GREEK"):
            token = "\\" + (name.split()[-1].lower() if "SMALL" in name else name.split()[-1].capitalize())
        elif len(token) > 1 and token[0].isalpha():
            token = "\\" + token
        token = _SPELLINGS.get(token, token).replace(" ", "")
        if token and (token != "," or (result and result[-1] not in _SEPARATORS)):
            result.append(token)
        if token == "}" and len(result) > 2 and result[-3] == "{" and result[-2] not in ("{", "}", ","):
            result[-3:] = [result[-2]]
    joined = " ".join(result[:-1] if result[-1:] == [","] else result)
    joined = re.sub(r"(\\(?:triangle|angle|square)) \{ ([A-Z ]+) \}", r"\1 \2", joined)
    joined = re.sub(r"\( (\\pmod [^()]+) \)", r"\1", joined)
    return tuple(_ENDS.sub(lambda ends: min(ends[0], f"{ends[1]} {ends[4]} {ends[3]}{ends[2]}"), joined).split())


def _without_font(match: re.Match[str]) -> str:
    if match[2] is not None:  # chemistry
        charged = re.sub(r"(?<=[A-Za-z0-9)\]])(?:\^\{?([0-9]*))?([-+])\}?(?=[\s)\]]|$)", r"^{\1\2}", match[2])
        return charged.replace("<=>", r"\rightleftharpoons ")
    return re.sub("[A-Za-z]{2,}", r" \\\g<0> ", match[1])


def _letters(items: Tokens) -> list[str]:
    """Returns the tokens with words split into letters, and without the `_` in text like `H_2O`."""
    result: list[str] = []
    for token, after in itertools.zip_longest(items, items[1:], fillvalue=""):
        if token != "_" or not (result and result[-1].isalpha() and after[:1].isdecimal()):
            result += token.removeprefix("\\") if token[-1].isalpha() else [token]
    return result


def split(items: Sequence[str], *separators: str) -> list[Tokens]:
    """Splits at these tokens, but not inside brackets."""
    parts: list[Tokens] = [()]
    depth = 0
    for token in items:
        depth += (token in ("(", "[", "{", r"\{")) - (token in (")", "]", "}", r"\}"))
        parts[-1:] = [parts[-1], ()] if depth == 0 and token in separators else [(*parts[-1], token)]
    return parts


def last_side(items: Tokens, *, are_names: bool = False) -> tuple[str, Tokens] | None:
    """Returns the first side of a chain of `=` ("" without `=`) and the last side; None if they contradict each other.

    An earlier side may be a name or, unless `are_names`, a value that equals the last or uses other variables.
    """
    *sides, last = split(items, "=")
    if len(sides) == 1 and _NAME.fullmatch(" ".join(last)) and not _variables(sides[0]):  # `5 = x`
        sides, last = [last], sides[0]
    if not all((*sides, last)) or any(len(split(side, *_CLAIMS)) > 1 for side in sides):
        return None if sides else ("", last)
    for side in sides:
        is_separate = not _variables(side) & _variables(last)
        is_call = len(side) > 3 and (side[0] == r"\frac" or side[0] not in last)  # `f(x)`, `dy/dx`
        if side[0] not in (r"\pi", r"\infty") and _NAME.fullmatch(" ".join(side)) and (is_separate or is_call):
            continue
        is_other = is_separate and (_variables(side) or (_read(side) is None and "\\" in "".join(side)))
        if are_names or _read(last) is None or not (is_other or _is_same(last, side)):
            return None
    return " ".join(sides[0]) if sides else "", last


def _variables(items: Tokens) -> set[str]:
    return {item for item in items if (item.isalpha() and item not in "ei") or item[1:] in _GREEK}


def _without_names(items: Tokens, *, are_names: bool) -> tuple[str, Tokens] | None:
    """Returns the name and value of `x = 2`, `x = 2, 3` and `x = 2, x = 3`; for `x = 2, y = 3`, "" and (2, 3)."""
    sides = [last_side(part, are_names=are_names) for part in split(items, *_SEPARATORS)]
    named = [side for side in sides if side is not None]
    names = [name for name, _ in named]
    if len(named) < len(sides) or (any(names[1:]) and not all(names)):
        return None
    is_mapping = len(set(names)) == len(names) > 1 and all(names) and len(split(items, r"\or")) == 1
    if not is_mapping and any(names[1:]) and len(set(names)) > 1:
        return None
    values = [value for _, value in (sorted(named) if is_mapping else named)]
    joined = tuple(itertools.chain(*((*value, ",") for value in values)))[:-1]
    return ("", ("(", *joined, ")")) if is_mapping else (names[0], joined)


@functools.lru_cache(maxsize=1024)
def _read(items: Tokens) -> tuple[Any, int] | None:
    """Returns the value and how many calculations it leaves undone; None if the tokens are not an expression."""
    if re.fullmatch(r"[0-9 ,]*[0-9]+(?: - [0-9]+)+[-0-9 ,]*", " ".join(items)):
        return None  # a date or a score, not a difference
    reader = _Reader(items)
    try:
        return reader.read_all(), reader.num_calculations
    except _ERRORS:
        return None


class _Reader:
    """Recursive-descent parser from tokens to SymPy objects; raises UnreadableError at the first wrong token."""

    def __init__(self, items: Tokens) -> None:
        self._tokens, self._at, self._depth, self._bars = (*items, ""), 0, 0, False
        self._sign, self._num_signs = 1, 0  # the sign that `\pm` stands for, and the number of `\pm` read
        self._degree: Any = 1  # the degree sign is only a unit, except in sin, cos and tan
        self.num_calculations = 0  # sums and products of plain numbers

    def read_all(self) -> Any:
        """Reads all tokens: one value, or the set of several values between separators; reads ± once for each sign."""
        values, separators = [], set()
        while True:
            start = self._at
            for sign in (1, -1):
                self._at, self._sign, self._num_signs = start, sign, 0
                values.append(self._relation())
                if self._num_signs == 0:
                    break
            if (separator := self._take(*_SEPARATORS)) is None:
                break
            separators |= {separator, self._take(*_SEPARATORS) or separator}  # `, and`
        self._need("")
        if len(values) == 1:
            return values[0]
        names = {value.name if isinstance(value, _Named) else None for value in values}
        if r"\or" in separators and len(names) == 1 and None not in names:
            return _Named(names.pop(), sympy.Union(*(value.values for value in values)))
        is_choice = r"\or" in separators and any(isinstance(value, _Relation) for value in values)
        return (r"\or", frozenset(values)) if is_choice else frozenset(values)

    def _take(self, *wanted: str) -> str | None:
        if self._tokens[self._at] not in wanted:
            return None
        self._at += 1
        return self._tokens[self._at - 1]

    def _need(self, *wanted: str) -> str:
        token = self._take(*wanted)
        if token is None:
            raise UnreadableError(f"{self._tokens[self._at]!r} is not one of {wanted}")
        return token

    def _relation(self) -> Any:
        sides, relations = [self._ratio()], []
        while relation := self._take(*_RELATIONS):
            relations.append(relation)
            sides.append(self._ratio())
        if not relations:
            return sides[0]
        if relations == [r"\in"] and isinstance(sides[0], sympy.Symbol):
            return _Named(sides[0], _as_set(sides[1]))
        differences = [_number(left) - _number(right) for left, right in itertools.pairwise(sides)]
        symbols = set().union(*(side.free_symbols for side in sides))
        if len(symbols) == 1 and not {"=", r"\in"} & {*relations}:
            return _Named(symbols.pop(), sympy.Intersection(*map(_solution, relations, differences)))
        if relations[0] in (">", r"\ge"):  # read the chain from right to left
            relations = [_MIRRORED[relation] for relation in reversed(relations)]
            differences = [-difference for difference in reversed(differences)]
        return _Relation(tuple(relations), tuple(differences))

    def _ratio(self) -> Any:
        parts = [self._set()]
        while self._take(":"):
            parts.append(self._set())
        ratios = [_number(part) / _number(parts[-1]) for part in parts[:-1]]
        return parts[0] if not ratios else ratios[0] if len(ratios) == 1 else ("ratio", *ratios)

    def _set(self) -> Any:
        value = self._sum()
        while operation := self._take(r"\cup", r"\cap", r"\setminus"):
            combine = {r"\cup": sympy.Union, r"\cap": sympy.Intersection, r"\setminus": sympy.Complement}[operation]
            value = combine(_as_set(value), _as_set(self._sum()))
        return value

    def _sum(self) -> Any:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnreadableError("too deep")
        value = None
        while (operation := self._take("+", "-", r"\pm", r"\mp")) or value is None:
            term = self._product()
            if operation in (r"\pm", r"\mp"):
                self._num_signs += 1
                if self._num_signs > 1:
                    raise UnreadableError("which signs belong together?")
            if operation is not None:
                term = {"+": 1, "-": -1, r"\pm": self._sign, r"\mp": -self._sign}[operation] * _number(term)
            if value is not None:
                self._count_calculation(value, term)
                term = _number(value) + term
            value = term
        self._depth -= 1
        return value

    def _count_calculation(self, left: Any, right: Any) -> None:
        self.num_calculations += bool(_number(left).is_Rational and _number(right).is_Rational)

    def _product(self) -> Any:
        """Reads factors joined by ·, × or /; refuses `a/b/c`, and `a/bc` unless a and b are numbers."""
        value = self._factors()
        has_quotient = False
        while operation := self._take("*", r"\cdot", r"\times", "/"):
            sign = -1 if self._take("-") else 1
            is_power_of_10 = self._tokens[self._at : self._at + 2] == ("10", "^")
            right = _number(self._factor() if operation == "/" else self._factors())
            is_plain = _number(value).is_Rational and right.is_Rational
            if operation == r"\times" and any(item.name[0].isupper() for item in (value * right).free_symbols):
                raise UnreadableError("perhaps a product of vectors or sets")
            if operation == "/":
                if has_quotient or (self._is_factor() and not is_plain):
                    raise UnreadableError("`a/b/c` or `a/bc`")
                has_quotient, right = True, 1 / right
                if self._is_factor():  # `1/2 x`
                    right *= self._factors()
            elif not is_power_of_10:  # `3 × 10^5` is a number, not a calculation left undone
                self._count_calculation(value, right)
            value = sign * value * right
        return value

    def _is_factor(self) -> bool:
        token = self._tokens[self._at]
        return token not in _NO_FACTORS and not (token == "|" and self._bars)

    def _factors(self, *, of_function: bool = False) -> Any:
        """Reads adjacent factors: a mixed number, or a product, in which capital letters do not commute."""
        value = self._factor()
        capitals = [value] if _is_capital(value) else []
        while self._is_factor() and not (of_function and self._tokens[self._at][1:] in _FUNCTIONS):
            token = self._tokens[self._at]
            factor = self._factor()
            if token[0] in ".0123456789":
                if not (isinstance(value, sympy.Integer) and self._take("/")):  # `1 1/2`
                    raise UnreadableError("a number after a factor")
                token, factor = r"\frac", factor / self._factor()
            if token == r"\frac" and isinstance(value, sympy.Integer) and factor.is_Rational:
                if not 0 < factor < 1:
                    raise UnreadableError("not a mixed number")
                value += factor
                continue
            self._count_calculation(value, factor)
            capitals += [factor] if _is_capital(factor) else []
            value = _number(value) * _number(factor)
        if len(capitals) > 1:
            value = value / sympy.Mul(*capitals) * sympy.Function("ordered")(*capitals)
        return value

    def _factor(self) -> Any:
        value = self._atom()
        while token := self._take("^", r"\degree", "!", "%"):
            value = _number(value)
            if token == "^":
                if self._tokens[self._at] in ("T", "c", "H", "t") and not value.is_Number:
                    raise UnreadableError("transposed, or a complement")
                value = self._raised(value)
            elif token == "!":
                if self._tokens[self._at] == "!":
                    raise UnreadableError("`!!`")
                _refuse_above(_MAX_FACTORIAL, value)
                self._count_calculation(value, value)
                value = sympy.factorial(value)
            else:
                value *= self._degree if token == r"\degree" else sympy.Rational(1, 100)
        return value

    def _raised(self, base: Any) -> Any:
        sign = -1 if self._take("-") else 1
        exponent = _number(self._atom())
        return _power(base, sign * (self._raised(exponent) if self._take("^") else exponent))

    def _atom(self) -> Any:
        token = self._tokens[self._at]
        self._at += 1
        name = token.removeprefix("\\")
        if re.fullmatch(r"[0-9]*\.?[0-9]+", token):
            return sympy.Rational(token)
        if token in ("(", "[", "]", "{", r"\{"):  # `]0, 1[` is an open interval
            return self._group(token)
        if token in ("|", r"\lfloor", r"\lceil"):
            self._bars, bars = token == "|", self._bars
            value = _number(self._sum())
            self._need("|" if token == "|" else rf"\r{name[1:]}")
            self._bars = bars
            return {"|": sympy.Abs, "lfloor": sympy.floor, "lceil": sympy.ceiling}[name](value)
        if token == r"\frac":
            if self._tokens[self._at + (self._tokens[self._at] == "{")] in ("d", r"\partial"):
                raise UnreadableError("a derivative")
            above = _number(self._atom())
            return above / _number(self._atom())
        if token == r"\binom":
            above, below = _number(self._atom()), _number(self._atom())
            _refuse_above(_MAX_FACTORIAL, above, below)
            return sympy.binomial(above, below)
        if token == r"\sqrt":
            degree = sympy.Integer(2)
            if self._take("["):
                degree = self._sum()
                self._need("]")
            return _power(_number(self._atom()), 1 / degree)
        if name in _FUNCTIONS and name != token:
            return self._function(name)
        if token.startswith(r"\begin{") and token[7:-1] in ("pmatrix", "bmatrix", "matrix", "cases"):
            return self._matrix(token.replace("begin", "end"))
        if token == r"\mathbb":
            self._need("R")
            return sympy.S.Reals
        if token == r"\emptyset":
            return frozenset()
        if token in _CALLS and self._take("("):
            inside = self._group("(")
            return sympy.Function(name)(*(inside if isinstance(inside, tuple) else (inside,)))
        if token in _CONSTANTS and self._tokens[self._at] != "_":
            return sympy.sympify(_CONSTANTS[token])
        if (token.isascii() and token.isalpha()) or name in _GREEK:
            return sympy.Symbol(name + self._subscript())
        raise UnreadableError(token)

    def _subscript(self) -> str:
        start = self._at
        if self._take("_"):
            end = self._tokens.index("}", start) if self._take("{") else self._at
            self._at = end + 1
        return "".join(self._tokens[start : self._at])

    def _group(self, opening: str) -> Any:
        """Reads the rest of a group after its opening bracket: a value, a tuple, a set or an interval."""
        bars, self._bars = self._bars, False  # inside brackets, `|` does not close an outer `|`
        closings = {"{": "}", r"\{": r"\}"}.get(opening)
        items = []
        if closings != self._tokens[self._at] or opening == "{":  # only `\{\}` may be empty
            items.append(self._relation())
            while self._take(","):
                items.append(self._relation())
        closing = self._need(closings) if closings else self._need(")", "]", "[")
        self._bars = bars
        if opening == r"\{":
            return frozenset(items)
        if len(items) == 1 and opening + closing in ("()", "[]", "{}"):
            return items[0]
        if opening + closing in ("()", "{}"):
            return tuple(items) if opening == "(" else frozenset(items)
        if len(items) != 2:
            raise UnreadableError("not an interval")
        are_open = opening != "[", closing != "]"
        value = sympy.Interval(*items, *are_open)  # opens infinite ends; one point or none is no Interval
        if not isinstance(value, sympy.Interval) or (value.left_open, value.right_open) != are_open:
            raise UnreadableError("an interval closed at infinity, or empty inside")
        return value

    def _function(self, name: str) -> Any:
        """Reads a function's base, power and argument, as in `\\log_2 8` and `\\sin^2 x`."""
        base = _number(self._atom()) if name == "log" and self._take("_") else None
        power = self._raised(sympy.E) if self._take("^") else None  # E**exponent; the last line takes its log
        if power == 1 / sympy.E and f"arc{name}" in _FUNCTIONS:
            name, power = f"arc{name}", None  # `\sin^{-1}`
        degree = self._degree  # restored after the argument
        self._degree = sympy.pi / 180 if name in _ANGLES else degree
        argument = _number(self._atom() if self._tokens[self._at] == "(" else self._factors(of_function=True))
        self._degree = degree
        if name in ("exp", "sinh", "cosh", "tanh"):
            _refuse_above(_MAX_LOG, argument)
        if name == "log":  # ambiguous without a base: e or 10
            value = sympy.log(argument) / (sympy.log(base) if base is not None else sympy.Symbol(r"\log"))
        else:
            value = getattr(sympy, _FUNCTIONS[name])(argument)
        return value if power is None else _power(value, sympy.log(power))

    def _matrix(self, end: str) -> Any:
        rows: list[list[Any]] = [[]]
        while self._tokens[self._at] != end:
            rows[-1].append(self._relation())
            self._take(",")
            if self._tokens[self._at] != end and self._need("&", "\\\\") != "&":
                rows.append([])
        self._need(end)
        return ("matrix", *(tuple(row) for row in rows if row))


def _number(value: Any) -> Any:
    if not isinstance(value, sympy.Expr):
        raise UnreadableError("not a number")
    return value


def _is_capital(value: Any) -> bool:
    base = value.base if isinstance(value, sympy.Pow) else value
    return isinstance(base, sympy.Symbol) and base.name[0].isupper()


def _power(base: Any, exponent: Any) -> Any:
    _refuse_above(_MAX_LOG, exponent, exponent * sympy.log(base, evaluate=False) if base != 0 else exponent)
    is_odd_root = exponent.is_Rational and exponent.q % 2 == 1 and exponent.q > 1
    if is_odd_root and base.is_Rational and base < 0:
        return -((-base) ** exponent) if exponent.p % 2 else (-base) ** exponent
    return base**exponent


def _refuse_above(limit: int, *values: Any) -> None:
    for value in values:
        if not all(abs(_at_point(value, index)) < limit for index in range(_NUM_POINTS)):
            raise UnreadableError("too large")


def _as_set(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) == 2:
        return sympy.Interval.open(*value)
    if isinstance(value, frozenset):
        return sympy.FiniteSet(*value)
    if isinstance(value, sympy.Set):
        return value
    raise UnreadableError("not a set")


class _Named(NamedTuple):
    """A variable and its possible values, a set of real numbers."""

    name: Any
    values: Any


class _Relation(NamedTuple):
    """A chain of relations between differences and zero."""

    relations: tuple[str, ...]
    differences: tuple[Any, ...]


def _solution(relation: str, difference: Any) -> Any:
    """Solves `difference relation 0` over the real numbers; the difference must be linear in its only variable."""
    if difference.has(sympy.oo):
        return sympy.S.Reals
    (name,) = difference.free_symbols
    slope = sympy.diff(difference, name)
    if not slope.is_Rational or slope == 0:
        raise UnreadableError("not linear")
    bound = sympy.FiniteSet(-difference.subs(name, 0) / slope)
    if relation == r"\ne":
        return sympy.S.Reals - bound
    is_below, is_open = (relation in ("<", r"\le")) == (slope > 0), relation in "<>"
    ends = (-sympy.oo, *bound) if is_below else (*bound, sympy.oo)
    return sympy.Interval(*ends, left_open=is_open, right_open=is_open)


def _at_point(value: Any, index: int, digits: int = 10) -> Any:
    """Evaluates at a point where each variable is a random rational number, positive at the first two points."""

    has_factorial = value.has(sympy.factorial, sympy.binomial)  # needs whole numbers

    def number(name: str) -> Any:
        source = random.Random(f"{index} {name}")
        sign = (1, 1, -1, source.choice((-1, 1)))[index]
        if has_factorial:
            return sympy.Integer(source.randrange(20, 60))
        return sympy.Rational(sign * source.randrange(1 << 8, 1 << 12), 1 << 10)

    numbers = {symbol: number(symbol.name) for symbol in value.free_symbols}
    value = value.replace(
        lambda node: isinstance(node, AppliedUndef),
        lambda node: number(f"{node.func} {[item.evalf(20, subs=numbers) for item in node.args]}"),
    )
    return (value.subs(numbers) if has_factorial else value).evalf(digits, subs=numbers, maxn=_DIGITS)


def _is_equal(given: Any, expected: Any) -> bool:
    if isinstance(given, _Named) != isinstance(expected, _Named):  # `x > 1` may equal an interval
        given, expected = (item.values if isinstance(item, _Named) else item for item in (given, expected))
    if isinstance(given, sympy.Set) != isinstance(expected, sympy.Set):  # so may `(1, 2)`
        try:
            given, expected = _as_set(given), _as_set(expected)
        except (UnreadableError, ValueError):
            return False
    match given, expected:
        case _Relation(), _Relation():
            return given.relations == expected.relations and all(
                map(_are_proportional, given.relations, given.differences, expected.differences)
            )
        case (sympy.Expr(), sympy.Expr()):
            if given == expected or (given.is_Rational and expected.is_Rational):
                return bool(given == expected)
            values = [_at_point(given - expected, index) for index in range(_NUM_POINTS)]
            return all(value.is_number and bool(abs(value) < _ZERO) for value in values)
        case (sympy.Set(), sympy.Set()) if given == expected:
            return True
        case sympy.Interval(), sympy.Interval():
            ends = zip(given.args, expected.args, strict=True)
            return all(one == other or _is_equal(one, other) for one, other in ends)
        case (sympy.Set(), sympy.Set()) if given.func == expected.func and given.args:
            return _is_equal(frozenset(given.args), frozenset(expected.args))
        case frozenset(), frozenset():
            pairs = ((given, expected), (expected, given))
            return all(any(_is_equal(item, other) for other in others) for items, others in pairs for item in items)
        case tuple(), tuple():
            return len(given) == len(expected) and all(map(_is_equal, given, expected))
    return type(given) is type(expected) and bool(given == expected)


def _are_proportional(relation: str, difference: Any, other: Any) -> bool:
    """Returns whether the ratio of two differences is constant and, for an inequality, positive."""
    if relation == "=":
        difference, other = (sympy.together(item).as_numer_denom()[0] for item in (difference, other))
    ratios = [_at_point(difference / other, index) for index in range(_NUM_POINTS)]
    if not all(ratio.is_number and ratio.is_finite and ratio != 0 for ratio in ratios):
        return False
    if relation not in ("=", r"\ne") and not ratios[0] > 0:
        return False
    return all(bool(abs(ratio - ratios[0]) < abs(ratios[0]) * 1e-8) for ratio in ratios)
