"""Finds layouts in which a run fits: the strategy's sizes, settings that save memory, servers and devices.

It returns only layouts that the strategy accepts (`PlannedRun.refusal`), the fastest first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightrl.plan.costs import USABLE_FRACTION
from lightrl.plan.memory import (
    PlannedRun,
    bytes_text,
    engine_memory,
    largest,
    rank_memories,
    ranks_text,
    role_cost,
    rows_of,
    served_fraction,
)
from lightrl.plan.speed import GPUS, Gpu, PlannedTime, planned_time
from lightrl.strategies.offload import Offloadable
from lightrl.trajectory import JsonObject

_MAX_RANKS = 4096  # the largest number to try
_OFFLOADS: tuple[tuple[Offloadable, ...], ...] = ((), ("optimizer",), ("activations",), ("optimizer", "activations"))
_RANKS = ("devices", "num_nodes")  # their product is the number of ranks
DEFAULT_GPU = "H100"  # layouts are ranked by this GPU's speed if the kind of GPU is unknown


@dataclass(frozen=True)
class Choice:
    """A layout in which a run fits."""

    run: PlannedRun
    time: PlannedTime

    @property
    def memory(self) -> float:
        """The memory of the rank that needs the most, in bytes."""
        return max(memory.total for memory in rank_memories(self.run))

    @property
    def sent(self) -> float:
        """Bytes that a rank sends per update for all its roles."""
        return sum(role_cost(self.run, role).sent for role in self.run.roles)


def settings_of(run: PlannedRun, base: PlannedRun) -> JsonObject:
    """Returns the settings that turn `base` into `run`, as a layer of YAML."""
    sizes = run.sizing(run)
    changed = _changes(sizes, base.sizing(base))
    trainer = changed.get("trainer", {})
    if trainer.keys() & _RANKS:  # sets both, because the user's file may have `auto`
        changed["trainer"] = {**trainer, **{name: sizes["trainer"][name] for name in _RANKS}}
    if strategy := _strategy_changes(run, base):
        changed["trainer"] = {**changed.get("trainer", {}), "strategy": strategy}
    return changed


def settings_text(run: PlannedRun, base: PlannedRun) -> str:
    """Names the settings that turn `base` into `run`, with their values."""
    flat = _paths(settings_of(run, base))
    dropped = {"trainer.engine", "trainer.devices", "trainer.num_nodes"}
    dropped |= {"trainer.strategy"} if run.layout == base.layout else set()
    texts = [f"{name} to {_value_text(value)}" for name, value in flat.items() if name not in dropped]
    if flat.keys() & {"trainer.devices", "trainer.num_nodes"}:
        texts.append(f"trainer.devices · trainer.num_nodes to {run.world}")
    return " and ".join(texts)


def choices(run: PlannedRun, device_bytes: float, gpu: Gpu, *, most: int = 3) -> list[Choice]:
    """Returns the fastest layouts on the run's ranks that fit a GPU's memory, at most one for each split of the model.

    A tie goes to the layout that changes the fewest settings.
    """
    best: list[tuple[float, int, PlannedRun]] = []
    for split in _splits(run):
        fitting = [each for each in _savings(split) if _fits(each, device_bytes)]
        seconds = ((planned_time(each, gpu, device_bytes).total_s, each) for each in fitting)
        ranked = [(each_s, len(_paths(settings_of(each, run))), each) for each_s, each in seconds]
        best += [min(ranked, key=lambda item: item[:2])] if ranked else []
    accepted = (each for *_, each in sorted(best, key=lambda item: item[:2]) if not run.refusal(each))
    served = filter(None, (_with_servers(each, device_bytes, gpu) for each in accepted))
    return list(itertools.islice(served, most))


def smallest(run: PlannedRun, device_bytes: float, gpu: Gpu) -> list[Choice]:
    """Returns the layouts that fit on the fewest ranks or whole nodes; [] if none fits or a role has a mesh."""
    if any(role.mesh is not None for role in run.roles):
        return []

    def fits(world: int) -> bool:
        resized = run.over(world)
        savers = (next(_savings(split, saves_most=True)) for split in _splits(resized))
        return any(_fits(saver, device_bytes) and not run.refusal(saver) for saver in savers)

    node = run.gpus_per_node
    within = [2**power for power in range(int(math.log2(node)) + 1) if 2**power < node]
    beyond = (node * 2**power for power in range(int(math.log2(max(1, _MAX_RANKS / node))) + 1))
    world = next((world for world in itertools.chain(within, beyond) if fits(world)), None)
    if world is None:
        return []
    # whole nodes between the last two sizes that were tried
    between = range(world // 2 + node, world, node) if world > 2 * node else range(0)
    world = next((world for world in between if fits(world)), world)
    return choices(run.over(world), device_bytes, gpu)


def _splits(run: PlannedRun) -> Iterator[PlannedRun]:
    """Yields the run with each split that FSDP2Strategy, or Parallel3DStrategy without cp, allows on these ranks."""
    if any(role.mesh is not None for role in run.roles):
        yield run
        return

    def of(layout: Literal["FSDP2", "3D"], pp: int = 1, tp: int = 1, cp: int = 1, ep: int = 1) -> PlannedRun:
        is_3d = layout == "3D"  # Parallel3DStrategy neither compiles layers nor offloads
        roles = (replace(role, pp=pp, tp=tp, cp=cp, is_compiled=role.is_compiled and not is_3d) for role in run.roles)
        changes: JsonObject = {"offloads": (), "keeps_gathered": False} if is_3d else {}
        return replace(run, layout=layout, ep=ep, roles=tuple(roles), **changes)

    if run.layout == "whole":
        yield run

    experts = [layer.experts for role in run.roles for layer in role.size.layers if layer.experts]
    heads = math.gcd(*(int(role.config.num_attention_heads) for role in run.roles))
    shards = run.world // run.num_replicas
    for ep, cp in itertools.product(_divisors(math.gcd(shards, *experts) if experts else 1), _divisors(heads)):
        if run.world % cp == 0 and (cp == 1 or run.batches_per_update is None):
            yield of("FSDP2", ep=ep, cp=cp)
    if run.num_replicas > 1 or run.refusal(of("3D")):
        return
    for tp in _divisors(run.world // run.num_nodes):
        for pp in _divisors(run.world // tp):
            for ep in _divisors(math.gcd(run.world // pp, *experts) if experts else 1) if pp * tp > 1 else ():
                split = of("3D", pp=pp, tp=tp, ep=ep)
                try:
                    role_cost(split, split.roles[0])
                except ValueError:  # the model cannot be split into these sizes
                    break
                yield split


def _savings(run: PlannedRun, *, saves_most: bool = False) -> Iterator[PlannedRun]:
    """Yields the run with each combination of settings that save memory, or only with all of them set."""
    flags = (True,) if saves_most else (False, True)
    if run.layout == "whole":
        yield run
        return
    for checkpoints in flags:
        if run.layout == "3D":
            yield replace(run, checkpoint_activations=checkpoints, reduce_every_microbatch=False)
            continue
        gathered = (True, False)[saves_most:] if run.keeps_gathered else (False,)
        all_offloads = _OFFLOADS[-1:] if saves_most else _OFFLOADS
        for reduces, keeps, offloads in itertools.product(flags, gathered, all_offloads):
            kept: Sequence[Offloadable] = ("parameters",) if "parameters" in run.offloads else offloads
            changed = replace(run, checkpoint_activations=checkpoints, reduce_every_microbatch=reduces)
            yield replace(changed, keeps_gathered=keeps, offloads=kept)


def _fits(run: PlannedRun, device_bytes: float) -> bool:
    return max(memory.total for memory in rank_memories(run)) <= USABLE_FRACTION * device_bytes


def _with_servers(run: PlannedRun, device_bytes: float, gpu: Gpu) -> Choice | None:
    """Chooses the fastest number of servers and tp on their GPUs; if none fits, adds GPUs, up to a node per server."""
    engine = run.engine
    if engine is None or engine.place != "servers" or not engine.starts_servers:
        return Choice(run, planned_time(run, gpu, device_bytes))
    fraction = served_fraction(run, device_bytes) if run.shares_gpus else USABLE_FRACTION
    heads = int(run.roles[0].config.num_attention_heads)
    least = engine.servers * engine.tp
    node = run.world // run.num_nodes if run.shares_gpus else run.gpus_per_node
    # colocated servers use all of the ranks' GPUs; separate ones get the given number of GPUs, then more
    totals = [run.world] if run.shares_gpus else [least, *(engine.servers * tp for tp in _divisors(node))]
    for gpus in (total for total in totals if total >= least):
        sizes = [tp for tp in _divisors(math.gcd(gpus, node)) if heads % tp == 0]  # a server's GPUs are on one node
        engines = [replace(engine, servers=gpus // tp, tp=tp) for tp in sizes]
        fitting = [each for each in engines if sum(engine_memory(run, each, rows=1)) <= fraction * device_bytes]
        runs = [replace(run, engine=each) for each in fitting]
        if made := [Choice(each, planned_time(each, gpu, device_bytes)) for each in runs]:
            return min(made, key=lambda choice: choice.time.total_s)
    return None


def _strategy_values(run: PlannedRun) -> JsonObject:
    role = next((role for role in run.roles if role.mesh is None), run.roles[0])
    values: JsonObject = {"activation_checkpointing": run.checkpoint_activations}
    if run.layout == "3D":
        return {"pp": role.pp, "dp": role.dp, "tp": role.tp, "ep": run.ep, "cp": role.cp, **values}
    values |= {"reduce_every_microbatch": run.reduce_every_microbatch, "ep": run.ep, "cp": role.cp}
    return {**values, "offload_to_cpu": list(run.offloads), "reshard_after_forward": not run.keeps_gathered}


def _strategy_changes(run: PlannedRun, base: PlannedRun) -> JsonObject:
    is_same = run.layout == base.layout
    unset: JsonObject = {"pp": 1, "tp": 1, "cp": 1, "ep": 1, "activation_checkpointing": False}
    unset |= {"reduce_every_microbatch": False, "offload_to_cpu": [], "reshard_after_forward": True}
    before = _strategy_values(base) if is_same else unset
    changed = {name: value for name, value in _strategy_values(run).items() if value != before.get(name)}
    if is_same and not changed:
        return {}
    name = "Parallel3DStrategy" if run.layout == "3D" else "FSDP2Strategy"
    return {"class_path": name, **({"init_args": changed} if changed else {})}


def _changes(values: Mapping[str, object], before: Mapping[str, object]) -> JsonObject:
    """Returns the values that differ, including nested ones; a class with changed arguments keeps its class_path."""
    changed: JsonObject = {}
    for name, value in values.items():
        old = before.get(name)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            if inner := _changes(value, old):
                changed[name] = {**({"class_path": value["class_path"]} if "class_path" in value else {}), **inner}
        elif value != old:
            changed[name] = value
    return changed


def _paths(settings: Mapping[str, object], path: str = "") -> dict[str, object]:
    """Flattens nested settings to entries such as `trainer.strategy's ep` → 8 or `trainer.strategy` → its class."""
    flat: dict[str, object] = {}
    for name, value in settings.items():
        if name == "init_args" and isinstance(value, Mapping):
            flat |= {f"{path}'s {key}": item for key, item in value.items()}
        elif name == "class_path":
            flat[path] = value
        elif isinstance(value, Mapping):
            flat |= _paths(value, f"{path}.{name}" if path else name)
        else:
            flat[f"{path}.{name}" if path else name] = value
    return flat


def _value_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace("'", "")


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True)
class Misfit:
    """Ranks or a server that need more memory than a GPU has, and a setting that helps."""

    where: str
    device: dict[str, float]  # bytes by cause
    usable: float
    device_bytes: float
    fix: str

    @property
    def cause(self) -> str:
        return max(self.device, key=self.device.__getitem__)

    @property
    def text(self) -> str:
        names = sorted(self.device, key=self.device.__getitem__, reverse=True)
        parts = ", ".join(f"{name} {bytes_text(self.device[name])}" for name in names)
        total, usable, given = map(bytes_text, (sum(self.device.values()), self.usable, self.device_bytes))
        need = "need" if self.where.startswith("ranks") else "needs"
        return f"{self.where} {need} {total} ({parts}), but {usable} of {given} are usable; {self.fix}"


def misfits(run: PlannedRun, device_bytes: float, gpu: Gpu = GPUS[DEFAULT_GPU]) -> Iterator[Misfit]:
    """Yields ranks and servers that need more than the usable part of a GPU's memory."""
    usable = USABLE_FRACTION * device_bytes
    for index, memory in enumerate(rank_memories(run)):
        if memory.total > usable:
            fix = _fix(run, index, device_bytes, gpu)
            yield Misfit(ranks_text(memory.ranks), memory.device, usable, device_bytes, fix)
    engine = run.engine
    if engine is None or engine.place != "servers":
        return
    weights, key_values = engine_memory(run, engine, rows=1)
    if weights + key_values > usable:
        heads = int(run.roles[0].config.num_attention_heads)
        sizes: Iterable[int] = (tp for tp in range(engine.tp + 1, heads + 1) if heads % tp == 0)
        if engine.starts_servers:  # each server must fit on one node
            node = run.world // run.num_nodes if run.shares_gpus else run.gpus_per_node
            sizes = (tp for tp in sizes if node % tp == 0)
        enough = (tp for tp in sizes if sum(engine_memory(run, replace(engine, tp=tp), rows=1)) <= usable)
        resized = [replace(run, engine=replace(engine, tp=tp)) for tp in enough]
        text = settings_text(resized[0], run) if resized else ""
        fix = (
            f"set {text}"
            if text
            else "use servers with more GPUs each (tp)"
            if resized
            else "use a smaller model, or larger nodes"
        )
        used = {"weights": weights, "KV cache of one trajectory": key_values}
        yield Misfit("a server's GPU", used, usable, device_bytes, fix)


def _fix(run: PlannedRun, index: int, device_bytes: float, gpu: Gpu) -> str:
    """Returns the first change that makes the ranks of `rank_memories(run)[index]` fit.

    In this order, it tries a smaller microbatch, the fastest layout on the same ranks, both together, and more ranks.
    """
    rank, usable = rank_memories(run)[index].ranks.start, USABLE_FRACTION * device_bytes

    def fits(changed: PlannedRun) -> bool:
        return next(memory for memory in rank_memories(changed) if rank in memory.ranks).total <= usable

    def microbatch(changed: PlannedRun) -> str:
        for text, most, resized in _numeric_settings(changed):
            if number := largest(most, resized, fits):
                return f"{text} to at most {number}"
        return ""

    if text := microbatch(run):
        return f"set {text}"
    engine = run.engine
    # if no servers fit, find a layout for the ranks alone
    alone = run if engine is None or engine.place != "servers" else replace(run, engine=None)
    if best := choices(run, device_bytes, gpu, most=1) or choices(alone, device_bytes, gpu, most=1):
        return f"set {settings_text(replace(best[0].run, engine=run.engine), run)}"
    for split in _splits(run):
        saving = next(_savings(split, saves_most=True))
        if (text := microbatch(saving)) and not run.refusal(saving):
            return f"set {settings_text(saving, run)} and {text}"
    if best := smallest(run, device_bytes, gpu) or smallest(alone, device_bytes, gpu):
        return f"set {settings_text(replace(best[0].run, engine=run.engine), run)}"
    return "no number of devices is enough: use a smaller model, LoRA, or bfloat16"


def _numeric_settings(run: PlannedRun) -> Iterator[tuple[str, int, Callable[[int], PlannedRun]]]:
    """Yields a setting's name, its largest useful value, and a function that returns the run with a given value."""
    engine = run.engine
    if engine is not None and engine.place == "rank 0":
        rows = rows_of(run, engine)
        yield "trainer.engine's max_batch", rows, lambda size: replace(run, engine=replace(engine, max_rows=size))
    if run.batches_per_update is not None:
        yield "data.batch_size", run.prompts or 1, lambda size: replace(run, prompts=size)
        return
    tokens = min(run.microbatch, math.ceil(run.update_tokens / min(role.dp for role in run.roles)))
    yield "model.microbatch_tokens", tokens, lambda size: replace(run, microbatch_tokens=size)
