"""The strategies that can train an RLModule: a single device, or FSDP2Strategy and its subclasses."""

from __future__ import annotations

import difflib

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy, StrategyRegistry
from transformers import PreTrainedModel

import lightrl
from lightrl.models import ParallelModel
from lightrl.models.model_spec import check_outputs
from lightrl.strategies.fsdp2 import FSDP2Strategy
from lightrl.strategies.head import LogprobSettings
from lightrl.strategies.ranks.role_mesh import check_meshes, planned_roles
from lightrl.strategies.single import SingleModel


def check_strategy(strategy: Strategy, module: L.LightningModule | None = None) -> None:
    """Raises ValueError if this strategy cannot train an RLModule, or does not support the module's models."""
    if isinstance(strategy, SingleDeviceStrategy):
        check_meshes(module, 1)
    elif isinstance(strategy, FSDP2Strategy):
        strategy.check_sizes(module)
    else:
        raise ValueError(
            f"{type(strategy).__name__} cannot train an RLModule. Set trainer.strategy to FSDP2Strategy, which gives "
            "the same gradients (if num_replicas is the number of processes, each has a whole copy, as in DDP), or set "
            "trainer.devices to 1."
        )
    for name, role in planned_roles(module).items():
        if role.spec.url is None:
            check_outputs(role.spec.load_config(), f"The {name}")


def named_strategy(strategy: Strategy | str) -> Strategy | str:
    """Returns lightrl's strategy with this name, or a name known to Lightning; raises ValueError for other names."""
    if not isinstance(strategy, str):
        return strategy
    ours = [name for name in lightrl.__all__ if name.endswith("Strategy")]
    if strategy in ours:
        named: Strategy = getattr(lightrl, strategy)()
        return named
    theirs = StrategyRegistry.available_strategies()
    if strategy == "auto" or strategy.lower() in theirs:
        return strategy
    names = {name.lower().removesuffix("strategy"): name for name in ("auto", *theirs, *ours)}
    similar = difflib.get_close_matches(strategy.lower().removesuffix("strategy"), names)
    # Prefer lightrl's strategies, because only they can train an RLModule.
    best = next((name for name in similar if names[name] in ours), similar[0] if similar else None)
    hint = f" Did you mean {names[best]}?" if best else ""
    raise ValueError(f"Unknown strategy {strategy!r}. Use {', '.join(ours)} or a Lightning strategy like auto.{hint}")


def parallel_model(
    strategy: Strategy,
    model: PreTrainedModel,
    settings: LogprobSettings,
    *,
    role: str = "policy",
    value_head: torch.nn.Linear | None = None,
) -> ParallelModel:
    """Returns the ParallelModel for this role's model; `value_head` is a critic's head on the model's body."""
    check_strategy(strategy)
    check_outputs(model.config, f"The {role}")  # again, because configure_model may have changed the model
    if isinstance(strategy, FSDP2Strategy):
        return strategy.parallel_model(model, settings, role=role, value_head=value_head)
    return SingleModel(model, settings, value_head=value_head, is_policy=role == "policy")
