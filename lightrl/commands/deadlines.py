"""`python -m lightrl.commands.deadlines`: every wait of lightrl, what ends it, when, and whom the message names.

A test finds each call and lock in the code that can block, and `tests/commands/waits.txt` has the row of each. Seconds
are read from the settings and constants that the code uses. `--write FILE` puts the table between two marks of a page.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

MARKS = ("<!-- python -m lightrl.commands.deadlines --write docs/deadlines.md -->", "<!-- end of the table -->")


@dataclass(frozen=True)
class Wait:
    """A wait, at the places that tests/commands/waits.txt has for it.

    Args:
        what: is waited for.
        limits: what ends the wait at the latest: `module:Class.setting` or `module:CONSTANT`; empty if `ends` does.
        ends: what ends it, where that is not the limit alone.
        names: whom or what the message names.
    """

    what: str
    limits: tuple[str, ...] = ()
    ends: str = ""
    names: str = ""

    def limit_texts(self) -> list[str]:
        """`StalenessControl.rollout_timeout_s: 1800 s`, or only the seconds of a constant."""
        return [_limit_text(limit) for limit in self.limits]


_TIMEOUTS = "engines.sglang.timeouts:Timeouts"
_HANG = "strategies.fsdp2:FSDP2Strategy.hang_timeout_s"
_ROLLOUT = "callbacks.staleness:StalenessControl.rollout_timeout_s"
_LOOP = "callbacks.staleness:StalenessControl.loop_timeout_s"
_WRITES = "strategies.atomic_write:BackgroundWrites"
_SYNC = "callbacks.weight_sync:WeightSync.sync_timeout_s"

SHORT_LOCKS = "a lock of a few lines"

WAITS = (
    # ------------------------------------------------------------------ ranks
    Wait("all ranks, to form a group", ("strategies.ranks:START_TIMEOUT",), names="the address that does not answer"),
    Wait("other ranks, before training", ("strategies.rank_watch:START_S", _HANG), "the longer; without a step",
         "the rank that is behind, stopped or gone"),
    Wait("other ranks, in a collective", (_HANG,), names="the rank that is behind, stopped or gone, and its phase"),
    Wait("a rank's state or the store on rank 0", (_HANG,), names="the rank, and the phase that it published last"),
    Wait("a rank's phase, to be published", ("strategies.rank_watch:POLL_S",), "the rank goes on"),
    Wait("other ranks, to learn of a failure", ends="6 s for the roll call of a broken connection, 3 s for the others"),
    Wait("this rank, to end by itself after another failed", ("strategies.rank_watch:GRACE_S",),
         names="the rank that failed"),
    Wait("the watch's threads, at the end", ends="2.5 s"),
    Wait("gloo's threads, at the end", ("strategies.fsdp2:EXIT_S",), "the process ends"),
    Wait("a new file, on the other hosts of a shared disk", ("strategies.shared_folder:VISIBLE_WITHIN_S",),
         names="the ranks that do not see it"),
    Wait("a name's address", ends="the system's resolver: some 10 s"),
    # ------------------------------------------------------------------ disks and threads
    Wait("a checkpoint's disk",
         (f"{_WRITES}.stall_s", f"{_WRITES}.stall_at_end_s"),
         "without a byte that the disk takes; the second one while a run ends", "the checkpoint"),
    Wait("data that is read ahead", ("data.windows:READ_TIMEOUT_S",), names="the batches"),
    Wait("the thread that reads ahead, at the end", ends="10 s; it is a daemon"),
    Wait("threads that compute", ends="their computation"),
    Wait("a function in a daemon thread", ends="the deadline of the row that calls it; the thread is abandoned"),
    # ------------------------------------------------------------------ rollouts
    Wait("groups of a batch, and rewards", (_ROLLOUT,), "without a trajectory that ends", "the prompts in progress"),
    Wait("the rollouts' event loop", (_LOOP,), names="the line that blocks it, or what its thread died of"),
    Wait("what is in flight, for a checkpoint", (_LOOP,), "half of it"),
    Wait("tasks that were given up", ("concurrency.loop_thread:_LAST_TASKS_S",),
         "10 s for close, then their daemon thread is abandoned"),
    Wait("a model call", ("dataflow:ModelCall.timeout_s",), names="the call"),
    Wait("a workflow, outside of generate", ("workflows.workflow:Workflow.own_timeout_s",),
         "the trajectory is dropped", "the workflow and the prompt"),
    Wait("a workflow worker, to start", ("rollout.workflow_pool:START_S",), names="the worker"),
    Wait("a workflow worker's answer", (_LOOP,), "it is replaced, and its trajectories are played again",
         "the worker, and where it is"),
    Wait("a workflow worker, to end", ("rollout.workflow_pool:END_S", "rollout.workflow_worker:END_S"), "SIGKILL"),
    Wait("a call of an environment",
         ("workflows.multi_turn:MultiTurn.step_timeout_s", "workflows.tools:ToolEnvironment.tool_timeout_s"),
         "the trajectory is dropped; after 64 threads that hang, all that need one more", "the method or tool"),
    Wait("a trajectory of several turns", ("workflows.multi_turn:MultiTurn.time_limit_s",), "it is truncated"),
    Wait("an agent", ("workflows.agent_workflow:AgentWorkflow.agent_timeout_s",), "the trajectory is dropped",
         "the function"),
    Wait("the agents' endpoint, at its start and end", ("workflows.openai_endpoint:_SHUTDOWN_TIMEOUT_S",)),
    # ------------------------------------------------------------------ rewards
    Wait("a reward", ("module:RLModule.reward_timeout_s",), "the trajectory is dropped",
         "the function and where it is"),
    Wait("a reward's first worker", ("rewards.pool:RewardPool.startup_timeout_s",),
         names="the function and where its import is"),
    Wait("work, in a worker of rewards or workflows", ends="close"),
    Wait("a reward's worker, to end", ("rewards.supervisor:_CLOSE_TIMEOUT_S", "rewards.pool:_END_TIMEOUT_S"),
         "SIGKILL"),
    Wait("the judge model", ("rewards.llm_judge:LLMJudge.deadline_s",), "the trajectory is dropped", "the endpoint"),
    Wait("a program in the sandbox", ("rewards.sandbox:Limits.wall_s", "rewards.sandbox:_GRACE_S"),
         "SIGKILL, then the guard's", "the limit"),
    # ------------------------------------------------------------------ engines
    Wait("LocalEngine's token in progress", ("engines.local.local_engine:LocalEngine.boundary_timeout_s",),
         names="the requests in progress"),
    Wait("a server's answer", (f"{_TIMEOUTS}.generate_s", f"{_TIMEOUTS}.request_s"),
         names="the server and its last answer"),
    Wait("a server, while all are lost", (f"{_TIMEOUTS}.server_wait_s",), names="each server's state"),
    Wait("servers, to start", (f"{_TIMEOUTS}.startup_s",), names="the server's log"),
    Wait("a step of a weight sync", (f"{_TIMEOUTS}.sync_s",), names="the servers that lack the version"),
    Wait("a broadcast of weights", ("engines.sglang.sync.transports:TRANSFER_TIMEOUT_S",), names="the group's address"),
    Wait("a sync that does not block", (_SYNC,), names="the version"),
    Wait("the prefix cache's canary",
         ("engines.sglang.sync.cache_canary:_SETTLE_S", "engines.sglang.sync.cache_canary:_ABORT_S")),
    Wait("a receiver of deltas", (f"{_TIMEOUTS}.sync_s",), "its client's"),
    Wait("servers, to end",
         ("engines.sglang.servers.server:_KILL_WAIT_S", "engines.sglang.servers.fleet:_CLOSE_TIMEOUT_S"), "SIGKILL"),
    Wait("a server, to be lost", (f"{_TIMEOUTS}.hang_s",), "close ends the watching thread", "the server, and why"),
    Wait("runs, to leave a server", ("engines.sglang.servers.registry:Announcement.leave.timeout_s",)),
    Wait("what a test tells FakeEngine to wait for", (_ROLLOUT,), "close"),
    # ------------------------------------------------------------------ locks, by who holds them
    Wait(SHORT_LOCKS, ends="its few lines: a holder sets fields, and waits for nothing but a change of them"),
    Wait("the lock of a disk or source, held while it is read or written", (_ROLLOUT,), "the deadline of what reads"),
    Wait("the lock of a server's start and end, held for either", ("engines.sglang.servers.server:_KILL_WAIT_S",),
         "an end is SIGKILL at the latest"),
    Wait("the lock of a weight load, held by another load", (f"{_TIMEOUTS}.server_wait_s", f"{_TIMEOUTS}.sync_s"),
         "the other load's", "the servers that lack the version"),
    Wait("a free slot, held by requests as many as are allowed at once", (_ROLLOUT,), "the end of one of them"),
    # ------------------------------------------------------------------ commands
    Wait("processes of a launch", ends="their end, or Ctrl-C", names="the process that failed"),
    Wait("Ctrl-C", ends="Ctrl-C"),
    Wait("a guarded process, and its parent", ends="the end of either; SIGKILL"),
    Wait("a C++ compiler", ("engines.local.kernels:_BUILD_TIMEOUT_S",), "then torch computes alone", "the command"),
    Wait("a machine that doctor asks", ("commands.doctor.machine:_CONNECT_S",), names="the address"),
    Wait("a Ray cluster's address", ("launch.ray:_REACH_S",), names="the address"),
)  # fmt: skip


def table() -> str:
    """The rows as Markdown."""
    lines = ["| waits for | at most | | names |", "|---|---|---|---|"]
    lines += [
        f"| {wait.what} | {', '.join(wait.limit_texts()) or '–'} | {wait.ends} | {wait.names} |" for wait in WAITS
    ]
    return "\n".join(lines) + "\n"


def _limit_text(limit: str) -> str:
    """`Class.setting` and its default, or the seconds of a constant; both read from the code."""
    module, _, path = limit.partition(":")
    *owners, name = path.split(".")
    owner = importlib.import_module(f"lightrl.{module}")
    for part in owners:
        owner = getattr(owner, part)
    if hasattr(owner, name):
        value = getattr(owner, name)
    else:
        value = inspect.signature(owner).parameters[name].default  # type: ignore[arg-type]
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    text = "none" if seconds is None else f"{seconds:g} s"
    return f"`{'.'.join([*owners, name])}` = {text}" if owners else text


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        sys.stdout.write(table())
        return
    if len(arguments) != 2 or arguments[0] != "--write":
        raise SystemExit("usage: python -m lightrl.commands.deadlines [--write FILE]")
    page = Path(arguments[1])
    before, _, rest = page.read_text().partition(f"{MARKS[0]}\n")
    page.write_text(f"{before}{MARKS[0]}\n{table()}{MARKS[1]}{rest.partition(MARKS[1])[2]}")


if __name__ == "__main__":
    main(sys.argv[1:])
