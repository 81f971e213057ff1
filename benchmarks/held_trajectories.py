"""The axis `trajectories` of `benchmarks.growth`: what a finished trajectory costs the controller, and what it holds.

A fake server in another process answers with precomputed tokens (that of `benchmarks.orchestrator`); SGLangEngine,
SingleTurn and RewardPool make them groups with rewards, which are all held, as those of one iteration are.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.orchestrator import GROUP_SIZE, PROMPT, NoText, SamePrompts, Server, Setting, started_engine
from lightrl.rewards import RewardPart, RewardPool
from lightrl.rollout import RolloutController, RolloutSettings
from lightrl.trajectory import Group, Sampling
from lightrl.workflows import SingleTurn

IN_FLIGHT = 64


def measured(num: int, num_tokens: int) -> dict[str, Any]:
    """`hold` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.growth", "--hold", str(num), str(num_tokens)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    values: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return values


def hold(num: int, num_tokens: int) -> dict[str, Any]:
    """Bytes per token of all held trajectories, and trajectories per second of this process's processor time.

    A first iteration of the same size is held too, and not measured: what requests in flight take is in memory then.
    """
    server = Server(0.1, num_tokens)
    try:
        setting = Setting([server.start().url], IN_FLIGHT, num, Sampling())
        first = take(setting, num=num, num_tokens=num_tokens)
        gc.collect()
        before, start = rss_bytes(), time.process_time()
        groups = take(setting, num=num, num_tokens=num_tokens)
        processor_s = time.process_time() - start
        gc.collect()
        held = rss_bytes() - before
    finally:
        server.stop()
    trajectories = [item for group in groups for item in group.trajectories]
    assert len(trajectories) == num == sum(len(group.trajectories) for group in first)
    total = sum(len(item.token_ids) for item in trajectories)
    assert total == num * (len(PROMPT) + num_tokens)
    return {
        "trajectories": num,
        "tokens_each": len(PROMPT) + num_tokens,
        "bytes_per_token": round(held / total, 1),
        "trajectories_per_processor_s": round(num / processor_s, 1),
        "processor_ns_per_token": round(1e9 * processor_s / total),
    }


def take(setting: Setting, *, num: int, num_tokens: int) -> list[Group]:
    num_groups = num // GROUP_SIZE
    worker = RewardPool(RewardPart("lightrl.rewards.regex_match", arguments={"pattern": "^$"}))
    worker.start()
    with started_engine(setting) as engine:
        controller = RolloutController(
            engine,
            SingleTurn(NoText()),  # type: ignore[arg-type]
            worker,
            RolloutSettings(
                group_size=GROUP_SIZE,
                groups_per_iteration=num_groups,
                total_groups=num_groups,
                max_staleness=1,
                max_concurrent=setting.in_flight // GROUP_SIZE,
            ),
            sampling=Sampling(max_new_tokens=num_tokens),
            prompts=SamePrompts(),  # type: ignore[arg-type]
        )
        try:
            return controller.take(0)
        finally:
            controller.close()
            worker.close()


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
