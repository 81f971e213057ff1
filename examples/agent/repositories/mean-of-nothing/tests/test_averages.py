import unittest

from averages import mean


class MeanTest(unittest.TestCase):
    def test_numbers(self):
        assert mean([1, 2, 6]) == 3.0

    def test_nothing(self):
        assert mean([]) == 0.0
