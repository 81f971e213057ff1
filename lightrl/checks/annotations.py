"""Annotations for type checkers and editors that jsonargparse must read differently.

For `**kwargs` jsonargparse reads the constructors that receive them, with their defaults and docstrings; of a TypedDict
it would know neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeAlias
    from typing import Unpack as Unpack

    StrOrObject: TypeAlias = str | Any  # a setting that is text in YAML, and in Python also an object
else:

    class Unpack:
        __class_getitem__ = staticmethod(lambda settings: Any)

    StrOrObject = str
