"""The list of bad inputs: long enough, and the one in docs/faults.md."""

from pathlib import Path

import pytest
from bad_input_page import page, rows_by_module

pytestmark = pytest.mark.bad_input


def test_there_are_at_least_200_inputs_and_the_page_has_them_all():
    assert sum(len(rows) for rows in rows_by_module().values()) >= 200
    text = (Path(__file__).parents[2] / "docs/faults.md").read_text()
    assert page(text) == text, "run `python tests/bad_input/bad_input_page.py docs/faults.md`"
