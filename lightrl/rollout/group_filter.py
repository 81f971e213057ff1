"""GroupFilter: which judged groups are not worth an update, and why.

A group teaches by the differences between its trajectories. One whose rewards are all equal has no advantages: it fills
a place in the iteration and gives no gradient. DAPO's dynamic sampling drops such groups and draws new prompts instead.

Source: DAPO, https://arxiv.org/abs/2503.14476.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightrl.trajectory import Group

# By reason: what mends a run in which too many groups are dropped for it.
ADVICE = {
    "filtered_zero_variance": "raise group_size or the temperature, or take prompts of middling difficulty",
    "filtered_too_hard": "lower min_success, or take easier prompts",
    "filtered_too_easy": "raise max_success, or take harder prompts",
    "filtered_too_long": "raise max_group_tokens, or lower max_new_tokens",
    "incomplete": "mend what makes trajectories fail, or train on incomplete groups",
    "failed": "mend what makes trajectories fail",
}
OTHER_ADVICE = "loosen the rule"


@dataclass(frozen=True)
class GroupFilter:
    """Called with each judged group; says why it is to be dropped, as (reason, message), or None to keep it.

    Dropping changes what is learnt. Without groups that always succeed or always fail the mean reward of what is
    trained on no longer tells how good the policy is (validation does), and a bound on tokens favors short completions.
    """

    drop_zero_variance: bool = True  # all trajectories of the group have the same reward
    min_success: float = 0.0  # of the group's share of right trajectories, 0 to 1
    max_success: float = 1.0
    max_group_tokens: int | None = None  # of the longest trajectory, prompt not counted
    rule: Callable[[Group], Any] | None = None  # a word or True drops the group; None, False or "" keeps it

    def __post_init__(self) -> None:
        if not 0 <= self.min_success <= self.max_success <= 1:
            raise ValueError(
                f"min_success={self.min_success} and max_success={self.max_success}, expected 0 <= min_success <= "
                "max_success <= 1. Mend them."
            )
        if self.max_group_tokens is not None and self.max_group_tokens < 1:
            raise ValueError(f"max_group_tokens={self.max_group_tokens}, expected at least 1 or None. Raise it.")

    def __call__(self, group: Group) -> tuple[str, str] | None:
        """What the first rule that the group breaks is called, and the group against it; None if it breaks none."""
        rewards = [trajectory.reward for trajectory in group.trajectories]
        success = success_rate(group)
        longest = max(sum(trajectory.loss_mask) for trajectory in group.trajectories)
        name = f"Group {group.id} of prompt {group.prompt.id!r}"
        if success < self.min_success:
            return "filtered_too_hard", f"{name} succeeds in {success:.2f}, below min_success={self.min_success}."
        if success > self.max_success:
            return "filtered_too_easy", f"{name} succeeds in {success:.2f}, above max_success={self.max_success}."
        if self.drop_zero_variance and rewards.count(rewards[0]) == len(rewards):
            return "filtered_zero_variance", f"{name} got reward {rewards[0]:g} in all {len(rewards)} trajectories."
        if self.max_group_tokens is not None and longest > self.max_group_tokens:
            return (
                "filtered_too_long",
                f"{name} wrote {longest} tokens, above max_group_tokens={self.max_group_tokens}.",
            )
        verdict = self.rule(group) if self.rule is not None else None
        if not verdict:
            return None
        return f"filtered_{verdict if isinstance(verdict, str) else 'rule'}", f"{name} breaks the rule given."


def success_rate(group: Group) -> float:
    """The share of right trajectories, 0 to 1: the mean accuracy of those that were judged, of which there is one."""
    return sum(trajectory.accuracy for trajectory in group.trajectories) / len(group.trajectories)
