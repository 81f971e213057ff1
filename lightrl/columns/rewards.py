"""The `rewards` column: rewards per token, whose sum is the trajectory's reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lightrl.columns.column import Column, Values


@dataclass(frozen=True)
class _Rewards(Column):
    comes_with_reward: ClassVar[bool] = True

    def _default(self, trajectory: Any, width: int) -> Values:
        """Puts the whole reward on the last loss token; NaN if there are agents, which need a reward each."""
        rewards = [0.0] * len(trajectory.token_ids)
        last = max((index for index, trains in enumerate(trajectory.loss_mask) if trains), default=None)
        if last is not None:
            rewards[last] = float("nan") if "agents" in trajectory.columns else float(trajectory.reward or 0.0)
        return self.array(rewards)


REWARDS = _Rewards("rewards", "d", as_runs=True, field="token_rewards")
