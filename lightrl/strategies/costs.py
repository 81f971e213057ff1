"""What a strategy costs, on paper: a rank's memory, bytes sent, idle time and microbatches, from a model's config.

`lightrl plan` and `lightrl launch` check a run with it, `python -m benchmarks.plan` compares layouts, and
benchmarks.gpu_update predicts memory; training does not use it. Rough estimates: bytes are those of one rank in one
update, tokens those of one update over all ranks. Parameters, gradients and Adam's two moments are float32, activations
bfloat16 unless `Work` says otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lightrl.strategies.spread_experience import TOKEN_DTYPES
from lightrl.strategies.tensor_plans import check_sizes, head_size, layer_parameters, split_layers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

USABLE_FRACTION = 0.9  # of a GPU's memory that a process may use
SERVED_BYTES = 2  # of a parameter that a server has, in bfloat16
TRAJECTORY_BYTES = 8  # per token of a trajectory, which rank 0 has as long as the iteration

_STATE_BYTES = 16  # parameter, gradient, two moments
_WHOLE_BYTES = 8  # a gathered parameter and its gradient
_ACTIVATION_BYTES = 2


@dataclass(frozen=True)
class Machine:
    """Hardware constants; the defaults come from an H100's data sheet and a common network, none is measured."""

    memory_bytes: float = 80e9
    flops: float = 989e12  # bfloat16, dense
    mfu: float = 0.45  # without communication
    local_bytes_per_s: float = 400e9  # per GPU, within a node
    remote_bytes_per_s: float = 50e9  # per GPU, between nodes
    gpus_per_node: int = 8


@dataclass(frozen=True)
class Work:
    """One update."""

    tokens: int  # of all ranks
    microbatch_tokens: int = 16384
    checkpoint_activations: bool = True
    compute_bytes: int = _ACTIVATION_BYTES  # of an activation, and of a parameter that FSDP2 gathers


@dataclass(frozen=True)
class Cost:
    """The cost of one strategy at one size."""

    strategy: Literal["FSDP2", "3D"]
    pp: int
    dp: int
    tp: int
    num_microbatches: int  # of a dp rank
    state_bytes: float  # parameters, gradients, moments
    gathered_bytes: float  # parameters while they are whole, and their gradients
    activation_bytes: float
    sent_bytes: float
    bubble_fraction: float
    compute_s: float
    communication_s: float  # not hidden behind compute
    step_s: float
    reduce_every_microbatch: bool = False  # FSDP2Strategy's setting

    @property
    def memory_bytes(self) -> float:
        return self.state_bytes + self.gathered_bytes + self.activation_bytes

    @property
    def gpus(self) -> int:
        return self.pp * self.dp * self.tp


def num_parameters(config: PretrainedConfig) -> int:
    """Parameters of a language model, without norms and biases."""
    ends = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return int(ends + config.num_hidden_layers * layer_parameters(config))


def key_value_bytes(config: PretrainedConfig, width: int = _ACTIVATION_BYTES) -> int:
    """What a decoder keeps of one token, in numbers of `width` bytes."""
    return 2 * int(config.num_hidden_layers * config.num_key_value_heads * head_size(config)) * width


def experience_bytes(num_scores: int) -> int:
    """What an iteration's SpreadExperience keeps of one token that has so many float32 scores."""
    return sum(dtype.itemsize for dtype in TOKEN_DTYPES.values()) + 4 * num_scores


def activation_bytes(
    config: PretrainedConfig, tokens: int, num_layers: float, *, checkpointed: bool, width: int = _ACTIVATION_BYTES
) -> float:
    """What `num_layers` layers keep of one microbatch for its backward; attention keeps no scores."""
    heads = head_size(config) * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    kept = 4 * config.hidden_size + heads + 4 * config.intermediate_size  # numbers per token and layer
    if not checkpointed:
        return float(width * tokens * num_layers * kept)
    return float(width * tokens * (num_layers * config.hidden_size + kept))


def fsdp2_cost(
    config: PretrainedConfig, gpus: int, work: Work, machine: Machine, *, reduce_every_microbatch: bool = False
) -> Cost:
    """FSDP2Strategy gathers layers for each microbatch, forward and backward.

    It keeps whole gradients until the last microbatch, or reduces them after each with `reduce_every_microbatch`.
    """
    total = num_parameters(config)
    num = _num_microbatches(work, gpus)
    ends = total - config.num_hidden_layers * layer_parameters(config)
    others = (gpus - 1) / gpus
    gathers = work.compute_bytes * 2 * total * num * others  # two gathers of each microbatch
    sent = gathers + 4 * total * others * (num if reduce_every_microbatch else 1)
    communication = sent / _bandwidth(gpus, machine)
    compute = _compute_s(config, gpus, work, machine)
    tokens = min(work.microbatch_tokens, math.ceil(work.tokens / gpus))
    waiting = 4 * total if num > 1 and not reduce_every_microbatch else 0  # whole gradients
    return Cost(
        strategy="FSDP2",
        pp=1,
        dp=gpus,
        tp=1,
        num_microbatches=num,
        state_bytes=_STATE_BYTES * total / gpus,
        gathered_bytes=work.compute_bytes * (2 * layer_parameters(config) + ends) + waiting,
        activation_bytes=activation_bytes(
            config,
            tokens,
            config.num_hidden_layers,
            checkpointed=work.checkpoint_activations,
            width=work.compute_bytes,
        ),
        sent_bytes=sent,
        bubble_fraction=0.0,
        compute_s=compute,
        communication_s=max(0.0, communication - compute),
        step_s=max(compute, communication),  # gathers hide behind the compute where there is enough of it
        reduce_every_microbatch=reduce_every_microbatch,
    )


def parallel_3d_cost(config: PretrainedConfig, pp: int, dp: int, tp: int, work: Work, machine: Machine) -> Cost:
    """Parallel3DStrategy with 1F1B: tp communicates in every layer.

    Over dp, a pipeline keeps its parameters whole within an update. Without a pipeline, layers are freed after each
    forward, gathered again for the backward and kept for the next forward; compute hides communication as in FSDP2.

    Raises:
        ValueError: if the model cannot be split this way.
    """
    check_sizes(config, pp, tp, "1F1B", 1)
    gpus = pp * dp * tp
    num = _num_microbatches(work, dp)
    tokens = min(work.microbatch_tokens, math.ceil(work.tokens / dp))
    ends = config.vocab_size * config.hidden_size
    layers = [len(part) for part in split_layers(config, pp)]
    held = [count * layer_parameters(config) for count in layers]
    held[0] += ends
    held[-1] += ends if pp > 1 or not config.tie_word_embeddings else 0
    largest = max(held) / tp
    others = (dp - 1) / dp
    sent_dp = whole = _WHOLE_BYTES * largest
    if pp == 1:
        in_layers = layers[0] * layer_parameters(config) / tp
        sent_dp += 4 * num * in_layers
        waiting = 4 * largest if num > 1 else 0  # whole gradients
        whole = waiting + _WHOLE_BYTES * (2 * in_layers / layers[0] + largest - in_layers)
    sent_dp *= others
    hidden = work.compute_bytes * tokens * config.hidden_size
    sent_tp = 8 * hidden * (tp - 1) / tp * max(layers) * num
    sent_pp = 2 * hidden / tp * num if pp > 1 else 0.0
    bubble = (pp - 1) / (num + pp - 1)
    compute = _compute_s(config, gpus, work, machine)
    dp_s = sent_dp / _bandwidth(gpus, machine)
    communication = sent_tp / _bandwidth(tp, machine) + sent_pp / machine.remote_bytes_per_s
    communication += max(0.0, dp_s - compute) if pp == 1 else dp_s
    return Cost(
        strategy="3D",
        pp=pp,
        dp=dp,
        tp=tp,
        num_microbatches=num,
        state_bytes=_STATE_BYTES * largest / dp,
        gathered_bytes=whole if dp > 1 else 0.0,
        activation_bytes=min(pp, num)
        * activation_bytes(
            config, tokens, max(layers), checkpointed=work.checkpoint_activations, width=work.compute_bytes
        )
        / tp,
        sent_bytes=sent_dp + sent_tp + sent_pp,
        bubble_fraction=bubble,
        compute_s=compute,
        communication_s=communication,
        step_s=compute / (1 - bubble) + communication,
    )


def _num_microbatches(work: Work, dp: int) -> int:
    return max(1, math.ceil(work.tokens / dp / work.microbatch_tokens))


def _bandwidth(ranks: int, machine: Machine) -> float:
    return machine.local_bytes_per_s if ranks <= machine.gpus_per_node else machine.remote_bytes_per_s


def _compute_s(config: PretrainedConfig, gpus: int, work: Work, machine: Machine) -> float:
    """Time of forward and backward, without attention scores; a checkpointed layer runs its forward twice."""
    per_token: Any = (8 if work.checkpoint_activations else 6) * num_parameters(config)
    return float(per_token * work.tokens / (gpus * machine.flops * machine.mfu))
