"""DynamicSampling: iterations of groups that teach, full size, with the others dropped and replaced by new prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.dotted_path import function_of
from lightrl.rollout import GroupFilter
from lightrl.trajectory import Group

if TYPE_CHECKING:
    import lightning as L


class DynamicSampling(RLCallback):
    """Drops judged groups by rules and draws new prompts for them, so that every iteration has its P groups.

    Each dropped trajectory is told to `on_trajectory_dropped` with the reason: `filtered_zero_variance`,
    `filtered_too_hard`, `filtered_too_easy`, `filtered_too_long`, `filtered_<word of the rule>`, `incomplete`,
    `oversampled`. On-policy the replacements start when all groups before them are in, together, so a run stays
    repeatable. An iteration of the trainer is then worth more rollouts, and an epoch of the data fewer iterations.

    Over-sampling starts `oversample_fraction`·P groups more than needed, so that an iteration waits for the fastest P,
    not for the slowest. It is biased: completions that take long, thus long ones, are left out more often, and the
    policy can learn to be short from that alone; watch `rollout/length_tokens`. On-policy all that is still in flight
    is given up when P groups are done, and which groups those are depends on the clock: such a run is not repeatable to
    the bit. With `max_staleness` > 0 stragglers stay in flight within the staleness bound and only those that would
    hold a batch back are given up; prompts given up come again in the next epoch.

    It logs `rollout/dropped_groups` and `rollout/dropped_groups_<reason>`, since the last iteration.

    Source: DAPO, https://arxiv.org/abs/2503.14476.

    Args:
        drop_zero_variance: drop a group whose trajectories all have the same reward.
        min_success, max_success: drop a group whose share of right trajectories is outside, 0 to 1. A trajectory is
            right by its metric `accuracy`, else by a reward of at least 1.
        max_group_tokens: drop a group in which the policy wrote a trajectory longer than this; None for no bound.
        rule: a function of a judged Group, or its dotted path; a word (the reason) or True drops the group, None or
            False keeps it. It is called on the rollouts' event loop: it must be quick.
        incomplete_groups: what becomes of a group of which a trajectory failed (a reward that raised, say): `train` on
            the others, `redraw` it with new seeds, three times at most, or `drop` it.
        oversample_fraction: of P, above.
        max_dropped_groups_per_iteration: the run ends with an error that says what was dropped if more are dropped for
            one iteration's groups; 10·P if None.
    """

    def __init__(
        self,
        *,
        drop_zero_variance: bool = True,
        min_success: float = 0.0,
        max_success: float = 1.0,
        max_group_tokens: int | None = None,
        rule: str | Callable[[Group], Any] | None = None,
        incomplete_groups: Literal["train", "redraw", "drop"] = "train",
        oversample_fraction: float = 0.0,
        max_dropped_groups_per_iteration: int | None = None,
    ) -> None:
        if incomplete_groups not in ("train", "redraw", "drop"):
            raise ValueError(f"incomplete_groups={incomplete_groups!r}, expected train, redraw or drop. Choose one.")
        if not 0 <= oversample_fraction <= 10:
            raise ValueError(f"oversample_fraction={oversample_fraction}, expected a number from 0 to 10. Mend it.")
        bound = max_dropped_groups_per_iteration
        if bound is not None and bound < 0:
            raise ValueError(f"max_dropped_groups_per_iteration={bound}, expected 0 or more, or None. Raise it.")
        self.group_filter = GroupFilter(
            drop_zero_variance=drop_zero_variance,
            min_success=min_success,
            max_success=max_success,
            max_group_tokens=max_group_tokens,
            rule=None if rule is None else function_of(rule, "rule"),
        )
        self.incomplete_groups = incomplete_groups
        self.oversample_fraction = oversample_fraction
        self.max_dropped_groups_per_iteration = bound
        self._reasons: set[str] = set()  # seen so far; each is logged from then on

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        module: Any = pl_module
        if stage == "fit" and self.group_filter.drop_zero_variance and getattr(module, "group_size", 2) < 2:
            raise ValueError(
                "drop_zero_variance=True drops every group of group_size=1, expected a group_size of 2 or more. Raise "
                "it, or set DynamicSampling.drop_zero_variance to false."
            )
        if stage == "fit" and self.group_filter.drop_zero_variance and not getattr(module, "has_rollout_reward", True):
            raise ValueError(
                "drop_zero_variance=True drops every group where a reward model is all of the reward, for it is asked "
                "when the groups are chosen, expected reward= beside reward_model=. Give one, or set "
                "DynamicSampling.drop_zero_variance to false."
            )

    def on_rollout_end(self, trainer: L.Trainer, module: L.LightningModule, groups: list[Group]) -> None:
        rl_trainer: Any = trainer
        drops: dict[str, int] = rl_trainer.rollout.drain_group_drops()
        self._reasons |= set(drops)
        values = {f"rollout/dropped_groups_{reason}": drops.get(reason, 0) for reason in sorted(self._reasons)}
        values["rollout/dropped_groups"] = sum(drops.values())
        for name, value in values.items():
            module.log(name, float(value), on_step=True, on_epoch=False)
