"""SavedState: the rollout's part of a checkpoint, taken at a token boundary of the engine."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.errors import EngineError, RolloutError
from lightrl.rollout.group_scheduler import GroupScheduler
from lightrl.rollout.prompts import PromptCursor, State
from lightrl.rollout.runner import ADMISSION_TICKS, AdmissionBatch, InFlightCompletions

log = logging.getLogger(__name__)


class Resumable(Protocol):
    """What runs the groups: TrajectoryRunner in this process, or WorkflowPool in others."""

    in_flight: InFlightCompletions

    async def states_of_workers(self) -> list[State]:
        """Returns what each workflow worker has in flight while the engine is paused."""


@dataclass(eq=False)
class SavedState:
    """Creates and restores the rollout's state; belongs to the controller's event loop."""

    engine: RolloutEngine
    scheduler: GroupScheduler
    cursor: PromptCursor
    runner: Resumable
    admission: AdmissionBatch

    async def take(self, run_seed: int, *, timeout_s: float) -> State:
        """Returns the state, in plain Python; without unfinished completions if the engine does not pause in time."""
        if not (self.scheduler.running and self.runner.in_flight.workflow.continues):
            return self._state(run_seed, {})
        taking = asyncio.ensure_future(self._at_boundary(run_seed))
        await asyncio.wait({taking}, timeout=timeout_s)
        if taking.done() and taking.exception() is None:
            return taking.result()
        error = taking.exception() if taking.done() else "it did not answer in time"
        taking.cancel()
        if isinstance(error, BaseException) and not isinstance(error, EngineError):
            raise error
        log.warning("The engine's unfinished completions are not in the checkpoint and will start again: %s", error)
        return self._state(run_seed, {})

    async def _at_boundary(self, run_seed: int) -> State:
        """Returns the state while the engine is paused at a token boundary, with unfinished completions."""
        async with self.admission.batch():
            for _ in range(ADMISSION_TICKS):  # until completions that finished before the pause are recorded
                await asyncio.sleep(0)
            unfinished = await self.engine.unfinished()
            return self._state(run_seed, unfinished, await self.runner.states_of_workers())

    def _state(
        self, run_seed: int, unfinished: Mapping[int, Completion], states_of_workers: Sequence[State] = ()
    ) -> State:
        """Assembles the state of all parts, given the unfinished completions of the engine and the workers."""
        cursor, prompts = self.cursor, self.cursor.prompts
        groups = self.scheduler.state_dict()
        return {
            "run_seed": run_seed,
            "next_position": cursor.next_position,
            "prompts": None if prompts is None else prompts.fingerprint,
            "stream": None
            if prompts is None
            else prompts.state_dict(min([cursor.next_position, *groups["in_flight"]])),
            "curriculum": cursor.state_dict(),
            **groups,
            **self.runner.in_flight.state_dict(unfinished, states_of_workers),
        }

    def load(self, state: State) -> None:
        """Restores the state before anything starts; raises RolloutError if another version of lightrl wrote it."""
        try:
            self.scheduler.load_state_dict(state)
            if self.scheduler.started:  # otherwise all groups start again
                self.runner.in_flight.load_state_dict(state)
            self.cursor.next_position = int(state["next_position"])
            if self.cursor.prompts is not None and state.get("stream") is not None:
                self.cursor.prompts.load_state_dict(state["stream"])
            saved_prompts, curriculum = state["prompts"], state["curriculum"]
        except (AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
            raise RolloutError(
                f"The checkpoint's rollout state was written by another version of lightrl ({error!r}). Resume with "
                "that version, or run `lightrl export` on the checkpoint and start a new run from the exported model."
            ) from error
        self.cursor.load_state_dict(curriculum)
        prompts = None if self.cursor.prompts is None else self.cursor.prompts.fingerprint
        if saved_prompts is not None and prompts is not None and saved_prompts != prompts:
            log.warning(
                "The checkpoint was written with prompts %s, but this run has %s: some prompts will be repeated and "
                "others skipped. Restore the data module's files, seed and shuffle, or start a new run.",
                saved_prompts,
                prompts,
            )
