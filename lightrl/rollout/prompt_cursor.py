"""PromptCursor: which position of the prompt stream comes next; with a Curriculum, which ones are passed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lightrl.errors import RolloutError, user_code
from lightrl.trajectory import Prompt, sampling_seed

MAX_SKIPPED = 100_000  # positions in a row


class Prompts(Protocol):
    """Prompts by position, without end."""

    def __getitem__(self, position: int) -> Prompt: ...


class Curriculum(Protocol):
    """Decides from past success how often a prompt is worth a rollout. Called on the event loop: it must be quick."""

    def weight(self, prompt_id: str) -> float:
        """The probability that this prompt is played when its turn comes, 0 to 1; 1 for one never seen."""
        ...

    def observe(self, prompt_id: str, success_rate: float) -> None:
        """A group of this prompt was judged: the share of right trajectories, 0 to 1, dropped groups included."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that `weight` depends on: plain Python, a copy."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class PromptCursor:
    """Walks through the stream, position by position, and never back.

    A curriculum thins the stream: at its turn a prompt is played with the probability `weight`, else passed over until
    its turn in the next epoch. The draw follows from (run seed, position) alone, so positions stay the identity of
    groups for seeds and resume, and the order follows from cursor and curriculum, which are the state.

    What was observed counts from the next choice on, in the order of positions, whatever was judged first.

    Args:
        prompts: the stream.
        curriculum: None plays every position.
    """

    def __init__(self, prompts: Prompts, curriculum: Curriculum | None = None) -> None:
        self.prompts = prompts
        self.curriculum = curriculum
        self.next_position = 0
        self.num_skipped = 0  # positions passed over, since this object was made
        self._observations: dict[int, tuple[str, float]] = {}  # not yet told to the curriculum, by position

    @property
    def fingerprint(self) -> str | None:
        """Tells the prompts of two runs apart; None if the stream has none."""
        return getattr(self.prompts, "fingerprint", None)

    def read(self, position: int) -> Prompt:
        """The prompt at this position.

        Raises:
            RolloutError: if the stream raises.
        """
        with user_code(f"Prompt {position} of the stream"):
            return self.prompts[position]

    def choose(self, run_seed: int) -> int:
        """The next position to play; the cursor then stands behind it.

        Raises:
            RolloutError: if the stream or the curriculum raises, or the curriculum plays none of very many prompts.
        """
        self._tell_observations()
        for position in range(self.next_position, self.next_position + MAX_SKIPPED):
            prompt = self.read(position)
            is_played = self._is_played(run_seed, position, prompt)
            self.next_position = position + 1
            if is_played:
                return position
            self.num_skipped += 1
        raise RolloutError(
            f"{type(self.curriculum).__name__} passed over {MAX_SKIPPED} prompts in a row, expected a weight above 0 "
            "for some of them. Are all solved? Stop here, give harder prompts, or let it forget what was solved."
        )

    def observe(self, position: int, prompt_id: str, success_rate: float) -> None:
        """Keeps the success of a judged group for the curriculum, if there is one."""
        if self.curriculum is not None:
            self._observations[position] = (prompt_id, success_rate)

    def state_dict(self) -> dict[str, Any] | None:
        """Of the curriculum and what it has yet to be told; None without one. `next_position` is kept by the caller."""
        if self.curriculum is None:
            return None
        observations = [[position, *seen] for position, seen in sorted(self._observations.items())]
        return {"state": self.curriculum.state_dict(), "observations": observations}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """A state without a curriculum leaves a new one as it is; that of a curriculum no longer given is forgotten."""
        if self.curriculum is None or state is None:
            return
        self.curriculum.load_state_dict(state["state"])
        self._observations = {position: (name, rate) for position, name, rate in state["observations"]}

    def _is_played(self, run_seed: int, position: int, prompt: Prompt) -> bool:
        if self.curriculum is None:
            return True
        with user_code(f"{type(self.curriculum).__name__}.weight"):
            weight = float(self.curriculum.weight(prompt.id))
        if not 0 <= weight <= 1:
            raise RolloutError(
                f"{type(self.curriculum).__name__}.weight({prompt.id!r}) is {weight}, expected a probability from 0 to "
                "1. Divide by the largest weight."
            )
        return sampling_seed(run_seed, "curriculum", position) / 2**63 < weight

    def _tell_observations(self) -> None:
        while self._observations and self.curriculum is not None:
            prompt_id, success_rate = self._observations.pop(min(self._observations))
            with user_code(f"{type(self.curriculum).__name__}.observe"):
                self.curriculum.observe(prompt_id, success_rate)
