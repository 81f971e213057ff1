"""Workflows: what maps a prompt to a trajectory, by calling the policy once or several times."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from lightrl.engines.engine import Completion
from lightrl.errors import RolloutError
from lightrl.trajectory import Prompt, Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Generate(Protocol):
    """Asks the policy; sampling settings, the seed of each turn and the session are bound to it."""

    async def __call__(self, token_ids: list[int], *, max_new_tokens: int | None = None) -> Completion:
        """The completion after these token ids, of at most `max_new_tokens` where that is below the sampling's."""
        ...


class Workflow(ABC):
    """One interaction with the policy, from prompt to trajectory. Token ids in, token ids out: nothing is re-encoded.

    The controller runs `group_size` of them for each prompt, at the same time, and judges what they return. A workflow
    has no state of its own that two interactions share.
    """

    # Most tokens of one interaction, prompt included, for workflows of several turns; None is the model's context.
    max_tokens: int | None = None

    def fit_context(self, context_tokens: int | None) -> None:
        """Takes the model's context as `max_tokens` where that is None; called once, before the first interaction.

        Raises:
            ValueError: if `max_tokens` is more than the context.
        """
        if self.max_tokens is None:
            self.max_tokens = context_tokens
        elif context_tokens is not None and self.max_tokens > context_tokens:
            raise ValueError(
                f"max_tokens={self.max_tokens} of {type(self).__name__} is more than the model's context of "
                f"{context_tokens} tokens, expected at most that. Lower it, or leave it out."
            )

    @abstractmethod
    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Plays one interaction.

        Args:
            prompt: the task; `prompt.token_ids` is set.
            generate: awaits the policy's completion after these token ids. Cancelled when the group is given up.

        Returns:
            The trajectory without reward; `group_id` and `sample` are filled in by the controller.

        Raises:
            RolloutError: if this interaction cannot be finished; it is dropped, with the reason counted.
        """


class SingleTurn(Workflow):
    """One completion after the prompt.

    Args:
        tokenizer: turns the completion's ids into `Trajectory.completion`, special tokens left out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        if not prompt.token_ids:
            raise RolloutError(
                f"Prompt {prompt.id!r} has no token ids, expected at least one. Render its messages first."
            )
        completion = await generate(prompt.token_ids)
        start, num_new = len(prompt.token_ids), len(completion.token_ids)
        return Trajectory(
            prompt=prompt,
            group_id=-1,
            sample=-1,
            token_ids=prompt.token_ids + completion.token_ids,
            loss_mask=[False] * start + [True] * num_new,
            behavior_logprobs=[0.0] * start + completion.logprobs,
            weight_versions=[-1] * start + completion.weight_versions,
            completion_ids=completion.token_ids,
            completion=self.tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            finish_reason=completion.finish_reason,
            is_truncated=completion.finish_reason == "length",
            turns=[Turn(start, start + num_new, completion.finish_reason)],
        )


def check_trajectory(trajectory: object, workflow: Workflow, prompt: Prompt) -> Trajectory:
    """What a workflow returned, if it is a trajectory that can be trained on.

    Raises:
        RolloutError: if it is none, its lists differ in length, or a token to train on has no weight version.
    """
    name = f"{type(workflow).__name__}.run"
    if not isinstance(trajectory, Trajectory):
        raise RolloutError(f"{name} returned {trajectory!r:.200} for prompt {prompt.id!r}, expected a Trajectory.")
    lists = ("token_ids", "loss_mask", "behavior_logprobs", "weight_versions")
    lengths = {field: len(getattr(trajectory, field)) for field in lists}
    if len(set(lengths.values())) > 1:
        raise RolloutError(
            f"{name} returned lists of lengths {lengths} for prompt {prompt.id!r}, expected one entry per token in "
            "each. Fill in False, 0.0 and -1 where the policy did not write."
        )
    trained = zip(trajectory.loss_mask, trajectory.weight_versions, strict=True)
    if any(is_trained and version < 0 for is_trained, version in trained):
        raise RolloutError(
            f"{name} set loss_mask where weight_versions is -1 for prompt {prompt.id!r}, expected only tokens that the "
            "policy wrote. Copy weight_versions from the Completion, or clear loss_mask there."
        )
    return trajectory
