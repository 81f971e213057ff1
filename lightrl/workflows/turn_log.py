"""TurnLog: what engine and environment answered in one conversation, so that a resumed run does not ask again; Journal:
the same in a file, at once, for environments with side effects, so that a killed run does not repeat them.

    completion ─► journal ─► begin ─► step() acts on the world ─► end, with answer and state ─► next completion

Between `begin` and `end` nobody can know after a kill whether `step` has acted: such a conversation is dropped.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.engine import Completion
from lightrl.errors import RolloutError
from lightrl.models.images import data_url
from lightrl.trajectory import JsonObject, Prompt
from lightrl.workflows.environment import Environment, call_environment


@dataclass(eq=False)
class Journal:
    """A file with a line for each completion and call of conversations, which is on the disk before it has effects."""

    path: Path  # created with the first line; of an earlier run, it is read, and continued
    first: int = 0  # position of the prompt stream; what earlier groups generated is left out
    logs: dict[str, TurnLog] = field(default_factory=dict)  # session → log of the earlier run

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):  # half a line of a killed run: what it announced has not started
                    os.truncate(self.path, file.tell() - len(line))
                elif int(line.split(b'"', 4)[3].partition(b":")[0]) >= self.first:  # a session begins with its position
                    self._take(json.loads(line))

    def _take(self, record: JsonObject) -> None:
        log = self.logs.setdefault(record["session"], TurnLog(record["session"], self))
        if "completion" in record:
            log.completions.append(Completion.from_state(record["completion"]))
        elif "end" in record:
            log.answers.append((record["end"], record["answer"], record["state"]))
        log.is_in_doubt = "begin" in record

    async def add(self, session: str, **record: object) -> None:
        """Returns when the line is on the disk.

        Raises:
            RolloutError: if it cannot be written.
        """
        await in_thread(self._append, json.dumps({"session": session, **record}) + "\n")

    def _append(self, line: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock, self.path.open("ab") as file:
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RolloutError(
                f"The journal {self.path} cannot be written: {error}. Without it a resumed run would repeat side "
                "effects. Free space on the disk."
            ) from error


@dataclass
class TurnLog:
    """The answers of one conversation so far; those of an earlier run are given again first."""

    session: str
    journal: Journal | None = None
    completions: list[Completion] = field(default_factory=list)  # the journal's, by turn
    answers: list[tuple[str, Any, Any]] = field(default_factory=list)  # method, result, state after it
    is_in_doubt: bool = False  # the last call may or may not have acted
    _num_given: int = 0

    async def ask(
        self, environment: Environment, method: str, prompt: Prompt, *arguments: object, timeout_s: float
    ) -> Any:
        """The environment's answer; one of the earlier run is not asked for again.

        Raises:
            RolloutError: if the call fails, its answer or the state are not JSON, or the earlier run died during it.
        """
        name = f"{type(environment).__name__}.{method}"
        if self._num_given < len(self.answers):
            then, answer, state = self.answers[self._num_given]
            if then != method:
                raise RolloutError(f"{name} is called where the earlier run called {then!r}.")
            environment.load_state_dict(prompt, state)
        elif self.is_in_doubt:
            raise RolloutError(f"The earlier run was killed in {name}, which may have acted; it is not called again.")
        else:
            if self.journal is not None:
                await self.journal.add(self.session, begin=method)
            returned = await call_environment(environment, method, *arguments, timeout_s=timeout_s)
            try:
                answer, state = json.loads(json.dumps([_with_data_urls(returned), environment.state_dict()]))
            except (TypeError, ValueError) as error:
                raise RolloutError(
                    f"{name} returned {returned!r:.200} with a state, one of which is not JSON ({error}); an "
                    "environment with state_dict must return what JSON can hold."
                ) from error
            if self.journal is not None:
                await self.journal.add(self.session, end=method, answer=answer, state=state)
            self.answers.append((method, answer, state))
        self._num_given += 1
        return answer

    def state_dict(self) -> list[list[object]]:
        return [list(answer) for answer in self.answers]


def turn_log_of(journal: Journal | None, session: str, saved: dict[str, list[list[Any]]]) -> TurnLog:
    """The log of a conversation that starts or continues: the journal's, which knows more than the checkpoint."""
    log = TurnLog(session, answers=[(method, answer, state) for method, answer, state in saved.pop(session, [])])
    log = log if journal is None else journal.logs.pop(session, log)
    log.journal = journal
    return log


def _with_data_urls(answer: Any) -> Any:
    """The answer with a data: URL for each image that is a file, which may be gone after a resume."""
    if isinstance(answer, (list, tuple)):
        return [_with_data_urls(item) for item in answer]
    if not isinstance(answer, dict):
        return answer
    if answer.get("type") == "image":
        image = next((answer[key] for key in ("image", "path", "url") if answer.get(key)), None)
        if isinstance(image, str):
            with suppress(ValueError):  # the conversation reports an image that cannot be read
                return {**answer, "image": data_url(image)}
    return {key: _with_data_urls(item) for key, item in answer.items()}
