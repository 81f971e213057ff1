"""Predicts an iteration's time by phase and its cost, on known GPUs, if each trajectory has its maximum length.

Compute takes its FLOPs at MFU of the peak, decoding its bytes at MBU of the memory's bandwidth, and communication its
bytes at the link's bandwidth, during the compute. tests/plan/test_speed.py compares it with an H200's measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightrl.plan.costs import head_sizes
from lightrl.plan.memory import PlannedRole, PlannedRun, decoding_rows, engine_memory, role_cost, rows_of

MFU, MBU = 0.4, 0.6  # assumed shares of the peak FLOP/s and of the memory's bandwidth
# LocalEngine's decode step waits for kernel launches: 15.57 ms for 28 layers (`sdpa_4d` in benchmarks/gpu/h200.jsonl).
LOCAL_LAYER_S = 15.57e-3 / 28


@dataclass(frozen=True)
class Gpu:
    """A GPU's peak rates."""

    torch_name: str  # in torch.cuda.get_device_name
    flops_per_s: float  # dense bfloat16
    bytes_per_s: float  # of its memory
    link_bytes_per_s: float  # to the other GPUs of its node, in one direction
    network_bytes_per_s: float = 50e9  # to other nodes: one adapter of 400 Gbit/s per GPU
    host_bytes_per_s: float = 64e9  # to the host's memory, in one direction

    def gather_bytes_per_s(self, ranks: int, parts: int, gpus_per_node: int) -> float:
        """Returns the bandwidth of gathers over `ranks` adjacent ranks, each `parts` of which gather different data.

        A node receives one copy of each part, and its parts share its adapters.
        """
        network = max(1.0, gpus_per_node / parts) * self.network_bytes_per_s
        return self.link_bytes_per_s if ranks <= gpus_per_node else min(self.link_bytes_per_s, network)

    def near_bytes_per_s(self, ranks: int, gpus_per_node: int) -> float:
        """Returns the bandwidth between `ranks` adjacent ranks, each of which sends its own data."""
        return self.link_bytes_per_s if ranks <= gpus_per_node else self.network_bytes_per_s


# Source: NVIDIA's data sheets, https://www.nvidia.com/en-us/data-center/ a100, h100, h200, hgx (B200) and l40s; dense
# FLOP/s are half of those with sparsity, one direction of a link is half of its total.
GPUS = {
    "A100": Gpu("NVIDIA A100-SXM4-80GB", 312e12, 2.04e12, 300e9, network_bytes_per_s=25e9, host_bytes_per_s=32e9),
    "H100": Gpu("NVIDIA H100 80GB HBM3", 989e12, 3.35e12, 450e9),
    "H200": Gpu("NVIDIA H200", 989e12, 4.8e12, 450e9),
    "B200": Gpu("NVIDIA B200", 2250e12, 8.0e12, 900e9),
    "L40S": Gpu("NVIDIA L40S", 362e12, 0.864e12, 32e9, network_bytes_per_s=25e9, host_bytes_per_s=32e9),
}


@dataclass(frozen=True)
class PlannedTime:
    """Seconds of an iteration's phases, and its size."""

    phases: tuple[tuple[str, float, str], ...]  # name, seconds, what it consists of
    num_gpus: int
    tokens: int  # of all trajectories
    trained_tokens: int  # those that the engine generates
    overlaps: bool  # the next rollout runs during the update

    @property
    def total_s(self) -> float:
        seconds = {name: each for name, each, _ in self.phases}
        rollout, train = seconds.get("rollout", 0.0), seconds.get("score", 0.0) + seconds["update"]
        return (max(rollout, train) if self.overlaps else rollout + train) + seconds.get("sync", 0.0)

    def cost(self, price_per_gpu_hour: float) -> tuple[float, float]:
        """Returns the cost of an iteration, and of a million trained tokens."""
        each = price_per_gpu_hour * self.num_gpus * self.total_s / 3600
        return each, each / self.trained_tokens * 1e6


def planned_time(run: PlannedRun, gpu: Gpu, device_bytes: float | None) -> PlannedTime:
    """Predicts the time of an iteration, or of an update of a run that trains on data.

    Gathers over all ranks overlap the compute. What adjacent ranks exchange, copies to the host and a pipeline's idle
    time come on top.

    Args:
        device_bytes: memory of each GPU, which limits the rows that a server decodes at once; None: it does not.
    """
    roles = {role.name: role for role in run.roles}
    rate = gpu.flops_per_s * MFU
    node = run.gpus_per_node
    batches = run.batches_per_update or 1
    updates = run.num_minibatches * run.update_epochs
    update = waiting = exchanged = 0.0
    for role in (role for role in run.roles if role.trained):
        # a backward is two passes, or one if most weights have no gradient; checkpointing repeats the forward
        passes = (3 if role.trained == role.parameters else 2) + run.checkpoint_activations
        compute_s = run.update_epochs * batches * passes * pass_flops(run, role) / len(role.ranks) / rate
        cost, near = role_cost(run, role), role.tp * max(role.cp, run.ep)  # ranks of cp and ep overlap
        idle = compute_s * (role.pp - 1) / cost.num_microbatches / run.stages_per_rank
        copied = 2 * cost.moments * ("optimizer" in run.offloads) + 2 * cost.offloaded * cost.num_microbatches
        exchanged_s = cost.sent_near / gpu.near_bytes_per_s(near, node) + copied / gpu.host_bytes_per_s
        ranks = len(role.ranks) // role.pp
        gathered_s = (cost.sent_dp - cost.sent_experts) / gpu.gather_bytes_per_s(ranks, role.tp, node)
        gathering_s = updates * (gathered_s + cost.sent_experts / gpu.gather_bytes_per_s(ranks, run.ep, node))
        waiting += max(0.0, gathering_s - compute_s - idle)
        exchanged += updates * exchanged_s
        update += max(compute_s + idle, gathering_s) + updates * exchanged_s
    limit = ", limited by communication" if waiting else ""
    limit += f"; exchanges with neighbors and the host {exchanged:.3g} s" if exchanged else ""
    phases = [("update", update, f"{2 * passes} · parameters · tokens, and attention, at {MFU:.0%} MFU{limit}")]
    if run.inferring:
        seconds = sum(pass_flops(run, roles[name]) / len(roles[name].ranks) / rate for name in run.inferring)
        phases.insert(0, ("score", seconds, f"{len(run.inferring)} forward passes: {', '.join(run.inferring)}"))
    engine, generated = run.engine, _generated(run)
    num_gpus = run.world
    if engine is not None:
        is_apart = engine.place != "rank 0" and not run.shares_gpus
        num_gpus += engine.servers * engine.tp if is_apart else 0
        share = math.ceil(run.trajectories / engine.servers)
        most = rows_of(run, engine) if device_bytes is None else decoding_rows(run, engine, device_bytes)
        rows = min(share, most)
        waves = math.ceil(share / rows)
        weights, key_values = engine_memory(run, engine, rows)
        read = weights + key_values * (1 - generated / 2 / run.longest)  # the average over the steps
        token_flops = 2 * (run.roles[0].size.used_in_layers + _ends(run.roles[0])) / engine.tp
        memory_s, compute_s = read / (gpu.bytes_per_s * MBU), token_flops * rows / rate
        step = max(memory_s, compute_s)
        cause = f"memory at {MBU:.0%} of its bandwidth" if memory_s > compute_s else f"compute at {MFU:.0%} MFU"
        if engine.name == "LocalEngine":
            step += run.roles[0].config.num_hidden_layers * LOCAL_LAYER_S
            cause = f"kernel launches, {LOCAL_LAYER_S * 1e3:.2f} ms per layer, and {cause}"
        prefill = token_flops * run.prompt_tokens * math.ceil((run.prompts or 1) / engine.servers) / rate
        text = (
            f"{waves} x {generated:,} steps of {rows:,} rows in {step * 1e3:.1f} ms ({cause}); prefill {prefill:.1f} s"
        )
        phases.insert(0, ("rollout", waves * generated * step + prefill, text))
        phases.append(
            ("sync", weights / gpu.near_bytes_per_s(run.world, node), "weights over the link; a shared disk is slower")
        )
    trained = run.trajectories * generated
    overlaps = run.max_staleness > 0 and not run.shares_gpus and engine is not None and engine.place != "rank 0"
    tokens = run.trajectories * run.longest * batches
    return PlannedTime(tuple(phases), num_gpus, tokens, trained * batches, overlaps)


def pass_flops(run: PlannedRun, role: PlannedRole) -> float:
    """Returns the FLOPs of a forward over all trajectories of an iteration, or over a batch of data."""
    config, num = role.config, run.trajectories
    matrices = role.size.used_in_layers * num * run.longest + _ends(role) * num * _generated(run)
    attention = config.num_hidden_layers * config.num_attention_heads * sum(head_sizes(config)) * num * run.longest**2
    return float(2 * matrices + attention)


def _ends(role: PlannedRole) -> int:
    return int(role.config.vocab_size * role.config.hidden_size)


def _generated(run: PlannedRun) -> int:
    """Returns the tokens of a trajectory that the engine generates, or all tokens of a row of data."""
    return run.longest if run.batches_per_update is not None else max(1, run.longest - run.prompt_tokens)
