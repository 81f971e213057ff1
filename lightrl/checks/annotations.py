"""Annotations for type checkers and editors, each with a simpler substitute for jsonargparse.

For plain `**kwargs`, jsonargparse finds the constructors that receive them and reads their defaults and docstrings.
It does not do so for a TypedDict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeAlias
    from typing import Unpack as Unpack

    StrOrObject: TypeAlias = str | Any  # a string in YAML, any object in Python
else:

    class Unpack:
        __class_getitem__ = staticmethod(lambda settings: Any)

    StrOrObject = str
