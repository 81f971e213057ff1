"""Estimates the memory of a run's ranks and servers from each model's costs (plan/costs.py) and ranks.

`lightrl plan`, `launch` and `doctor run` get their numbers from `rank_memories` and `engine_memory`, for a PlannedRun
that planned_run.py reads from the run's classes; `misfits` looks for settings with which the run fits.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from lightrl.engines.engine import PlannedEngine
from lightrl.models import RoleMesh
from lightrl.models.expert_parallel import num_split_experts
from lightrl.plan.costs import (
    TRAJECTORY_BYTES,
    USABLE_FRACTION,
    Work,
    activation_bytes,
    experience_bytes,
    fsdp2_cost,
    key_value_bytes,
    num_parameters,
    parallel_3d_cost,
    peak_bytes,
)
from lightrl.strategies.layouts.probes import may_be_cut
from lightrl.strategies.offload import Offloadable

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_STATE = ("weights", "gradients", "moments")
_SERVER_FRACTION = 0.1  # share of a GPU for a server's CUDA graphs and activations, besides weights and key-values
_MAX_RANKS = 4096  # the largest number that is tried
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class UnknownMemory(ValueError):
    """A model's configuration cannot be read here, or lacks sizes that the formulas need."""

    def __init__(self, reason: object) -> None:
        super().__init__(f"Memory was not checked: {' '.join(str(reason).split())}")


@dataclass(frozen=True)
class PlannedRole:
    """A model and the ranks that hold it."""

    name: str
    config: PretrainedConfig  # config of the text model
    parameters: int
    trained: int  # number of trained parameters
    ranks: range
    mesh: RoleMesh | None = None
    pp: int = 1
    tp: int = 1
    cp: int = 1
    width: int = 4  # bytes of a parameter
    waits_on_host: bool = False
    expert_parameters: int = 0  # parameters of a mixture's experts
    is_compiled: bool = False  # torch.compile compiles the decoder layers

    @property
    def dp(self) -> int:
        return max(1, len(self.ranks) // (self.pp * self.tp * self.cp))


@dataclass(frozen=True)
class PlannedRun:
    """The properties of a run that determine its memory, and those that messages about it name."""

    roles: tuple[PlannedRole, ...]  # the policy first
    world: int
    layout: Literal["whole", "FSDP2", "3D"]
    prompts: int | None  # prompts per iteration; None if the data does not state them
    group_size: int
    num_minibatches: int
    update_epochs: int
    microbatch_tokens: int
    prompt_tokens: int  # of the longest prompt
    new_tokens: int
    longest: int  # tokens of the longest trajectory
    prompt_source: str = "data.max_prompt_tokens"
    max_staleness: int = 0
    num_scores: int = 0  # float32 numbers per token, in addition to those of the rollout
    is_mixed: bool = False  # bfloat16 or float16 under autocast
    checkpoint_activations: bool = False
    reduce_every_microbatch: bool = False
    keeps_gathered: bool = False  # whether parameters stay gathered between forward and backward
    num_replicas: int = 1
    ep: int = 1  # ranks over which each layer's experts are divided
    offloads: Sequence[Offloadable] = ()  # what is kept in host memory
    engine: PlannedEngine | None = None
    shares_gpus: bool = False  # the engine's servers are on the ranks' GPUs
    batches_per_update: int | None = None  # batches of data; None if trajectories are rolled out

    @property
    def trajectories(self) -> int:
        return (self.prompts or 1) * self.group_size

    @property
    def update_tokens(self) -> int:
        """The largest number of tokens in a minibatch."""
        return math.ceil(self.trajectories / self.num_minibatches) * self.longest

    @property
    def microbatch(self) -> int:
        """Tokens of the largest microbatch, which contains at least one trajectory."""
        return max(self.microbatch_tokens, self.longest)

    def over(self, world: int, pp: int = 1, tp: int = 1) -> PlannedRun:
        """Returns the run on `world` ranks; raises ValueError if a role's mesh does not fit them."""
        layout: Literal["whole", "FSDP2", "3D"] = "3D" if pp * tp > 1 else self.layout
        roles = tuple(
            replace(role, ranks=range(world), pp=pp, tp=tp)
            if role.mesh is None
            else replace(role, ranks=role.mesh.ranks(world))
            for role in self.roles
        )
        return replace(self, world=world, layout="FSDP2" if world > 1 and layout == "whole" else layout, roles=roles)


@dataclass(frozen=True)
class RoleCost:
    """Bytes on one rank of a role; for a pipeline, on the stage with the most parameters."""

    weights: float
    gradients: float
    moments: float
    gathered: float
    activations: float
    logits: float
    sent: float  # in one update
    offloaded: float = 0.0  # activations on the host, each counted once

    @property
    def working(self) -> float:
        """The memory that is freed when the role has finished its work."""
        return self.gathered + self.activations + self.logits


def role_cost(run: PlannedRun, role: PlannedRole) -> RoleCost:
    """Estimates a role's bytes; raises ValueError if the model cannot be split this way."""
    config, is_trained = role.config, role.trained > 0
    tokens = max(run.update_tokens, role.dp * run.longest)
    compute = 2 if run.is_mixed else role.width
    # A frozen model keeps nothing, but each layer needs as much in its forward as a checkpointed layer recomputes.
    keeps = is_trained and "activations" not in run.offloads
    checkpoints = run.checkpoint_activations or not keeps
    copies = run.layout == "whole" and compute != role.width and not checkpoints
    work = Work(tokens, run.microbatch, checkpoints, role.width, compute, copies, role.cp, role.is_compiled)
    share, gathered, sent = 1.0, 0.0, 0.0
    num_layers = config.num_hidden_layers if keeps else 0
    microbatch = math.ceil(min(run.microbatch, math.ceil(tokens / role.dp)) / role.cp)
    actual_work = replace(work, checkpoint_activations=run.checkpoint_activations)
    waits = is_trained and not keeps
    offloaded = activation_bytes(config, microbatch, config.num_hidden_layers, actual_work) if waits else 0.0
    activations, logits = peak_bytes(config, microbatch, num_layers, work)
    if run.layout == "FSDP2":
        shards = max(1, len(role.ranks) // run.num_replicas)
        work = replace(actual_work, tokens=math.ceil(tokens / len(role.ranks)) * shards)
        actual_cost, reduced_cost = (
            fsdp2_cost(config, shards, work, reduce_every_microbatch=each)
            for each in (run.reduce_every_microbatch, True)
        )
        share = 1 / shards
        gatherable = role.parameters - role.expert_parameters * (1 - 1 / run.ep)  # a rank gathers only its experts
        # the costs count one dense feed-forward layer instead of a mixture's experts
        uncounted = max(0.0, gatherable - num_parameters(config)) if role.expert_parameters else 0.0
        waiting = actual_cost.gathered_bytes - reduced_cost.gathered_bytes  # whole gradients
        waiting += role.width * uncounted if waiting else 0.0
        layers = reduced_cost.gathered_bytes + 2 * compute * uncounted / config.num_hidden_layers  # of two layers
        whole = compute * gatherable if run.keeps_gathered else 0
        gathered = max(layers, whole) + waiting * role.trained / role.parameters
        sent = actual_cost.sent_bytes
    elif run.layout == "3D":
        cost = parallel_3d_cost(config, role.pp, role.dp, role.tp, work)
        share = cost.state_bytes / (4 * role.width * num_parameters(config))
        gathered = cost.gathered_bytes if is_trained else cost.gathered_bytes / 2
        activations = cost.activation_bytes if is_trained else activations / role.tp
        logits = logits / role.tp
        sent = cost.sent_bytes
    trained_width = 4 if role.trained < role.parameters else role.width  # adapters are float32 on any base
    trained = trained_width * role.trained * share
    weights = role.width * (role.parameters - role.trained) * share + trained
    sent = sent if is_trained else 0.0
    return RoleCost(weights, trained, 2 * trained, gathered, activations, logits, sent, offloaded)


@dataclass(frozen=True)
class RankMemory:
    """Bytes per rank, by cause. The roles on a rank work one after another, so only the largest role counts."""

    ranks: range
    device: dict[str, float]
    host: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.device.values())


def rank_memories(run: PlannedRun) -> list[RankMemory]:
    """Estimates the memory of each range of ranks that have the same roles."""
    costs = {role.name: role_cost(run, role) for role in run.roles}
    cuts = {0, run.world, *(edge for role in run.roles for edge in (role.ranks.start, role.ranks.stop))}
    cuts |= {1} if run.engine is not None and run.engine.place == "rank 0" else set()
    return [_memory(run, range(*ends), costs) for ends in itertools.pairwise(sorted(cuts))]


def _memory(run: PlannedRun, ranks: range, costs: dict[str, RoleCost]) -> RankMemory:
    """Estimates the memory of each of these ranks, which have the same roles."""
    here = [role for role in run.roles if ranks.start in role.ranks]
    resting = [role for role in here if not role.waits_on_host]
    state = {name: sum(getattr(costs[role.name], name) for role in resting) for name in _STATE}
    working = [costs[role.name] for role in resting]
    for role in here:  # weights that wait on the host are on the device only while the role works
        cost = costs[role.name]
        working += [replace(cost, gathered=cost.gathered + cost.weights)] if role.waits_on_host else []
    device, host = dict(state), dict[str, float]()
    if "parameters" in run.offloads:
        device, host = host, device
    if working:
        most = max(working, key=lambda cost: cost.working)
        device |= {"gathered": most.gathered, "activations": most.activations, "logits": most.logits}
        if "activations" in run.offloads:
            host["activations"] = max(cost.offloaded for cost in working)
        if "optimizer" in run.offloads and "moments" in device:
            host["moments"] = device["moments"]
            device["moments"] = max(0.0, host["moments"] - most.activations - most.logits)  # free during the update
    if ranks.start == 0 and run.engine is not None and run.engine.place == "rank 0":
        weights, key_values = engine_memory(run, run.engine)
        device |= {"engine weights": weights, "key-values": key_values}
    tokens = run.trajectories * run.longest
    if run.batches_per_update is None:
        host["experience"] = experience_bytes(run.num_scores) * tokens / min((role.dp for role in here), default=1)
        host |= {"trajectories, only on rank 0": float(TRAJECTORY_BYTES * tokens)} if ranks.start == 0 else {}
    if run.max_staleness and any(role.name == "policy" for role in here):  # for WeightSync.verify
        host["weights of older versions, to check answers"] = (run.max_staleness + 1) * costs["policy"].gradients
    return RankMemory(ranks, device, host)


def rows_of(run: PlannedRun, engine: PlannedEngine) -> int:
    """Returns the number of trajectories that decode together in each server."""
    rows = math.ceil(run.trajectories * (run.max_staleness + 1) / engine.servers)
    return rows if engine.max_rows is None else min(engine.max_rows, rows)


def engine_memory(run: PlannedRun, engine: PlannedEngine, rows: int | None = None) -> tuple[float, float]:
    """Returns the bytes of weights and of key-values on each GPU of a server, by default for all its trajectories."""
    policy = run.roles[0]
    config = policy.config
    tokens = run.longest * (rows_of(run, engine) if rows is None else rows)
    key_values = key_value_bytes(config, engine.width) * tokens / min(engine.tp, int(config.num_key_value_heads))
    ends = config.vocab_size * config.hidden_size * (1 if getattr(config, "tie_word_embeddings", False) else 2)
    layer_width = 1 if engine.is_block_fp8 else engine.width
    return (layer_width * (policy.parameters - ends) + engine.width * ends) / engine.tp, key_values


def decoding_rows(run: PlannedRun, engine: PlannedEngine, device_bytes: float) -> int:
    """Returns how many of a server's trajectories of maximum length its memory holds at once; the others wait."""
    fraction = served_fraction(run, device_bytes) if run.shares_gpus else USABLE_FRACTION
    weights, each = engine_memory(run, engine, rows=1)
    return min(rows_of(run, engine), max(1, int((fraction * device_bytes - weights) // each)))


def suited(run: PlannedRun, device_bytes: float, *, may_checkpoint: bool, may_cut: bool) -> PlannedRun:
    """Adds activation checkpointing, then reduces microbatches, if the run's ranks do not fit otherwise.

    Key-values on rank 0 count as at most a quarter of the usable memory, since further rows can wait.
    """
    usable = USABLE_FRACTION * device_bytes

    def fits(changed: PlannedRun) -> bool:
        first, *others = rank_memories(changed)
        cached = max(0.0, first.device.get("key-values", 0.0) - usable / 4)
        return max(first.total - cached, *(memory.total for memory in others), 0.0) <= usable

    if not fits(run) and may_checkpoint:
        run = replace(run, checkpoint_activations=True)
    if not fits(run) and may_cut and run.batches_per_update is None:
        tokens = _largest(run.microbatch, lambda size: replace(run, microbatch_tokens=size), fits)
        run = replace(run, microbatch_tokens=tokens or run.microbatch_tokens)
    return run


def key_value_capacity(run: PlannedRun, device_bytes: float) -> float:
    """Returns the bytes of rank 0's GPU that are left for an engine's key-values."""
    memory = rank_memories(run)[0]
    return max(0.0, USABLE_FRACTION * device_bytes - memory.total + memory.device.get("key-values", 0.0))


def served_fraction(run: PlannedRun, device_bytes: float) -> float:
    """Returns `mem_fraction_static` for SGLang on the ranks' GPUs, which hold weights and gradients meanwhile."""
    state_bytes = max(sum(memory.device.get(name, 0.0) for name in _STATE[:2]) for memory in rank_memories(run))
    return max(0.1, math.floor(100 * (USABLE_FRACTION - _SERVER_FRACTION - state_bytes / device_bytes)) / 100)


def memory_line(run: PlannedRun) -> str:
    """Describes the memory of the rank that needs most memory, and of each GPU of a server."""
    line = f"Memory of a rank, on paper: {bytes_text(max(memory.total for memory in rank_memories(run)))}"
    if run.engine is None or run.engine.place != "servers":
        return f"{line}."
    return f"{line}; of a server's GPU: {bytes_text(engine_memory(run, run.engine)[0])} for weights, besides its cache."


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


def misfits(run: PlannedRun, device_bytes: float) -> Iterator[Misfit]:
    """Yields ranks and servers that need more than the usable part of a GPU's memory."""
    usable = USABLE_FRACTION * device_bytes
    for index, memory in enumerate(rank_memories(run)):
        if memory.total > usable:
            fix = _fix(run, index, usable)
            yield Misfit(ranks_text(memory.ranks), memory.device, usable, device_bytes, fix)
    engine = run.engine
    if engine is None or engine.place != "servers":
        return
    weights, key_values = engine_memory(run, engine, rows=1)
    if weights + key_values > usable:
        heads = int(run.roles[0].config.num_attention_heads)
        sizes = (tp for tp in range(engine.tp + 1, heads + 1) if heads % tp == 0)
        enough = (tp for tp in sizes if sum(engine_memory(run, replace(engine, tp=tp), rows=1)) <= usable)
        tp = next(enough, None)
        fix = "use a smaller model" if tp is None else f"set trainer.engine's tp, or launch.tp, to at least {tp}"
        used = {"weights": weights, "key-values of one trajectory": key_values}
        yield Misfit("a server's GPU", used, usable, device_bytes, fix)


def _fix(run: PlannedRun, index: int, usable: float) -> str:
    """Returns the first change of settings that makes the ranks of `rank_memories(run)[index]` fit.

    If no setting is enough, returns the smallest number of devices, with the settings that need the fewest.
    """
    rank = rank_memories(run)[index].ranks.start

    def fits(changed: PlannedRun) -> bool:
        return next(memory for memory in rank_memories(changed) if rank in memory.ranks).total <= usable

    for settings, changed in _strategy_changes(run):
        if fits(changed):
            return f"set {settings}"
        for text, most, resized in _numeric_settings(changed):
            number = _largest(most, resized, fits)
            if number:
                return f"set {' and '.join(filter(None, (settings, text)))} to at most {number}"
    if all(role.ranks == range(run.world) for role in run.roles):
        policy = run.roles[0]
        strategy = "trainer.strategy to FSDP2Strategy" if run.layout == "whole" else ""
        worlds, fix = range(2 * run.world, _MAX_RANKS + 1, run.world), ""
        for settings, changed in _strategy_changes(replace(run, layout="FSDP2") if strategy else run):
            resized = functools.partial(changed.over, pp=policy.pp, tp=policy.tp)
            if worlds and fits(resized(worlds[-1])):
                world = next(world for world in worlds if fits(resized(world)))
                worlds = range(2 * run.world, world, run.world)  # a setting is cheaper than devices
                devices = f"trainer.devices · trainer.num_nodes to at least {world}"
                fix = f"set {' and '.join(filter(None, (strategy, settings, devices)))}"
        if fix:
            return fix
    return "no number of devices is enough: use a smaller model, LoRA, or bfloat16"


def _strategy_changes(run: PlannedRun) -> Iterator[tuple[str, PlannedRun]]:
    """Yields settings of the strategy that need less memory, those that cost least time first, and the changed run."""
    flags = {"activation_checkpointing": "checkpoint_activations", "reduce_every_microbatch": "reduce_every_microbatch"}
    num_flags = {"whole": 0, "3D": 1, "FSDP2": 2}[run.layout]
    unset = [name for name in list(flags)[:num_flags] if not getattr(run, flags[name])]
    sizes: list[tuple[dict[str, str], PlannedRun]] = [({}, run)]
    if run.layout == "FSDP2" and all(role.mesh is None for role in run.roles):
        sizes += [({"ep": str(ep)}, replace(run, ep=ep)) for ep in _expert_splits(run)]
        heads = [int(role.config.num_attention_heads) for role in run.roles]
        cuts = run.batches_per_update is None and all(may_be_cut(role.config) for role in run.roles)
        for cp in _divisors(math.gcd(run.world, *heads), above=run.roles[0].cp) if cuts else ():
            sizes.append(({"cp": str(cp)}, replace(run, roles=tuple(replace(role, cp=cp) for role in run.roles))))
    for settings, changed in sizes:
        for num in range(len(unset) + 1):
            values = dict.fromkeys(unset[:num], "true") | settings
            text = " and ".join(f"trainer.strategy's {name} to {value}" for name, value in values.items())
            fields: dict[str, Any] = {flags[name]: True for name in unset[:num]}
            yield text, replace(changed, **fields)


def _expert_splits(run: PlannedRun) -> list[int]:
    """Returns the larger values of `ep` that FSDP2Strategy accepts."""
    mixtures = [role for role in run.roles if role.expert_parameters]
    if not mixtures or "parameters" in run.offloads or any(role.is_compiled for role in run.roles):
        return []
    try:
        experts = [num_split_experts(role.config) for role in mixtures]
    except ValueError:  # transformers cannot divide this family's experts
        return []
    return _divisors(math.gcd(run.world // run.num_replicas, *experts), above=run.ep)


def _divisors(number: int, *, above: int) -> list[int]:
    return [size for size in range(above + 1, number + 1) if number % size == 0]


def _numeric_settings(run: PlannedRun) -> Iterator[tuple[str, int, Callable[[int], PlannedRun]]]:
    """Yields a setting's name, its largest value with an effect, and a function that returns the run with a value."""
    engine = run.engine
    if engine is not None and engine.place == "rank 0":
        rows = rows_of(run, engine)
        yield "trainer.engine's max_batch", rows, lambda size: replace(run, engine=replace(engine, max_rows=size))
    if run.batches_per_update is not None:
        dp, each = run.roles[0].dp, run.longest * run.group_size

        def of_batch(size: int) -> PlannedRun:
            return replace(run, prompts=size, microbatch_tokens=math.ceil(size / dp) * each)

        yield "data.batch_size", run.prompts or 1, of_batch
        return
    tokens = min(run.microbatch, math.ceil(run.update_tokens / min(role.dp for role in run.roles)))
    yield "model.microbatch_tokens", tokens, lambda size: replace(run, microbatch_tokens=size)


def _largest(most: int, resized: Callable[[int], PlannedRun], fits: Callable[[PlannedRun], bool]) -> int:
    """Returns the largest size below `most` that fits, or 0 if none does; `most` itself does not fit."""
    return bisect.bisect_left(range(1, most), True, key=lambda size: not fits(resized(size)))


def ranks_text(ranks: range) -> str:
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start} to {ranks.stop - 1}"


def bytes_text(number: float) -> str:
    for unit, size in _UNITS:
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} B"


def num_devices(devices: object) -> int:
    """Returns the number of ranks per host; `auto` counts as 1, since the launch sets the number of ranks."""
    if devices in (None, "auto"):
        return 1
    text = str(devices).strip("[] ")
    if text.isdigit() and int(text) > 0 and not isinstance(devices, list):
        return int(text)
    if isinstance(devices, list) or "," in text:
        return len([part for part in text.split(",") if part.strip()])
    raise ValueError(f"lightrl launch needs a number of trainer.devices, or launch.ranks, got devices={devices!r}.")
