"""What the reward of a trajectory costs: rewards per second, overhead of the pool, faults.

    python -m benchmarks.rewards [--quick] [--trajectories 10000] [--workers 2] [--timeout-s 1.0]

Measurements:
    math_direct      math_answer on GSM8K-like answers, called in this process, on one core
    math_expressions the same on LaTeX answers, whose values are compared
    overhead         a no-op function through RewardPool and RewardHook, against a direct call; all trajectories are
                     submitted at once, as in a rollout, and one by one
    kill             from the deadline of a hung call until the next call of the same worker returns
    faults           N trajectories, of which 5 % hang and 5 % raise, against the same work without faults: there 5 %
                     sleep for the timeout, and all return. Both run the same calls on the same number of workers; the
                     difference is the cost of detecting, killing, replacing and reporting
    sandbox          a program that prints, in LocalSandbox, against a plain subprocess

Targets: math_direct 200 rewards/s per core; faults at most 1.3 times.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.report import Report, interleaved, median_ratio
from lightrl.errors import RewardError
from lightrl.rewards import Limits, LocalSandbox, RewardHook, RewardPool, RewardWorker, math_answer
from lightrl.trajectory import Prompt, Trajectory

FAULTY = 0.05  # of each kind
NUMBERS = ["#### {}", "so the total is {} dollars.\n#### ${}", r"thus \boxed{{{}}}", "The answer is {}."]
EXPRESSIONS = [
    (r"\frac{3}{4}", "0.75"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"(x+1)^2", "x^2+2x+1"),
    (r"[0, \infty)", r"[0,\infty)"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    (r"\frac{\pi}{2}", r"\pi/2"),
]


def nothing(trajectory: Trajectory) -> float:
    return 1.0


def faulty(trajectory: Trajectory) -> float:
    """Hangs, sleeps or raises, as the prompt's field `do` says."""
    what = trajectory.prompt.fields["do"]
    if what == "hang":
        time.sleep(3600)
    if what == "sleep":
        time.sleep(trajectory.prompt.fields["seconds"])
    if what == "raise":
        raise ValueError("5 % do")
    return 1.0


def trajectory_of(completion: str, num_tokens: int = 128, **fields: object) -> Trajectory:
    half = num_tokens // 2
    return Trajectory(
        prompt=Prompt(id="p", token_ids=list(range(half)), fields=fields),
        group_id=0,
        sample=0,
        token_ids=list(range(num_tokens)),
        loss_mask=[False] * half + [True] * half,
        behavior_logprobs=[0.0] * half + [-1.2345678] * half,
        weight_versions=[-1] * half + [3] * half,
        completion_ids=list(range(half, num_tokens)),
        completion=completion,
    )


def math_trajectories(num: int) -> list[Trajectory]:
    return [
        trajectory_of(NUMBERS[index % 4].format(*[index] * 2), answer=f"reason\n#### {index + index % 2}")
        for index in range(num)
    ]


def expression_trajectories(num: int) -> list[Trajectory]:
    """Expressions with different numbers, so that no cache of parsed texts helps."""
    pairs = [EXPRESSIONS[index % len(EXPRESSIONS)] for index in range(num)]
    return [
        trajectory_of(rf"so \boxed{{{text} + {index}}}", answer=f"{answer} + {index}")
        for index, (text, answer) in enumerate(pairs)
        if "[" not in text and "{1" not in text
    ]


def direct_s(trajectories: Sequence[Trajectory]) -> float:
    start = time.perf_counter()
    for trajectory in trajectories:
        math_answer(trajectory)
    return time.perf_counter() - start


def rewarded_s(worker: RewardWorker, trajectories: Sequence[Trajectory], *, together: bool = True) -> tuple[float, int]:
    """Seconds to compute all, and how many failed."""

    async def compute_one(trajectory: Trajectory) -> int:
        try:
            await worker.compute_rewards([trajectory])[0]
        except RewardError:
            return 1
        return 0

    async def compute_all() -> int:
        if together:
            return sum(await asyncio.gather(*map(compute_one, trajectories)))
        return sum([await compute_one(trajectory) for trajectory in trajectories])

    start = time.perf_counter()
    num_failed = asyncio.run(compute_all())
    return time.perf_counter() - start, num_failed


def measure_math(report: Report, num: int) -> float:
    direct_s(math_trajectories(10))
    rates = []
    for name, trajectories in (
        ("math_direct", math_trajectories(num)),
        ("math_expressions", expression_trajectories(num)),
    ):
        direct_s(trajectories[:10])
        seconds = [direct_s(trajectories) for _ in range(3)]
        rates.append(len(trajectories) / statistics.median(seconds))
        report.add(name, trajectories=len(trajectories), rewards_per_s=round(rates[-1], 1))
    return rates[0]


def measure_overhead(report: Report, num: int) -> None:
    trajectories = [trajectory_of("x", 512) for _ in range(num)]
    start = time.perf_counter()
    for trajectory in trajectories:
        nothing(trajectory)
    direct_us = (time.perf_counter() - start) / num * 1e6
    for name, worker in (("pool", RewardPool("benchmarks.rewards.nothing")), ("hook", RewardHook(nothing))):
        worker.start()
        rewarded_s(worker, trajectories[:100])
        for together in (True, False):
            seconds, _ = rewarded_s(worker, trajectories, together=together)
            report.add(
                "overhead",
                worker=name,
                asked="at once" if together else "one by one",
                overhead_us=round(seconds / num * 1e6 - direct_us, 1),
                direct_us=round(direct_us, 3),
                rewards_per_s=round(num / seconds, 1),
            )
        worker.close()


def measure_kill(report: Report, repeats: int) -> None:
    timeout_s = 0.5
    pool = RewardPool("benchmarks.rewards.faulty", timeout_s=timeout_s)
    pool.start()
    pair = [trajectory_of("x", do="hang"), trajectory_of("x", do="")]
    seconds = [rewarded_s(pool, pair)[0] - timeout_s for _ in range(repeats)]
    pool.close()
    report.add(
        "kill",
        first_ms=round(seconds[0] * 1e3, 1),  # without a spare process
        later_ms=round(statistics.median(seconds[1:]) * 1e3, 1),
        worst_ms=round(max(seconds) * 1e3, 1),
    )


def measure_faults(report: Report, num: int, workers: int, timeout_s: float, repeats: int) -> float:
    step = round(1 / FAULTY)

    def seconds(hang: str, fail: str) -> float:
        kinds = {0: hang, step // 2: fail}
        trajectories = [trajectory_of("x", do=kinds.get(i % step, ""), seconds=timeout_s) for i in range(num)]
        allowed_s = timeout_s if hang == "hang" else 9 * timeout_s
        pool = RewardPool("benchmarks.rewards.faulty", workers=workers, timeout_s=allowed_s)
        pool.start()
        try:
            result, num_failed = rewarded_s(pool, trajectories)
        finally:
            pool.close()
        assert num_failed == (2 * num // step if hang == "hang" else 0), num_failed
        return result

    contenders = {"faults": lambda: seconds("hang", "raise"), "without": lambda: seconds("sleep", "")}
    results = interleaved(contenders, repeats=repeats)
    ratio = median_ratio(results["faults"], results["without"])
    report.add(
        "faults",
        trajectories=num,
        workers=workers,
        timeout_s=timeout_s,
        faults_s=round(statistics.median(results["faults"]), 2),
        without_s=round(statistics.median(results["without"]), 2),
        **ratio,
    )
    return ratio["ratio"]


def measure_sandbox(report: Report, num: int) -> None:
    sandbox, limits = LocalSandbox(), Limits()
    program = "print(sum(map(int, input().split())))"
    layers = sandbox.run(program, "1 2", limits).layers

    def plain() -> float:
        start = time.perf_counter()
        command = [sys.executable, "-I", "-B", "-X", "utf8", "-c", program]
        subprocess.run(command, input="1 2", capture_output=True, text=True, check=True)
        return time.perf_counter() - start

    def sandboxed() -> float:
        start = time.perf_counter()
        sandbox.run(program, "1 2", limits)
        return time.perf_counter() - start

    results = interleaved({"sandbox": sandboxed, "plain": plain}, repeats=num)
    sandbox.close()
    report.add(
        "sandbox",
        layers=len(layers),
        run_ms=round(statistics.median(results["sandbox"]) * 1e3, 1),
        plain_ms=round(statistics.median(results["plain"]) * 1e3, 1),
        **median_ratio(results["sandbox"], results["plain"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small numbers, as a smoke test")
    parser.add_argument("--trajectories", type=int, default=10_000, help="for the measurement with faults")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=1.0)
    options = parser.parse_args()
    report = Report("rewards", quick=options.quick)
    rate = measure_math(report, 200 if options.quick else 2000)
    measure_overhead(report, 200 if options.quick else 2000)
    measure_kill(report, 3 if options.quick else 10)
    measure_sandbox(report, 3 if options.quick else 30)
    num, timeout_s = (80, 0.5) if options.quick else (options.trajectories, options.timeout_s)
    ratio = measure_faults(report, num, options.workers, timeout_s, repeats=1)
    report.finish(math_target_met=rate >= 200, faults_target_met=ratio <= 1.3)


if __name__ == "__main__":
    main()
