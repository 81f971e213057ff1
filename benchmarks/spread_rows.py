"""The axis `ranks` of `benchmarks.growth`: what an iteration takes on each data-parallel rank, and what travels.

Processes on gloo play what a run does between rollout and update, with its own code: rank 0 has the trajectories, each
rank gets the numbers of all and the tokens of its rows, proximal logprobs (from a model that says 0) and advantages are
added, and every microbatch of the update is made.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.held_trajectories import rss_bytes
from lightrl.algorithms import GRPO
from lightrl.experience import Experience
from lightrl.loops.score import score
from lightrl.loops.shared_rollout import SharedRollout
from lightrl.loops.sharing import shard
from lightrl.models import ModelSpec, Outputs
from lightrl.rollout import RolloutSettings
from lightrl.strategies import Message, Microbatches, ShardedExperience
from lightrl.strategies.rank_watch import RankWatch
from lightrl.strategies.ranks import ProcessRanks, Send, watch_all
from lightrl.strategies.sharded_experience.experience import TOKEN_BYTES
from lightrl.strategies.sharded_experience.placement import microbatch_rows, minibatches
from lightrl.trajectory import Group, Prompt, Trajectory

GROUP_SIZE = 8
NUM_MINIBATCHES = 4
MICROBATCH_TOKENS = 16384


def lower_bound_bytes(has: Tensor, needs: Tensor, sizes: Sequence[int]) -> Counter[int]:
    """By rank, what it must receive at least: the rows that it needs and does not have, each once."""
    missing = (needs & ~has).long() @ torch.tensor(sizes, dtype=torch.int64)
    return Counter(dict(enumerate(missing.tolist())))


class CountedRanks(ProcessRanks):
    """Counts the bytes that come to this rank."""

    received_bytes = 0

    def exchange(
        self, sends: Sequence[Send], pack: Callable[[Send], Tensor], num_bytes: Callable[[Send], int]
    ) -> list[tuple[Send, Tensor]]:
        came = super().exchange(sends, pack, num_bytes)
        self.received_bytes += sum(data.numel() for _, data in came)
        return came

    def receive(self, source: int = 0) -> Message:
        message = super().receive(source)
        self.received_bytes += 32 + len(message.payload)
        return message

    def total(self, values: Tensor, operation: Any = "sum") -> Tensor:
        self.received_bytes += values.numel() * values.element_size()
        return super().total(values, operation)


class Zeros:
    """A model that says 0."""

    def forward(self, microbatches: Sequence[Experience], *, topk: int = 0) -> Iterator[Outputs]:
        for part in microbatches:
            zeros = torch.zeros(part.token_ids.shape)
            yield Outputs(zeros, zeros)


class Played:
    """A controller whose rollouts are there."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        self.engine = self
        self.weight_version = 0

    def take(self, weight_version: int, *, on_wait: Any) -> list[Group]:
        return self.groups

    def drain_drops(self) -> list[Any]:
        return []

    def drain_group_drops(self) -> dict[str, int]:
        return {}

    progress = drain_group_drops


def trajectories(num: int, width: int) -> list[Trajectory]:
    """Completions of up to `width` tokens, half as long on average."""
    draw = np.random.default_rng(0)
    made = []
    for row in range(num):
        length = int(draw.integers(16, width + 1))
        trains = np.arange(length) >= 8
        ids = draw.integers(0, 1000, length, dtype=np.int32)
        made.append(
            Trajectory(
                prompt=Prompt(id=f"prompt-{row // GROUP_SIZE}", token_ids=list(range(8))),
                group_id=row // GROUP_SIZE,
                sample=row % GROUP_SIZE,
                token_ids=ids,  # type: ignore[arg-type]
                loss_mask=trains,  # type: ignore[arg-type]
                behavior_logprobs=np.where(trains, -draw.random(length), 0).astype(np.float32),  # type: ignore[arg-type]
                weight_versions=np.where(trains, 0, -1).astype(np.int32),  # type: ignore[arg-type]
                completion_ids=ids[8:],  # type: ignore[arg-type]
                completion="",
                reward=float(draw.integers(0, 2)),
            )
        )
    return made


def trimmed_rss_bytes() -> int:
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return rss_bytes()


def host_bytes(experience: ShardedExperience) -> int:
    """Of all rows the numbers, and of the rows that are here the tokens."""
    rows = sum(value.numel() * value.element_size() for value in experience.rows.values())
    return rows + sum(item.nbytes for values in experience.tokens.values() for item in values.rows if item is not None)


def device_bytes(experience: ShardedExperience, module: GRPO, ranks: ProcessRanks) -> int:
    """The most that two successive microbatches take: one is computed on, and the next comes."""
    most = 0
    for picked in minibatches(experience, epochs=1, seed=0):
        minibatch = experience.select(picked)
        rows = microbatch_rows(minibatch, ranks, module.microbatch_tokens)
        sizes = [
            sum(value.numel() * value.element_size() for value in part.tensors().values())
            for part in Microbatches(minibatch, rows, torch.device("cpu"))
        ]
        most = max(most, *sizes, *(first + second for first, second in itertools.pairwise(sizes)))
    return most


def play(ranks: CountedRanks, num: int, width: int) -> dict[str, Any]:
    """An iteration from the rollout to the last microbatch of the update, on this rank."""
    policy = ModelSpec(config={"model_type": "qwen3"}, tokenizer="never loaded")
    settings: dict[str, Any] = {"num_minibatches": NUM_MINIBATCHES, "microbatch_tokens": MICROBATCH_TOKENS}
    module: Any = GRPO(policy, reward=len, decoupled=True, **settings)
    module.parallel_models = {"policy": Zeros()}
    items = trajectories(num, width) if ranks.is_main else []
    groups = [
        Group(first // GROUP_SIZE, items[first].prompt, items[first : first + GROUP_SIZE])
        for first in range(0, len(items), GROUP_SIZE)
    ]
    num_groups = num // GROUP_SIZE
    asked = RolloutSettings(group_size=GROUP_SIZE, groups_per_iteration=num_groups, total_groups=num_groups)
    controller: Any = Played(groups)
    rollout = SharedRollout(lambda: controller, ranks, run_seed=0, settings=asked)
    before = trimmed_rss_bytes()
    ranks.received_bytes = 0
    taken = rollout.take(0)
    whole = rollout.pop_experience()
    experience = shard(whole, module, ranks, seed=0, has_all=[0])
    del whole
    rows = [item for group in taken for item in group.trajectories]
    experience = score(module, experience, rows if ranks.is_main else [])
    received = ranks.received_bytes
    bound = 0
    if not ranks.is_main:
        work = experience.rows["_work"].T
        has = torch.zeros_like(work)
        has[0] = True
        bound = lower_bound_bytes(has, work, (experience.lengths * TOKEN_BYTES).tolist())[ranks.rank]
        bound += sum(value.numel() * value.element_size() for value in experience.table.values())
    return {
        "tokens": int(experience.lengths.sum()),
        "tokens_here": int(experience.lengths[experience.rows_here].sum()),
        "host_bytes": host_bytes(experience),
        "rss_growth_bytes": trimmed_rss_bytes() - before,
        "device_bytes": device_bytes(experience, module, ranks),
        "received_bytes": received,
        "lower_bound_bytes": bound,
    }


def work(rank: int, size: int, folder: str, num: int, width: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    group = dist.new_group(backend="gloo")
    watch: RankWatch = watch_all(group, main_address="127.0.0.1", hang_timeout_s=600.0)
    ranks = CountedRanks(dp_group=group, control_group=group, device=torch.device("cpu"), watch=watch)
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(play(ranks, num, width)))
    dist.barrier()
    ranks.close()
    dist.destroy_process_group()


def measured(size: int, num: int, width: int) -> dict[str, Any]:
    """Of the rank that holds or receives most; rank 0's resident memory has the trajectories beside."""
    with tempfile.TemporaryDirectory() as folder:
        fork = get_context("fork")
        processes = [fork.Process(target=work, args=(rank, size, folder, num, width)) for rank in range(size)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError("A rank failed; its traceback is above.")
        found = [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(size)]
    most = {name: max(rank[name] for rank in found) for name in found[0]}
    total, bound = (sum(rank[name] for rank in found) for name in ("received_bytes", "lower_bound_bytes"))
    return {
        "ranks": size,
        "trajectories": num,
        "width": width,
        **most,
        "received_over_lower_bound": round(total / bound, 3) if bound else None,
    }
