"""PooledPlayer: plays groups by the workers of a WorkflowPool; judging, order and what a checkpoint has stay here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.rewards import Judge
from lightrl.rollout.drop_tally import DropTally
from lightrl.rollout.group_player import GroupPlayer
from lightrl.rollout.settings import RolloutSettings
from lightrl.rollout.tasks import Tasks
from lightrl.rollout.workflow_pool import WorkflowPool
from lightrl.rollout.written import Written
from lightrl.trace import span
from lightrl.trajectory import Prompt, Sampling, Trajectory, sampling_seed
from lightrl.workflows.workflow import Workflow


def make_player(
    engine: RolloutEngine,
    workflow: Workflow,
    tasks: Tasks,
    judge: Judge,
    tally: DropTally,
    settings: RolloutSettings,
) -> GroupPlayer:
    """What plays groups: a PooledPlayer if there are `workflow_workers`. ValueError if it cannot do that."""
    num, silent_s = settings.workflow_workers, settings.loop_timeout_s
    if num == 0:
        return GroupPlayer(engine, workflow, tasks, judge=judge, tally=tally)
    pool = WorkflowPool(engine, workflow, num, tasks, silent_s=silent_s)
    return PooledPlayer(engine, workflow, tasks, judge=judge, tally=tally, pool=pool)


class LentWritten(Written):
    """What a checkpoint has, lent to workers as they need it, and what they have written, collected for the next one.

    Args:
        on_forget: called with a group's seed name when nothing of it is needed any more.
    """

    def __init__(self, on_forget: Callable[[str], object]) -> None:
        super().__init__()
        self.collected: list[dict[str, Any]] = []  # `state_dict` of each worker, for the next call of this one's
        self._on_forget = on_forget
        self._lent: dict[str, list[tuple[int, str]]] = {}  # seeds and sessions, by seed name

    def lend(self, seed_name: str, sample: int, run_seed: int) -> dict[str, Any] | None:
        """What a checkpoint has of an interaction, to `borrow`; None in a validation, which nothing resumes."""
        if seed_name not in self._completions:
            return None
        session = f"{seed_name}/{sample}"
        seeds = (sampling_seed(run_seed, seed_name, sample, turn) for turn in itertools.count())
        begun = {seed: self.begun[seed] for seed in itertools.takewhile(self.begun.__contains__, seeds)}
        self._lent.setdefault(seed_name, []).extend((seed, session) for seed in begun)
        return {"begun": begun, "answers": {key: self._answers[key] for key in [session] if key in self._answers}}

    def forget(self, seed_name: str) -> None:
        if seed_name in self._completions:
            self._on_forget(seed_name)
        super().forget(seed_name)
        for seed, session in self._lent.pop(seed_name, ()):
            self.begun.pop(seed, None)
            self._answers.pop(session, None)

    def state_dict(self, workflow: Workflow, unfinished: Mapping[int, Completion]) -> dict[str, Any]:
        state = super().state_dict(workflow, unfinished)
        written = dict(state["written"])
        collected, self.collected = self.collected, []
        for part in collected:
            written |= dict(part["written"])
            state["answers"] |= part["answers"]
        return state | {"written": [[seed, item] for seed, item in written.items()]}


@dataclass(eq=False)
class PooledPlayer(GroupPlayer):
    """A GroupPlayer whose workflows run in the workers of a pool."""

    pool: WorkflowPool = field(kw_only=True)

    def __post_init__(self) -> None:
        self.written = self._lent = LentWritten(self.pool.forget)

    async def open(self) -> None:
        await self.pool.open()

    async def interact(
        self, prompt: Prompt, sample: int, sampling: Sampling, run_seed: int, seed_name: str
    ) -> Trajectory:
        lent = self._lent.lend(seed_name, sample, run_seed)
        with span("interaction", "generate", "generations", session=f"{seed_name}/{sample}"):
            return await self.pool.play(prompt, seed_name, lent, sample, sampling, run_seed)

    async def collect(self) -> None:
        self._lent.collected = await self.pool.written()
