"""The child's side of RewardPool: a fresh interpreter that imports one function and judges what comes through a pipe.

Both directions carry one JSON value per line.

    pool ─► worker   {"parts": [{"path": ...}, ...], "timeout_s": ..., "memory_limit_mib": ...}, then batches:
                     [trajectory, ...]
    worker ─► pool   {"runs_together": ...} or {"problem": ...}, then per trajectory, as soon as it is judged:
                     {"index": 0, "reward": 1.0, "metrics": {...}, "rewards": null, "extracted": null}
                     or {"index": 0, "error": ..., "reason": ...}

The child is two processes. The worker runs the function and leads a process group; its parent, the guardian, runs no
user code and ends that group when the pool asks for it, closes the pipe or dies. (The worker cannot guard itself: C
code may hold its interpreter for hours, as a regular expression does, and its own children would survive it.) Neither
imports torch; what a reward function needs, its module imports.
"""

from __future__ import annotations

import contextlib
import difflib
import faulthandler
import importlib
import json
import os
import pkgutil
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from lightrl.concurrency.parent_guard import kill_group, wait_for_parent
from lightrl.errors import RewardError
from lightrl.rewards.judgment import Outcome, Runner
from lightrl.rewards.parts import RewardPart, bound, summed
from lightrl.trajectory import Trajectory

_SIGNALS = {signal.SIGTERM, signal.SIGUSR1}  # of the pool: end, and show the stack


def main() -> None:
    """Serves the pool whose process id is `sys.argv[1]` until it closes the pipe or dies."""
    parent = int(sys.argv[1])
    del sys.argv[1:]
    requests, replies = _take_over_pipes()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # no moment in which a guardian dies without its worker
    worker = os.fork()  # before there is any thread
    if worker:
        os.close(replies)  # so that the pool sees it close when the worker ends
        _guard(worker, parent, requests)
    os.setpgid(0, 0)
    faulthandler.enable()  # a crash in C code shows where it was
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the pool asks so where a hung call is
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    with os.fdopen(requests, "rb") as lines:
        settings = json.loads(lines.readline())
        parts = [RewardPart(**part) for part in settings["parts"]]
        _limit_memory(settings["memory_limit_mib"])
        try:
            function = summed(parts, [_bound(part) for part in parts])
        except ValueError as error:
            _reply(replies, {"problem": str(error)})
            return
        runner = Runner(function, name=" + ".join(part.path for part in parts), timeout_s=settings["timeout_s"])
        _reply(replies, {"runs_together": runner.runs_together})
        for line in lines:
            for index, outcome in runner.outcomes(map(Trajectory.from_json, json.loads(line))):
                _reply(replies, _record(index, outcome))


def _bound(part: RewardPart) -> Callable[[Trajectory], Any]:
    function = resolve(part.path)
    try:
        return bound(part, function)
    except (Exception, SystemExit) as error:  # a class whose constructor fails is user code too
        if isinstance(error, ValueError) and str(error).startswith("reward="):
            raise
        raise ValueError(f"reward={part.path!r} cannot be made with {part.arguments}: {error!r}. Mend them.") from error


def _limit_memory(limit_mib: int | None) -> None:
    """Of this process and of each that it starts; allocations beyond fail, which Python calls a MemoryError.

    The limit is on data (RLIMIT_DATA: private memory that may be written), not on address space, of which libraries
    reserve tens of GiB that they never touch.
    """
    if limit_mib is not None:
        with contextlib.suppress(OSError, ValueError):  # a lower hard limit holds already
            resource.setrlimit(resource.RLIMIT_DATA, (limit_mib << 20, limit_mib << 20))


def resolve(path: str) -> Callable[[Trajectory], Any]:
    """The function behind a dotted path `package.module.function`; classes in between are allowed.

    Raises:
        ValueError: if there is none, with what is wrong and the nearest names.
    """
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError(
            f"reward={path!r} is no dotted path, expected package.module.function. Write the module's name, a dot and "
            "the function's name."
        )
    found: Any = None
    num_imported = 0
    for num_imported in range(len(parts) - 1, 0, -1):
        found = _imported(".".join(parts[:num_imported]), path)
        if found is not None:
            break
    if found is None:
        raise ValueError(
            f"reward={path!r}: there is no module {parts[0]!r} on the import path, expected {parts[0]}.py or a package "
            f"{parts[0]}/ in one of {[entry for entry in sys.path if os.path.isdir(entry)]}. "  # noqa: PTH112
            "Run from the folder that has it, mend the name, or install the package."
        )
    for position, part in enumerate(parts[num_imported:], start=num_imported):
        if not hasattr(found, part):
            owner = ".".join(parts[:position])
            raise ValueError(
                f"reward={path!r}: {owner!r} has no {part!r}, expected a function. {_nearest(part, found)}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(
            f"reward={path!r} is {_kind(found)}, expected a function that takes a Trajectory. Name the function in it."
        )
    return found  # type: ignore[no-any-return]


def _imported(module: str, path: str) -> ModuleType | None:
    """The module, or None if it does not exist; ValueError if its own code fails."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            return None
        problem = error
    except (Exception, SystemExit) as error:  # the border of user code
        raise ValueError(_import_failed(module, path, error)) from error
    raise ValueError(_import_failed(module, path, problem)) from problem


def _import_failed(module: str, path: str, error: BaseException) -> str:
    # Frames of importlib say nothing to the user.
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    text = "".join([*traceback.format_list(frames), *traceback.format_exception_only(type(error), error)]).rstrip()
    return (
        f"reward={path!r}: importing module {module!r} failed with {type(error).__name__}, expected it to import. "
        f"Mend it:\n{text}"
    )


def _nearest(name: str, owner: object) -> str:
    names = [item for item in dir(owner) if not item.startswith("__")]
    if hasattr(owner, "__path__"):
        names += [item.name for item in pkgutil.iter_modules(owner.__path__)]
    nearest = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if nearest:
        return f"Did you mean {' or '.join(repr(item) for item in nearest)}?"
    functions = [item for item in names if callable(getattr(owner, item, None)) and not item.startswith("_")]
    return f"It has {', '.join(functions[:10]) or 'no function'}. Mend the name."


def _kind(found: object) -> str:
    return "a module" if isinstance(found, ModuleType) else f"of type {type(found).__name__}"


def _take_over_pipes() -> tuple[int, int]:
    """The two pipes under new numbers; what the function reads and prints goes to /dev/null and stderr instead."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return requests, replies


def _guard(worker: int, parent: int, requests: int) -> NoReturn:
    """Waits for the first of: the worker ends, the pool sends SIGTERM, closes the pipe or dies; nobody is left then."""
    with contextlib.suppress(PermissionError, ProcessLookupError):  # the worker was faster, or is gone
        os.setpgid(worker, worker)
    mirror = threading.Thread(target=_end_like, args=(worker,), daemon=True)
    mirror.start()
    signal.signal(signal.SIGTERM, lambda *_: kill_group(worker))
    signal.signal(signal.SIGUSR1, lambda *_: os.kill(worker, signal.SIGUSR1))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    wait_for_parent(parent, requests)
    kill_group(worker)
    mirror.join()
    raise AssertionError("the mirror ends this process")


def _end_like(worker: int) -> NoReturn:
    """Waits for the worker's end and ends this process with the same code or signal."""
    # WNOWAIT: until it is waited for, nobody else can have the number of its group.
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    kill_group(worker)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core dump is enough
        signal.pthread_kill(threading.get_ident(), -code)  # this thread, so that it does not return
    os._exit(code if code >= 0 else 128 - code)


def _reply(replies: int, record: dict[str, Any]) -> None:
    left = memoryview(json.dumps(record).encode() + b"\n")
    while left:
        left = left[os.write(replies, left) :]


def _record(index: int, outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, RewardError):
        return {"index": index, "error": str(outcome), "reason": outcome.reason}
    return {"index": index, **vars(outcome)}
