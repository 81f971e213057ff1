"""Workflow: maps a prompt to a trajectory by calling the policy once or several times; SingleTurn: once."""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lightrl.engines.engine import Completion
from lightrl.errors import RolloutError
from lightrl.functional import joined_supports, num_coded_tokens
from lightrl.models.chat_template import ChatTemplate
from lightrl.trajectory import Prompt, TokenArray, Trajectory, Turn, token_array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Generate(Protocol):
    """Calls the policy; sampling settings, session and the seed of each turn are bound to it."""

    async def __call__(self, token_ids: list[int], *, max_new_tokens: int | None = None) -> Completion:
        """The completion after these token ids; `max_new_tokens` can only lower the sampling's."""
        ...


class Workflow(ABC):
    """One interaction with the policy, from prompt to trajectory. Token ids in, token ids out: nothing is re-encoded.

    The controller runs `group_size` of them at the same time for each prompt and judges the results. Interactions share
    no state.
    """

    # Maximum tokens of one interaction with several turns, prompt included; None is the model's context.
    max_tokens: int | None = None

    # Seconds that `run` may spend at a time outside of `generate`, as on a tool; then the trajectory is dropped. None
    # for workflows that set deadlines on all that they await.
    own_timeout_s: float | None = 600.0

    # Whether an interaction that a checkpoint cut short can go on in a resumed run; otherwise it starts again. `run` is
    # then called again, and `generate` returns what the checkpoint has before it asks the engine, so the same
    # completions must lead to the same calls.
    continues: bool = False
    # Whether completions are written to the run's journal at once: what follows from them must not happen twice.
    has_side_effects: bool = False

    # Reads what the policy wrote; before the first interaction, it gets the ids that end a turn.
    template: ChatTemplate | None = None

    @classmethod  # noqa: B027 - there may be none
    def check_settings(cls, **settings: Any) -> None:
        """Raises ValueError for an argument of the constructor that is out of range, before there is a tokenizer."""

    def fit_context(self, context_tokens: int | None) -> None:
        """Sets `max_tokens` to the model's context if it is None; called once, before the first interaction.

        Raises:
            ValueError: if `max_tokens` is more than the context.
        """
        if self.max_tokens is None:
            self.max_tokens = context_tokens
        elif context_tokens is not None and self.max_tokens > context_tokens:
            raise ValueError(
                f"max_tokens={self.max_tokens} of {type(self).__name__} exceeds the model's context of "
                f"{context_tokens} tokens. Lower it, or leave it out."
            )

    @abstractmethod
    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Plays one interaction.

        Args:
            prompt: the task; `prompt.token_ids` is set.
            generate: awaits the policy's completion after these token ids. Cancelled if the group is abandoned.

        Returns:
            The trajectory without reward; the controller fills in `group_id` and `sample`.

        Raises:
            RolloutError: if this interaction cannot be finished; it is dropped and counted by reason.
        """


class SingleTurn(Workflow):
    """One completion after the prompt.

    Args:
        tokenizer: turns the completion's ids into `Trajectory.completion`, without end tokens.
    """

    _latest: tuple[Prompt, TokenArray[int], TokenArray[float], str] | None = None  # of `_of_prompt`

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.template: ChatTemplate = ChatTemplate(tokenizer)
        self.continues = type(self).run is SingleTurn.run

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        if not prompt.token_ids:
            raise RolloutError(f"Prompt {prompt.id!r} has no token ids. Render its messages first.")
        return self.trajectory_of(prompt, await generate(prompt.token_ids))

    def trajectory_of(self, prompt: Prompt, completion: Completion) -> Trajectory:
        """What `run` returns for this completion of a prompt that has token ids."""
        prompt_ids, zeros, opening = self._of_prompt(prompt)
        start, num_new = len(prompt_ids), len(completion.token_ids)
        versions = token_array("weight_versions", completion.weight_versions).runs()
        token_ids: TokenArray[int] = TokenArray.joined([prompt_ids, completion.token_ids], "i")
        return Trajectory(
            prompt=prompt,
            group_id=-1,
            sample=-1,
            token_ids=token_ids,
            loss_mask=_runs("?", (False, start), (True, num_new)),
            behavior_logprobs=TokenArray.joined([zeros, completion.logprobs], "f"),
            weight_versions=_runs("i", (-1, start), *versions),
            completion_ids=completion.token_ids,
            completion=opening + self.template.text_of(completion.token_ids),
            finish_reason=completion.finish_reason,
            is_truncated=completion.finish_reason == "length",
            turns=[Turn(start, start + num_new, completion.finish_reason)],
            supports=joined_supports([(start, None), (num_new, completion.supports)]),
        )

    def _of_prompt(self, prompt: Prompt) -> tuple[TokenArray[int], TokenArray[float], str]:
        """Token ids, zeros and opened thinking of a prompt, made once for completions that come together."""
        if self._latest is None or self._latest[0] is not prompt:
            token_ids: TokenArray[int] = TokenArray(prompt.token_ids or (), "i")
            zeros: TokenArray[float] = TokenArray.of_stored(bytes(4 * len(token_ids)), b"", "f")
            self._latest = prompt, token_ids, zeros, self.template.opened_thinking(prompt, token_ids)
        return self._latest[1:]


@functools.lru_cache(64)  # most are of this iteration
def _runs(code: str, *runs: tuple[int, int]) -> TokenArray[Any]:
    return TokenArray.of_runs(runs, code)


async def wait_or_abandon(
    task: asyncio.Future[Any], *others: asyncio.Future[Any], within_s: float | None = None
) -> None:
    """Waits for a task or the first of `others`; a task that is not done then is cancelled, its outcome ignored."""
    try:
        await asyncio.wait({task, *others}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(lambda late: late.cancelled() or late.exception())


def check_trajectory(trajectory: object, workflow: Workflow, prompt: Prompt) -> Trajectory:
    """Checks that a workflow returned a trajectory to train on, and returns it.

    Raises:
        RolloutError: if it is not, its lists differ in length, or a token in the loss mask has no weight version.
    """
    name = f"{type(workflow).__name__}.run"
    if not isinstance(trajectory, Trajectory):
        raise RolloutError(f"{name} must return a Trajectory, got {trajectory!r:.200} for prompt {prompt.id!r}.")
    lists = ("token_ids", "loss_mask", "behavior_logprobs", "weight_versions")
    lengths = {field: len(getattr(trajectory, field)) for field in lists}
    if len(set(lengths.values())) > 1:
        raise RolloutError(
            f"{name} returned lists of lengths {lengths} for prompt {prompt.id!r}; each needs one entry per token. "
            "Use False, 0.0 and -1 for tokens that the policy did not write."
        )
    if trajectory.supports is not None and (coded := num_coded_tokens(trajectory.supports)) != lengths["token_ids"]:
        raise RolloutError(
            f"{name} returned the supports of {coded} tokens for prompt {prompt.id!r}, which has "
            f"{lengths['token_ids']}. Use functional.joined_supports, with None for what the policy did not write."
        )
    if bool((np.asarray(trajectory.loss_mask) & (np.asarray(trajectory.weight_versions) < 0)).any()):
        raise RolloutError(
            f"{name} set loss_mask where weight_versions is -1 for prompt {prompt.id!r}: only tokens that the policy "
            "wrote can be trained on. Copy weight_versions from the Completion, or clear loss_mask there."
        )
    return trajectory
