"""TurnLog: records an environment's answers in one conversation, so that a resumed run need not ask again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from lightrl.errors import RolloutError
from lightrl.models import self_contained
from lightrl.trajectory import Prompt
from lightrl.workflows.environment import Environment, call_environment


@dataclass
class TurnLog:
    """The answers of one conversation so far; answers from an earlier run are replayed first."""

    answers: list[tuple[str, Any, Any]] = field(default_factory=list)  # method, answer, state after it
    _num_given: int = 0

    async def ask(
        self, environment: Environment, method: str, prompt: Prompt, *arguments: object, timeout_s: float
    ) -> Any:
        """Returns the environment's answer, without a call if the earlier run recorded it.

        Raises:
            RolloutError: if the call fails, or its answer or the environment's state is not JSON.
        """
        name = f"{type(environment).__name__}.{method}"
        if self._num_given < len(self.answers):
            recorded_method, answer, state = self.answers[self._num_given]
            if recorded_method != method:
                raise RolloutError(
                    f"The resumed run calls {name} at a point where the earlier run called {recorded_method!r}."
                )
            environment.load_state_dict(prompt, state)
        else:
            returned = await call_environment(environment, method, *arguments, timeout_s=timeout_s)
            try:
                answer, state = json.loads(json.dumps([self_contained(returned), environment.state_dict()]))
            except (TypeError, ValueError) as error:
                raise RolloutError(
                    f"{name} returned {returned!r:.200}, but that or the environment's state is not JSON ({error}). An "
                    "environment with state_dict must return only values that JSON can store."
                ) from error
            self.answers.append((method, answer, state))
        self._num_given += 1
        return answer

    def state_dict(self) -> list[list[object]]:
        return [list(answer) for answer in self.answers]
