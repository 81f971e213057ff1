"""Which model families 3D parallelism knows, how their layers are split over tp and which layers make a pipeline stage.

Everything here is decided on paper, from a config: nothing touches a device or a process group. To add a family, add a
line to FAMILIES; tests/strategies/test_tensor_plans.py then asks for equal logprobs under pp and tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """What tells a family's decoder layers from Llama's; all have q, k, v, o, gate, up and down projections."""

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")  # of a layer, over the hidden states
    head_norm_axis: int | None = None  # the axis of heads where q_norm and k_norm see [B, T, heads, head size]
    ropes_by_kind: bool = False  # one rotary embedding for each kind of layer
    window_everywhere: bool = False  # `sliding_window` holds for all layers, not for those that `layer_types` names


_GEMMA_NORMS = (*Family().norms, "pre_feedforward_layernorm", "post_feedforward_layernorm")

# By `model_type` of the config.
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(head_norm_axis=2),
    "mistral": Family(window_everywhere=True),
    "gemma": Family(),
    "gemma2": Family(norms=_GEMMA_NORMS),
    "gemma3_text": Family(norms=_GEMMA_NORMS, head_norm_axis=1, ropes_by_kind=True),
}

SCHEDULES = ("1F1B", "Interleaved1F1B")


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model.

    Raises:
        ValueError: if the table does not have it.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"model_type={config.model_type!r} has no plan for tensor and pipeline parallelism, expected one of "
            f"{', '.join(FAMILIES)}. Use FSDP2Strategy, which takes any model, or add the family to "
            "lightrl/strategies/tensor_plans.py."
        )
    return family


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """Of each layer: `full_attention` or `sliding_attention`."""
    num: int = config.num_hidden_layers
    if family_of(config).window_everywhere:
        return ["full_attention" if config.sliding_window is None else "sliding_attention"] * num
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    return ["full_attention"] * num if kinds is None else list(kinds)


def check_world(pp: int, dp: int, tp: int, world_size: int) -> None:
    """Refuses sizes that do not make up the world.

    Raises:
        ValueError: with the product, the world size and sizes that fit.
    """
    if min(pp, dp, tp) < 1:
        raise ValueError(f"(pp, dp, tp) = {(pp, dp, tp)}, expected at least 1 each. Raise the smallest.")
    if pp * dp * tp == world_size:
        return
    if world_size % (pp * tp) == 0:
        advice = f"Set dp to {world_size // (pp * tp)}"
    else:
        advice = f"Choose pp · tp among the divisors of {world_size}: {_listed(_divisors(world_size))}"
    raise ValueError(
        f"pp · dp · tp = {pp} · {dp} · {tp} = {pp * dp * tp} does not make up the world, expected {world_size}, "
        f"the number of processes. {advice}, or start {pp * dp * tp} processes (trainer.devices · trainer.num_nodes)."
    )


def check_sizes(config: PretrainedConfig, pp: int, tp: int, schedule: str, stages_per_rank: int) -> None:
    """Refuses a model that cannot be split this way.

    Raises:
        ValueError: with the numbers and the nearest valid choice: family, schedule, heads against tp, layers against
            the stages.
    """
    family_of(config)
    check_schedule(schedule, stages_per_rank)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        count = int(getattr(config, name))
        if count % tp:
            fitting = [
                size
                for size in _divisors(config.num_key_value_heads)
                if config.vocab_size % size == 0 and config.intermediate_size % size == 0
            ]
            nearest = min(fitting, key=lambda size: (abs(size - tp), size))
            raise ValueError(
                f"tp={tp} does not divide the model's {name}={count}, expected a divisor of heads, key-value heads, "
                f"intermediate and vocabulary size. Set tp to {nearest} (possible: {_listed(fitting)})."
            )
    num_stages = pp * stages_per_rank
    if config.num_hidden_layers < num_stages:
        raise ValueError(
            f"pp={pp} with {stages_per_rank} stages on each rank makes {num_stages} stages, but the model has "
            f"{config.num_hidden_layers} layers, expected at least one layer for each stage. Set pp to at most "
            f"{max(1, config.num_hidden_layers // stages_per_rank)}."
        )


def check_schedule(schedule: str, stages_per_rank: int) -> None:
    """Refuses schedules that are not exact and numbers of stages that do not belong to the schedule.

    Raises:
        ValueError: for any other schedule, zero-bubble ones first of all.
    """
    if schedule not in SCHEDULES:
        reason = ""
        if "zero" in schedule.lower() or "zbv" in schedule.lower() or "dualpipe" in schedule.lower():
            reason = ": under nested fully_shard zero-bubble schedules give wrong gradients without any error"
        raise ValueError(f"schedule={schedule!r}, expected one of {', '.join(SCHEDULES)}{reason}. Choose one of them.")
    expected = "1" if schedule == "1F1B" else "at least 2"
    if (stages_per_rank == 1) != (schedule == "1F1B") or stages_per_rank < 1:
        raise ValueError(
            f"stages_per_rank={stages_per_rank} with schedule={schedule!r}, expected {expected}. Leave it out for the "
            "schedule's default."
        )


def split_layers(config: PretrainedConfig, num_stages: int) -> list[range]:
    """The layers of each stage, in order, so that the heaviest stage is as light as can be.

    Weights are parameters. The embedding counts on the first stage, which holds the most activations as well, the
    output head on the last.
    """
    embedding = config.vocab_size * config.hidden_size / layer_parameters(config)
    load = [0.0] * num_stages
    load[0] += embedding
    load[-1] += embedding
    counts = [1] * num_stages
    load = [value + 1 for value in load]
    for _ in range(config.num_hidden_layers - num_stages):
        lightest = min(range(num_stages), key=lambda stage: load[stage])
        counts[lightest] += 1
        load[lightest] += 1
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def layer_parameters(config: PretrainedConfig) -> int:
    """Parameters of one decoder layer, norms and biases left out."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * config.hidden_size * head_size * (config.num_attention_heads + config.num_key_value_heads)
    return int(attention + 3 * config.hidden_size * config.intermediate_size)


def logit_cap(config: PretrainedConfig) -> float | None:
    """c where the logits are c · tanh(logits / c), as in Gemma 2; None without a cap."""
    cap: Any = getattr(config, "final_logit_softcapping", None)
    return None if cap is None else float(cap)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
