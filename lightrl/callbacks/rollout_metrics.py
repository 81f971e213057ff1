"""RolloutMetrics: metrics for each iteration that show whether and how fast a run learns.

Shapes: B trajectories, T tokens. Every name ends in a unit; a `_fraction` is a share of trajectories (0 to 1) unless
stated otherwise. The metrics come from one iteration's groups, which every rank has, so nothing is reduced.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.loops.evaluation_loop import RestartStage
from torchmetrics import Metric

from lightrl.callbacks.progress import SHORT_NAMES
from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.bounds import check_bounds
from lightrl.checks.printable import count_text
from lightrl.data.mixture import by_source
from lightrl.experience import Experience
from lightrl.models.routes import RouteLayout, load_entropy
from lightrl.module import RLModule
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.trajectory import Group, JsonObject

log = logging.getLogger(__name__)

THROWN_AWAY = {
    "thrown_away_tokens": "rollout/dropped_length_tokens",
    "thrown_away_correct": "rollout/dropped_accuracy_fraction",
}


class RolloutMetrics(RLCallback):
    """Logs every iteration's rewards, lengths, staleness and times, and warns when there is nothing to learn.

    If all trajectories in a group get the same reward, their advantages are 0, and the policy learns nothing from the
    group. `rollout/zero_variance_fraction` is the share of these groups. If it is 1 for several iterations in a row,
    one warning explains why; another can follow only after the share has fallen. Groups of one trajectory do not count.

    When the number of failures doubles, a warning quotes the last one. See docs/reference/metrics.md for the metrics.

    Args:
        zero_variance_patience: iterations in a row without any reward variance before the warning.
        metrics: your own metrics, by name: `update` gets the iteration's groups, `compute` returns the number to log.
            They are reset after every iteration.
    """

    def __init__(self, zero_variance_patience: int = 3, *, metrics: dict[str, Metric] | None = None) -> None:
        check_bounds(1, zero_variance_patience=zero_variance_patience)
        self.zero_variance_patience = zero_variance_patience
        self.metrics = dict(metrics or {})
        for metric in self.metrics.values():
            metric.distributed_available_fn = lambda: False  # no reduction: each rank updates it with all groups
        self._num_flat_iterations = 0  # iterations in a row without variance in any group
        self._groups: list[Group] = []  # groups of this iteration
        self._num_dropped: Counter[str] = Counter()  # reason → number; 0 for reasons of earlier iterations
        self._num_failed = 0  # failed trajectories in this fit
        self._warns_at = 1  # number of failed trajectories at which the next warning is due
        self._last_failure = ""
        self._num_skipped = 0.0  # prompts skipped in this fit up to the last iteration
        self._thrown_away = MeansSince()
        self._route_layout: RouteLayout | None = None  # experts of this fit's policy
        self._num_generated_tokens = 0
        self._num_loss_tokens = 0
        self._rollout_ended_s: float | None = None  # monotonic clock
        self._is_resumed = False  # the first groups were generated before this fit
        self._validated_at: int | None = None  # the iteration after which a fit last validated
        self._overlapped_s: float | None = None  # from the end of the last rollout to the end of this one

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._num_failed, self._warns_at = 0, 1
        self._num_skipped = 0.0
        self._route_layout = None
        self._thrown_away = MeansSince()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._is_resumed, self._rollout_ended_s = trainer.global_step > 0, None
        epoch_loop = trainer.fit_loop.epoch_loop
        if trainer.fit_loop.restarting:
            total: Any = epoch_loop.batch_progress.total
            total.ready = total.started = total.processed  # Lightning would count an interrupted iteration twice
            if self._validated_at not in (None, trainer.global_step):
                # Lightning would skip a validation that was due when the checkpoint was saved
                epoch_loop.val_loop.batch_progress.reset_on_run()
                epoch_loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validated_at = trainer.global_step

    def on_rollout_start(self, trainer: RLTrainer, module: RLModule) -> None:
        self._num_loss_tokens = 0

    def on_trajectory_dropped(self, trainer: RLTrainer, module: RLModule, reason: str, message: str) -> None:
        if trainer.training:
            self._num_dropped[reason] += 1
            if reason == "rollout" or reason.startswith("reward_"):
                self._num_failed += 1
                self._last_failure = message

    def on_rollout_end(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        now = time.monotonic()
        self._overlapped_s = None if self._rollout_ended_s is None else now - self._rollout_ended_s
        self._rollout_ended_s = now

    def on_rewards_ready(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        values = reward_metrics(groups)
        for suffix, part in by_source(group for group in groups if group.trajectories).items():
            values |= {f"{name}{suffix}": value for name, value in reward_metrics(part).items()}
        values["rollout/dropped_trajectories"] = float(sum(self._num_dropped.values()))
        for reason, num in self._num_dropped.items():
            values[f"rollout/dropped_trajectories_{reason}"] = float(num)
        if self._num_failed >= self._warns_at:
            self._warn_of_failures(trainer)
        self._num_dropped = Counter(dict.fromkeys(self._num_dropped, 0))
        progress = trainer.rollout.progress()
        num_skipped = progress["skipped_prompts"]
        if num_skipped:
            values["rollout/skipped_prompts"] = float(num_skipped - self._num_skipped)
        self._num_skipped = num_skipped
        values |= self._thrown_away.means(progress, "thrown_away_trajectories", THROWN_AWAY)
        if "rollout/accuracy_fraction" not in values:
            values.pop("rollout/dropped_accuracy_fraction", None)
        for name, metric in self.metrics.items():
            metric.update(groups)
            values[name] = float(metric.compute())
            metric.reset()
        _log(module, values)
        self._groups = groups

    def _warn_of_failures(self, trainer: RLTrainer) -> None:
        self._warns_at = 2 * self._num_failed
        if trainer.is_global_zero:
            log.warning(
                "Dropped trajectories of iteration %d: %s (%d failed so far). The last failure: %s",
                trainer.weight_version + 1,
                ", ".join(f"{num} {reason}" for reason, num in self._num_dropped.items() if num),
                self._num_failed,
                self._last_failure,
            )

    def on_experience_ready(self, trainer: RLTrainer, module: RLModule, experience: Experience) -> None:
        self._num_generated_tokens = int(experience.generated_token_counts.sum())
        values = experience_metrics(experience, trainer.weight_version)
        for suffix, part in by_source(self._groups).items():
            rows = torch.isin(experience.group_ids, torch.tensor([group.id for group in part]))
            if rows.any():
                lengths = experience.generated_token_counts[rows].double()
                values[f"rollout/length_tokens{suffix}"] = float(lengths.mean())
        local = experience.local
        if local.routes is not None:
            policy: Any = module.policy
            self._route_layout = self._route_layout or RouteLayout.of(policy.config)
            if self._route_layout is not None:
                load = experience.total(self._route_layout.load(local.routes[local.loss_mask]))
                if load.any():
                    values["rollout/expert_load_entropy_nats"] = load_entropy(load)
        _log(module, values)

        # Advantages may be nonzero although no group has variance, for example relative to the batch mean. With a
        # teacher's top-k tokens, the policy is trained without advantages.
        advantages = None if "teacher_topk_ids" in local.extras else local.advantages
        can_learn = advantages is None or bool(experience.total(advantages[local.loss_mask].any().int(), "max"))
        comparable = _comparable(self._groups)
        is_flat = not can_learn and bool(comparable) and all(_is_flat(group) for group in comparable)
        self._num_flat_iterations = self._num_flat_iterations + 1 if is_flat else 0
        if self._num_flat_iterations == self.zero_variance_patience and trainer.is_global_zero:
            log.warning(explain_zero_variance(self._groups, self._num_flat_iterations))

    def on_minibatch_start(
        self, trainer: RLTrainer, module: RLModule, minibatch: Experience, index: int, total: int
    ) -> None:
        self._num_loss_tokens += minibatch.num_loss_tokens

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self._rollout_ended_s is None:
            return  # a plain LightningModule
        rl_trainer = cast("RLTrainer", trainer)
        seconds = rl_trainer.phase_seconds
        values = {f"time/{phase}_s": phase_s for phase, phase_s in seconds.items()}
        generation_s = seconds.get("rollout")
        if rl_trainer.rollout.settings.max_staleness > 0:
            values["time/straggler_wait_s"] = rl_trainer.rollout.progress()["straggler_wait_s"]
            if self._overlapped_s is not None or self._is_resumed:
                generation_s = self._overlapped_s
        if generation_s and not rl_trainer.rollout.is_recorded:
            values["rollout/tokens_per_s"] = self._num_generated_tokens / generation_s
        if seconds.get("update"):
            values["update/tokens_per_s"] = self._num_loss_tokens / seconds["update"]
        _log(pl_module, values)

    def state_dict(self) -> JsonObject:
        return {"num_flat_iterations": self._num_flat_iterations, "validated_at": self._validated_at or 0}

    def load_state_dict(self, state_dict: JsonObject) -> None:
        self._num_flat_iterations = state_dict["num_flat_iterations"]
        self._validated_at = state_dict.get("validated_at")


class MeansSince:
    """Computes means of the values added to running sums since the last call."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def means(self, sums: Mapping[str, float], count: str, names: Mapping[str, str]) -> dict[str, float]:
        """Returns metric → mean, where `names` maps sums to metrics; empty if `count` has not changed."""
        added = {name: sums.get(name, 0) - self._before.get(name, 0) for name in (count, *names)}
        self._before |= {name: sums.get(name, 0) for name in added}
        return {metric: added[name] / added[count] for name, metric in names.items()} if added[count] else {}


def reward_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """Returns the metrics for one iteration's rewards, by name; raises ValueError if there is no trajectory."""
    groups = list(groups)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        raise ValueError("There are no trajectories: every group in this iteration was dropped.")
    named: defaultdict[str, list[float]] = defaultdict(list)
    rewards: list[Any] = []  # never None: the rollout hands over only trajectories with rewards
    for trajectory in trajectories:
        rewards.append(trajectory.reward)
        for name, value in trajectory.metrics.items():
            named["accuracy_fraction" if name == "accuracy" else name].append(value)
    comparable = _comparable(groups)
    flat = {"rollout/zero_variance_fraction": statistics.fmean(map(_is_flat, comparable))} if comparable else {}
    return {
        "rollout/reward": statistics.fmean(rewards),  # first, because a narrow terminal cuts Lightning's bar
        **{f"rollout/{name}": statistics.fmean(values) for name, values in named.items()},
        "rollout/reward_std": float(torch.tensor(rewards).std(correction=0)),
        **flat,
    }


def experience_metrics(experience: Experience, weight_version: int) -> dict[str, float]:
    """Returns metrics for length, truncation, mixed versions and staleness; the policy is at `weight_version`."""
    num_generated = experience.generated_token_counts
    oldest, newest = experience.version_bounds
    is_mixed = (num_generated > 0) & (oldest < newest)
    staleness = (weight_version - oldest)[num_generated > 0].double()
    values = {
        "rollout/length_tokens": float(num_generated.double().mean()),
        "rollout/truncated_fraction": float(experience.is_truncated.double().mean()),
        "rollout/mixed_version_fraction": float(is_mixed.double().mean()),
    }
    if "reward_model_scores" in experience.extras:
        values["rollout/reward_model"] = float(experience["reward_model_scores"].double().mean())
    if len(staleness):
        values["staleness/mean_versions"] = float(staleness.mean())
        values["staleness/max_versions"] = float(staleness.max())
    return values


def explain_zero_variance(groups: Iterable[Group], num_iterations: int) -> str:
    """Explains why no group of two or more has reward variance, and what to try."""
    groups = _comparable(groups)
    rewards: list[Any] = [group.trajectories[0].reward for group in groups]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    correct_fraction = statistics.fmean(trajectory.accuracy for trajectory in trajectories)
    cut_fraction = statistics.fmean(trajectory.finish_reason == "length" for trajectory in trajectories)
    problem = (
        f"No group has had any reward variance for {count_text(num_iterations, 'iteration')} ({len(groups)} groups of "
        "two or more): within a group every trajectory got the same reward"
    )
    effect = "All advantages are 0, so without a KL term the gradient is 0 and the policy learns nothing. "
    if cut_fraction >= 0.9 and correct_fraction < 0.5:
        problem += f"; {cut_fraction:.0%} were cut at the length limit, so no reward or environment saw how they end"
        advice = "Increase model.sampling.max_new_tokens, or check the stop tokens that the run prints at its start."
    elif all(len({tuple(item.completion_ids) for item in group.trajectories}) == 1 for group in groups):
        problem += " because all completions are the same"
        advice = (
            "Sampling does not explore: increase the temperature, check policy/entropy_nats, or lower the learning "
            "rate."
        )
    elif min(rewards) != max(rewards):
        problem += f" (between {min(rewards):g} and {max(rewards):g})"
        advice = "Each prompt is always or never solved: use prompts of medium difficulty, or increase group_size."
    elif correct_fraction < 0.5:
        advice = (
            f"All fail, with reward {rewards[0]:g}: the task is too hard for this policy, or the reward or the answer "
            "format is broken. Read completions in the trajectory log, try the reward function on a correct answer, "
            "start with easier prompts, give partial rewards, or train with SFT first."
        )
    else:
        advice = f"All succeed, with reward {rewards[0]:g}: the task is too easy or already solved. Use harder prompts."
    return f"{problem}. {effect}{advice}"


def _log(module: L.LightningModule, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        module.log(name, value, prog_bar=name in SHORT_NAMES, on_step=True, on_epoch=False)


def _comparable(groups: Iterable[Group]) -> list[Group]:
    return [group for group in groups if len(group.trajectories) >= 2]


def _is_flat(group: Group) -> bool:
    rewards = [trajectory.reward for trajectory in group.trajectories]
    return rewards.count(rewards[0]) == len(rewards)
