"""Judges with two Ray actors as workers, from the first of two hosts, whose CPUs are taken until a test says `free`.

A line for each batch that it asks for.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

import ray

from lightrl.errors import RewardError
from lightrl.rewards import RewardPool
from lightrl.trajectory import Prompt, Trajectory

NUM = 200  # trajectories of a batch; the test has it too


def host(trajectory: Trajectory) -> dict[str, float]:
    """The number of the host that judges: they are called node1 and node2."""
    return {"reward": 1.0, "host": float(socket.gethostname().removeprefix("node"))}


async def batch(pool: RewardPool) -> dict[str, Any]:
    prompt = Prompt("p", token_ids=[1])
    lists: dict[str, Any] = {
        "token_ids": [1],
        "loss_mask": [False],
        "behavior_logprobs": [0.0],
        "weight_versions": [-1],
    }
    rows = [Trajectory(prompt, 0, sample, **lists, completion_ids=[], completion="") for sample in range(NUM)]
    outcomes = await asyncio.gather(*(pool.score(row) for row in rows), return_exceptions=True)
    failed = [outcome.reason for outcome in outcomes if isinstance(outcome, RewardError)]
    hosts = [int(outcome.metrics["host"]) for outcome in outcomes if not isinstance(outcome, BaseException)]
    return {"failed": failed, "judged": len(hosts), "hosts": sorted(set(hosts))}


def main() -> None:
    ray.init(address="auto", log_to_driver=False)
    here = {f"node:{ray.util.get_node_ip_address()}": 0.001}
    holder = ray.remote(type("Holder", (), {})).options(num_cpus=8, resources=here).remote()
    ray.get(holder.__ray_ready__.remote())
    pool = RewardPool("ray_hosts_run.host", workers=2)
    pool.start()
    for line in sys.stdin:
        if line == "free\n":
            ray.kill(holder)
            continue
        sys.stdout.write(json.dumps(asyncio.run(batch(pool))) + "\n")
        sys.stdout.flush()
    pool.close()


if __name__ == "__main__":
    main()
