"""SuccessRateCurriculum: prompts that the policy sometimes solves come most, those it always or never solves least."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SuccessRateCurriculum:
    """Weights a prompt by the success of its past groups.

    A group's advantages come from the differences between its trajectories; with 0/1 rewards their variance is
    r·(1 - r) at success rate r, largest at 1/2. A prompt's weight, the probability that it is played when its turn
    comes, falls from 1 at `target` along a straight line to `floor` at the rates 0 and 1.
    It is a Curriculum of lightrl.rollout; each epoch is a turn of every prompt.

    Args:
        target: the success rate that teaches most, 0 to 1.
        floor: the least weight, so that what is too hard now is tried again.
        solved_times: a prompt solved by its whole group so often in a row is passed over from then on; None for never.
        memory: weight of the past in the success rate, 0 (only the last group counts) to below 1.
    """

    def __init__(
        self, *, target: float = 0.5, floor: float = 0.1, solved_times: int | None = 3, memory: float = 0.5
    ) -> None:
        for name, value, high in (("target", target, 1.0), ("floor", floor, 1.0), ("memory", memory, 0.999)):
            if not 0 <= value <= high:
                raise ValueError(f"{name}={value}, expected a number from 0 to {high:g}. Mend it.")
        if solved_times is not None and solved_times < 1:
            raise ValueError(f"solved_times={solved_times}, expected at least 1, or None for never. Raise it.")
        self.target = target
        self.floor = floor
        self.solved_times = solved_times
        self.memory = memory
        self._rates: dict[str, float] = {}  # exponential mean over a prompt's groups, by prompt id
        self._num_solved: dict[str, int] = {}  # times in a row, where it is at least one

    def weight(self, prompt_id: str) -> float:
        """1 for a prompt never seen, 0 for one that is solved, else between `floor` and 1."""
        if self.solved_times is not None and self._num_solved.get(prompt_id, 0) >= self.solved_times:
            return 0.0
        if prompt_id not in self._rates:
            return 1.0
        rate = self._rates[prompt_id]
        farthest = self.target if rate < self.target else 1 - self.target
        distance = abs(rate - self.target) / farthest if farthest else 0.0
        return 1.0 - (1.0 - self.floor) * distance

    def observe(self, prompt_id: str, success_rate: float) -> None:
        """Takes the success rate of one more group of this prompt into account."""
        past = self._rates.get(prompt_id, success_rate)
        self._rates[prompt_id] = self.memory * past + (1 - self.memory) * success_rate
        if success_rate < 1:
            self._num_solved.pop(prompt_id, None)
        else:
            self._num_solved[prompt_id] = self._num_solved.get(prompt_id, 0) + 1

    def state_dict(self) -> dict[str, Any]:
        return {"rates": dict(self._rates), "num_solved": dict(self._num_solved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rates = dict(state["rates"])
        self._num_solved = dict(state["num_solved"])
