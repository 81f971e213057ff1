"""What passes and what is refused; that constructors ask is tested beside each."""

import math

import pytest

from lightrl.checks.bounds import check_bounds, check_positive


def test_a_number_on_its_bound_and_none_pass() -> None:
    check_bounds(0, 1, lowest=0, highest=1, none=None)
    check_bounds(1, unbounded=math.inf)


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        pytest.param(-1, (0,), r"^gamma must be >= 0, got -1\.$", id="below the only bound"),
        pytest.param(-1, (0, 1), r"^gamma must be between 0 and 1, got -1\.$", id="below"),
        pytest.param(1.5, (0, 1), r"^gamma must be between 0 and 1, got 1\.5\.$", id="above"),
        pytest.param(math.nan, (0,), r"^gamma must be >= 0, got nan\.$", id="no number"),
    ],
)
def test_what_is_beyond_a_bound_is_refused_by_its_name(value: float, bounds: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_bounds(*bounds, lam=0.5, gamma=value)


@pytest.mark.parametrize("value", [0, -1.5, math.inf, math.nan])
def test_what_is_no_positive_finite_number_is_refused_by_its_name(value: float) -> None:
    check_positive(timeout_s=0.5, none=None)
    with pytest.raises(ValueError, match=rf"^delay_s must be a finite number above 0, got {value}\.$"):
        check_positive(timeout_s=0.5, delay_s=value)
