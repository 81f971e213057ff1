"""A harness of verifiers whose agent asks the model once. Those of verifiers install their agent when they start, from
the network, which a program of ours does not have; this one runs in the same Python."""

import sys
from typing import Any

import verifiers.v1 as vf

__all__ = ["AsksOnce"]
PROGRAM = """
import sys
from openai import OpenAI

url, key, model, question = sys.argv[1:]
messages = [{"role": "user", "content": question}]
print(OpenAI(base_url=url, api_key=key).chat.completions.create(model=model, messages=messages))
"""


class AsksOnce(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, gate: Any = None
    ) -> Any:
        command = [sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, data.prompt]
        return await runtime.run_program(command, self.config.resolved_env)
