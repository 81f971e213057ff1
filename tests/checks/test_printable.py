"""Counts and sentences as a person reads them."""

import pytest

from lightrl.checks.printable import count_text, one_period


@pytest.mark.parametrize(
    ("number", "name", "text"),
    [
        (1, "update", "1 update"),
        (2, "update", "2 updates"),
        (0, "trajectory", "0 trajectories"),
        (1, "trajectory", "1 trajectory"),
    ],
)
def test_one_thing_is_not_called_many(number, name, text):
    assert count_text(number, name) == text


def test_a_sentence_that_ends_with_the_sentence_of_an_error_has_one_period():
    assert one_period("It failed: no disk.. Free one..") == "It failed: no disk. Free one."
    assert one_period("runs/.../a and ../b wait ... for 1..2") == "runs/.../a and ../b wait ... for 1..2"
