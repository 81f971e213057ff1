"""GroupFilter: which groups are, by their rewards, not worth an update, and why.

A group teaches by the differences between its trajectories. One whose rewards are all equal has no advantages: it takes
up a place in the iteration and gives no gradient. DAPO's dynamic sampling drops such groups and samples new prompts.

Source: DAPO, https://arxiv.org/abs/2503.14476.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightrl.checks.bounds import check_bounds
from lightrl.trajectory import Group

# By reason: how to fix a run in which too many groups are dropped for it.
ADVICE = {
    "filtered_zero_variance": "increase group_size or the temperature, or use prompts of medium difficulty",
    "filtered_too_hard": "lower min_success, or use easier prompts",
    "filtered_too_easy": "increase max_success, or use harder prompts",
    "filtered_too_long": "increase max_group_tokens, or lower max_new_tokens",
    "incomplete": "fix what makes trajectories fail, or train on incomplete groups",
    "failed": "fix what makes trajectories fail",
}
OTHER_ADVICE = "loosen the rule"


@dataclass(frozen=True)
class GroupFilter:
    """Called with each group that has its rewards; returns why to drop it, as (reason, message), or None to keep it.

    Dropping changes what is learned. Without groups that always succeed or always fail, the mean training reward no
    longer tells how good the policy is (validation does), and a bound on tokens favors short completions.
    """

    drop_zero_variance: bool = True  # all trajectories of the group have the same reward
    min_success: float = 0.0  # bounds on the group's success rate, 0 to 1
    max_success: float = 1.0
    max_group_tokens: int | None = None  # of the longest trajectory, prompt not counted
    rule: Callable[[Group], Any] | None = None  # a word or True drops the group; None, False or "" keeps it

    def __post_init__(self) -> None:
        check_bounds(1, max_group_tokens=self.max_group_tokens)
        if not 0 <= self.min_success <= self.max_success <= 1:
            bounds = f"min_success={self.min_success} and max_success={self.max_success}"
            raise ValueError(f"0 <= min_success <= max_success <= 1 must hold, got {bounds}.")

    def __call__(self, group: Group) -> tuple[str, str] | None:
        """The reason and message of the first rule that drops the group; None if no rule does."""
        rewards = [trajectory.reward for trajectory in group.trajectories]
        success = success_rate(group)
        longest = max(trajectory.num_loss_tokens for trajectory in group.trajectories)
        name = f"Group {group.id} of prompt {group.prompt.id!r}"
        if success < self.min_success:
            return "filtered_too_hard", f"{name} has success rate {success:.2f}, below min_success={self.min_success}."
        if success > self.max_success:
            return "filtered_too_easy", f"{name} has success rate {success:.2f}, above max_success={self.max_success}."
        if self.drop_zero_variance and rewards.count(rewards[0]) == len(rewards):
            return "filtered_zero_variance", f"{name} got reward {rewards[0]:g} in all {len(rewards)} trajectories."
        if self.max_group_tokens is not None and longest > self.max_group_tokens:
            bound = f"max_group_tokens={self.max_group_tokens}"
            return "filtered_too_long", f"{name} has a trajectory of {longest} tokens, above {bound}."
        reason = self.rule(group) if self.rule is not None else None
        if not reason:
            return None
        return f"filtered_{reason if isinstance(reason, str) else 'rule'}", f"{name} is dropped by the rule."


def success_rate(group: Group) -> float:
    """The mean accuracy of the group's trajectories, 0 to 1; there must be at least one."""
    return sum(trajectory.accuracy for trajectory in group.trajectories) / len(group.trajectories)
