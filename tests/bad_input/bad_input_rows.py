"""What the tables of bad input are made of: what is wrong, the input, and the words that its one message must have."""

from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Row:
    """One bad input."""

    what: str  # also the test's id
    given: Any
    says: tuple[str, ...]  # file, line or setting; what was expected; how to fix it

    def check(self, message: str) -> None:
        missing = [words for words in self.says if words not in message]
        assert not missing, f"{missing} not in:\n{message}"
        assert "Traceback" not in message


def row(what: str, given: Any, *says: str) -> Row:
    return Row(what, given, says)


def each(rows: list[Row]) -> pytest.MarkDecorator:
    """Runs a test for each row, as its argument `case`."""
    return pytest.mark.parametrize("case", rows, ids=[item.what for item in rows])
