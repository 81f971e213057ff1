"""Model families of 3D parallelism: how their layers are split over tp, and which layers make a pipeline stage.

All functions work on a config alone, without devices or process groups. To add a family, add a line to FAMILIES;
tests/strategies/test_tensor_plans.py then checks for equal logprobs under pp and tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightrl.strategies.ranks import divisors

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """How a family's decoder layers differ from Llama's; all have q, k, v, o, gate, up and down projections."""

    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")  # a layer's, over the hidden states
    float_norms: bool = False  # a norm multiplies by its weight in float32, whatever the model's dtype
    head_norm_axis: int | None = None  # in q_norm's and k_norm's inputs, such as 2 for [B, T, heads, head size]
    ropes_by_kind: bool = False  # one rotary embedding per kind of layer
    window_everywhere: bool = False  # `sliding_window` applies to all layers, not those named in `layer_types`


_GEMMA_NORMS = (*Family().norms, "pre_feedforward_layernorm", "post_feedforward_layernorm")

# Keys are the config's `model_type`.
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "qwen2": Family(),
    "qwen3": Family(head_norm_axis=2),
    "mistral": Family(window_everywhere=True),
    "gemma": Family(float_norms=True),
    "gemma2": Family(norms=_GEMMA_NORMS, float_norms=True),
    "gemma3_text": Family(norms=_GEMMA_NORMS, float_norms=True, head_norm_axis=1, ropes_by_kind=True),
}

SCHEDULES = ("1F1B", "Interleaved1F1B")


def family_of(config: PretrainedConfig) -> Family:
    """The family of a model; raises ValueError if FAMILIES lacks it."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"model_type={config.model_type!r} has no plan for tensor and pipeline parallelism. Use one of "
            f"{', '.join(FAMILIES)}, or FSDP2Strategy, which takes any model, or add the family to "
            "lightrl/strategies/tensor_plans.py."
        )
    return family


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """`full_attention` or `sliding_attention`, for each layer."""
    num: int = config.num_hidden_layers
    if family_of(config).window_everywhere:
        return ["full_attention" if config.sliding_window is None else "sliding_attention"] * num
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    return ["full_attention"] * num if kinds is None else list(kinds)


def check_world(pp: int, dp: int, tp: int, world_size: int) -> None:
    """Raises ValueError, with sizes that fit, if pp · dp · tp is not the world size."""
    if min(pp, dp, tp) < 1:
        raise ValueError(f"pp, dp and tp must be at least 1, got {pp}, {dp} and {tp}.")
    if pp * dp * tp == world_size:
        return
    if world_size % (pp * tp) == 0:
        advice = f"Set dp to {world_size // (pp * tp)}"
    else:
        advice = f"Choose pp · tp among the divisors of {world_size}: {_listed(divisors(world_size))}"
    raise ValueError(
        f"pp · dp · tp = {pp} · {dp} · {tp} = {pp * dp * tp} must equal the number of processes, {world_size}. "
        f"{advice}, or start {pp * dp * tp} processes (trainer.devices · trainer.num_nodes)."
    )


def check_sizes(config: PretrainedConfig, pp: int, tp: int, schedule: str, stages_per_rank: int) -> None:
    """Raises ValueError, with the nearest valid choice, for a model that cannot be split this way."""
    family_of(config)
    check_schedule(schedule, stages_per_rank)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        count = int(getattr(config, name))
        if count % tp:
            fitting = [
                size
                for size in divisors(config.num_key_value_heads)
                if config.vocab_size % size == 0 and config.intermediate_size % size == 0
            ]
            nearest = min(fitting, key=lambda size: (abs(size - tp), size))
            raise ValueError(
                f"tp={tp} must divide the model's {name}={count}, and all of heads, key-value heads, intermediate and "
                f"vocabulary size. Set tp to {nearest} (possible: {_listed(fitting)})."
            )
    num_stages = pp * stages_per_rank
    if config.num_hidden_layers < num_stages:
        raise ValueError(
            f"pp={pp} with {stages_per_rank} stages per rank makes {num_stages} stages, but the model only has "
            f"{config.num_hidden_layers} layers. Set pp to at most "
            f"{max(1, config.num_hidden_layers // stages_per_rank)}."
        )


def check_schedule(schedule: str, stages_per_rank: int) -> None:
    """Raises ValueError for schedules that are not exact, and for a number of stages that does not fit the schedule."""
    if schedule not in SCHEDULES:
        reason = ""
        if "zero" in schedule.lower() or "zbv" in schedule.lower() or "dualpipe" in schedule.lower():
            reason = " Under nested fully_shard zero-bubble schedules give wrong gradients without any error."
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}.{reason}")
    required = "1" if schedule == "1F1B" else "at least 2"
    if (stages_per_rank == 1) != (schedule == "1F1B") or stages_per_rank < 1:
        raise ValueError(f"stages_per_rank must be {required} with schedule={schedule!r}, got {stages_per_rank}.")


def split_layers(config: PretrainedConfig, num_stages: int) -> list[range]:
    """The layers of each stage, in order, so that the largest stage has as few parameters as possible.

    The embedding counts for the first stage, which also holds the most activations, and the output head for the last.
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


def head_size(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or int(config.hidden_size // config.num_attention_heads)


def layer_parameters(config: PretrainedConfig) -> int:
    """Parameters of one decoder layer, without norms and biases."""
    attention = 2 * config.hidden_size * head_size(config) * (config.num_attention_heads + config.num_key_value_heads)
    return int(attention + 3 * config.hidden_size * config.intermediate_size)


def logit_cap(config: PretrainedConfig) -> float | None:
    """c if the logits are c · tanh(logits / c), as in Gemma 2; None without a cap."""
    cap: float | None = getattr(config, "final_logit_softcapping", None)
    return cap


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
