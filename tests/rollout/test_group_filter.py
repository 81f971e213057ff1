"""GroupFilter: each rule by hand."""

from typing import Any

import pytest

from lightrl.rollout import GroupFilter
from lightrl.testing import make_groups
from lightrl.trajectory import Group


def group(*rewards: float, num_tokens: int = 2) -> Group:
    return make_groups([rewards], completion_ids=(9,) * num_tokens)[0]


@pytest.mark.parametrize(
    ("settings", "rewarded", "reason"),
    [
        pytest.param({}, group(0.0, 1.0), None, id="rewards that differ"),
        pytest.param({}, group(0.5, 0.5, 0.5), "filtered_zero_variance", id="rewards that are all equal"),
        pytest.param({"drop_zero_variance": False}, group(0.5, 0.5), None, id="equal, and that may be"),
        pytest.param({"min_success": 0.5}, group(0.0, 0.2, 1.0), "filtered_too_hard", id="a third succeeds"),
        pytest.param({"max_success": 0.6}, group(0.0, 1.0, 1.0), "filtered_too_easy", id="two thirds succeed"),
        pytest.param({"min_success": 0.5, "max_success": 0.5}, group(0.0, 1.0), None, id="just at both bounds"),
        pytest.param({"max_group_tokens": 5}, group(0.0, 1.0, num_tokens=6), "filtered_too_long", id="too long"),
        pytest.param({"max_group_tokens": 5}, group(0.0, 1.0, num_tokens=5), None, id="just as long as may be"),
        pytest.param({"rule": lambda rewarded: "dull"}, group(0.0, 1.0), "filtered_dull", id="a word of the user's"),
        pytest.param({"rule": lambda rewarded: rewarded.id == 0}, group(0.0, 1.0), "filtered_rule", id="a yes"),
        pytest.param({"rule": lambda rewarded: None}, group(0.0, 1.0), None, id="nothing from the user's rule"),
    ],
)
def test_reason(settings: dict[str, Any], rewarded: Group, reason: str | None) -> None:
    dropped = GroupFilter(**settings)(rewarded)
    assert (dropped[0] if dropped else None) == reason
    assert dropped is None or "'prompt-0'" in dropped[1]


def test_success_is_the_accuracy_that_the_reward_gives_where_it_gives_one() -> None:
    rewarded = group(0.1, 0.2)
    for trajectory in rewarded.trajectories:
        trajectory.metrics["accuracy"] = 1.0
    dropped = GroupFilter(max_success=0.9)(rewarded)
    assert dropped is not None
    assert dropped[0] == "filtered_too_easy"


@pytest.mark.parametrize(
    "settings", [{"min_success": 0.7, "max_success": 0.5}, {"max_success": 2}, {"min_success": -1}]
)
def test_bounds_that_no_group_can_keep_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="min_success"):
        GroupFilter(**settings)
    with pytest.raises(ValueError, match="max_group_tokens"):
        GroupFilter(max_group_tokens=0)
