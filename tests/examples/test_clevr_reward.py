import pytest
from reward_functions import trajectory_that

from examples.vision.counting import reward


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        *[("3", "3", 1.0), ("[3]", "[3]", 1.0), ("There are 2 cubes and 1 sphere, so the answer is [3].", "[3]", 1.0)],
        *[("There are [3], or perhaps 4.", "[3]", 0.0), ("[13]", "[3]", 0.0), ("three", "[3]", 0.0)],
    ],
)
def test_the_last_number_is_the_answer(completion, answer, expected):
    assert reward(trajectory_that(completion, answer=answer)) == expected
