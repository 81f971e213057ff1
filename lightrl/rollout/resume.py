"""SavedState: the rollout's part of a checkpoint, taken at a token boundary of the engine.

InFlightCompletions: what running groups have generated so far and the answers they got, so that a resumed run can
continue from there.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.errors import EngineError, RolloutError
from lightrl.rollout.group_scheduler import GroupScheduler
from lightrl.rollout.prompts import PromptCursor, State
from lightrl.rollout.tasks import ADMISSION_TICKS, AdmissionBatch
from lightrl.trajectory import sampling_seed
from lightrl.workflows.turn_log import TurnLog
from lightrl.workflows.workflow import Workflow

log = logging.getLogger(__name__)


@dataclass(eq=False)
class InFlightCompletions:
    """The completions of running groups, by seed name of the group. Belongs to one event loop."""

    workflow: Workflow
    started: dict[int, Completion] = field(default_factory=dict)  # seed -> a checkpoint's, complete or partial
    _completions: dict[str, dict[int, Completion | None]] = field(default_factory=dict)  # seeds; None: in progress
    _answers: dict[str, list[list[Any]]] = field(default_factory=dict)  # session -> a checkpoint's
    _logs: dict[str, dict[str, TurnLog]] = field(default_factory=dict)  # session -> log

    def open(self, seed_name: str) -> None:
        """Includes a training group that starts in checkpoints from now on."""
        self._completions.setdefault(seed_name, {})

    def close(self, seed_name: str) -> None:
        """Forgets a group that is done or given up."""
        self._completions.pop(seed_name, None)
        self._logs.pop(seed_name, None)

    def hand_over(self, seed_name: str, samples: Sequence[int], run_seed: int) -> State | None:
        """Removes and returns a checkpoint's part of these samples, for a worker's `take_over`; None in validation."""
        if seed_name not in self._completions:
            return None
        started: dict[int, Completion] = {}
        for sample in samples:
            seeds = (sampling_seed(run_seed, seed_name, sample, turn) for turn in itertools.count())
            started |= {seed: self.started.pop(seed) for seed in itertools.takewhile(self.started.__contains__, seeds)}
        sessions = {f"{seed_name}/{sample}" for sample in samples} & self._answers.keys()
        return {"started": started, "answers": {session: self._answers.pop(session) for session in sessions}}

    def take_over(self, seed_name: str, parts: State) -> None:
        """Opens a training group in this worker, with what `hand_over` returned."""
        self.open(seed_name)
        self.started |= parts["started"]
        self._answers |= parts["answers"]

    def completions(self, seed_name: str) -> dict[int, Completion | None]:
        """Returns the dict of a running group's completions, which callers fill; a throw-away dict in validation."""
        return self._completions.get(seed_name, {})

    def turn_log(self, seed_name: str, session: str) -> TurnLog | None:
        """Returns the log of a training rollout that a resumed run can continue; None for others."""
        if seed_name not in self._completions or not self.workflow.continues:
            return None
        answers = [(method, answer, state) for method, answer, state in self._answers.pop(session, [])]
        log = self._logs.setdefault(seed_name, {})[session] = TurnLog(answers)
        return log

    def state_dict(self, unfinished: Mapping[int, Completion], states_of_workers: Sequence[State] = ()) -> State:
        """
        Args:
            unfinished: by seed, the engine's completions in progress.
            states_of_workers: the workflow workers' states, in the form that this method returns.
        """
        logs = [item for logs in self._logs.values() for item in logs.items()]
        completions: dict[int, Any] = {}
        if self.workflow.continues:
            generated = {seed: item for group in self._completions.values() for seed, item in group.items()}
            known = {**self.started, **{seed: item or unfinished.get(seed) for seed, item in generated.items()}}
            completions = {seed: item.state_dict() for seed, item in known.items() if item and len(item.token_ids)}
        answers = self._answers | {session: log.state_dict() for session, log in logs if log.answers}
        for state in states_of_workers:
            completions |= dict(state["written"])
            answers |= state["answers"]
        return {"written": [[seed, item] for seed, item in completions.items()], "answers": answers}

    def load_state_dict(self, state: State) -> None:
        self.started = {seed: Completion.from_state(item) for seed, item in state["written"]}
        self._answers = dict(state["answers"])


class Resumable(Protocol):
    """What runs the groups: TrajectoryRunner in this process, or WorkflowPool in others."""

    in_flight: InFlightCompletions

    async def states_of_workers(self) -> list[State]:
        """Returns what each workflow worker has in flight while the engine is paused."""
        ...


@dataclass(eq=False)
class SavedState:
    """Belongs to the controller's event loop."""

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
        async with self.admission.batch():
            for _ in range(ADMISSION_TICKS):  # completions that have ended are reported meanwhile
                await asyncio.sleep(0)
            unfinished = await self.engine.unfinished()
            return self._state(run_seed, unfinished, await self.runner.states_of_workers())

    def _state(
        self, run_seed: int, unfinished: Mapping[int, Completion], states_of_workers: Sequence[State] = ()
    ) -> State:
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
            before, curriculum = state["prompts"], state["curriculum"]
        except (AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
            raise RolloutError(
                f"The checkpoint's rollout state has the form of another version of lightrl ({error!r}). Resume with "
                "that version, or run `lightrl export` on the checkpoint and start a new run from the exported model."
            ) from error
        self.cursor.load_state_dict(curriculum)
        now = None if self.cursor.prompts is None else self.cursor.prompts.fingerprint
        if before is not None and now is not None and before != now:
            log.warning(
                "The checkpoint was written with prompts %s, but this run has %s: some prompts will be repeated and "
                "others skipped. Restore the data module's files, seed and shuffle, or start a new run.",
                before,
                now,
            )
