"""Rollout, where loop and callbacks get groups from, and RecordedRollout, which replays an earlier run's groups.

RolloutController generates groups, and `loops.SharedRollout` shares rank 0's controller with all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from lightrl.engines.engine import RolloutEngine
from lightrl.errors import RolloutError
from lightrl.rollout.group_scheduler import Drop, RolloutSettings
from lightrl.rollout.prompts import State
from lightrl.trajectory import Group, Prompt, Sampling
from lightrl.weights import Bucket
from lightrl.workflows.workflow import Workflow

OnWait = Callable[[int, int], None]  # (trajectories done, trajectories needed), about ten times a second; may raise


class Rollout(Protocol):
    """Provides groups for training and validation. RolloutController documents the methods."""

    @property
    def is_recorded(self) -> bool:
        """Whether trajectories and weight versions come from an earlier run, so that nothing is generated."""

    @property
    def settings(self) -> RolloutSettings: ...

    @property
    def run_seed(self) -> int: ...

    @property
    def engine(self) -> RolloutEngine | None:
        """The engine on rank 0; None on other ranks."""

    @property
    def workflow(self) -> Workflow | None: ...  # None on ranks other than 0

    @property
    def weight_version(self) -> int:
        """The version of the engine's current weights; -1 before the first load."""

    def take(self, weight_version: int, *, on_wait: OnWait | None = None) -> list[Group]: ...
    def wait_for_rewards(self, groups: Sequence[Group], *, on_wait: OnWait | None = None) -> None: ...
    def commit(self) -> None: ...
    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None: ...
    def evaluate(
        self, prompts: Sequence[Prompt], *, sampling: Sampling, num_samples: int = 1, on_wait: OnWait | None = None
    ) -> list[Group]: ...
    def drain_drops(self) -> list[Drop]: ...
    def drain_group_drops(self) -> dict[str, int]: ...
    def progress(self) -> dict[str, float]: ...
    def state_dict(self) -> State: ...
    def load_state_dict(self, state: State) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class RecordedRollout:
    """A Rollout that reads groups from a list: iteration k takes the k-th entry, starting over after the last one."""

    is_recorded = True
    settings = RolloutSettings()
    engine = workflow = None

    iterations: Sequence[list[Group]]  # the groups of each iteration, with rewards
    run_seed: int  # seeds shuffles and dropout; the recorded run's seed repeats its iterations bit for bit
    weight_version: int = -1

    def take(self, weight_version: int, *, on_wait: OnWait | None = None) -> list[Group]:
        return self.iterations[weight_version % len(self.iterations)]

    def wait_for_rewards(self, groups: Sequence[Group], *, on_wait: OnWait | None = None) -> None:
        """No-op: the rewards are already recorded."""

    def commit(self) -> None:
        """No-op: no group is in flight."""

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Consumes the export although there is no engine, because exporting is a collective of all ranks."""
        for _ in buckets:
            pass
        self.weight_version = weight_version

    def evaluate(self, *args: object, **kwargs: object) -> NoReturn:
        raise RolloutError(
            "A run on recorded trajectories has no engine and cannot validate. Remove the validation data, or set "
            "trainer.limit_val_batches to 0."
        )

    def drain_drops(self) -> list[Drop]:
        return []

    def drain_group_drops(self) -> dict[str, int]:
        return {}

    def progress(self) -> dict[str, float]:
        return {"skipped_prompts": 0, "weight_version": self.weight_version}

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        """No-op: the weight version is the only state, and the loop restores it."""

    def close(self, timeout_s: float = 10.0) -> None:
        """No-op: there is nothing to close."""
