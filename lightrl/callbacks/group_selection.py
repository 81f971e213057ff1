"""DynamicSampling selects groups by their rewards, PromptCurriculum selects prompts by their past success."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.callbacks.rollout_metrics import MeansSince
from lightrl.checks.bounds import check_bounds, check_choice
from lightrl.checks.user_code import function_of
from lightrl.module import RLModule
from lightrl.rollout import Curriculum, GroupFilter, RolloutSettings
from lightrl.trajectory import Group, JsonMapping, JsonObject

if TYPE_CHECKING:
    import lightning as L

    from lightrl.rollout.rl_trainer import RLTrainer


class DynamicSampling(RLCallback):
    """Drops groups by rules and replaces them with rollouts of new prompts, so that every iteration has P groups.

    `on_trajectory_dropped` is called for each dropped trajectory, with the reason: `filtered_zero_variance`,
    `filtered_too_hard`, `filtered_too_easy`, `filtered_too_long`, `filtered_<word of the rule>`, `incomplete` or
    `oversampled`. On-policy, replacements start together after all earlier groups are done, so a run stays
    reproducible. An iteration then costs more rollouts, and an epoch over the data lasts fewer iterations.

    Over-sampling starts `oversample_fraction`·P more groups than needed, so that an iteration waits only for the
    fastest P groups. It is biased: long completions are dropped more often, which alone can teach the policy to be
    short; watch `rollout/length_tokens`. On-policy, groups still in flight when P are done are dropped, so the run is
    not reproducible bit for bit. With `max_staleness` > 0, only groups that would delay a batch are dropped; their
    prompts come again in the next epoch.

    Source: DAPO, https://arxiv.org/abs/2503.14476.

    Args:
        drop_zero_variance: drop a group whose trajectories all have the same reward.
        min_success, max_success: drop a group whose share of correct trajectories, 0 to 1, is outside these bounds. A
            trajectory is correct if its `accuracy` metric says so or, without that metric, if its reward is at least 1.
        max_group_tokens: drop a group if a trajectory has more generated tokens than this; None for no limit.
        rule: a function of a Group, or its dotted path. It returns True or a one-word reason to drop the group, and
            None or False to keep it. It runs on the rollout's event loop, so it must be fast.
        incomplete_groups: what happens to a group that lost a trajectory, for example because its reward raised:
            `train` on the others, `resample` the group with new seeds, at most three times, or `drop` it.
        oversample_fraction: extra groups to start, as a fraction of P; see above.
        max_dropped_groups_per_iteration: if more groups are dropped in one iteration, the run ends with an error that
            lists the reasons; None means 10·P.
    """

    is_single = True

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

    def before_fit(self, trainer: RLTrainer, module: Any, data: Any) -> None:
        if not self.group_filter.drop_zero_variance or not isinstance(module, RLModule):
            return
        tasks = getattr(data, "tasks", None)
        if min([module.group_size, *(tasks.group_sizes.values() if tasks else ())]) < 2:
            raise ValueError(
                "With group_size=1, DynamicSampling.drop_zero_variance drops every group. Set group_size to 2 or more, "
                "or drop_zero_variance to false."
            )
        if not module.has_rollout_reward:
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


class SuccessRateCurriculum:
    """Weights a prompt by the success rate of its past groups.

    A group's advantages come from differences between its trajectories. With rewards 0 and 1, their variance at success
    rate r is r·(1 - r), which is largest at 1/2. A prompt's weight is the probability that it is sampled when its turn
    comes, once per epoch: 1 at the rate `target`, falling linearly to `floor` at the rates 0 and 1. Implements
    `lightrl.rollout.Curriculum`.

    Args:
        target: the success rate with the highest weight, 0 to 1.
        floor: the lowest weight, so that prompts that are still too hard are tried again.
        solved_times: drop a prompt when its whole group has solved it this many times in a row; None means never.
        memory: weight of earlier groups in the success rate, from 0 (only the last group counts) to below 1.
    """

    def __init__(
        self, *, target: float = 0.5, floor: float = 0.1, solved_times: int | None = 3, memory: float = 0.5
    ) -> None:
        check_bounds(0, 1, target=target, floor=floor)
        check_bounds(0, 0.999, memory=memory)
        check_bounds(1, solved_times=solved_times)
        self.target, self.floor = target, floor
        self.solved_times, self.memory = solved_times, memory
        self._rates: dict[str, float] = {}  # prompt id → exponential moving average of its groups' success rates
        self._num_solved: dict[str, int] = {}  # prompt id → times solved in a row; absent if not solved last time

    def weight(self, prompt_id: str) -> float:
        """Returns 1 for a new prompt, 0 for a solved one, otherwise a weight between `floor` and 1."""
        if self.solved_times is not None and self._num_solved.get(prompt_id, 0) >= self.solved_times:
            return 0.0
        if prompt_id not in self._rates:
            return 1.0
        rate = self._rates[prompt_id]
        farthest = self.target if rate < self.target else 1 - self.target
        distance = abs(rate - self.target) / farthest if farthest else 0.0
        return 1.0 - (1.0 - self.floor) * distance

    def success_rate(self, prompt_id: str) -> float | None:
        """Returns the exponential moving average of the success rates of a prompt's groups; None for a new prompt."""
        return self._rates.get(prompt_id)

    def observe(self, prompt_id: str, success_rate: float) -> None:
        """Adds the success rate of one of this prompt's groups."""
        past = self._rates.get(prompt_id, success_rate)
        self._rates[prompt_id] = self.memory * past + (1 - self.memory) * success_rate
        if success_rate < 1:
            self._num_solved.pop(prompt_id, None)
        else:
            self._num_solved[prompt_id] = self._num_solved.get(prompt_id, 0) + 1

    def state_dict(self) -> JsonObject:
        return {"rates": dict(self._rates), "num_solved": dict(self._num_solved)}

    def load_state_dict(self, state: JsonMapping) -> None:
        self._rates = dict(state["rates"])
        self._num_solved = dict(state["num_solved"])


class PromptCurriculum(RLCallback):
    """Skips prompts by their past success, so that iterations consist of prompts from which the policy can learn.

    In each epoch, a prompt runs with the probability that the curriculum assigns it. Prompts keep the order of the
    stream, and an epoch lasts fewer iterations than the loader reports. Checkpoints contain the curriculum's state, so
    a resumed run chooses the same prompts. If the curriculum has a `success_rate` method, past success is logged.

    Args:
        curriculum: any object with the methods of `lightrl.rollout.Curriculum`; None uses SuccessRateCurriculum().
    """

    is_single = True

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
