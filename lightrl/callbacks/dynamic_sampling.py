"""DynamicSampling chooses groups to train on by their rewards; PromptCurriculum chooses prompts by past success."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.callbacks.rollout_metrics import MeansSince
from lightrl.checks.bounds import check_bounds, check_choice
from lightrl.checks.user_code import function_of
from lightrl.data import SuccessRateCurriculum
from lightrl.module import RLModule
from lightrl.rollout import Curriculum, GroupFilter, RolloutSettings
from lightrl.trajectory import Group

if TYPE_CHECKING:
    import lightning as L

    from lightrl.rollout.rl_trainer import RLTrainer


class DynamicSampling(RLCallback):
    """Drops groups by rules and rolls out new prompts in their place, so that every iteration has its P groups.

    `on_trajectory_dropped` is called for each dropped trajectory, with the reason: `filtered_zero_variance`,
    `filtered_too_hard`, `filtered_too_easy`, `filtered_too_long`, `filtered_<word of the rule>`, `incomplete` or
    `oversampled`. On-policy, the replacements start together once all groups before them are done, so a run stays
    reproducible. An iteration then costs more rollouts, and an epoch of the data lasts fewer iterations.

    Over-sampling starts `oversample_fraction`·P more groups than needed, so that an iteration waits for the fastest P
    groups and not for the slowest. It is biased: long completions are left out more often, which alone can teach the
    policy to be short; watch `rollout/length_tokens`. On-policy, groups still in flight when P are done are dropped, so
    the run is not reproducible bit for bit. With `max_staleness` > 0, only groups that would delay a batch are dropped;
    their prompts come again in the next epoch.

    Source: DAPO, https://arxiv.org/abs/2503.14476.

    Args:
        drop_zero_variance: drop a group whose trajectories all have the same reward.
        min_success, max_success: drop a group whose share of correct trajectories, 0 to 1, is outside these bounds. A
            trajectory is correct if its metric `accuracy` says so or, without that metric, if its reward is at least 1.
        max_group_tokens: drop a group with a trajectory of more generated tokens than this; None for no limit.
        rule: a function of a Group, or its dotted path. True, or a word as the reason, drops the group; None or
            False keeps it. The function runs on the rollout's event loop, so it must be fast.
        incomplete_groups: what happens to a group that lost a trajectory, for example because its reward raised:
            `train` on the others, `resample` it with new seeds, at most three times, or `drop` it.
        oversample_fraction: extra groups to start, as a fraction of P; see above.
        max_dropped_groups_per_iteration: if more groups are dropped in one iteration, the run ends with an error that
            lists the reasons; None means 10·P.
    """

    def __init__(
        self,
        *,
        drop_zero_variance: bool = True,
        min_success: float = 0.0,
        max_success: float = 1.0,
        max_group_tokens: int | None = None,
        rule: str | Callable[[Group], str | bool | None] | None = None,
        incomplete_groups: Literal["train", "resample", "drop"] = "train",
        oversample_fraction: float = 0.0,
        max_dropped_groups_per_iteration: int | None = None,
    ) -> None:
        check_choice(("train", "resample", "drop"), incomplete_groups=incomplete_groups)
        check_bounds(0, 10, oversample_fraction=oversample_fraction)
        check_bounds(0, max_dropped_groups_per_iteration=max_dropped_groups_per_iteration)
        self.group_filter = GroupFilter(
            drop_zero_variance=drop_zero_variance,
            min_success=min_success,
            max_success=max_success,
            max_group_tokens=max_group_tokens,
            rule=None if rule is None else function_of(rule, "rule"),
        )
        self.incomplete_groups = incomplete_groups
        self.oversample_fraction = oversample_fraction
        self.max_dropped_groups_per_iteration = max_dropped_groups_per_iteration
        self._reasons: set[str] = set()  # drop reasons that have occurred; logged from then on

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit" or not self.group_filter.drop_zero_variance or not isinstance(pl_module, RLModule):
            return
        tasks = getattr(getattr(trainer, "datamodule", None), "tasks", None)
        if min([pl_module.group_size, *(tasks.group_sizes.values() if tasks else ())]) < 2:
            raise ValueError(
                "DynamicSampling.drop_zero_variance drops every group of group_size=1. Set group_size to 2 or more, or "
                "drop_zero_variance to false."
            )
        if not pl_module.has_rollout_reward:
            raise ValueError(
                "DynamicSampling.drop_zero_variance drops every group if a reward model is the only reward, because "
                "it runs after the groups are chosen. Set reward= in addition to reward_model=, or set "
                "drop_zero_variance to false."
            )

    def configure_rollout(self, trainer: RLTrainer, module: RLModule, settings: RolloutSettings) -> RolloutSettings:
        return replace(
            settings,
            group_filter=self.group_filter,
            incomplete_groups=self.incomplete_groups,
            oversample_fraction=self.oversample_fraction,
            max_dropped_groups=self.max_dropped_groups_per_iteration,
        )

    def on_rollout_end(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        drops = trainer.rollout.drain_group_drops()
        self._reasons |= set(drops)
        values: dict[str, float] = {
            f"rollout/dropped_groups_{name}": drops.get(name, 0) for name in sorted(self._reasons)
        }
        values["rollout/dropped_groups"] = sum(drops.values())
        if self.oversample_fraction:
            num_given_up = drops.get("oversampled", 0)
            values["rollout/given_up_fraction"] = num_given_up / (num_given_up + len(groups))
        module.log_dict(values)


class PromptCurriculum(RLCallback):
    """Skips prompts by their past success, so that iterations consist of prompts from which the policy can learn.

    In each epoch, a prompt runs with the probability that the curriculum assigns it. Prompts keep the order of the
    stream, and an epoch lasts fewer iterations than the loader reports. The curriculum's state is part of the
    checkpoint, so a resumed run chooses the same prompts. If it has a method `success_rate`, past success is logged.

    Args:
        curriculum: any object with the methods of `lightrl.rollout.Curriculum`; None uses SuccessRateCurriculum().
    """

    def __init__(self, curriculum: Curriculum | None = None) -> None:
        self.curriculum = SuccessRateCurriculum() if curriculum is None else curriculum
        self._success = MeansSince()

    def configure_rollout(self, trainer: RLTrainer, module: RLModule, settings: RolloutSettings) -> RolloutSettings:
        return replace(settings, curriculum=self.curriculum)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._success = MeansSince()

    def on_rollout_end(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        for kind in ("played", "skipped"):
            names = {f"{kind}_again_success": f"rollout/{kind}_success_fraction"}
            module.log_dict(self._success.means(trainer.rollout.progress(), f"{kind}_again", names))
