"""Written: what running groups have written and been answered so far, so that a resumed run goes on from there."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightrl.engines.engine import Completion
from lightrl.workflows.turn_log import Journal, TurnLog, turn_log_of
from lightrl.workflows.workflow import Workflow


@dataclass(eq=False)
class Written:
    """Belongs to the controller's event loop. A group is known by its seed name while it runs."""

    begun: dict[int, Completion] = field(default_factory=dict)  # by seed: what a checkpoint has, whole or in part
    journal: Journal | None = None  # of workflows with side effects
    _completions: dict[str, dict[int, Completion | None]] = field(default_factory=dict)  # by seed; None: in progress
    _answers: dict[str, list[list[Any]]] = field(default_factory=dict)  # of a checkpoint, by session
    _logs: dict[str, dict[str, TurnLog]] = field(default_factory=dict)  # by session

    def open_journal(self, folder: Path) -> None:
        """Of a run that starts; `load_state_dict` continues that of an earlier one."""
        self.journal = Journal(folder / f"journal-{secrets.token_hex(4)}.jsonl")

    def open(self, seed_name: str) -> None:
        """This group starts."""
        self._completions[seed_name] = {}

    def forget(self, seed_name: str) -> None:
        """This group is done or given up."""
        self._completions.pop(seed_name, None)
        self._logs.pop(seed_name, None)

    def borrow(self, seed_name: str, lent: Mapping[str, Any]) -> None:
        """This group's interaction starts here, with what another process has of it."""
        self._completions.setdefault(seed_name, {})
        self.begun |= lent["begun"]
        self._answers |= lent["answers"]

    def completions(self, seed_name: str) -> dict[int, Completion | None]:
        """Those of a running group, to be set; of validation, which nothing resumes, an empty dict."""
        return self._completions.get(seed_name, {})

    def turn_log(self, workflow: Workflow, seed_name: str, session: str) -> TurnLog | None:
        """Of a training rollout that can continue in a resumed run."""
        if seed_name not in self._completions or not workflow.continues:
            return None
        journal = self.journal if workflow.has_side_effects else None
        log = self._logs.setdefault(seed_name, {})[session] = turn_log_of(journal, session, self._answers)
        return log

    def state_dict(self, workflow: Workflow, unfinished: Mapping[int, Completion]) -> dict[str, Any]:
        """
        Args:
            unfinished: by seed, what the engine has of the completions in progress.
        """
        logs = [item for logs in self._logs.values() for item in logs.items()]
        return {
            "written": self._written(unfinished) if workflow.continues else [],
            "answers": self._answers | {session: log.state_dict() for session, log in logs if log.answers},
            "journal": None if self.journal is None else str(self.journal.path.absolute()),
        }

    def _written(self, unfinished: Mapping[int, Completion]) -> list[list[Any]]:
        written = {seed: item for seeds in self._completions.values() for seed, item in seeds.items()}
        whole = {**self.begun, **{seed: item or unfinished.get(seed) for seed, item in written.items()}}
        return [[seed, item.state_dict()] for seed, item in whole.items() if item is not None and len(item.token_ids)]

    def load_state_dict(self, state: Mapping[str, Any], *, goes_on: bool, first: int) -> None:
        """
        Args:
            first: position of the prompt stream from which on groups may be played.
            goes_on: False starts all groups again; what a journal has is not repeated even so.
        """
        if goes_on:
            self.begun = {seed: Completion.from_state(item) for seed, item in state["written"]}
            self._answers = dict(state["answers"])
        if self.journal is not None and state.get("journal"):
            self.journal = Journal(Path(state["journal"]), first=first)
