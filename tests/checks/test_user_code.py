"""Functions by dotted path: found, or refused with the name of the setting."""

import math

import pytest

from lightrl.checks.user_code import function_of


def test_a_path_gives_the_function_and_a_function_is_itself():
    assert function_of("math.floor", "rule") is math.floor
    assert function_of(math.floor, "rule") is math.floor


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        pytest.param("nowhere.floor", r"rule='nowhere\.floor': there is no module 'nowhere'", id="no module"),
        pytest.param("math.flor", r"rule='math\.flor': 'math' has no 'flor'\. Did you mean 'floor'", id="no such name"),
        pytest.param("floor", "rule='floor' must be a dotted path such as", id="no dot"),
        pytest.param("math.pi", r"rule='math\.pi' is of type float; it must be a function", id="no function"),
    ],
)
def test_other_paths_are_refused_with_the_settings_name(path: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        function_of(path, "rule")
