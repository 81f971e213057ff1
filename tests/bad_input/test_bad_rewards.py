"""What reward functions return with an error: the trajectory is dropped with one message that names the prompt."""

import pytest
import tiny
from bad_input_rows import each, row

from lightrl.errors import RewardError
from lightrl.rewards import RewardResult

pytestmark = pytest.mark.bad_input

HERE = "prompt "

REWARDS = [
    row("reward: nothing", None, "must return a number, or a dict of numbers", HERE, "its return value is None (NoneType)"),
    row("reward: a text", "1", HERE, "its return value is '1' (str)"),
    row("reward: NaN", float("nan"), HERE, "its return value is nan. It must be finite", "division by zero"),
    row("reward: 1e300", 1e300, HERE, "1e+300. It must be at most 1e+15", "overflow"),
    row("reward: an empty dict", {}, HERE, 'needs the key "reward" or "rewards"'),
    row("reward: a dict without reward", {"accuracy": 1.0}, "['accuracy']", 'needs the key "reward" or "rewards"'),
    row("reward: a dict of 10^5 names", {"reward": 1.0, **dict.fromkeys(map(str, range(10**5)), 1.0)}, "100,001 names", HERE, "at most 1,000"),
    row("reward: a name that is a number", {"reward": 1.0, 3: 1.0}, "the key 3", "must be strings"),
    row("reward: a metric that is a text", {"reward": 1.0, "note": "good"}, "'note' is 'good' (str)"),
    row("reward: a metric of NaN", {"reward": 1.0, "note": float("nan")}, "'note' is nan"),
    row("reward: 10^6 rewards per token", {"rewards": [1.0] * 10**6}, HERE, "rewards"),
    row("reward: one number for rewards per token", {"rewards": 1.0}, HERE, "rewards"),
    row("reward: reward and rewards that differ", {"reward": 5.0, "rewards": "zeros"}, HERE, "Return one of the two"),
]  # fmt: skip


@each(REWARDS)
def test_a_return_value_is_refused(case):
    trajectory = tiny.random_trajectories()[0]
    given = case.given
    if isinstance(given, dict) and given.get("rewards") == "zeros":
        given = {**given, "rewards": [0.0] * len(trajectory.token_ids)}
    with pytest.raises(RewardError) as caught:
        RewardResult.of(given, trajectory)
    case.check(str(caught.value))
    assert len(str(caught.value)) < 2000
