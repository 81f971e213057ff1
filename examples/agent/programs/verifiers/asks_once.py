"""A verifiers harness that asks the model once, with the same Python interpreter.

The harnesses in verifiers install their agent from the network, which a program run by AgentWorkflow cannot reach.
"""

import sys
from typing import Any

import verifiers.v1 as vf

__all__ = ["AsksOnce"]
PROGRAM = """
import sys
from openai import OpenAI

url, key, model, prompt = sys.argv[1:]
messages = [{"role": "user", "content": prompt}]
print(OpenAI(base_url=url, api_key=key).chat.completions.create(model=model, messages=messages))
"""


class AsksOnce(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Runs PROGRAM with the endpoint, the key, the model name and the prompt."""

    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, gate: Any = None
    ) -> Any:
        command = [sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, data.prompt]
        return await runtime.run_program(command, self.config.resolved_env)
