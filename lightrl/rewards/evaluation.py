"""Validation and test metrics: reward, accuracy, pass@k, lengths, and the reward function's other numbers.

Each is a torchmetrics.Metric over all batches. Every rank has all groups, so nothing is reduced across ranks. This is
the only file in the package that imports torch; workers do not import it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torchmetrics import MeanMetric, Metric, SumMetric

from lightrl.trajectory import Group


@dataclass(eq=False)
class Evaluation:
    """The metrics for a validation or test; Lightning computes and resets them at the end."""

    group_size: int  # requested completions per prompt; more than 1 adds pass@k
    _metrics: dict[tuple[str, str], Metric] = field(default_factory=dict)  # (part, name) → metric

    def update(self, groups: Sequence[Group], custom: Mapping[str, Metric], *, part: str = "0") -> dict[str, Metric]:
        """Updates the metrics for which the batch has numbers, and returns them by name.

        Args:
            groups: the batch, without failed trajectories.
            custom: user metrics; `update` gets groups, `compute` returns a number. Parts other than "0" use copies.
            part: part of the data, such as one of several validation sets; each part has separate metrics.
        """
        updated = {"prompts": self._metrics.setdefault((part, "prompts"), SumMetric(sync_on_compute=False))}
        updated["prompts"].update(sum(bool(group.trajectories) for group in groups))
        for name, numbers in evaluation_numbers(groups, self.group_size).items():
            updated[name] = self._metrics.setdefault((part, name), MeanMetric(sync_on_compute=False))
            updated[name].update(sum(numbers) / len(numbers), weight=len(numbers))
        for name, metric in custom.items():
            if part != "0":
                if (part, name) not in self._metrics:
                    self._metrics[part, name] = metric.clone()
                    self._metrics[part, name].reset()
                metric = self._metrics[part, name]
            metric.distributed_available_fn = lambda: False  # no reduction: each rank updates it with all groups
            metric.update(groups)
            updated[name] = metric
        return updated


def evaluation_numbers(groups: Sequence[Group], group_size: int) -> dict[str, list[float]]:
    """Returns each metric's numbers: one per trajectory that has the metric, or one per prompt for pass@k."""
    nonempty = [group for group in groups if group.trajectories]
    trajectories = [trajectory for group in nonempty for trajectory in group.trajectories]
    num_failed = len(groups) * group_size - len(trajectories)
    numbers = {"failed_fraction": [1.0] * num_failed + [0.0] * len(trajectories)}
    if trajectories:
        numbers["reward"] = [float(item.reward or 0.0) for item in trajectories]
        for name in {name for item in trajectories for name in item.metrics}:
            logged = "accuracy_fraction" if name == "accuracy" else name
            numbers[logged] = [item.metrics[name] for item in trajectories if name in item.metrics]
        numbers["length_tokens"] = [float(item.num_loss_tokens) for item in trajectories]
        numbers["truncated_fraction"] = [float(item.is_truncated) for item in trajectories]
        if group_size > 1:
            solved = [float(any(item.accuracy >= 1 for item in group.trajectories)) for group in nonempty]
            numbers[f"pass_at_{group_size}_fraction"] = solved
    return numbers
