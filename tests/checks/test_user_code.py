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
        pytest.param("nowhere.floor", r"rule='nowhere\.floor' cannot be imported: No module named", id="no module"),
        pytest.param("math.flor", r"rule='math\.flor' cannot be imported: .*no attribute 'flor'", id="no such name"),
        pytest.param("floor", r"rule='floor' cannot be imported: .*Use a dotted path", id="no dot"),
        pytest.param("math.pi", r"rule='math\.pi' must be a function, got 3\.14", id="no function"),
    ],
)
def test_other_paths_are_refused_with_the_settings_name(path: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        function_of(path, "rule")
