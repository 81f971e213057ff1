"""rows: turns a folder of tasks into rows of data, after checking and preparing their environments."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from lightrl.checks.bounds import check_choice
from lightrl.trajectory import JsonObject
from lightrl.workflows.task_folders.folder import TaskFolder, task_of
from lightrl.workflows.task_folders.runtime import Runtime, cache_folder, runtime_of

log = logging.getLogger(__name__)

_PROGRESS_S = 5.0


def rows(
    split: str = "train", *, folder: str, runtime: str = "local", bad_tasks: Literal["error", "drop"] = "error"
) -> Iterator[JsonObject]:
    """Yields a row for each task in a folder, after building or pulling what its runtime needs.

    A row has `question` (the instruction), `task_folder`, `runtime` and, if the task sets it, `agent_timeout_s`.

    Args:
        split: has no effect, because a folder is one split.
        folder: the folder that contains the task folders.
        runtime: where agents and tests run: `local`, `docker`, `podman` or the dotted path to a Runtime.
        bad_tasks: what to do with tasks that cannot run there: raise an `error`, or `drop` and count them.

    Raises:
        ValueError: if the runtime is missing, or tasks cannot run there.
    """
    check_choice(("error", "drop"), bad_tasks=bad_tasks)
    machines = runtime_of(runtime)
    tasks = [task_of(str(path.parent)) for path in sorted(Path(folder).expanduser().glob("*/task.toml"))]
    if (missing := machines.missing()) is not None:
        raise ValueError(f"{len(tasks)} tasks in {folder} need runtime={runtime!r}: {missing}")
    problems = {task: problem for task in tasks if (problem := _problem(task, machines)) is not None}
    problems |= _build([task for task in tasks if task not in problems], machines.build)
    if problems:
        examples = "; ".join(f"{task.folder.name}: {problem}" for task, problem in list(problems.items())[:3])
        text = f"{len(problems)} of {len(tasks)} tasks in {folder} cannot run with runtime={runtime!r} ({examples})."
        if bad_tasks == "error" or len(problems) == len(tasks):
            raise ValueError(f"{text} Choose another runtime, or leave them out with bad_tasks: drop.")
        log.warning("%s They are dropped.", text)
    for task in tasks:
        if task not in problems:
            values = {"question": task.instruction, "task_folder": str(task.folder), "runtime": runtime}
            has_timeout = "timeout_sec" in task.config.get("agent", {})  # otherwise the workflow's deadline applies
            yield values | ({"agent_timeout_s": task.timeout_s("agent")} if has_timeout else {})


def _problem(task: TaskFolder, machines: Runtime) -> str | None:
    try:
        _ = task.instruction, task.limits_mib(), [task.timeout_s(name) for name in ("agent", "verifier", "environment")]
        _ = task.environment("environment"), task.environment("verifier"), task.digest
        return task.problem or machines.problem(task)
    except (OSError, ValueError) as error:
        return str(error).rstrip(".")


def _build(tasks: list[TaskFolder], build: Callable[[TaskFolder], str]) -> dict[TaskFolder, str]:
    """Builds each distinct environment once and logs progress; returns the tasks that failed, and why."""
    first = {task.digest: task for task in tasks}
    log.info("Preparing the environments of %d tasks (%d distinct).", len(tasks), len(first))
    failed: dict[str, str] = {}
    reported_s = time.monotonic()

    def built(task: TaskFolder) -> str | None:
        try:
            build(task)
        except (OSError, ValueError) as error:
            return str(error)
        return None

    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / "lock").open("w") as lock, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first rank builds the environments; the others wait and reuse them
        for number, (digest, problem) in enumerate(zip(first, pool.map(built, first.values()), strict=True), start=1):
            if problem is not None:
                failed[digest] = problem
            if time.monotonic() > reported_s + _PROGRESS_S:
                reported_s = time.monotonic()
                log.info("Prepared %d of %d task environments.", number, len(first))
    return {task: failed[task.digest] for task in tasks if task.digest in failed}
