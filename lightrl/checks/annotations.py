"""Annotations that type checkers and editors read, and simpler ones that jsonargparse reads in their place.

For plain `**kwargs`, jsonargparse finds the constructors that receive them and reads their defaults and docstrings.
For a TypedDict, it would not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeAlias
    from typing import Unpack as Unpack

    StrOrObject: TypeAlias = str | Any  # a setting that is a string in YAML; in Python, it may be any object
else:

    class Unpack:
        __class_getitem__ = staticmethod(lambda settings: Any)

    StrOrObject = str
