"""Whether a model fits the plan: its heads and layers, the ranks of its roles, and the memory of a GPU, on paper."""

from __future__ import annotations

from lightrl.checks.printable import count_text
from lightrl.launch.memory import memory_line, misfits
from lightrl.launch.run_facts import RunFacts
from lightrl.launch.settings import Layout
from lightrl.strategies.tensor_plans import check_sizes


def check_model(layout: Layout, facts: RunFacts, split: tuple[int, int]) -> None:
    """Raises ValueError if ranks, meshes or the model's sizes do not allow the layout; `split` is (pp, tp)."""
    pp, tp = split
    if layout.ranks % (pp * tp):
        raise ValueError(
            f"{count_text(layout.ranks, 'trainer rank')} cannot be split by pp={pp} · tp={tp} = {pp * tp}, which must "
            "divide them. Change launch.ranks, or pp and tp of trainer.strategy."
        )
    for role, mesh in facts.meshes.items():
        try:
            mesh.ranks(layout.ranks)
        except ValueError as error:
            ranks = count_text(layout.ranks, "rank")
            raise ValueError(f"model.{role}.mesh does not fit the launch's {ranks}: {error}") from error
    if facts.planned is None:
        return
    config = facts.planned.roles[0].config
    if pp * tp > 1:
        check_sizes(config, pp, tp, "1F1B", 1)
    heads = int(config.num_attention_heads)
    if layout.servers and heads % layout.tp:
        raise ValueError(f"launch.tp={layout.tp} must divide the model's {heads} attention heads.")


def check_memory(layout: Layout, facts: RunFacts, split: tuple[int, int], gpu_memory_gb: float | None) -> list[str]:
    """A line on the memory that ranks and servers need; raises ValueError if a GPU cannot have it."""
    if facts.planned is None:
        return [facts.unknown] if facts.unknown else []
    run = facts.planned.launched(layout, *split)
    if gpu_memory_gb is not None and not facts.on_cpu:
        for misfit in misfits(run, gpu_memory_gb * 1e9):
            raise ValueError(f"launch.gpu_memory_gb={gpu_memory_gb:g} is not enough: {misfit.text}.")
    return [memory_line(run)]
