"""Rollout: where the loop and the callbacks get their groups from.

RolloutController generates them, `loops.SharedRollout` shares rank 0's controller with all ranks, and RecordedRollout
reads those of an earlier run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from lightrl.rollout.drop_tally import Drop
from lightrl.rollout.settings import RolloutSettings
from lightrl.trajectory import Group, Prompt, Sampling
from lightrl.weights import Bucket

OnWait = Callable[[int, int], None]  # (trajectories done, trajectories needed), about ten times a second; may raise


class VersionedEngine(Protocol):
    """What every rank knows of the engine; rank 0's also has the methods of RolloutEngine and its abilities."""

    @property
    def weight_version(self) -> int:
        """Of the weights that sample now; -1 before the first load."""
        ...


class Rollout(Protocol):
    """Groups to train on and to validate with. RolloutController documents the methods."""

    @property
    def is_recorded(self) -> bool:
        """Whether the trajectories and their weight versions are those of an earlier run, and nothing generates now."""
        ...

    @property
    def settings(self) -> RolloutSettings: ...

    @property
    def run_seed(self) -> int: ...

    @property
    def engine(self) -> VersionedEngine: ...

    @property
    def local(self) -> Rollout:
        """The rollout of this process alone, for threads that must not start a collective; rank 0 only."""
        ...

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
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...
