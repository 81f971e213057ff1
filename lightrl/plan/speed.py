"""Predicts an iteration's time by phase and its cost, on known GPUs, if each trajectory has its maximum length.

Compute takes its FLOPs at MFU of the peak, decoding its bytes at MBU of the memory's bandwidth, and communication its
bytes at the link's bandwidth, during the compute. tests/plan/test_speed.py compares it with an H200's measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightrl.plan.memory import PlannedRole, PlannedRun, decoding_rows, engine_memory, role_cost, rows_of
from lightrl.strategies.parallel_3d import head_size, layer_parameters

MFU, MBU = 0.4, 0.6  # assumed shares of the peak FLOP/s and of the memory's bandwidth
# LocalEngine's decode step waits for kernel launches: 15.57 ms for 28 layers (`sdpa_4d` in benchmarks/gpu/h200.jsonl).
LOCAL_LAYER_S = 15.57e-3 / 28
NETWORK_BYTES_PER_S = 50e9  # per GPU beyond a node: 400 Gbit/s
_NODE_RANKS = 8
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names in configs


@dataclass(frozen=True)
class Gpu:
    """A GPU's peak rates."""

    torch_name: str  # in torch.cuda.get_device_name
    flops_per_s: float  # dense bfloat16
    bytes_per_s: float  # of its memory
    link_bytes_per_s: float  # to the other GPUs of its node, in one direction


# Source: NVIDIA's data sheets, https://www.nvidia.com/en-us/data-center/ a100, h100, h200, hgx (B200) and l40s; dense
# FLOP/s are half of those with sparsity, one direction of a link is half of its total.
GPUS = {
    "A100": Gpu("NVIDIA A100-SXM4-80GB", 312e12, 2.04e12, 300e9),
    "H100": Gpu("NVIDIA H100 80GB HBM3", 989e12, 3.35e12, 450e9),
    "H200": Gpu("NVIDIA H200", 989e12, 4.8e12, 450e9),
    "B200": Gpu("NVIDIA B200", 2250e12, 8.0e12, 900e9),
    "L40S": Gpu("NVIDIA L40S", 362e12, 0.864e12, 32e9),
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


def planned_time(run: PlannedRun, gpu: Gpu, device_bytes: float | None, inferring: Sequence[str] = ()) -> PlannedTime:
    """Predicts the time of an iteration, or of an update of a run that trains on data.

    Args:
        device_bytes: memory of each GPU, which limits the rows that a server decodes at once; None: it does not.
        inferring: the role of each forward pass between rollout and update.

    Raises:
        ValueError: if a mixture's config does not say how many experts a token uses.
    """
    roles = {role.name: role for role in run.roles}
    rate = gpu.flops_per_s * MFU
    link = gpu.link_bytes_per_s if run.world <= _NODE_RANKS else min(gpu.link_bytes_per_s, NETWORK_BYTES_PER_S)
    batches = run.batches_per_update or 1
    updates = run.num_minibatches * run.update_epochs
    update = compute = 0.0
    for role in (role for role in run.roles if role.trained):
        # a backward is two passes, or one if most weights have no gradient; checkpointing repeats the forward
        passes = (3 if role.trained == role.parameters else 2) + run.checkpoint_activations
        compute_s = run.update_epochs * batches * passes * pass_flops(run, role) / len(role.ranks) / rate
        compute += compute_s
        update += max(compute_s, updates * role_cost(run, role).sent / link)
    limit = "" if update == compute else ", limited by communication"
    phases = [("update", update, f"{2 * passes} · parameters · tokens, and attention, at {MFU:.0%} MFU{limit}")]
    if inferring:
        seconds = sum(pass_flops(run, roles[name]) / len(roles[name].ranks) / rate for name in inferring)
        phases.insert(0, ("score", seconds, f"{len(inferring)} forward passes: {', '.join(inferring)}"))
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
        token_flops = 2 * (layer_parameters_in_use(run.roles[0]) + _ends(run.roles[0])) / engine.tp
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
        phases.append(("sync", weights / link, "weights over the link; a shared disk is slower"))
    trained = run.trajectories * generated
    overlaps = run.max_staleness > 0 and not run.shares_gpus and engine is not None and engine.place != "rank 0"
    tokens = run.trajectories * run.longest * batches
    return PlannedTime(tuple(phases), num_gpus, tokens, trained * batches, overlaps)


def pass_flops(run: PlannedRun, role: PlannedRole) -> float:
    """Returns the FLOPs of a forward over all trajectories of an iteration, or over a batch of data."""
    config, num = role.config, run.trajectories
    matrices = layer_parameters_in_use(role) * num * run.longest + _ends(role) * num * _generated(run)
    attention = config.num_hidden_layers * config.num_attention_heads * head_size(config) * num * run.longest**2
    return float(2 * matrices + 2 * attention)


def layer_parameters_in_use(role: PlannedRole) -> float:
    """Returns the parameters in layers that each token uses."""
    config, ends = role.config, _ends(role) * (1 if getattr(role.config, "tie_word_embeddings", False) else 2)
    if not role.expert_parameters:
        return float(config.num_hidden_layers * layer_parameters(config))
    used = getattr(config, "num_experts_per_tok", None)
    total = next((number for name in _EXPERTS if (number := getattr(config, name, None))), None)
    if used is None or total is None:
        raise ValueError(f"No time is predicted: the config of {role.name} does not say how many experts a token uses.")
    return float(role.parameters - ends - role.expert_parameters * (1 - used / total))


def _ends(role: PlannedRole) -> int:
    return int(role.config.vocab_size * role.config.hidden_size)


def _generated(run: PlannedRun) -> int:
    """Returns the tokens of a trajectory that the engine generates, or all tokens of a row of data."""
    return run.longest if run.batches_per_update is not None else max(1, run.longest - run.prompt_tokens)
