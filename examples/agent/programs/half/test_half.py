"""Run as `python3 test_half.py`."""

from half import half

assert half(4) == 2
