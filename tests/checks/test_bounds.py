"""What passes and what is refused; that constructors ask is tested beside each."""

from __future__ import annotations

import math

import pytest

from lightrl.checks.bounds import check_bounds


def test_a_number_on_its_bound_and_none_pass() -> None:
    check_bounds(0, 1, lowest=0, highest=1, none=None)
    check_bounds(1, unbounded=math.inf)


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        pytest.param(-1, (0,), r"^gamma=-1, expected at least 0\. Raise it\.$", id="below the only bound"),
        pytest.param(-1, (0, 1), r"^gamma=-1, expected 0 to 1\. Raise it\.$", id="below"),
        pytest.param(1.5, (0, 1), r"^gamma=1\.5, expected 0 to 1\. Lower it\.$", id="above"),
        pytest.param(math.nan, (0,), r"^gamma=nan, expected at least 0\. Give a number\.$", id="no number"),
    ],
)
def test_what_is_beyond_a_bound_is_refused_by_its_name(value: float, bounds: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_bounds(*bounds, lam=0.5, gamma=value)
