"""What of a PlannedRun does not fit the memory of a device, and which setting would change that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightrl.commands.plan_costs import (
    PlannedRun,
    RankMemory,
    engine_memory,
    rank_memories,
    ranks_text,
    rows_of,
)

_MAX_RANKS = 4096  # that are tried


@dataclass(frozen=True)
class Misfit:
    """What needs more memory than there is, and which setting would change it."""

    where: str
    cause: str
    cause_bytes: float
    total: float
    fix: str


def misfits(run: PlannedRun, room: float) -> Iterator[Misfit]:
    """Ranks and servers whose memory is above `room` bytes."""
    for index, memory in enumerate(rank_memories(run)):
        if memory.total > room:
            cause = max(memory.device, key=lambda name: memory.device[name])
            yield Misfit(ranks_text(memory.ranks), cause, memory.device[cause], memory.total, _fix(run, index, room))
    engine = run.engine
    if engine is None or engine.place != "servers":
        return
    weights, key_values = engine_memory(run, engine, rows=1)
    if weights + key_values > room:
        heads = int(run.roles[0].config.num_attention_heads)
        fitting = (tp for tp in range(engine.tp + 1, heads + 1) if heads % tp == 0)
        enough = (tp for tp in fitting if sum(engine_memory(run, replace(engine, tp=tp), rows=1)) <= room)
        tp = next(enough, None)
        fix = "use a smaller model" if tp is None else f"set trainer.engine's tp to at least {tp}"
        yield Misfit("a server's GPU", "weights", weights, weights + key_values, fix)


def _fix(run: PlannedRun, index: int, room: float) -> str:
    """The first of these changes after which the ranks of `rank_memories(run)[index]` have room."""
    start = rank_memories(run)[index].ranks.start
    is_data = run.batches_per_update is not None
    tokens = "data.batch_size" if is_data else "model.microbatch_tokens"
    for settings, changed in _changes(run):
        for name, text in (("key-values", "trainer.engine's max_batch"), ("activations", tokens)):
            smaller = _less_of(changed, name, start, room)
            if smaller is not None:
                number, is_less = smaller
                if is_less and is_data:
                    number = number // (run.longest * run.group_size) * run.roles[0].dp
                if is_less and not number:
                    continue
                texts = [*settings, *([f"{text} to at most {number}"] if is_less else [])]
                return f"set {' and '.join(texts)}"
    for world in range(2 * run.world, _MAX_RANKS + 1, run.world):
        wider = _over_ranks(run, world)
        if wider is not None and _total_at(wider, start) <= room:
            strategy = "trainer.strategy to FSDP2Strategy and " if run.layout == "whole" else ""
            return f"set {strategy}trainer.devices · trainer.num_nodes to at least {world}"
    return "no number of devices is enough: use a smaller model, LoRA, or bfloat16"


def _changes(run: PlannedRun) -> Iterator[tuple[list[str], PlannedRun]]:
    yield [], run
    if run.layout != "whole" and not run.checkpoint_activations:
        settings = ["activation_checkpointing of trainer.strategy to true"]
        yield settings, replace(run, checkpoint_activations=True)
    if run.layout == "FSDP2" and not run.reduce_every_microbatch:
        yield (
            ["activation_checkpointing and reduce_every_microbatch of trainer.strategy to true"],
            replace(run, checkpoint_activations=True, reduce_every_microbatch=True),
        )


def _less_of(run: PlannedRun, cause: str, start: int, room: float) -> tuple[int, bool] | None:
    """The largest size that leaves room, and whether it is below that of `run`; None if there is none."""
    if _total_at(run, start) <= room:
        return 0, False
    for _ in range(2):  # a second microbatch may keep whole gradients, which the first answer does not know
        memory = _memory_at(run, start)
        amount = memory.device.get(cause, 0.0)
        left = room - memory.total + amount
        if not amount or left <= 0:
            return None
        if cause == "activations":
            tokens = min(run.microbatch, math.ceil(run.update_tokens / min(role.dp for role in run.roles)))
            number = math.floor(tokens * left / amount)
            run = replace(run, microbatch_tokens=number)
        else:
            assert run.engine is not None
            number = math.floor(rows_of(run, run.engine) * left / amount)
            run = replace(run, engine=replace(run.engine, max_rows=number))
        if number >= 1 and _total_at(run, start) <= room:
            return number, True
    return None


def _over_ranks(run: PlannedRun, world: int) -> PlannedRun | None:
    """The run on so many ranks; None if its roles have ranks of their own."""
    if any(role.ranks != range(run.world) for role in run.roles):
        return None
    layout = "FSDP2" if run.layout == "whole" else run.layout
    return replace(
        run, world=world, layout=layout, roles=tuple(replace(role, ranks=range(world)) for role in run.roles)
    )


def _memory_at(run: PlannedRun, rank: int) -> RankMemory:
    return next(memory for memory in rank_memories(run) if rank in memory.ranks)


def _total_at(run: PlannedRun, rank: int) -> float:
    return _memory_at(run, rank).total
