"""What validation and test measure of judged groups: reward, accuracy, pass@k, lengths, and a reward's own numbers."""

from __future__ import annotations

from collections.abc import Sequence

from lightrl.trajectory import Group


def evaluation_numbers(groups: Sequence[Group], group_size: int) -> dict[str, list[float]]:
    """By metric name one number per trajectory that has it, or per prompt for pass@k; empty if nothing is judged.

    Args:
        groups: without their failed trajectories.
        group_size: completions asked for per prompt; above 1 gives pass@k.
    """
    judged = [group for group in groups if group.trajectories]
    trajectories = [trajectory for group in judged for trajectory in group.trajectories]
    if not trajectories:
        return {}
    numbers: dict[str, list[float]] = {"reward": [float(item.reward or 0.0) for item in trajectories]}
    for name in sorted({name for item in trajectories for name in item.metrics} | {"accuracy"}):
        if name == "accuracy":
            numbers["accuracy_fraction"] = [item.accuracy for item in trajectories]
        else:
            numbers[name] = [item.metrics[name] for item in trajectories if name in item.metrics]
    numbers["length_tokens"] = [float(sum(item.loss_mask)) for item in trajectories]
    numbers["truncated_fraction"] = [float(item.is_truncated) for item in trajectories]
    if group_size > 1:
        solved = [float(any(item.accuracy >= 1 for item in group.trajectories)) for group in judged]
        numbers[f"pass_at_{group_size}_fraction"] = solved
    return numbers
