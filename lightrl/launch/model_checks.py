"""Whether a model fits the plan: its heads and layers, the ranks of its roles, and the memory of a GPU, on paper."""

from __future__ import annotations

from lightrl.launch.run_facts import RunFacts
from lightrl.launch.settings import Layout
from lightrl.strategies.costs import (
    SERVED_BYTES,
    USABLE_FRACTION,
    Machine,
    Work,
    fsdp2_cost,
    num_parameters,
    parallel_3d_cost,
)
from lightrl.strategies.tensor_plans import check_sizes


def check_model(layout: Layout, facts: RunFacts, split: tuple[int, int]) -> None:
    """Raises ValueError if ranks, meshes or the model's sizes do not allow the layout; `split` is (pp, tp)."""
    pp, tp = split
    if layout.ranks % (pp * tp):
        raise ValueError(
            f"{layout.ranks} trainer ranks cannot be split by pp={pp} · tp={tp} = {pp * tp}, which must divide them. "
            "Change launch.ranks, or pp and tp of trainer.strategy."
        )
    for role, mesh in facts.meshes.items():
        try:
            mesh.ranks(layout.ranks)
        except ValueError as error:
            raise ValueError(f"model.{role}.mesh does not fit the launch's {layout.ranks} ranks: {error}") from error
    config = facts.load_config()
    if config is None:
        return
    if pp * tp > 1:
        check_sizes(config, pp, tp, "1F1B", 1)
    heads = getattr(config.get_text_config(), "num_attention_heads", None)
    if layout.servers and heads and heads % layout.tp:
        raise ValueError(f"launch.tp={layout.tp} must divide the model's {heads} attention heads.")


def check_memory(layout: Layout, facts: RunFacts, split: tuple[int, int], gpu_memory_gb: float | None) -> list[str]:
    """A line on the memory that ranks and servers need; raises ValueError if a GPU cannot have it.

    By the formulas of strategies/costs.py: parameters, gradients and Adam's moments in float32, and activations of one
    microbatch. Only the policy is counted, so a run with a critic or a reference policy needs more.
    """
    config = facts.load_config()
    if config is None or facts.on_cpu:
        return []
    pp, tp = split
    tokens = facts.microbatch_tokens
    work = Work(layout.ranks // (pp * tp) * tokens, tokens, facts.checkpoints_activations)
    text = config.get_text_config()
    if pp * tp > 1:
        cost = parallel_3d_cost(text, pp, layout.ranks // (pp * tp), tp, work, Machine())
    else:
        cost = fsdp2_cost(text, layout.ranks, work, Machine())
    trainer_gb = cost.memory_bytes / 1e9
    server_gb = SERVED_BYTES * num_parameters(text) / layout.tp / 1e9 if layout.servers else 0.0
    room_gb = None if gpu_memory_gb is None else USABLE_FRACTION * gpu_memory_gb
    what = f"{room_gb:.1f} GB are usable of launch.gpu_memory_gb={gpu_memory_gb:g}" if gpu_memory_gb else ""
    if room_gb is not None and trainer_gb > room_gb:
        raise ValueError(
            f"A trainer rank needs about {trainer_gb:.1f} GB ({cost.state_bytes / 1e9:.1f} for parameters, gradients "
            f"and moments, {cost.gathered_bytes / 1e9:.1f} gathered, {cost.activation_bytes / 1e9:.1f} for activations "
            f"of {tokens} tokens), but {what}. Increase launch.ranks, lower microbatch_tokens, or set "
            "activation_checkpointing."
        )
    if room_gb is not None and server_gb > room_gb:
        raise ValueError(
            f"A server's GPU needs {server_gb:.1f} GB for the weights in bfloat16, but {what}. Increase launch.tp."
        )
    line = f"Memory of a rank, on paper: {trainer_gb:.1f} GB"
    return [line + (f"; of a server's GPU: {server_gb:.1f} GB for weights, beside its cache." if server_gb else ".")]
