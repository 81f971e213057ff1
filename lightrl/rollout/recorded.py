"""RecordedRollout: groups of an earlier run instead of a controller; no engine, no thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from lightrl.errors import RolloutError
from lightrl.rollout.drop_tally import Drop
from lightrl.rollout.protocol import OnWait
from lightrl.rollout.settings import RolloutSettings
from lightrl.trajectory import Group
from lightrl.weights import Bucket


class RecordedRollout:
    """A Rollout that reads its groups from a list.

    Iteration k takes the k-th entry and starts over after the last one, so the weight version is the only state.

    Args:
        iterations: the groups of each iteration, judged.
        run_seed: of shuffles and dropout; the seed of the recorded run repeats its iterations bit for bit.
    """

    is_recorded = True
    settings = RolloutSettings()

    def __init__(self, iterations: Sequence[list[Group]], *, run_seed: int) -> None:
        self.iterations = iterations
        self.run_seed = run_seed
        self.weight_version = -1

    @property
    def engine(self) -> RecordedRollout:
        """Itself: WeightSync reads the engine's weight version."""
        return self

    @property
    def local(self) -> RecordedRollout:
        return self

    def take(self, weight_version: int, *, on_wait: OnWait | None = None) -> list[Group]:
        return self.iterations[weight_version % len(self.iterations)]

    def wait_for_rewards(self, groups: Sequence[Group], *, on_wait: OnWait | None = None) -> None:
        """They are recorded."""

    def commit(self) -> None:
        """Nothing is in flight."""

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Nothing generates, but the export must be consumed because all ranks take part in it."""
        for _ in buckets:
            pass
        self.weight_version = weight_version

    def evaluate(self, *args: Any, **kwargs: Any) -> NoReturn:
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

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The weight version is the only state, and the loop restores it."""

    def close(self, timeout_s: float = 10.0) -> None:
        """Nothing is open."""
