"""Annotations for type checkers and editors that jsonargparse must read differently.

For plain `**kwargs`, jsonargparse finds the constructors that receive them and reads their defaults and docstrings.
With a TypedDict it would find neither.
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
