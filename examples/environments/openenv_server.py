"""An openenv 0.10 server: guess a digit; the answer is + for higher, - for lower.

pip install openenv==0.10.0, or: python scripts/environments/build.py openenv
PYTHON examples/environments/openenv_server.py --port 8010
"""

import argparse
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Hint(Observation):
    text: str


class GuessDigit(Environment):  # type: ignore[misc, type-arg]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(step_count=0)
        self.secret = 0

    def reset(self, seed: int | None = None, secret: int | None = None, **_: Any) -> Hint:
        self._state = State(step_count=0)
        self.secret = (seed or 0) % 10 if secret is None else secret
        return Hint(text="=")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        self._state.step_count += 1
        guess = int(action.message) if action.message in [*"0123456789"] else -1
        is_right = guess == self.secret
        return Hint(text="+" if guess < self.secret else "-", reward=float(is_right), done=is_right)

    @property
    def state(self) -> State:
        return self._state


parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, default=8010)
parser.add_argument("--max_sessions", type=int, default=512)
options = parser.parse_args()
app = create_fastapi_app(GuessDigit, Guess, Hint, max_concurrent_envs=options.max_sessions)
uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")
