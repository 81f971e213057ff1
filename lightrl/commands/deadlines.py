"""`python -m lightrl.commands.deadlines`: every wait of lightrl, what ends it, when, and whom the message names.

A test compares the table with the code: each call that can block is in a row, and each row has such a call. Seconds are
read from the settings and constants that the code uses. `--write FILE` puts the table between two marks of a page.
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
    """A wait, at one or several places.

    Args:
        what: is waited for.
        places: `file:function:call` in lightrl/, with wildcards as in fnmatch.
        limits: what ends the wait at the latest: `module:Class.setting` or `module:CONSTANT`; empty if `ends` does.
        ends: what ends it, where that is not the limit alone.
        names: whom or what the message names.
    """

    what: str
    places: tuple[str, ...]
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
_SYNC = "callbacks.weight_sync:WeightSync.sync_timeout_s"

WAITS = (
    # ------------------------------------------------------------------ ranks
    Wait(
        "all ranks, to form a group",
        ("strategies/fsdp2.py:*.setup_environment:dist.*", "strategies/role_mesh.py:make_place:dist.*",
         "strategies/stages.py:ends_group:dist.*", "strategies/ranks.py:watch_all:dist.*"),
        ("strategies.ranks:START_TIMEOUT",), names="the address that does not answer",
    ),
    Wait(
        "other ranks, in a collective",
        ("strategies/ranks.py:*Ranks.*:*", "strategies/p*.py:*:*", "strategies/tensor_parallel.py:*:dist.*",
         "strategies/stages.py:SplitModel.*:dist.*", "strategies/checkpoint_folder.py:*:dist.*",
         "loops/shared*.py:*:*receive", "loops/sharing.py:*:*receive"),
        (_HANG,), names="the rank that is behind, stopped or gone, and its phase",
    ),
    Wait(
        "a rank's state or the store on rank 0", ("strategies/rank_watch.py:RankWatch._tick:*",
        "strategies/rank_watch.py:RankWatch._run:*"), (_HANG,), names="the rank, and the phase that it published last",
    ),
    Wait("other ranks, to learn of a failure",
         ("strategies/rank_watch.py:RankWatch.fail:*", "strategies/rank_watch.py:RankWatch._wait_until_known:*"),
         ends="6 s for the roll call of a broken connection, 3 s for the others"),
    Wait("this rank, to end by itself after another failed", ("strategies/rank_watch.py:RankWatch._end:*",),
         ("strategies.rank_watch:GRACE_S",), names="the rank that failed"),
    Wait("the watch's threads, at the end", ("strategies/rank_watch.py:RankWatch.close:*",), ends="2.5 s"),
    Wait("a new file, on the other hosts of a shared disk", ("strategies/shared_folder.py:*:*",),
         ("strategies.shared_folder:VISIBLE_WITHIN_S",), names="the ranks that do not see it"),
    Wait("the other half of a pass, in a thread", ("strategies/halves.py:*:*",), ends="its computation"),
    # ------------------------------------------------------------------ disks
    Wait(
        "a checkpoint's disk",
        ("strategies/atomic_write.py:*:*", "strategies/checkpoint.py:*:*", "strategies/fsdp2.py:*:self._writes.wait"),
        ("strategies.atomic_write:BackgroundWrites.stall_s", "strategies.atomic_write:BackgroundWrites.stall_at_end_s"),
        "without a byte that the disk takes; the second one while a run ends", "the checkpoint",
    ),
    Wait("data that is read ahead", ("data/windows.py:*:*", "concurrency/daemon_future.py:*:*"),
         ("data.windows:READ_TIMEOUT_S",), names="the batches"),
    Wait("the thread that reads ahead, at the end", ("data/completions.py:*:*",), ends="10 s; it is a daemon"),
    Wait("checksums of parameters, in threads", ("weights/digests.py:*:*",), ends="their computation"),
    # ------------------------------------------------------------------ rollouts
    Wait("groups of a batch, and rewards", ("rollout/controller.py:*._wait_for:*", "rollout/controller.py:*._take:*",
         "rollout/controller.py:*._evaluate:*", "rollout/player.py:Player.wait_for_rewards:*", "rollout/wave.py:*:*",
         "rollout/group_player.py:*:*"), (_ROLLOUT,), "without a trajectory that ends", "the prompts in progress"),
    Wait("the rollouts' event loop", ("concurrency/loop_thread.py:LoopThread.*:*",), (_LOOP,),
         names="the line that blocks it"),
    Wait("what is in flight, for a checkpoint", ("rollout/saved_state.py:*:*",), (_LOOP,), "half of it"),
    Wait("tasks that were given up", ("rollout/tasks.py:*:*", "concurrency/loop_thread.py:_end_tasks:*"),
         ("concurrency.loop_thread:_LAST_TASKS_S",), "10 s for close, then their daemon thread is abandoned"),
    Wait("tokens of a replayed schedule", ("rollout/pace.py:*:*",), (_ROLLOUT,), names="the versions that lack tokens"),
    Wait("a model call", ("loops/run_calls.py:*:*",), ("dataflow:ModelCall.timeout_s",), names="the call"),
    Wait("a workflow, outside of generate", (), ("workflows.workflow:Workflow.own_timeout_s",),
         "the trajectory is dropped", "the workflow and the prompt"),
    Wait("a call of an environment", ("concurrency/call_within.py:*:*",),
         ("workflows.multi_turn:MultiTurn.step_timeout_s", "workflows.tools:ToolEnvironment.tool_timeout_s"),
         "the trajectory is dropped; after 64 threads that hang, all that need one more", "the method or tool"),
    Wait("a trajectory of several turns", ("workflows/multi_turn.py:*:*", "workflows/workflow.py:wait_or_abandon:*"),
         ("workflows.multi_turn:MultiTurn.time_limit_s",), "it is truncated"),
    Wait("an agent", ("workflows/agent_*.py:*:*",), ("workflows.agent_workflow:AgentWorkflow.agent_timeout_s",),
         "the trajectory is dropped", "the function"),
    Wait("the agents' endpoint, at its end", ("workflows/openai_endpoint.py:*:*",),
         ("workflows.openai_endpoint:_SHUTDOWN_TIMEOUT_S",)),
    # ------------------------------------------------------------------ rewards
    Wait("a reward", ("rewards/supervisor.py:Supervisor._run:*", "rewards/judgment.py:*:*",
         "rewards/hook.py:*.receive:*", "rewards/pool.py:_WorkerProcess._exchange:*", "rewards/parts.py:*:*"),
         ("module:RLModule.reward_timeout_s",), "the trajectory is dropped", "the function and where it is"),
    Wait("a reward's first worker", ("rewards/supervisor.py:Supervisor.start:*",
         "rewards/supervisor.py:Supervisor._new_worker:*"), ("rewards.pool:RewardPool.startup_timeout_s",),
         names="the function and where its import is"),
    Wait("work, in a reward's worker", ("rewards/supervisor.py:Supervisor._take_batch:*",
         "rewards/hook.py:_WorkerThread._serve:*"), ends="close"),
    Wait("a reward's worker, to end", ("rewards/supervisor.py:Supervisor.close:*", "rewards/hook.py:*.end:*",
         "rewards/pool.py:*.end:*", "rewards/pool.py:*._obituary:*", "rewards/worker.py:*:*"),
         ("rewards.supervisor:_CLOSE_TIMEOUT_S", "rewards.pool:_END_TIMEOUT_S"), "SIGKILL"),
    Wait("the judge model", ("rewards/llm_judge.py:*:*",), ("rewards.llm_judge:LLMJudge.deadline_s",),
         "the trajectory is dropped", "the endpoint"),
    Wait("a program in the sandbox", ("rewards/sandbox*.py:*:*",),
         ("rewards.sandbox:Limits.wall_s", "rewards.sandbox:_GRACE_S"), "SIGKILL, then the guard's", "the limit"),
    # ------------------------------------------------------------------ engines
    Wait("LocalEngine's token in progress", ("engines/local/*.py:*:*",),
         ("engines.local.local_engine:LocalEngine.boundary_timeout_s",), names="the requests in progress"),
    Wait("a server's answer", ("engines/sglang/connection.py:*:*", "engines/sglang/writer.py:*:*",
         "engines/sglang/scoring.py:*:*", "engines/sglang/sync/report.py:*:*",
         "engines/sglang/sync/served_adapters.py:*:*",
         "engines/sglang/home_loop.py:HomeLoop.call:*"),
         (f"{_TIMEOUTS}.generate_s", f"{_TIMEOUTS}.request_s"), names="the server and its last answer"),
    Wait("a server, while all are lost", ("engines/sglang/home_loop.py:HomeLoop.wait_for_change:*",
         "engines/sglang/members.py:*:*"), (f"{_TIMEOUTS}.server_wait_s",), names="each server's state"),
    Wait("servers, to start", ("engines/sglang/servers/server.py:SGLangServer.wait_ready:*",
         "engines/sglang/servers/registry.py:Registry.*:time.sleep"),
         (f"{_TIMEOUTS}.startup_s",), names="the server's log"),
    Wait("a step of a weight sync", ("engines/sglang/sync/loading.py:*:*", "engines/sglang/sync/server_sync.py:*:*",
         "engines/sglang/sync/relay.py:*:*", "engines/sglang/sync/bucket_feed.py:*:*",
         "engines/sglang/sync/transports/d*.py:*:*"),
         (f"{_TIMEOUTS}.sync_s",), names="the servers that lack the version"),
    Wait("a broadcast of weights", ("engines/sglang/sync/transports/broadcast.py:*:*", "weights/broadcast.py:*:*"),
         ("engines.sglang.sync.transports:TRANSFER_TIMEOUT_S",), names="the group's address"),
    Wait("a sync that does not block", ("callbacks/weight_sync.py:*:*",), (_SYNC,), names="the version"),
    Wait("the prefix cache's canary", ("engines/sglang/sync/cache_canary.py:*:*",),
         ("engines.sglang.sync.cache_canary:_SETTLE_S", "engines.sglang.sync.cache_canary:_ABORT_S")),
    Wait("a receiver of deltas", ("engines/sglang/sync/receiver.py:*:*",), (f"{_TIMEOUTS}.sync_s",), "its client's"),
    Wait("servers, to end", ("engines/sglang/servers/server.py:*._end_process:*",
         "engines/sglang/servers/fleet.py:ServerFleet.stop:*",
         "engines/sglang/home_loop.py:HomeLoop.end_tasks:*"),
         ("engines.sglang.servers.server:_KILL_WAIT_S", "engines.sglang.servers.fleet:_CLOSE_TIMEOUT_S"), "SIGKILL"),
    Wait("a server, to be lost", ("engines/sglang/servers/fleet.py:*:self._stopping.wait",), (f"{_TIMEOUTS}.hang_s",),
         "close ends the watching thread", "the server, and why"),
    Wait("runs, to leave a server", ("engines/sglang/servers/registry.py:Announcement.*:*",),
         ("engines.sglang.servers.registry:Announcement.leave.timeout_s",)),
    Wait("what a test tells FakeEngine to wait for", ("engines/fake_engine.py:*:*",), (_ROLLOUT,), "close"),
    # ------------------------------------------------------------------ commands
    Wait("processes of a launch", ("launch/*.py:*:*", "commands/launch.py:*:*"), ends="their end, or Ctrl-C",
         names="the process that failed"),
    Wait("Ctrl-C", ("commands/inspect.py:*:*", "commands/serve.py:*:*", "inspect/answers.py:*:*"), ends="Ctrl-C"),
    Wait("a guarded process, and its parent", ("concurrency/parent_guard.py:*:*",), ends="the end of either; SIGKILL"),
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
