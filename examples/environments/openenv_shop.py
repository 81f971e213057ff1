"""An openenv 0.10 server for OpenEnvTools: its environment has a tool that returns prices.

Start it like openenv_server.py. The chat template must show tools, and the policy must know how to call them.
"""

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

PRICES = {"tea": "3", "milk": "2"}


class Shop(MCPEnvironment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("shop")
        self._state = State(step_count=0)

        @tools.tool  # type: ignore[untyped-decorator]
        def price(item: str) -> str:
            """Finds the price of an item.

            Args:
                item: its name
            """
            return PRICES[item]

        super().__init__(tools)

    def reset(self, seed: int | None = None, **_: Any) -> Observation:
        return Observation(metadata={"task": "What does tea cost?"})

    def step(self, action: Any, timeout_s: float | None = None, **others: Any) -> Observation:
        observation = super().step(action, timeout_s=timeout_s, **others)
        return self._with_reward(action, observation)

    async def step_async(self, action: Any, timeout_s: float | None = None, **others: Any) -> Observation:
        observation = await super().step_async(action, timeout_s=timeout_s, **others)
        return self._with_reward(action, observation)

    def _with_reward(self, action: Any, observation: Observation) -> Observation:
        if isinstance(action, CallToolAction):
            observation.reward = float(observation.error is None and action.arguments.get("item") == "tea")
        return observation

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError(f"There is no action {type(action).__name__}.")

    @property
    def state(self) -> State:
        return self._state


app = create_fastapi_app(Shop, CallToolAction, CallToolObservation, max_concurrent_envs=8)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[sys.argv.index("--port") + 1]), log_level="warning")
