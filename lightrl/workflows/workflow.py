"""Workflow: maps a prompt to a trajectory by calling the policy; SingleTurn calls the policy once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Unpack

import numpy as np

from lightrl.checks.user_code import named_user_code
from lightrl.columns import TOKENS, TokenArray, column_named, extended
from lightrl.concurrency.abandon import each_when_done, is_abandoned
from lightrl.engines.engine import Completion
from lightrl.errors import RewardError, RolloutError
from lightrl.models.chat_template import ChatTemplate
from lightrl.trajectory import Attached, Prompt, Sampling, Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class TurnLog:
    """The environment's answers in one conversation so far. Answers from an earlier run are replayed first."""

    answers: list[tuple[str, Any, Any]] = field(default_factory=list)  # method, answer, state after the call
    num_given: int = 0  # answers that the workflow has received in this run

    def state_dict(self) -> list[list[object]]:
        return [list(answer) for answer in self.answers]


RunResult = Trajectory | RolloutError | RewardError  # an error drops the trajectory
GroupResult = tuple[int, RunResult]  # the sample's number and its result


class Generate(Protocol):
    """Calls the policy; the sampling settings, the session and each turn's seed are already set."""

    async def __call__(
        self,
        token_ids: list[int],
        *,
        max_new_tokens: int | None = None,
        grammar: str = "",
        **attached: Unpack[Attached],
    ) -> Completion:
        """Returns the completion for these token ids.

        Args:
            max_new_tokens: can lower the limit in `sampling` but not raise it.
            grammar: see `Sampling`; raises ValueError if the engine does not support grammars.
            attached: the observations' content besides token ids; see `Attached` in trajectory.py.
        """
        ...


class GroupGenerate(Protocol):
    """Calls the policy for the trajectories in one group, and continues a checkpoint's unfinished completions."""

    @property
    def samples(self) -> Sequence[int]:
        """The numbers of the trajectories to run. In a resumed group, the others may already be finished."""
        ...

    def for_sample(self, sample: int) -> Generate:
        """Returns the function that calls the policy for one trajectory."""
        ...

    def for_all(self, token_ids: list[int]) -> AsyncGenerator[tuple[int, Completion | RolloutError], None]:
        """Sends one request for all samples to the engine; yields each sample's completion as soon as it is done."""
        ...


class Workflow(ABC):
    """One interaction with the policy, from prompt to trajectory. Token ids in, token ids out: nothing is re-encoded.

    `run_group` runs the interactions in a group concurrently; they share no state. The controller computes rewards.
    """

    # Maximum number of tokens in a multi-turn interaction, including the prompt. None means the model's context.
    max_tokens: int | None = None

    # Maximum number of seconds that `run` may spend between calls to `generate`, for example on a tool; a trajectory
    # that exceeds it is dropped. Set it to None in a workflow that has a deadline for everything that it awaits.
    own_timeout_s: float | None = 600.0

    # Whether an interaction that a checkpoint interrupted can continue in a resumed run instead of starting over. `run`
    # is called again, and `generate` returns the checkpoint's completions before it asks the engine, so the same
    # completions must lead to the same calls.
    continues: bool = False

    # Decodes what the policy generated. Its end-of-turn ids are set before the first interaction.
    template: ChatTemplate | None = None

    @property
    def samples_apart(self) -> bool:
        """Whether the trajectories in a group share no sampled tokens; False if a subclass overrides `run_group`."""
        return type(self).run_group in (Workflow.run_group, SingleTurn.run_group)

    def sampling_of(self, prompt: Prompt, sampling: Sampling) -> Sampling:
        """Returns the sampling settings for this prompt. An override may only lower `max_new_tokens`."""
        return sampling

    @classmethod  # noqa: B027 - not every workflow has settings
    def check_settings(cls, **settings: Any) -> None:
        """Raises ValueError for a constructor argument that is out of range; called before the tokenizer is loaded."""

    def fit_context(self, context_tokens: int | None) -> None:
        """Sets `max_tokens` to the model's context if it is None; called once, before the first interaction.

        Raises ValueError if `max_tokens` exceeds the context.
        """
        if self.max_tokens is None:
            self.max_tokens = context_tokens
        elif context_tokens is not None and self.max_tokens > context_tokens:
            raise ValueError(
                f"max_tokens={self.max_tokens} of {type(self).__name__} exceeds the model's context of "
                f"{context_tokens} tokens. Lower it, or leave it out."
            )

    async def run_group(self, prompt: Prompt, generate: GroupGenerate) -> AsyncGenerator[GroupResult, None]:
        """Runs the trajectories in a group and yields each as soon as it is done, so that its reward is computed early.

        This default calls `run` for all samples concurrently. Raising an exception drops all samples that
        have not been yielded; yielding a RolloutError or RewardError drops only that sample.

        Args:
            prompt: the task; `prompt.token_ids` is set.
            generate: calls the policy. On cancellation its requests are removed from the engine.

        Yields:
            Each of `generate.samples` once, in any order.
        """
        runs = {
            sample: asyncio.ensure_future(_run_sample(self, prompt, generate.for_sample(sample)))
            for sample in generate.samples
        }
        async with contextlib.aclosing(each_when_done(runs)) as done:
            async for sample, run in done:
                yield sample, run.result()

    def clean_up(self, trajectory: Trajectory) -> None:  # noqa: B027 - most workflows leave nothing
        """Deletes what `run` left for the reward function; called when the reward is known or will not be computed."""

    @abstractmethod
    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Runs one interaction.

        Args:
            prompt: the task; `prompt.token_ids` is set.
            generate: waits for the policy's completion for the given token ids. Cancelled if the group is abandoned.

        Returns:
            The trajectory without reward; the controller fills in `group_id` and `sample`.

        Raises:
            RolloutError: if this interaction cannot be finished. The interaction is dropped and counted by reason.
        """


def class_of(setting: object) -> type | None:
    """Returns the setting if it is a class, or the class of a functools.partial (`class_path` in YAML), else None."""
    items = (setting.func, *setting.args) if isinstance(setting, functools.partial) else (setting,)
    return next((item for item in items if isinstance(item, type)), None)


def check_workflow(workflow: Any) -> None:
    """Raises ValueError if a workflow from YAML has an argument that is out of range."""
    workflow_class = class_of(workflow)
    if workflow_class is not None and workflow_class is not workflow and issubclass(workflow_class, Workflow):
        workflow_class.check_settings(**workflow.keywords)


class SingleTurn(Workflow):
    """Generates one completion for the prompt.

    Args:
        tokenizer: decodes the completion into `Trajectory.completion`, without end tokens.
    """

    # Shared by a group's completions: the latest prompt, its token ids, a zero for each id, and the thinking it opens.
    _latest: tuple[Prompt, TokenArray[int], TokenArray[float], str] | None = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.template: ChatTemplate = ChatTemplate(tokenizer)
        self.continues = type(self).run is SingleTurn.run

    async def run_group(self, prompt: Prompt, generate: GroupGenerate) -> AsyncGenerator[GroupResult, None]:
        """Generates the completions for all samples in one request, unless a subclass overrides only `run`."""
        if type(self).run is not SingleTurn.run:
            async with contextlib.aclosing(super().run_group(prompt, generate)) as results:
                async for result in results:
                    yield result
            return
        async with contextlib.aclosing(generate.for_all(_token_ids(prompt))) as completions:
            async for sample, completion in completions:
                if isinstance(completion, RolloutError):
                    yield sample, completion
                    continue
                trajectory: Trajectory | RolloutError
                try:
                    with named_user_code(f"{type(self).__name__}.run", on=f"prompt {prompt.id!r}"):
                        trajectory = self.trajectory_of(prompt, completion)
                except RolloutError as error:
                    trajectory = error
                yield sample, trajectory

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        return self.trajectory_of(prompt, await generate(_token_ids(prompt)))

    def trajectory_of(self, prompt: Prompt, completion: Completion) -> Trajectory:
        """Returns the trajectory for this completion; the prompt must have token ids."""
        if self._latest is None or self._latest[0] is not prompt:
            ids: TokenArray[int] = TokenArray(prompt.token_ids or (), "i")
            no_logprobs: TokenArray[float] = TokenArray.of_stored(bytes(4 * len(ids)), b"", "f")
            self._latest = prompt, ids, no_logprobs, self.template.opened_thinking(prompt, ids)
        _, prompt_ids, zeros, opening = self._latest
        start, num_new = len(prompt_ids), len(completion.token_ids)
        versions = TOKENS["weight_versions"].array(completion.weight_versions).runs()
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
            columns=extended({}, start, completion.columns, num_new),
        )


@functools.lru_cache(64)  # most calls in an iteration repeat a few arguments
def _runs(code: str, *runs: tuple[int, int]) -> TokenArray[Any]:
    return TokenArray.of_runs(runs, code)


def _token_ids(prompt: Prompt) -> list[int]:
    if not prompt.token_ids:
        raise RolloutError(f"Prompt {prompt.id!r} has no token ids. Render its messages first.")
    return prompt.token_ids


@dataclass(eq=False)
class _TimedGenerate:
    """Calls the policy for one workflow run, and cancels the run if it spends too long outside of these calls."""

    timeout_s: float | None  # the longest time outside of calls; None for no limit
    generate: Generate
    is_over: bool = False
    _num_generating: int = 0
    _timer: asyncio.TimerHandle | None = None
    _task: asyncio.Task[object] | None = None

    @property
    def turn_log(self) -> TurnLog | None:
        return getattr(self.generate, "turn_log", None)

    async def __call__(self, token_ids: list[int], **settings: Any) -> Completion:
        self._num_generating += 1
        self._stop_timer()
        try:
            return await self.generate(token_ids, **settings)
        finally:
            self._num_generating -= 1
            if self._num_generating == 0:
                self._start_timer()

    @contextlib.contextmanager
    def limit_time(self) -> Iterator[None]:
        """Cancels the current task if the workflow in this block spends longer than `timeout_s` between calls."""
        self._task = asyncio.current_task()
        self._start_timer()
        try:
            yield
        finally:
            self._task = None  # so that a call that is still running does not start a timer
            self._stop_timer()

    def _start_timer(self) -> None:
        if self.timeout_s is not None and self._task is not None:
            self._timer = asyncio.get_running_loop().call_later(self.timeout_s, self._cancel_run)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _cancel_run(self) -> None:
        assert self._task is not None
        self.is_over = True
        self._task.cancel()


async def _run_sample(workflow: Workflow, prompt: Prompt, generate: Generate) -> RunResult:
    """Runs a workflow once and returns its trajectory, or the error that drops it. An EngineError propagates."""
    name = f"{type(workflow).__name__}.run"
    timed_generate = _TimedGenerate(workflow.own_timeout_s, generate)
    try:
        with named_user_code(name, on=f"prompt {prompt.id!r}"), timed_generate.limit_time():
            return check_trajectory(await workflow.run(prompt, timed_generate), workflow, prompt)
    except (RolloutError, RewardError) as error:
        return error
    except asyncio.CancelledError:
        if is_abandoned(asyncio.current_task()):
            raise
        if not timed_generate.is_over:
            return self_cancellation(name, prompt)
        return RolloutError(
            f"{name} spent own_timeout_s={timed_generate.timeout_s:g} outside of generate on prompt {prompt.id!r}. Set "
            "a deadline on what it awaits, or increase the class attribute own_timeout_s."
        )


def self_cancellation(name: str, prompt: Prompt) -> RolloutError:
    """Returns the error for a workflow that raised CancelledError without being cancelled."""
    return RolloutError(f"{name} raised CancelledError on prompt {prompt.id!r}, although nobody cancelled it.")


def check_trajectory(trajectory: object, workflow: Workflow, prompt: Prompt) -> Trajectory:
    """Checks that training can use what a workflow returned, and returns it.

    Raises RolloutError if it is not a Trajectory, its lists differ in length, a logprob is not finite, or a token in
    the loss mask has no weight version.
    """
    name = f"{type(workflow).__name__}.run"
    if not isinstance(trajectory, Trajectory):
        raise RolloutError(f"{name} must return a Trajectory, got {trajectory!r:.200} for prompt {prompt.id!r}.")
    try:
        trajectory.pack()
    except ValueError as error:
        raise RolloutError(f"{name} returned invalid numbers for prompt {prompt.id!r}: {error}") from error
    lengths = {field: len(getattr(trajectory, field)) for field in TOKENS}
    if len(set(lengths.values())) > 1:
        raise RolloutError(
            f"{name} returned lists of lengths {lengths} for prompt {prompt.id!r}; each needs one entry per token. "
            "Use False, 0.0 and -1 for tokens that the policy did not generate."
        )
    if not np.isfinite(np.asarray(trajectory.behavior_logprobs)).all():
        raise RolloutError(f"{name} returned behavior_logprobs that are not finite for prompt {prompt.id!r}.")
    for column, values in trajectory.columns.items():
        if problem := column_named(column).problem(values, lengths["token_ids"]):
            raise RolloutError(f"For prompt {prompt.id!r}, {name} returned a trajectory that {problem}")
    if bool((np.asarray(trajectory.loss_mask) & (np.asarray(trajectory.weight_versions) < 0)).any()):
        raise RolloutError(
            f"{name} set loss_mask where weight_versions is -1 for prompt {prompt.id!r}: only tokens that the policy "
            "generated can be trained on. Copy weight_versions from the Completion, or clear loss_mask there."
        )
    return trajectory
