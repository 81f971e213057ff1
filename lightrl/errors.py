"""The exceptions that a run raises, as a tree. Errors a user can fix before the run are ValueErrors and TypeErrors.

LightRLError
├── EngineError               the rollout engine failed
│   ├── EngineUnreachable     no server answers at the engine's address
│   ├── EngineTimeout         the engine did not answer before its deadline
│   └── WeightSyncError       the engine did not load the new weights
│       └── WeightSyncUndone  the engine still serves the previous weights
├── RolloutError              a workflow or an environment failed, or no batch was ready in time
├── RewardError               a reward function raised, did not return a finite number, hung or was killed
├── OtherRankFailed           another process in the run failed first, so this process had to stop
└── TrainingError             the update cannot continue (repeated non-finite gradients)
"""

import functools


class LightRLError(Exception):
    """Base class of the errors that lightrl raises during a run."""


class EngineError(LightRLError):
    """The rollout engine failed."""


class EngineUnreachable(EngineError):
    """Nothing answers at the engine's address."""


class EngineTimeout(EngineError):
    """The engine did not answer before its deadline."""


class WeightSyncError(EngineError):
    """The engine did not load the new weights, or a check showed that it has different weights."""


class WeightSyncUndone(WeightSyncError):
    """The engine did not load the new weights and still serves the previous weights, so the sync may be retried."""


class RolloutError(LightRLError):
    """A workflow or an environment failed, or no batch of groups was complete before the deadline."""

    trajectory: object = None  # the trajectory recorded before a workflow failed, for the log


class RewardError(LightRLError):
    """A reward function raised, did not return a finite number, hung or was killed.

    Args:
        message: what happened, what was expected, how to fix it.
        reason: `raised`, `invalid`, `not_finite`, `timeout` or `killed`; failures are counted by reason.
    """

    def __init__(self, message: str, *, reason: str = "raised") -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(RewardError, reason=self.reason), (str(self),)


class OtherRankFailed(LightRLError):
    """Another process in the run failed first; `__cause__` is the error that followed in this process."""


class TrainingError(LightRLError):
    """The update cannot continue."""
