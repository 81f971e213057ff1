"""MultiTurn: conversations between the policy and an environment, token by token.

Reading order:
    workflow.py      MultiTurn, which alternates the policy's turns and the environment's answers
    environment.py   Environment, which answers the policy; RetryWithFeedback, made from any reward function
    conversation.py  the tokens of one conversation: what the policy sampled, and what the chat template adds

May import: the same as workflows/. To add an environment, subclass Environment and write `step`.
"""

from typing import TYPE_CHECKING

from lightrl import loaded_on_first_use

if TYPE_CHECKING:
    from lightrl.workflows.multi_turn.conversation import Conversation, TurnRenderer
    from lightrl.workflows.multi_turn.environment import (
        CheckedStep,
        Environment,
        Observation,
        RetryWithFeedback,
        Step,
        as_messages,
        call_environment,
        checked_metrics,
    )
    from lightrl.workflows.multi_turn.workflow import MultiTurn, answer_or_replay

# Loaded on first use, so that a reward process that imports a user's environment starts without torch.
_HOMES = {
    "CheckedStep": "environment",
    "Conversation": "conversation",
    "Environment": "environment",
    "MultiTurn": "workflow",
    "Observation": "environment",
    "RetryWithFeedback": "environment",
    "Step": "environment",
    "TurnRenderer": "conversation",
    "answer_or_replay": "workflow",
    "as_messages": "environment",
    "call_environment": "environment",
    "checked_metrics": "environment",
}

__all__ = ["CheckedStep", "Conversation", "Environment", "MultiTurn", "Observation", "RetryWithFeedback", "Step"]
__all__ += ["TurnRenderer", "answer_or_replay", "as_messages", "call_environment", "checked_metrics"]

__getattr__ = loaded_on_first_use(__name__, _HOMES)
