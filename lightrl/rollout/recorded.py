"""RecordedRollout: groups that were rolled out before, in the place of the controller; no engine, no thread."""

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
    """What the loop asks of a RolloutController, answered from a list.

    Iteration k takes the k-th entry and begins anew after the last, so the weight version is all the state there is.

    Args:
        iterations: the groups of each iteration, judged.
        run_seed: of shuffles and dropout; with the seed of the recorded run an iteration is repeated bit for bit.
    """

    is_recorded = True
    settings = RolloutSettings()

    def __init__(self, iterations: Sequence[list[Group]], *, run_seed: int) -> None:
        self.iterations = iterations
        self.run_seed = run_seed
        self.weight_version = -1

    @property
    def engine(self) -> RecordedRollout:
        """Itself: WeightSync asks which version the engine has."""
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
        """Nobody generates; the export is drained, for all ranks take part in it."""
        for _ in buckets:
            pass
        self.weight_version = weight_version

    def evaluate(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RolloutError(
            "A run on recorded trajectories was asked to validate, expected no validation: there is no engine. "
            "Leave out the validation data, or set trainer.limit_val_batches to 0."
        )

    def drain_drops(self) -> list[Drop]:
        return []

    def drain_group_drops(self) -> dict[str, int]:
        return {}

    def progress(self) -> dict[str, int]:
        return {"skipped_prompts": 0, "weight_version": self.weight_version}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The position is the weight version, which the loop restores."""

    def close(self, timeout_s: float = 10.0) -> None:
        """Nothing is open."""
