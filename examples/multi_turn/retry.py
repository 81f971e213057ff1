"""GSM8K with a second chance: the policy is told that its answer is wrong and may try again."""

from lightrl import GRPO
from lightrl.workflows import MultiTurn, RetryWithFeedback


def math_with_feedback() -> RetryWithFeedback:
    return RetryWithFeedback(
        "lightrl.rewards.math_answer",
        feedback="That is not right. Look for the mistake and solve it again; end with #### and the number.",
    )


class RetryGRPO(GRPO):
    def configure_workflow(self) -> MultiTurn:
        """Discounts the second try by 0.8, so that a correct first answer earns more."""
        return MultiTurn(self.tokenizer, math_with_feedback, max_turns=2, max_tokens=1024, discount=0.8)
