"""Estimates the memory of a run's ranks and servers from each model's costs (plan/costs.py) and ranks.

`lightrl plan`, `launch` and `doctor run` get their numbers from `rank_memories` and `engine_memory`. planned_run.py
makes the PlannedRun from the run's classes; advice.py finds settings with which the run fits.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from lightrl.engines.engine import PlannedEngine
from lightrl.models import RoleMesh
from lightrl.plan.costs import (
    TRAJECTORY_BYTES,
    USABLE_FRACTION,
    Work,
    activation_bytes,
    experience_bytes,
    fsdp2_cost,
    key_value_bytes,
    key_value_ranks,
    layer_bytes,
    parallel_3d_cost,
    peak_bytes,
)
from lightrl.plan.sizes import ModelSize
from lightrl.strategies.offload import Offloadable
from lightrl.trajectory import JsonObject

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_STATE = ("weights", "gradients", "moments")
_SCALE_BYTES = 4 / 64  # per parameter in NF4: each rank has the float32 scales of all blocks
_SERVER_FRACTION = 0.1  # share of a GPU for a server's CUDA graphs and activations, besides weights and KV cache
NODE_RANKS = 8  # GPUs per node, assumed if neither the trainer nor the launch sets more
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class UnknownMemory(ValueError):
    """A model's configuration cannot be read here, or lacks sizes that the formulas need."""

    def __init__(self, reason: object) -> None:
        super().__init__(f"Memory was not checked: {' '.join(str(reason).split())}")


@dataclass(frozen=True)
class PlannedRole:
    """A model and the ranks that hold it."""

    name: str
    size: ModelSize
    trained: int  # number of trained parameters
    ranks: range
    mesh: RoleMesh | None = None
    pp: int = 1
    tp: int = 1
    cp: int = 1
    width: int = 4  # bytes per parameter
    waits_on_host: bool = False
    is_compiled: bool = False  # torch.compile compiles the decoder layers
    in_4_bits: int = 0  # number of quantized parameters
    moment_bytes: float | None = None  # optimizer state per trained parameter; None means AdamW's, in its dtype

    @property
    def config(self) -> PretrainedConfig:
        return self.size.config

    @property
    def parameters(self) -> int:
        return self.size.parameters

    @property
    def dp(self) -> int:
        return max(1, len(self.ranks) // (self.pp * self.tp * self.cp))


@dataclass(frozen=True)
class PlannedOpponent:
    """SelfPlay's opponent on rank 0: an engine with an older version, and a pool of versions in host memory."""

    engine: PlannedEngine
    fraction: float  # share of the episodes in which the opponent plays
    num_versions: int


def trainer_sizing(run: PlannedRun) -> JsonObject:
    """Returns the trainer settings that give a run its ranks and servers; used if no launch sets them."""
    trainer: JsonObject = {"devices": run.world // run.num_nodes, "num_nodes": run.num_nodes}
    if run.engine is not None and run.engine.place == "servers" and run.engine.starts_servers:
        sizes = {"servers": run.engine.servers, "tp": run.engine.tp}
        trainer["engine"] = {"class_path": run.engine.name, "init_args": sizes}
    return {"trainer": trainer}


@dataclass(frozen=True)
class PlannedRun:
    """The properties of a run that determine its memory or that messages about memory mention."""

    roles: tuple[PlannedRole, ...]  # the policy first
    world: int
    layout: Literal["whole", "FSDP2", "3D"]
    prompts: int | None  # prompts per iteration; None if the data has no batch size
    group_size: int
    num_minibatches: int
    update_epochs: int
    microbatch_tokens: int  # has no effect on batches of data
    prompt_tokens: int  # tokens in the longest prompt
    new_tokens: int
    longest: int  # tokens in the longest trajectory
    prompt_source: str = "data.max_prompt_tokens"
    max_staleness: int = 0
    num_scores: int = 0  # float32 numbers per token, in addition to the rollout's
    is_mixed: bool = False  # bfloat16 or float16 under autocast
    checkpoint_activations: bool = False
    reduce_every_microbatch: bool = False
    keeps_gathered: bool = False  # whether parameters stay gathered between forward and backward
    num_replicas: int = 1
    ep: int = 1  # ranks over which each layer's experts are divided
    offloads: Sequence[Offloadable] = ()  # what is kept in host memory
    engine: PlannedEngine | None = None
    opponent: PlannedOpponent | None = None
    shares_gpus: bool = False  # the engine's servers are on the ranks' GPUs
    batches_per_update: int | None = None  # batches of data; None if trajectories are rolled out
    inferring: Sequence[str] = ()  # the role of each forward pass between rollout and update
    refusal: Callable[[PlannedRun], str | None] = lambda run: None  # why the strategy refuses the sizes, or None
    num_nodes: int = 1  # nodes, each with the same number of ranks
    gpus_per_node: int = NODE_RANKS
    stages_per_rank: int = 1  # pipeline stages; more than one means Interleaved1F1B
    sizing: Callable[[PlannedRun], JsonObject] = trainer_sizing  # the settings that give a run its ranks and servers

    @property
    def trajectories(self) -> int:
        return (self.prompts or 1) * self.group_size

    @property
    def update_tokens(self) -> int:
        """The largest number of tokens in a minibatch."""
        return math.ceil(self.trajectories / self.num_minibatches) * self.longest

    @property
    def microbatch(self) -> int:
        """The number of tokens in the largest microbatch; without rollouts, in a rank's share of a batch."""
        if self.batches_per_update is not None:
            return math.ceil((self.prompts or 1) / self.roles[0].dp) * self.group_size * self.longest
        return max(self.microbatch_tokens, self.longest)  # a microbatch has at least one trajectory

    def over(self, world: int, pp: int = 1, tp: int = 1) -> PlannedRun:
        """Returns the run on `world` ranks; raises ValueError if a role's mesh does not fit them."""
        layout: Literal["whole", "FSDP2", "3D"] = "3D" if pp * tp > 1 else self.layout
        roles = tuple(
            replace(role, ranks=range(world), pp=pp, tp=tp)
            if role.mesh is None
            else replace(role, ranks=role.mesh.ranks(world))
            for role in self.roles
        )
        layout = "FSDP2" if world > 1 and layout == "whole" else layout
        nodes = num_nodes(world, self.gpus_per_node)
        return replace(self, world=world, num_nodes=nodes, layout=layout, roles=roles)


def num_nodes(world: int, gpus_per_node: int) -> int:
    """Returns the smallest number of nodes over which `world` ranks can be divided equally."""
    return next(num for num in range(math.ceil(world / gpus_per_node), world + 1) if world % num == 0)


@dataclass(frozen=True)
class RoleCost:
    """Bytes on one rank of a role; for a pipeline, on the stage with the most parameters."""

    weights: float
    gradients: float
    moments: float
    gathered: float
    activations: float
    logits: float
    sent_dp: float  # parameters and gradients, per update
    sent_experts: float = 0.0  # the experts' part of sent_dp
    sent_near: float = 0.0  # between adjacent ranks (over tp, cp, ep or pp), per update
    num_microbatches: int = 1
    offloaded: float = 0.0  # activations on the host, each counted once
    one_layer: float = 0.0  # activations of one layer

    @property
    def sent(self) -> float:
        return self.sent_dp + self.sent_near

    @property
    def working(self) -> float:
        """Bytes that are freed when the role has finished its work."""
        return self.gathered + self.activations + self.logits


def role_cost(run: PlannedRun, role: PlannedRole) -> RoleCost:
    """Estimates a role's bytes; raises ValueError if the model cannot be split this way."""
    size, is_trained = role.size, role.trained > 0
    tokens = max(run.update_tokens, role.dp * (run.longest if run.batches_per_update is None else run.microbatch))
    compute = 2 if run.is_mixed else role.width
    # A frozen model keeps no activations, but each layer needs as much memory as recomputing a checkpointed one.
    keeps_activations = is_trained and "activations" not in run.offloads
    checkpoints = run.checkpoint_activations or not keeps_activations
    copies = run.layout == "whole" and compute != role.width and not checkpoints
    ep = run.ep if run.layout != "whole" and size.expert_parameters else 1
    stages = run.stages_per_rank if role.pp > 1 else 1
    sizes = (role.cp, ep, role.is_compiled, stages)
    work = Work(tokens, run.microbatch, checkpoints, role.width, compute, copies, *sizes)
    share, gathered, cost = 1.0, 0.0, None
    microbatch = math.ceil(min(run.microbatch, math.ceil(tokens / role.dp)) / role.cp)
    actual_work = replace(work, checkpoint_activations=run.checkpoint_activations)
    is_offloaded = is_trained and not keeps_activations
    offloaded = activation_bytes(size, microbatch, 1.0, actual_work) if is_offloaded else 0.0
    activations, logits = peak_bytes(size, microbatch, 1.0 if keeps_activations else 0.0, work)
    if run.layout == "FSDP2":
        shards = max(1, len(role.ranks) // run.num_replicas)
        work = replace(actual_work, tokens=math.ceil(tokens / len(role.ranks)) * shards)
        cost = fsdp2_cost(size, shards, work, reduce_every_microbatch=run.reduce_every_microbatch)
        share = 1 / shards
        whole = compute * size.gathered(ep) if run.keeps_gathered else 0
        gathered = max(cost.gathered_bytes, whole) + cost.gradient_bytes * role.trained / role.parameters
    elif run.layout == "3D":
        cost = parallel_3d_cost(size, role.pp, role.dp, role.tp, work)
        share = cost.state_bytes / (4 * role.width * size.parameters)
        gathered = cost.gathered_bytes if is_trained else cost.gathered_bytes / 2
        activations = cost.activation_bytes if is_trained else activations / role.tp
        logits = logits / role.tp
    merged = sum(layer.num * layer.merged for layer in size.layers) / ep / role.pp
    activations += compute * merged / (size.num_layers / role.pp if checkpoints else 1)
    trained_width = 4 if role.trained < role.parameters else role.width  # adapters are float32 on any base
    trained = trained_width * role.trained * share
    quantized = role.in_4_bits * (share / 2 + _SCALE_BYTES)
    moments = 2 * trained if role.moment_bytes is None else role.moment_bytes * role.trained * share
    weights = role.width * (role.parameters - role.trained - role.in_4_bits) * share + quantized + trained
    sent = (0.0, 0.0, 0.0)
    if cost is not None and is_trained:
        sent = (cost.sent_dp, cost.sent_experts, cost.sent_tp + cost.sent_pp)
    num = math.ceil(tokens / role.dp / run.microbatch)
    one_layer = float(microbatch * max(layer_bytes(size, layer, work) for layer in size.layers))
    return RoleCost(weights, trained, moments, gathered, activations, logits, *sent, num, offloaded, one_layer)


@dataclass(frozen=True)
class RankMemory:
    """Bytes per rank, by cause. A rank's roles work one after another, so only the largest working memory counts."""

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
    cuts |= {1} if run.opponent is not None or (run.engine is not None and run.engine.place == "rank 0") else set()
    return [_memory(run, range(*ends), costs) for ends in itertools.pairwise(sorted(cuts))]


def _memory(run: PlannedRun, ranks: range, costs: dict[str, RoleCost]) -> RankMemory:
    here = [role for role in run.roles if ranks.start in role.ranks]  # the same roles on each of these ranks
    on_device = [role for role in here if not role.waits_on_host]
    state = {name: sum(getattr(costs[role.name], name) for role in on_device) for name in _STATE}
    working = [costs[role.name] for role in on_device]
    for role in here:  # weights that wait on the host are on the device only while the role works
        cost = costs[role.name]
        working += [replace(cost, gathered=cost.gathered + cost.weights)] if role.waits_on_host else []
    device, host = dict(state), dict[str, float]()
    if "parameters" in run.offloads:
        device, host = host, device  # the state is on the host
    if working:
        most = max(working, key=lambda cost: cost.working)
        device |= {"gathered": most.gathered, "activations": most.activations, "logits": most.logits}
        if "activations" in run.offloads:
            host["activations"] = max(cost.offloaded for cost in working)
        if "optimizer" in run.offloads and "moments" in device:
            host["moments"] = device["moments"]
            # during the backward pass, the moments take the memory of all activations and logits but the last layer's
            freed = most.activations + most.logits - most.one_layer
            device["moments"] = max(0.0, host["moments"] - max(0.0, freed))
    if ranks.start == 0 and run.engine is not None and run.engine.place == "rank 0":
        weights, key_values = engine_memory(run, run.engine)
        device |= {"engine weights": weights, "KV cache": key_values}
    if ranks.start == 0 and run.opponent is not None:
        rows = math.ceil(run.opponent.fraction * rows_of(run, run.opponent.engine))
        weights, key_values = engine_memory(run, run.opponent.engine, rows)
        device |= {"opponent's weights": weights, "opponent's KV cache": key_values}
        policy = run.roles[0]
        host["older versions, only on rank 0"] = float(run.opponent.num_versions * policy.width * policy.parameters)
    tokens = run.trajectories * run.longest
    if run.batches_per_update is None:
        host["experience"] = experience_bytes(run.num_scores) * tokens / min((role.dp for role in here), default=1)
        host |= {"trajectories, only on rank 0": float(TRAJECTORY_BYTES * tokens)} if ranks.start == 0 else {}
    if run.max_staleness and any(role.name == "policy" for role in here):  # for WeightSync.verify
        host["weights of older versions, to verify servers"] = (run.max_staleness + 1) * costs["policy"].gradients
    return RankMemory(ranks, device, host)


def rows_of(run: PlannedRun, engine: PlannedEngine) -> int:
    """Returns the number of trajectories that each server decodes at once."""
    rows = math.ceil(run.trajectories * (run.max_staleness + 1) / engine.servers)
    return rows if engine.max_rows is None else min(engine.max_rows, rows)


def engine_memory(run: PlannedRun, engine: PlannedEngine, rows: int | None = None) -> tuple[float, float]:
    """Returns the bytes per server GPU of the weights, and of the KV cache for `rows` trajectories (default: all)."""
    policy = run.roles[0]
    config = policy.config
    tokens = run.longest * (rows_of(run, engine) if rows is None else rows)
    key_values = key_value_bytes(config, engine.width) * tokens / key_value_ranks(config, engine.tp)
    ends = config.vocab_size * config.hidden_size * (1 if getattr(config, "tie_word_embeddings", False) else 2)
    layer_width = 1 if engine.is_block_fp8 else engine.width
    return (layer_width * (policy.parameters - ends) + engine.width * ends) / engine.tp, key_values


def decoding_rows(run: PlannedRun, engine: PlannedEngine, device_bytes: float) -> int:
    """Returns how many trajectories of maximum length fit in a server's memory at once; the others wait."""
    fraction = served_fraction(run, device_bytes) if run.shares_gpus else USABLE_FRACTION
    weights, each = engine_memory(run, engine, rows=1)
    return min(rows_of(run, engine), max(1, int((fraction * device_bytes - weights) // each)))


def suited(run: PlannedRun, device_bytes: float, *, may_checkpoint: bool, may_cut: bool) -> PlannedRun:
    """If the run's ranks do not fit, turns on activation checkpointing; if that is not enough, reduces microbatches.

    Rank 0's KV cache counts as at most a quarter of the usable memory, since rows that do not fit can wait.
    """
    usable = USABLE_FRACTION * device_bytes

    def fits(changed: PlannedRun) -> bool:
        first, *others = rank_memories(changed)
        key_values = sum(first.device.get(name, 0.0) for name in ("KV cache", "opponent's KV cache"))
        cached = max(0.0, key_values - usable / 4)
        return max(first.total - cached, *(memory.total for memory in others), 0.0) <= usable

    if not fits(run) and may_checkpoint:
        run = replace(run, checkpoint_activations=True)
    if not fits(run) and may_cut and run.batches_per_update is None:
        tokens = largest(run.microbatch, lambda size: replace(run, microbatch_tokens=size), fits)
        run = replace(run, microbatch_tokens=tokens or run.microbatch_tokens)
    return run


def key_value_capacity(run: PlannedRun, device_bytes: float) -> float:
    """Returns how many bytes of rank 0's GPU are left for an engine's KV cache."""
    memory = rank_memories(run)[0]
    return max(0.0, USABLE_FRACTION * device_bytes - memory.total + memory.device.get("KV cache", 0.0))


def served_fraction(run: PlannedRun, device_bytes: float) -> float:
    """Returns `mem_fraction_static` for SGLang on the ranks' GPUs, which also hold the ranks' weights and gradients."""
    state_bytes = max(sum(memory.device.get(name, 0.0) for name in _STATE[:2]) for memory in rank_memories(run))
    return max(0.1, math.floor(100 * (USABLE_FRACTION - _SERVER_FRACTION - state_bytes / device_bytes)) / 100)


def memory_line(run: PlannedRun) -> str:
    """Describes the memory of the rank that needs the most, and of each GPU of a server."""
    line = f"Estimated memory per rank: {bytes_text(max(memory.total for memory in rank_memories(run)))}"
    if run.engine is None or run.engine.place != "servers":
        return f"{line}."
    return f"{line}; per server GPU: {bytes_text(engine_memory(run, run.engine)[0])} for weights, plus the KV cache."


def largest(most: int, resized: Callable[[int], PlannedRun], fits: Callable[[PlannedRun], bool]) -> int:
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
    raise ValueError(f"lightrl launch needs trainer.devices as a number, or launch.ranks; got devices={devices!r}.")
