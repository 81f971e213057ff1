"""A task for verifiers 0.4, run by its agent with the policy at the address in the environment.

It reads a prompt such as `3719=` from standard input. It runs in the Python built by scripts/environments/build.py
verifiers, and knows nothing about training.
"""

import asyncio
import os
import sys
from pathlib import Path

import verifiers.v1 as vf


class Data(vf.TaskData):  # type: ignore[misc]
    answer: str


class Largest(vf.Task[Data]):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def is_exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


async def main(prompt: str) -> None:
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    config = vf.AgentConfig(model="policy", client=client, runtime=vf.SubprocessConfig(), harness={"id": "asks_once"})
    async with vf.make_agent(config) as agent:
        trace = await agent.run(Largest(Data(idx=0, prompt=prompt, answer=max(prompt[:4]))))
    if not trace.ok:
        sys.exit(f"{[error.message for error in trace.errors]}")
    Path("reward.txt").write_text(str(trace.reward))


asyncio.run(main(sys.stdin.read()))
