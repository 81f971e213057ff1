"""RewardPool with real processes: what it gives back, whom it blames, and that nothing survives it."""

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
from reward_functions import trajectory_that
from reward_workers import outcomes, reasons, started
from waits import comes_true, is_gone

from lightrl.errors import RewardError
from lightrl.rewards import RewardPool, RewardResult, supervisor
from lightrl.rewards.pool import WorkerProcess

HERE = str(Path(__file__).parent)


def pool_of(function: str, **settings: object) -> AbstractContextManager[RewardPool]:
    return started(RewardPool(f"reward_functions.{function}", search_paths=[HERE], **settings))


def descendants() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def all_end(pids: Iterable[int]) -> bool:
    return comes_true(lambda: all(map(is_gone, pids)))


@pytest.fixture(scope="module", params=["obey", "obey_async"])
def pool(request: pytest.FixtureRequest) -> Iterator[RewardPool]:
    with pool_of(request.param) as pool:
        yield pool


def test_512_trajectories_each_get_their_own_reward(pool):
    results = outcomes(pool, *(trajectory_that(give=float(i), sample=i) for i in range(512)))
    assert results == [RewardResult(float(i)) for i in range(512)]


@pytest.mark.parametrize("what", ["raise", "sys.exit"])
def test_a_function_that_raises_costs_its_own_trajectory_only(pool, what):
    results = outcomes(pool, trajectory_that(), trajectory_that(do=what, sample=5), trajectory_that())
    assert reasons(results) == [1.0, "raised", 1.0]
    assert "prompt 'train-3', sample 5" in str(results[1])
    assert "reward_functions.py" in str(results[1])  # the function's traceback
    assert "lightrl/rewards" not in str(results[1])  # and nothing but


def test_prints_leave_the_results_alone_and_go_to_stderr_with_a_prefix(pool, capfd):
    results = outcomes(pool, trajectory_that(do="print"), trajectory_that(give=2.0))
    assert reasons(results) == [1.0, 2.0]
    printed = capfd.readouterr()
    assert printed.out == ""
    assert re.search(r"\[reward worker \d+\] raw bytes on descriptor 1\n", printed.err)
    assert "\\x1b]0;title\\x07\\x1b[2J\n" in printed.err  # a terminal shows these codes, and does not obey them
    assert "\x1b" not in printed.err


def test_a_function_that_reads_stdin_finds_it_empty(pool):
    assert reasons(outcomes(pool, trajectory_that(do="read"))) == [0.0]


ENDS = {"exit": "exit code 3", "abort": "signal SIGABRT", "interrupt": "signal SIGINT", "close": "it closed its connec"}
ENDS |= {"allocate": "memory_limit_mib"}


@pytest.mark.parametrize(
    ("function", "what"), [*(("obey", what) for what in ENDS), ("obey_async", "exit"), ("obey_async", "abort")]
)
def test_a_worker_that_dies_is_replaced_and_the_culprit_named(function, what):
    with pool_of(function, **{"memory_limit_mib": 256} if what == "allocate" else {}) as pool:
        batch = [trajectory_that(sample=i, do=what if i == 2 else None, num_bytes=1 << 30) for i in range(6)]
        results = outcomes(pool, *batch)
    assert reasons(results) == [1.0, 1.0, "killed", 1.0, 1.0, 1.0]
    assert ENDS[what] in str(results[2])


@pytest.mark.parametrize("function", ["obey", "obey_async"])
def test_a_hung_call_in_the_middle_of_a_batch_is_the_only_one_that_fails(function):
    with pool_of(function, timeout_s=3.0) as pool:
        batch = [trajectory_that(sample=i, give=float(i), do="hang" if i == 20 else None) for i in range(64)]
        results = outcomes(pool, *batch)
    assert reasons(results) == [float(i) if i != 20 else "timeout" for i in range(64)]
    assert "sample 20 within timeout_s=3" in str(results[20])


def test_a_function_that_forks_answers_once():
    with pool_of("return_twice") as pool:
        assert reasons(outcomes(pool, *[trajectory_that(sample=number) for number in range(20)])) == [0.25] * 20


def test_a_hang_that_blocks_the_event_loop_is_found_out_by_trying_alone():
    with pool_of("block_async", timeout_s=3.0) as pool:
        results = outcomes(pool, *(trajectory_that(sample=i, do="hang" if i == 1 else None) for i in range(4)))
    assert reasons(results) == [1.0, "timeout", 1.0, 1.0]


@pytest.mark.extra
def test_expressions_that_grow_without_end_return_or_are_killed():
    towers = ["9^{" * 80 + "9" + "}" * 80, r"\frac{1}{" * 90 + "2" + "}" * 90]
    towers += ["99999999!", "(" * 400, r"\int x^{x^x} dx"]
    with started(RewardPool("lightrl.rewards.math_answer", timeout_s=0.5, memory_limit_mib=1024)) as pool:
        results = outcomes(pool, *(trajectory_that(f"\\boxed{{{tower}}}", answer="x^2") for tower in towers))
    assert all(isinstance(item, RewardResult) or item.reason in ("timeout", "killed", "raised") for item in results)
    assert all(item.metrics["accuracy"] == 0.0 for item in results if isinstance(item, RewardResult))


@pytest.mark.parametrize("what", ["hang", "hold"], ids=["sleeping", "in C code"])
def test_the_message_about_a_hang_says_where_it_was(what):
    with pool_of("obey", timeout_s=2.0) as pool:
        (error,) = outcomes(pool, trajectory_that(do=what))
    assert error.reason == "timeout"
    assert 'reward_functions.py", line' in str(error)
    assert "in obey" in str(error)


def test_memory_within_the_limit_is_given():
    with pool_of("obey", memory_limit_mib=1024) as pool:
        assert reasons(outcomes(pool, trajectory_that(do="allocate", num_bytes=1 << 28))) == [float(1 << 28)]


def test_a_worker_is_replaced_after_so_many_calls_and_no_call_waits_for_it():
    async def one_by_one(pool: RewardPool) -> list[RewardResult]:
        results = []
        while len({item.metrics["pid"] for item in results}) < 3 and len(results) < 20_000:
            results.append(await pool.compute_rewards([trajectory_that(do="leak")])[0])
        return results

    with pool_of("obey", recycle_after=5) as pool:
        results = asyncio.run(one_by_one(pool))
    pids = [item.metrics["pid"] for item in results]
    assert len(set(pids)) == 3
    calls = pids.count(pids[0])
    assert calls >= 5
    assert [item.reward for item in results if item.metrics["pid"] == pids[0]] == list(range(1, calls + 1))


def test_workers_use_one_thread_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with pool_of("obey") as pool:
        assert reasons(outcomes(pool, trajectory_that(do="threads"))) == [1.0]


def test_async_calls_of_one_worker_run_together():
    with pool_of("obey_async", timeout_s=600.0) as pool:
        # The first call may leave alone before the second is there, so it is not one of the two that meet.
        results = outcomes(pool, trajectory_that(), trajectory_that(do="meet"), trajectory_that(do="meet"))
    assert reasons(results) == [1.0, 1.0, 1.0]


def test_a_cancelled_call_leaves_the_pool_usable():
    async def cancel_and_go_on(pool: RewardPool) -> RewardResult:
        results = pool.compute_rewards([trajectory_that()] * 8)
        await asyncio.sleep(0)
        for result in results:
            result.cancel()
        await asyncio.gather(*results, return_exceptions=True)
        return await pool.compute_rewards([trajectory_that(give=3.0)])[0]

    with pool_of("obey") as pool:
        assert asyncio.run(cancel_and_go_on(pool)) == RewardResult(3.0)


async def outcomes_of_group(pool: RewardPool, group: list[object], cancelled: int | None = None) -> list[object]:
    results = pool.compute_rewards(group)
    if cancelled is not None:
        results[cancelled].cancel()
    return await asyncio.gather(*results, return_exceptions=True)


def test_trajectories_of_a_group_each_get_their_own_outcome(pool):
    group = [trajectory_that(give=0.5), trajectory_that(answer={1, 2}), trajectory_that(), trajectory_that(give=0.25)]
    first, refused, cancelled, last = asyncio.run(outcomes_of_group(pool, group, cancelled=2))
    assert [first, last] == [RewardResult(0.5), RewardResult(0.25)]
    assert isinstance(refused, RewardError)
    assert "cannot be sent to the reward process as JSON: it contains {1, 2} (set)" in str(refused)
    assert isinstance(cancelled, asyncio.CancelledError)


def test_close_fails_the_calls_on_their_way_and_ends_all_processes():
    async def close_while_hanging(pool: RewardPool) -> list[object]:
        results = pool.compute_rewards([trajectory_that(do="hang")] * 5)
        await asyncio.sleep(0.2)
        pool.close()
        return await asyncio.gather(*results, return_exceptions=True)

    before = descendants()
    with pool_of("obey", workers=2) as pool:
        children = descendants() - before
        results = asyncio.run(close_while_hanging(pool))
        pool.close()
        assert len(children) >= 2
        assert reasons(results) == ["killed"] * 5
        assert all_end(children)
        assert reasons(asyncio.run(outcomes_of_group(pool, [trajectory_that()] * 2))) == ["killed", "killed"]


RESULT = '{"index": %s, "reward": %s, "metrics": %s, "rewards": %s, "extracted": %s}\n'
FORGED = {
    "a list as index": ("[2]", "1.0", "{}", "null", "null"),
    "true as index": ("true", "1.0", "{}", "null", "null"),
    "NaN": ("2", "NaN", "{}", "null", "null"),
    "a word as reward": ("2", '"high"', "{}", "null", "null"),
    "too large": ("2", "1e300", "{}", "null", "null"),
    "metrics that are a number": ("2", "1.0", "5", "null", "null"),
    "an infinite metric": ("2", "1.0", '{"a": Infinity}', "null", "null"),
    "another length": ("2", "1.0", "{}", "[1.0]", "null"),
    "another sum": ("2", "9.0", "{}", "[0.0, 0.0, 0.0, 1.0]", "null"),
    "a number as text": ("2", "1.0", "{}", "null", "3"),
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_forged_result_costs_one_process(forged):
    with pool_of("obey") as pool:
        lines = {"do": "write into the pipe", "lines": [RESULT % forged]}
        results = outcomes(pool, *[trajectory_that(sample=i, **(lines if i == 2 else {})) for i in range(4)])
    assert reasons(results) == [1.0, 1.0, "killed", 1.0]
    assert "reply pipe" in str(results[2])


def test_a_second_reply_to_an_earlier_call_is_no_reward_of_this_one():
    with pool_of("obey") as pool:
        lines = [RESULT % ("0", "99.0", "{}", "null", "null")]
        assert reasons(outcomes(pool, trajectory_that())) == [1.0]
        assert reasons(outcomes(pool, trajectory_that(do="write into the pipe", lines=lines))) == ["killed"]


@pytest.mark.parametrize("function", ["obey", "obey_async"])
@pytest.mark.parametrize(
    "lines",
    [
        *[["stray\n"], ["{}\n"], ["3\n"], ["[[["], ["\n"], ['{"reward": 1.0}\n'], ["[" * 100_000 + "\n"]],
        ['{"index": 99, "error": "", "reason": "raised"}\n'],
        ['{"index": 2, "error": 1, "reason": "raised"}\n'],
        ['{"index": 2, "error": "", "reason": "bored"}\n'],
    ],
    ids=[
        *["text", "dict", "number", "no newline", "empty", "a reward", "deep", "another call"],
        *["an error that is no text", "another reason"],
    ],
)
def test_a_stray_line_on_the_reply_pipe_costs_one_process(function, lines):
    with pool_of(function) as pool:
        batch = [trajectory_that(sample=i, do="write into the pipe" if i == 2 else None, lines=lines) for i in range(6)]
        results = outcomes(pool, *batch)
        assert reasons(outcomes(pool, *[trajectory_that()] * 3)) == [1.0] * 3
    assert reasons(results) == [1.0, 1.0, "killed", 1.0, 1.0, 1.0]
    assert "reply pipe" in str(results[2]) or "unexpected outcome" in str(results[2])


def test_a_stray_line_that_comes_between_two_calls_costs_no_call(tmp_path):
    with pool_of("obey") as pool:
        begin, done = tmp_path / "begin", tmp_path / "done"
        call = trajectory_that(do="write into the pipe later", begin=str(begin), done=str(done))
        assert reasons(outcomes(pool, call)) == [1.0]
        begin.touch()
        assert comes_true(done.exists)
        assert reasons(outcomes(pool, trajectory_that(give=2.0))) == [2.0]


def test_a_reward_that_prints_without_a_newline_keeps_no_memory_here(capfd):
    with pool_of("obey") as pool:
        call = trajectory_that(do="print without a newline", times=200)
        assert reasons(outcomes(pool, trajectory_that())) == [1.0]
        tracemalloc.start()
        results = outcomes(pool, call)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert reasons(results) == [1.0]
    assert peak < 4 << 20
    assert capfd.readouterr().err.count(".") == 200 << 16


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to their guard")
@pytest.mark.parametrize("end", ["close", "hang"])
def test_processes_with_a_session_of_their_own_end_with_the_worker(end):
    with pool_of("obey", timeout_s=5.0) as pool:
        (result,) = outcomes(pool, trajectory_that(do="spawn a session"))
        children = [int(result.metrics["child"]), int(result.metrics["grandchild"])]
        assert not any(map(is_gone, children))
        if end == "hang":
            assert reasons(outcomes(pool, trajectory_that(do="hang"))) == ["timeout"]
            assert all_end(children)
    assert all_end(children)


def test_a_worker_that_was_killed_while_idle_costs_no_trajectory():
    before = descendants()
    with pool_of("obey") as pool:
        killed = descendants() - before
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        assert all_end(killed)
        assert reasons(outcomes(pool, trajectory_that(), trajectory_that(give=2.0))) == [1.0, 2.0]


@pytest.mark.parametrize("num_failures", [2, 1000], ids=["for a while", "for ever"])
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError(errno.EAGAIN, "no process"), id="EAGAIN"),
        pytest.param(OSError(errno.ENOSPC, "disk full"), id="a full disk", marks=pytest.mark.extra),
        pytest.param(MemoryError("no memory"), id="MemoryError", marks=pytest.mark.extra),
    ],
)
def test_a_machine_that_starts_no_processes_costs_no_trajectory_or_says_so(error, num_failures, monkeypatch):
    monkeypatch.setattr(supervisor, "_RESTART_WAIT_S", 0.01)
    with pool_of("obey") as pool:
        start, failures = WorkerProcess.__init__, [error] * num_failures

        def start_later(worker, *args, **settings):
            if failures:
                raise failures.pop()
            start(worker, *args, **settings)

        monkeypatch.setattr(WorkerProcess, "__init__", start_later)
        killed = descendants()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        assert all_end(killed)
        if num_failures == 2:
            assert reasons(outcomes(pool, trajectory_that(), trajectory_that(give=2.0))) == [1.0, 2.0]
        else:
            results = outcomes(pool, trajectory_that(), trajectory_that())
            assert all("has no worker left: its worker could not be started" in str(result) for result in results)
            assert all(str(error.args[-1]) in str(result) for result in results)


def test_kill_9_of_the_trainer_ends_workers_and_what_they_started(tmp_path):
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from lightrl.rewards import RewardPool
from reward_functions import trajectory_that
from reward_workers import outcomes
pool = RewardPool("reward_functions.obey", search_paths=[sys.argv[1]])
pool.start()
outcomes(pool, trajectory_that(do="spawn", file=sys.argv[2]))
"""
    file = tmp_path / "pids"
    trainer = subprocess.Popen([sys.executable, "-c", script, HERE, str(file)])
    assert comes_true(lambda: file.exists() and file.read_text())
    pids = [int(pid) for pid in file.read_text().split()]
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    assert len(pids) == 2
    assert all_end(pids)


def test_a_worker_imports_no_torch():
    with pool_of("has_torch") as pool:
        assert reasons(outcomes(pool, trajectory_that())) == [0.0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module.reward", "no module 'no_such_module'. Run from the folder"),
        ("reward_functions.lenght", "'reward_functions' has no 'lenght'.*Did you mean 'length'"),
        ("reward_functions.zzzz", "has no 'zzzz'.*It has .*length"),
        ("reward_functions.sub.reward", "'reward_functions' has no 'sub'"),
        ("reward_functions.NOT_A_FUNCTION", "is of type int; it must be a function"),
        ("lightrl.rewards.pool", "is a module; it must be a function"),
        ("length", "must be a dotted path"),
        (
            "reward_functions.two_trajectories",
            r"signature is \(trajectory.*, other.*missing a required argument: 'other'",
        ),
        (
            "broken_reward_module.reward",
            "(?s)could not be imported.*broken_reward_module.py.*ModuleNotFoundError: No module named",
        ),
    ],
)
def test_a_path_without_a_function_is_refused_at_start(path, message, tmp_path):
    (tmp_path / "broken_reward_module.py").write_text("import a_package_that_is_not_installed\n")
    pool = RewardPool(path, search_paths=[HERE, str(tmp_path)])
    with pytest.raises(ValueError, match=message):
        pool.start()


def test_a_module_that_never_imports_is_refused_after_its_deadline(tmp_path):
    (tmp_path / "slow_reward_module.py").write_text("import time\ntime.sleep(600)\n")
    pool = RewardPool("slow_reward_module.reward", search_paths=[str(tmp_path)], startup_timeout_s=6)
    with pytest.raises(ValueError, match=r"(?s)startup_timeout_s=6.*slow_reward_module.py"):
        pool.start()


SETTINGS = ["workers", "timeout_s", "startup_timeout_s", "memory_limit_mib", "recycle_after"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_are_not_positive_are_refused(setting):
    with pytest.raises(ValueError, match=f"^{setting} must be .*, got 0"):
        RewardPool("reward_functions.length", **{setting: 0})
