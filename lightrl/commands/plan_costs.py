"""Memory, messages and batch sizes of a planned run, by the formulas of strategies/costs.py.

Pure: plan_run.py reads a PlannedRun from a configuration, plan_fit.py looks for settings that fit, plan_tables.py
prints.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from lightrl.strategies.costs import (
    TRAJECTORY_BYTES,
    Machine,
    Work,
    activation_bytes,
    experience_bytes,
    fsdp2_cost,
    key_value_bytes,
    num_parameters,
    parallel_3d_cost,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_STATE = ("weights", "gradients", "moments")


@dataclass(frozen=True)
class PlannedRole:
    """A model and the ranks that have it."""

    name: str
    config: PretrainedConfig  # of its text
    parameters: int
    trained: int  # of them
    ranks: range
    pp: int = 1
    tp: int = 1
    width: int = 4  # bytes of a parameter
    waits_on_host: bool = False

    @property
    def dp(self) -> int:
        return len(self.ranks) // (self.pp * self.tp)


@dataclass(frozen=True)
class PlannedEngine:
    """What generates: on the device of rank 0, on servers, or on another device of this machine."""

    name: str
    place: Literal["rank 0", "servers", "elsewhere"]
    servers: int = 1
    tp: int = 1
    width: int = 2  # bytes of a parameter and of a key or value
    max_rows: int | None = None  # that decode together; None: all in flight

    def key_value_share(self, config: PretrainedConfig) -> int:
        """GPUs over which the key-values of a token are split."""
        return min(self.tp, int(config.num_key_value_heads))


@dataclass(frozen=True)
class PlannedRun:
    """What memory and messages depend on."""

    roles: tuple[PlannedRole, ...]  # the policy first
    world: int
    layout: Literal["whole", "FSDP2", "3D"]
    prompts: int | None  # P; None if the data does not say
    group_size: int
    num_minibatches: int
    update_epochs: int
    microbatch_tokens: int
    prompt_tokens: int  # of the longest
    new_tokens: int
    longest: int  # trajectory, in tokens
    prompt_source: str = "data.max_prompt_tokens"
    max_staleness: int = 0
    num_scores: int = 0  # float32 numbers per token, beside those of the rollout
    compute_bytes: int = 4
    checkpoint_activations: bool = False
    reduce_every_microbatch: bool = False
    keeps_gathered: bool = False  # parameters, between forward and backward
    num_replicas: int = 1
    offloads: bool = False  # parameters, gradients and moments wait on the host
    engine: PlannedEngine | None = None
    batches_per_update: int | None = None  # of data; None if trajectories are rolled out

    @property
    def trajectories(self) -> int:
        return (self.prompts or 1) * self.group_size

    @property
    def update_tokens(self) -> int:
        """At most, of one minibatch."""
        return math.ceil(self.trajectories / self.num_minibatches) * self.longest

    @property
    def microbatch(self) -> int:
        """Tokens of the largest microbatch: it has at least one trajectory."""
        return max(self.microbatch_tokens, self.longest)


def ranks_text(ranks: range) -> str:
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start} to {ranks.stop - 1}"


@dataclass(frozen=True)
class RoleCost:
    """Bytes on one rank of a role; for a pipeline, on the stage that has most parameters."""

    weights: float
    gradients: float
    moments: float
    gathered: float
    activations: float
    sent: float  # in one update

    @property
    def working(self) -> float:
        """What is free again when another role works."""
        return self.gathered + self.activations


def role_cost(run: PlannedRun, role: PlannedRole) -> RoleCost:
    """Raises ValueError if the model cannot be split this way."""
    work = Work(
        max(run.update_tokens, role.dp * run.longest), run.microbatch, run.checkpoint_activations, run.compute_bytes
    )
    tokens = min(work.microbatch_tokens, math.ceil(work.tokens / role.dp))
    is_trained = role.trained > 0
    share, gathered, sent = 1.0, 0.0, 0.0
    activations = activation_bytes(
        role.config,
        tokens,
        role.config.num_hidden_layers if is_trained else 0,
        checkpointed=run.checkpoint_activations or not is_trained,
        width=run.compute_bytes,
    )
    if run.layout == "FSDP2":
        shards = max(1, len(role.ranks) // run.num_replicas)
        work = replace(work, tokens=math.ceil(work.tokens / len(role.ranks)) * shards)
        kept, reduced = (
            fsdp2_cost(role.config, shards, work, Machine(), reduce_every_microbatch=each)
            for each in (run.reduce_every_microbatch, True)
        )
        share = 1 / shards
        waiting = kept.gathered_bytes - reduced.gathered_bytes  # whole gradients
        whole = run.compute_bytes * role.parameters if run.keeps_gathered else 0
        gathered = max(reduced.gathered_bytes, whole) + waiting * role.trained / role.parameters
        sent = kept.sent_bytes
    elif run.layout == "3D":
        cost = parallel_3d_cost(role.config, role.pp, role.dp, role.tp, work, Machine())
        share = cost.state_bytes / (16 * num_parameters(role.config))
        gathered = cost.gathered_bytes if is_trained else cost.gathered_bytes / 2
        activations = cost.activation_bytes if is_trained else activations / role.tp
        sent = cost.sent_bytes
    weights, trained = role.width * role.parameters * share, role.width * role.trained * share
    return RoleCost(weights, trained, 2 * trained, gathered, activations, sent if is_trained else 0.0)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of each of these ranks, by cause; roles that share a rank work in turn, and the largest counts."""

    ranks: range
    device: dict[str, float]
    host: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.device.values())


def rank_memories(run: PlannedRun) -> list[RankMemory]:
    """For the ranks that have the same roles."""
    costs = {role.name: role_cost(run, role) for role in run.roles}
    cuts = {0, run.world, *(edge for role in run.roles for edge in (role.ranks.start, role.ranks.stop))}
    cuts |= {1} if run.engine is not None and run.engine.place == "rank 0" else set()
    edges = sorted(cuts)
    return [_memory(run, range(*ends), costs) for ends in itertools.pairwise(edges)]


def _memory(run: PlannedRun, ranks: range, costs: dict[str, RoleCost]) -> RankMemory:
    here = [role for role in run.roles if ranks.start in role.ranks]
    resting = [role for role in here if not role.waits_on_host]
    state = {name: sum(getattr(costs[role.name], name) for role in resting) for name in _STATE}
    waiting = [replace(costs[role.name], gathered=costs[role.name].working) for role in here if role.waits_on_host]
    waiting = [replace(cost, gathered=cost.gathered + cost.weights, activations=0.0) for cost in waiting]
    working = max([*(costs[role.name] for role in resting), *waiting], key=lambda cost: cost.working, default=None)
    device: dict[str, float] = {} if run.offloads else dict(state)
    if working is not None:
        device |= {"gathered": working.gathered, "activations": working.activations}
    if ranks.start == 0 and run.engine is not None and run.engine.place == "rank 0":
        weights, key_values = engine_memory(run, run.engine)
        device |= {"engine weights": weights, "key-values": key_values}
    most_dp = min((role.dp for role in here), default=1)
    tokens = run.trajectories * run.longest
    host: dict[str, float] = {}
    if run.batches_per_update is None:
        host["experience"] = experience_bytes(run.num_scores) * tokens / most_dp
        host |= {"trajectories, rank 0 alone": float(TRAJECTORY_BYTES * tokens)} if ranks.start == 0 else {}
    if run.offloads:
        host |= state
    return RankMemory(ranks, device, host)


def rows_of(run: PlannedRun, engine: PlannedEngine) -> int:
    """Trajectories that decode together in each server."""
    rows = math.ceil(run.trajectories * (run.max_staleness + 1) / engine.servers)
    return rows if engine.max_rows is None else min(engine.max_rows, rows)


def engine_memory(run: PlannedRun, engine: PlannedEngine, rows: int | None = None) -> tuple[float, float]:
    """Bytes of weights and of key-values, on each GPU of a server; of all its trajectories if `rows` is None."""
    policy = run.roles[0]
    tokens = run.longest * (rows_of(run, engine) if rows is None else rows)
    key_values = key_value_bytes(policy.config, engine.width) * tokens / engine.key_value_share(policy.config)
    return engine.width * policy.parameters / engine.tp, key_values


def data_rows(run: PlannedRun) -> list[tuple[str, str, str]]:
    """As `batch_rows`, of a run that trains on data."""
    rows, dp = run.trajectories, run.roles[0].dp
    name = "pairs" if run.group_size == 2 else "chats"
    numbers = [
        (f"{name} per batch", run.prompts or 1, "data.batch_size" if run.prompts else "not stated by the data: 1"),
        ("batches per update", run.batches_per_update or 1, "trainer.accumulate_grad_batches"),
        ("tokens per row, at most", run.longest, run.prompt_source),
        ("tokens per batch, at most", rows * run.longest, f"{rows:,} · {run.longest:,}, padded to the longest"),
        ("  on each of the dp ranks", run.microbatch, f"{rows:,} rows / {dp}; one forward and backward"),
    ]
    return [(name, f"{number:,}", origin) for name, number, origin in numbers]


def batch_rows(run: PlannedRun) -> list[tuple[str, str, str]]:
    """Name, number and origin of each batch size; those of a rank are of the policy's."""
    prompts, total = run.prompts or 1, run.trajectories
    dp = run.roles[0].dp if run.roles else run.world
    update = math.ceil(total / run.num_minibatches)
    rank_tokens = math.ceil(update / dp) * run.longest
    microbatches = math.ceil(rank_tokens / run.microbatch)
    longest = f"{run.prompt_tokens:,} of the prompt ({run.prompt_source}) + {run.new_tokens:,} new"
    rows = [
        ("prompts per iteration, P", prompts, "data.batch_size" if run.prompts else "not stated by the data: 1"),
        ("trajectories per prompt, G", run.group_size, "model.group_size"),
        ("trajectories per iteration", total, f"P · G = {prompts} · {run.group_size}"),
        (
            "trajectories in flight, at most",
            total * (run.max_staleness + 1),
            f"P · G · (max_staleness + 1) = {total} · {run.max_staleness + 1}",
        ),
        ("tokens per trajectory, at most", run.longest, longest),
        ("tokens per iteration, at most", total * run.longest, f"{total:,} · {run.longest:,}"),
        (
            "updates per iteration",
            run.num_minibatches * run.update_epochs,
            f"num_minibatches · update_epochs = {run.num_minibatches} · {run.update_epochs}",
        ),
        ("trajectories per update", update, f"{total:,} / num_minibatches = {total:,} / {run.num_minibatches}"),
        ("  on each of the dp ranks", math.ceil(update / dp), f"{update:,} / {dp}, balanced by tokens"),
        ("tokens per microbatch, at most", run.microbatch, "model.microbatch_tokens, but one trajectory at least"),
        (
            "microbatches per rank and update",
            max(1, microbatches),
            f"{rank_tokens:,} tokens / {run.microbatch:,}; fewer if trajectories are shorter",
        ),
    ]
    return [(name, f"{number:,}", origin) for name, number, origin in rows]
