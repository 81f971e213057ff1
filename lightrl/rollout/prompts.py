"""PromptCursor chooses the stream's next prompt, Curriculum skips prompts, and PromptsAhead makes them in advance."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightrl.checks.user_code import named_user_code
from lightrl.concurrency.abandon import Tasks
from lightrl.concurrency.in_thread import in_thread
from lightrl.errors import RolloutError
from lightrl.trace import span
from lightrl.trajectory import Prompt, sampling_seed

State = dict[str, Any]  # plain Python, for a checkpoint
MAX_SKIPPED = 100_000  # maximum number of positions skipped in a row
AHEAD = 256  # number of prompts that a thread makes in advance in one call
MAX_PREPARED = 2_048  # maximum number of positions to prepare before a choice; a PromptStream keeps more than this


class Prompts(Protocol):
    """An endless stream of prompts, which has None at a position without a prompt to run.

    Subclass it and implement `__getitem__`. The other methods let a thread make prompts in advance if that takes time.
    """

    def __getitem__(self, position: int) -> Prompt | None: ...

    @property
    def fingerprint(self) -> str | None:
        """A string that differs between runs with different prompts; None skips the comparison."""
        return None

    def is_prepared(self, position: int) -> bool:
        """Whether the prompt at this position is ready to be read."""
        return True

    def prepare(self, first: int, num: int) -> None:
        """Makes the prompts at these positions; called in a thread."""
        return

    def state_dict(self, position: int) -> State | None:
        """Returns state that lets a resumed run read from this position on; None if no state is needed."""
        return None

    def load_state_dict(self, state: State) -> None:
        """Restores what `state_dict` returned."""
        return


class Curriculum(Protocol):
    """Decides from past success how often to roll out a prompt. Called on the event loop, so it must be fast.

    It may have a `success_rate(prompt_id)` method, for metrics: past success from 0 to 1, or None for a new prompt.
    """

    def weight(self, prompt_id: str) -> float:
        """Returns the probability, 0 to 1, of running this prompt when its turn comes; 1 for a new prompt."""

    def observe(self, prompt_id: str, success_rate: float) -> None:
        """Records the mean accuracy, 0 to 1, of a group for this prompt; also called for dropped groups."""

    def state_dict(self) -> State:
        """Returns a copy of everything that `weight` depends on, in plain Python."""

    def load_state_dict(self, state: State) -> None: ...


@dataclass(eq=False)
class PromptCursor:
    """Walks through the stream position by position, never backward.

    When a prompt's turn comes, it runs with the probability that the curriculum returns; otherwise it is skipped until
    the next epoch. The random number depends only on run seed and position, so a position still identifies a group for
    seeds and resume. Observations take effect at the next choice, by position, not in the order in which groups finish.
    """

    prompts: Prompts | None  # the stream; None if there is nothing to choose
    curriculum: Curriculum | None = None  # None runs every position
    next_position: int = 0
    num_skipped: int = 0  # positions skipped since this object was made
    past_success: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # sums over prompts seen before
    # Position → prompt id and success rate, until the curriculum gets them.
    _observations: dict[int, tuple[str, float]] = field(default_factory=dict)

    def at(self, position: int) -> Prompt | None:
        """Returns the prompt at a position; raises RolloutError if the stream raises."""
        assert self.prompts is not None
        with named_user_code(f"Prompt {position} in the stream"):
            return self.prompts[position]

    def choose(self, run_seed: int) -> int:
        """Returns the next position to run and moves the cursor past it.

        Raises RolloutError if the stream or the curriculum raises, or skips too many prompts in a row.
        """
        while self._observations and self.curriculum is not None:
            prompt_id, success_rate = self._observations.pop(min(self._observations))
            with named_user_code(f"{type(self.curriculum).__name__}.observe"):
                self.curriculum.observe(prompt_id, success_rate)
        rate_of = getattr(self.curriculum, "success_rate", None)
        for position in range(self.next_position, self.next_position + MAX_SKIPPED):
            prompt = self.at(position)
            is_chosen = prompt is not None and self._is_chosen(run_seed, position, prompt)
            if prompt is not None and rate_of is not None:
                rate, kind = rate_of(prompt.id), "played" if is_chosen else "skipped"
                if rate is not None:  # not a new prompt
                    self.past_success[f"{kind}_again"] += 1
                    self.past_success[f"{kind}_again_success"] += rate
            self.next_position = position + 1
            if is_chosen:
                return position
            self.num_skipped += 1
        if self.curriculum is None:
            raise RolloutError(
                f"{MAX_SKIPPED} consecutive rows yielded no prompt: row_filter, bad_rows or the length limits dropped "
                "all of them. Loosen these settings, or fix the data."
            )
        raise RolloutError(
            f"{type(self.curriculum).__name__} skipped {MAX_SKIPPED} prompts in a row. If all of them are solved, end "
            "the run, use harder prompts, or reset the curriculum."
        )

    def unprepared(self, positions: Sequence[int], num: int, run_seed: int) -> int | None:
        """Returns the first unprepared position, of these and the next `num` choices, or None. Raises like `choose`."""
        prompts = self.prompts
        assert prompts is not None
        for position in positions:
            if not prompts.is_prepared(position):
                return position
        for position in range(self.next_position, self.next_position + MAX_PREPARED):
            if num <= 0:
                return None
            if not prompts.is_prepared(position):
                return position
            prompt = self.at(position)
            num -= prompt is not None and self._is_chosen(run_seed, position, prompt)
        return None

    def observe(self, position: int, prompt_id: str, success_rate: float) -> None:
        """Stores a group's success rate; the next `choose` passes it to the curriculum."""
        self._observations[position] = (prompt_id, success_rate)

    def state_dict(self) -> State | None:
        """Returns the curriculum's state and pending observations, but not `next_position`; None without curriculum."""
        if self.curriculum is None:
            return None
        observations = [[position, *item] for position, item in sorted(self._observations.items())]
        return {"state": self.curriculum.state_dict(), "observations": observations}

    def load_state_dict(self, state: State | None) -> None:
        """Restores the curriculum if both this run and the checkpoint have one."""
        if self.curriculum is None or state is None:
            return
        self.curriculum.load_state_dict(state["state"])
        self._observations = {position: (name, rate) for position, name, rate in state["observations"]}

    def _is_chosen(self, run_seed: int, position: int, prompt: Prompt) -> bool:
        if self.curriculum is None:
            return True
        with named_user_code(f"{type(self.curriculum).__name__}.weight"):
            weight = float(self.curriculum.weight(prompt.id))
        if not 0 <= weight <= 1:
            name = f"{type(self.curriculum).__name__}.weight({prompt.id!r})"
            raise RolloutError(f"{name} must be a probability from 0 to 1, got {weight}.")
        return sampling_seed(run_seed, "curriculum", position) / 2**63 < weight


@dataclass(eq=False)
class PromptsAhead:
    """Makes prompts before they are needed; belongs to the controller's event loop."""

    cursor: PromptCursor  # determines which prompts come next
    tasks: Tasks  # ends the run if the stream raises
    then: Callable[[], Coroutine[object, None, None]]  # starts the admissible groups once prompts have been made
    _making: asyncio.Task[None] | None = None

    def lacks(self, positions: Sequence[int], num: int, run_seed: int) -> bool:
        """Whether a prompt at these positions or among the next `num` choices is missing; if so, starts making it.

        If the stream raises, the run fails, and this returns False because no group starts.
        """
        try:
            missing = self.cursor.unprepared(positions, num, run_seed)
        except RolloutError as error:
            self.tasks.fail(error)
            return False
        if missing is not None:
            self._begin(missing)
        return missing is not None

    def refill(self) -> None:
        """Makes more prompts if fewer than half of `AHEAD` are left."""
        first, prompts = self.cursor.next_position, self.cursor.prompts
        if prompts is not None and not prompts.is_prepared(first + AHEAD // 2):
            self._begin(first)

    def _begin(self, first: int) -> None:
        if self._making is None or self._making.done():
            self._making = self.tasks.spawn(self._make(first))

    async def _make(self, first: int) -> None:
        prompts = self.cursor.prompts
        assert prompts is not None
        with (
            span("make prompts", "data", "prompts", first=first),
            named_user_code(f"Making the prompts at position {first} and after"),
        ):
            await in_thread(prompts.prepare, first, AHEAD)
        self._making = None
        await self.then()
