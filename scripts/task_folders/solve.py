"""Checks a folder of tasks: a task's tests must reward its solution with 1, and an agent that does nothing with 0.

    python scripts/task_folders/solve.py my-tasks                      in this machine's sandbox
    python scripts/task_folders/solve.py my-tasks --runtime podman

Prints each task with other rewards. Run it before training: where the solution fails, the policy can earn nothing;
where an agent that does nothing passes, it learns nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from lightrl.errors import RolloutError
from lightrl.rewards.sandbox import remove_folder
from lightrl.trajectory import Prompt
from lightrl.workflows.agent_workflow import AgentResult
from lightrl.workflows.task_folders import TaskFolder, Verifier, rows
from lightrl.workflows.task_folders.runtime import NO_ENDPOINT, Json
from lightrl.workflows.task_folders.verifier import script

NUM_AT_ONCE = 2


async def reward_of(task: TaskFolder, runtime: str, network: str, *, solved: bool) -> tuple[float, str]:
    """Returns the reward of a task's solution, or of an agent that does nothing, and what failed ("" if nothing)."""
    verifier = Verifier(network=network)
    fields = {"task_folder": str(task.folder), "runtime": runtime, "agent_timeout_s": task.timeout_s("agent")}
    prompt = Prompt(task.folder.name, messages=[], fields=fields)
    copies = [(str(task.folder.resolve() / "solution"), "/solution")] if solved else []

    async def start(request: Json, prompt: Prompt) -> Json:
        return await verifier.start_agent(request, prompt, copies)

    command = verifier.command(script("/solution/solve.sh") if solved else ["true"], start)
    problem = ""
    try:
        result = await command.run(prompt, f"http://127.0.0.1:{NO_ENDPOINT}/v1", "")
    except RolloutError as error:
        result, problem = getattr(error, "result", AgentResult()), str(error)
    if result.workspace is None:
        return 0.0, problem
    try:
        return (await verifier.reward(prompt, result.workspace))[0], problem
    except RolloutError as error:
        return 0.0, f"{problem} {error}".strip()
    finally:
        remove_folder(str(Path(result.workspace).parent))


async def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--runtime", default="local")
    parser.add_argument("--network", choices=("none", "allow"), default="none")
    parser.add_argument("--bad-tasks", choices=("error", "drop"), default="error")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    made = await asyncio.to_thread(
        lambda: list(rows(folder=options.folder, runtime=options.runtime, bad_tasks=options.bad_tasks))
    )
    free = asyncio.Semaphore(NUM_AT_ONCE)
    counts: dict[tuple[float, float], int] = {}

    async def check(folder: str) -> None:
        async with free:
            task = TaskFolder(Path(folder))
            solved, problem = await reward_of(task, options.runtime, options.network, solved=True)
            empty, _ = await reward_of(task, options.runtime, options.network, solved=False)
        counts[solved, empty] = counts.get((solved, empty), 0) + 1
        if (solved, empty) != (1.0, 0.0):
            print(f"{task.folder.name}: solution {solved:g}, no work {empty:g}. {problem}")

    await asyncio.gather(*(check(str(row["task_folder"])) for row in made))
    for (solved, empty), number in sorted(counts.items()):
        print(f"{number} of {len(made)} tasks: solution {solved:g}, no work {empty:g}")
    return 0 if set(counts) == {(1.0, 0.0)} else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
