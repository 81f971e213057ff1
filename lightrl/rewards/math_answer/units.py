r"""Units after a number: `m/s^2` equals `m\,s^{-2}`, hours are not minutes, and `x` is not a unit."""

from __future__ import annotations

import re
from collections import Counter

Unit = frozenset[tuple[str, int]]  # each unit with its power; empty if there is nothing to compare

_PREFIXES = {"": "", "k": "kilo", "M": "mega", "G": "giga", "m": "milli", "c": "centi", "d": "deci", "u": "micro"}
_PREFIXES["n"] = "nano"
_PREFIXED = "m meter metre,g gram,s sec second,L l liter litre,J joule,N newton,W watt,V volt,A amp ampere,Pa pascal,"
_PREFIXED += "Hz hertz,eV electronvolt,cal calorie,mol mole,ohm,F farad,C coulomb,T tesla,K kelvin,Wh,B byte"
_OTHERS = "min minute,h hr hour,day,week,month,yr year,in inch inches,ft foot feet,yd yard,mi mile,lb pound £,"
_OTHERS += "oz ounce,gal gallon,qt quart,pt pint,deg degree,degC celsius,degF fahrenheit,rad radian,$ dollar,¢ cent,"
_OTHERS += "€ euro,¥ yen,₹ Rs rs rupee,atm atmosphere,mph,kph kmh,cc,fl"
_NAMES = {name: names.split()[0] for names in _OTHERS.split(",") for name in names.split()} | {
    f"{prefix if is_symbol else long}{name}": f"{prefix}{names.split()[0]}"
    for names in _PREFIXED.split(",")
    for name in names.split()
    for is_symbol in [name in (names.split()[0], "l", "ohm")]
    for prefix, long in _PREFIXES.items()
}
_COMPOUND = {"mph": {"mi": 1, "h": -1}, "kph": {"km": 1, "h": -1}, "cc": {"cm": 3}}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_NO_UNITS = frozenset(  # these words and their plurals are not units
    "and but nor not plus minus time over divided modulo mod remainder million billion trillion thousand "  # noqa: SIM905
    "hundred dozen half halve third quarter fourth fifth sixth seventh eighth ninth tenth hundredth thousandth one two "
    "three four five six seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety zero "
    "negative squared cubed factorial root sin cos tan log exp wrong incorrect false maybe perhaps".split()
)
_HAN = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_NO_HAN_UNIT = re.compile("[万亿兆千百十半或和与又点加减乘除之倍萬億點減]")
_PART = re.compile(r"\s*(?:(?P<word>[^\W\d_]+|[$€£¥¢\u20a0-\u20cf])\.?|\*\*(?P<power>[-+]?[0-9])|(?P<mark>[/()*]))\s*")


def unit_of(text: str, *, letters: bool = True) -> Unit | None:
    """Parses a unit: `m/s**2` is {("m", 1), ("s", -2)}; a noun that is not a known unit, such as `apples`, is empty.

    Returns None if the text may be something else, for example a variable or a number word.

    Args:
        text: unit names with `*`, `/` and `**`.
        letters: whether a single letter is a unit rather than a variable.
    """
    text = text.strip(" .")
    powers: Counter[str] = Counter()
    latest: dict[str, int] = {}  # the last unit read, to which a `**` applies
    at = num_words = 0
    sign = factor = group = 1  # -1 after `/`; 2 or 3 after `square` or `cubic`; the sign before `(`
    is_known = True
    while at < len(text):
        part = _PART.match(text, at)
        if part is None or num_words > 5 or _NO_HAN_UNIT.search(text):
            return None
        at, word = part.end(), part["word"]
        if part["power"]:
            powers.update({name: power * (int(part["power"]) - 1) for name, power in latest.items()})
        elif part["mark"] == "/" or word == "per":
            sign = -1
        elif part["mark"] in ("(", ")"):
            group, sign = (sign, 1) if part["mark"] == "(" else (1, 1)
        elif word in _POWERS:
            factor = _POWERS[word]
        elif word:
            num_words += 1
            singular = word.lower().removesuffix("s")
            name = _NAMES.get(word) or _NAMES.get(word.lower()) or (_NAMES.get(singular) if len(word) > 2 else None)
            name = (name if len(word) > 1 or letters else None) if word.isalpha() else name or word
            is_noun = len(word) > 2 and singular not in _NO_UNITS
            if name is None and not is_noun and not _HAN.match(word) and word != "of":
                return None
            is_known = is_known and name is not None
            parts = _COMPOUND.get(name or "", {name or "": 1})
            latest = {part: power * sign * group * factor for part, power in parts.items()}
            powers.update(latest)
            sign = factor = 1
    if powers["degC"] or powers["degF"]:
        del powers["deg"]
    return frozenset((name, power) for name, power in powers.items() if power) if is_known else frozenset()
