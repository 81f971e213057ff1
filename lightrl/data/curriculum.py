"""SuccessRateCurriculum: prefers prompts that the policy solves sometimes, but not always."""

from __future__ import annotations

from lightrl.checks.bounds import check_bounds
from lightrl.trajectory import JsonMapping, JsonObject


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
        self._rates: dict[str, float] = {}  # prompt id → exponential mean of its groups' success rates
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
        """Returns the exponential mean of the success rates of a prompt's groups; None for a new prompt."""
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
