"""The exceptions of a run, as a tree; what a user can mend before the run is a ValueError or TypeError instead.

LightRLError
├── EngineError               the rollout engine failed
│   ├── EngineUnreachable     nobody answers
│   ├── EngineTimeout         an answer is overdue
│   └── WeightSyncError       the engine did not take the new weights
├── RolloutError              a workflow or an environment failed, or no batch came in time
├── RewardError               a reward function raised, returned no finite number, hung or was killed
├── OtherRankFailed           another process of the run failed first, and this one could not go on
└── TrainingError             the update cannot go on (gradients without a finite value, again and again)
"""


class LightRLError(Exception):
    """Base of everything that lightrl raises during a run."""


class EngineError(LightRLError):
    """The rollout engine failed."""


class EngineUnreachable(EngineError):
    """Nobody answers where the engine should be."""


class EngineTimeout(EngineError):
    """The engine did not answer before its deadline."""


class WeightSyncError(EngineError):
    """The engine did not take the new weights, or could not be shown to have them."""


class RolloutError(LightRLError):
    """A workflow or an environment failed, or no batch of groups was finished before the deadline."""


class RewardError(LightRLError):
    """A reward function gave no finite number; `reason` is one word for counting.

    Args:
        message: what happened, what was expected, how to mend.
        reason: `raised`, `not_finite`, `timeout` or `killed`.
    """

    def __init__(self, message: str, *, reason: str = "raised") -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_reward_error, (str(self), self.reason)


def _rebuild_reward_error(message: str, reason: str) -> "RewardError":
    return RewardError(message, reason=reason)


class OtherRankFailed(LightRLError):
    """Another process of the run failed first; its cause is what this one, which could not go on alone, met then."""


class TrainingError(LightRLError):
    """The update cannot go on."""
