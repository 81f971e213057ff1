"""Plans for 3D parallelism: how layers are split over tp, and which layers form a pipeline stage.

They follow transformers' plans in a config's class, `base_model_tp_plan` and `base_model_pp_plan`. A run on the meta
device checks that the model fits its plans. No function needs devices or process groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from lightrl.models import new_model
from lightrl.models.hybrids import keeps_states
from lightrl.models.moe import moe_blocks
from lightrl.models.trials import once_per_config
from lightrl.strategies.layouts.probes import rope_depends_on_length
from lightrl.strategies.ranks.processes import divisors

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SCHEDULES = ("1F1B", "Interleaved1F1B")

# How a plan may split a layer's module: by columns, by rows, or only its heads' activations.
_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
_BODY = {"embed_tokens", "layers", "norm"}


@dataclass(frozen=True)
class LogitTransform:
    """How a model turns the head's outputs x into logits: scale · x, or cap · tanh(x / cap) if there is a cap."""

    scale: float = 1.0
    cap: float | None = None


def tensor_plan(config: PretrainedConfig) -> dict[str, str]:
    """Returns the tp plan of the model's family: name of a layer's module, for example `self_attn.q_proj` → style.

    Raises:
        ValueError: if there is no plan, or Parallel3DStrategy does not support the plan.
    """
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not plan:
        _refuse(config, "transformers has no plan for its tensor parallelism (base_model_tp_plan)")
    plan = {name: style for name, style in plan.items() if "experts" not in name.split(".")}
    for name, style in plan.items():
        if not name.startswith("layers.*.") or style not in _STYLES:
            _refuse(config, f"its plan has {style} for {name}")
    return {name.removeprefix("layers.*."): style for name, style in plan.items()}


def layer_plan(plan: Mapping[str, str], layer: nn.Module) -> dict[str, str]:
    """Returns the part of a plan for the modules of this layer, which may have a MoE block or an MLP.

    Nothing in a MoE block is split, since tp ranks hold different tokens there.
    """
    modules, blocks = dict(layer.named_modules()), tuple(f"{name}." for name in moe_blocks(layer))
    return {name: style for name, style in plan.items() if name in modules and not name.startswith(blocks)}


@once_per_config
def check_model(config: PretrainedConfig, tp: int) -> LogitTransform:
    """Runs a model on the meta device to check that its parts fit together; returns how the model changes logits.

    Raises:
        ValueError: if stages or tensor slices would not give the whole model's results.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = new_model(config).eval()
    body: Any = model.base_model
    others = {name.partition(".")[0] for name, _ in body.named_parameters()} - _BODY
    if others or not all(hasattr(body, name) for name in _BODY):
        _refuse(config, f"its body is not just embed_tokens, layers and norm (it has {', '.join(sorted(others))})")
    if moe_blocks(model) and (keeps_states(config) or getattr(config, "index_topk", None)):
        _refuse(config, "it is a mixture of experts with states or sparse attention")
    if rope_depends_on_length(model):
        _refuse(config, "its rotary embedding depends on the number of tokens in a forward")
    for layer in body.layers if tp > 1 else ():
        _check_layer(config, layer, is_mixture=bool(moe_blocks(model)))
    head = model.get_output_embeddings()
    if tp > 1 and head.bias is not None:
        _refuse(config, "its output head has a bias")
    if tp > 1 and type(body.embed_tokens) is not nn.Embedding and not hasattr(body.embed_tokens, "embed_scale"):
        _refuse(config, f"its embedding is a {type(body.embed_tokens).__name__}")
    # Large numbers, because a cap like 30 · tanh(logits / 30) hardly changes logits near 0.
    hidden, raw = torch.linspace(-1, 1, 6).view(1, 2, 3), torch.linspace(-99, 101, 8).view(1, 2, 4)
    fake_layer, fake_head = _Fake(hidden), _Fake(raw)
    body.layers = nn.ModuleList([fake_layer for _ in body.layers])
    body.norm = nn.Identity()
    model.set_output_embeddings(fake_head)
    # Without a mask, transformers would build one from the positions' values, which the meta device lacks.
    mask = torch.empty(1, 1, 1, 1, dtype=torch.bool)
    with torch.no_grad():
        token_ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
        logits = model(input_ids=token_ids, attention_mask=mask, use_cache=False).logits
    if not torch.equal(fake_head.received, hidden):
        _refuse(config, "it changes hidden states between its last layer and its head")
    scale, cap = float(logits[0, 0, 0] / raw[0, 0, 0]), getattr(config, "final_logit_softcapping", None)
    if torch.allclose(logits, raw * scale):
        return LogitTransform(scale=scale)
    if cap is None or not torch.allclose(logits, torch.tanh(raw / cap) * cap):
        _refuse(config, "it does more to logits than scale or cap them")
    return LogitTransform(cap=cap)


def _check_layer(config: PretrainedConfig, layer: nn.Module, *, is_mixture: bool) -> None:
    """Raises ValueError unless each module with parameters is planned, in a MoE block, or a token or head norm."""
    modules, blocks = dict(layer.named_modules()), tuple(moe_blocks(layer))
    plan = layer_plan(tensor_plan(config), layer)
    if "" in blocks:
        _refuse(config, "its experts are not in a block of their own")
    if missing := sorted(set(tensor_plan(config)) - set(modules)) if not is_mixture else ():
        _refuse(config, f"its layers differ: one has no {missing[0]}")
    for name, module in modules.items():
        if plan.get(name) in ("colwise", "rowwise") or any(f"{name}.".startswith(f"{block}.") for block in blocks):
            continue
        shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
        # A rank has all features of some tokens, or in attention all features of some heads.
        size = head_size(config) if name.startswith("self_attn.") else config.hidden_size
        if shapes and ("norm" not in type(module).__name__.lower() or {*shapes} != {(size,)}):
            _refuse(config, f"no part of {name} ({type(module).__name__}) can be computed separately")


class _Fake(nn.Module):
    """A layer or head that stores its input and returns a given tensor."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = self.received = output

    def forward(self, hidden: Tensor, **_: object) -> Tensor:
        self.received = hidden
        return self.output


def _refuse(config: PretrainedConfig, reason: str) -> NoReturn:
    raise ValueError(
        f"Parallel3DStrategy cannot split model_type={config.model_type!r}: {reason}. Use FSDP2Strategy, which "
        "supports any model."
    )


def check_world(sizes: Mapping[str, int], world_size: int) -> None:
    """Raises ValueError, suggesting sizes, if the product of the sizes pp, dp, cp and tp is not the world size."""
    sizes = {name: size for name, size in sizes.items() if name != "cp" or size != 1}
    names, numbers, product = " · ".join(sizes), " · ".join(map(str, sizes.values())), math.prod(sizes.values())
    if min(sizes.values()) < 1:
        raise ValueError(f"{names} must each be at least 1, got {numbers}.")
    if product == world_size:
        return
    others = product // sizes["dp"]
    if world_size % others == 0:
        advice = f"Set dp to {world_size // others}"
    else:
        names_of_others = " · ".join(name for name in sizes if name != "dp")
        advice = f"Choose {names_of_others} among the divisors of {world_size}: {_listed(divisors(world_size))}"
    raise ValueError(
        f"{names} = {numbers} = {product} must equal the number of processes, {world_size}. "
        f"{advice}, or start {product} processes (trainer.devices · trainer.num_nodes)."
    )


def check_sizes(config: PretrainedConfig, pp: int, tp: int, schedule: str, stages_per_rank: int) -> None:
    """Raises ValueError, suggesting the nearest valid sizes, if the model cannot be split like this."""
    if pp > 1 and set(getattr(config, "base_model_pp_plan", None) or {}) != _BODY:
        _refuse(config, "transformers has no plan for its stages' embed_tokens, layers and norm (base_model_pp_plan)")
    sizes = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    if tp > 1:
        tensor_plan(config)
    if pp * tp > 1 and getattr(config, "is_heterogeneous", False):
        _refuse(config, "its layers differ in size")
    check_schedule(schedule, stages_per_rank)
    for name in sizes if tp > 1 else ():
        count = getattr(config, name)
        if not isinstance(count, int):
            _refuse(config, f"its layers differ in {name}")
        if count % tp:
            fitting = [size for size in divisors(config.num_key_value_heads) if config.intermediate_size % size == 0]
            nearest = min(fitting, key=lambda size: (abs(size - tp), size))
            raise ValueError(
                f"tp={tp} must divide the model's {name}={count}, as well as its heads, key-value heads and "
                f"intermediate size. Set tp to {nearest} (possible: {_listed(fitting)})."
            )
    if (tp - 1) * -(-config.vocab_size // tp) >= config.vocab_size:
        raise ValueError(f"tp={tp} leaves the last rank no token of vocab_size={config.vocab_size}. Use a smaller tp.")
    num_stages = pp * stages_per_rank
    if config.num_hidden_layers < num_stages:
        raise ValueError(
            f"pp={pp} with {stages_per_rank} stages per rank makes {num_stages} stages, but the model only has "
            f"{config.num_hidden_layers} layers. Set pp to at most "
            f"{max(1, config.num_hidden_layers // stages_per_rank)}."
        )


def check_schedule(schedule: str, stages_per_rank: int) -> None:
    """Raises ValueError for an unsupported schedule, or a number of stages that does not fit the schedule."""
    if schedule not in SCHEDULES:
        reason = ""
        if "zero" in schedule.lower() or "zbv" in schedule.lower() or "dualpipe" in schedule.lower():
            reason = " With nested fully_shard, zero-bubble schedules give wrong gradients without any error."
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}.{reason}")
    required = "1" if schedule == "1F1B" else "at least 2"
    if (stages_per_rank == 1) != (schedule == "1F1B") or stages_per_rank < 1:
        raise ValueError(f"stages_per_rank must be {required} with schedule={schedule!r}, got {stages_per_rank}.")


def split_layers(config: PretrainedConfig, num_stages: int, layer_parameters: float) -> list[range]:
    """Assigns layers to stages, in order, so that the largest stage has as few parameters as possible.

    The embedding is added to the first stage, which also holds the most activations, and the output head to the last.

    Args:
        layer_parameters: the number of parameters in a layer, on average, with all its experts.
    """
    embedding = config.vocab_size * config.hidden_size / layer_parameters
    counts, load = [1] * num_stages, [1.0] * num_stages
    load[0] += embedding
    load[-1] += embedding
    for _ in range(config.num_hidden_layers - num_stages):
        lightest = min(range(num_stages), key=lambda stage: load[stage])
        counts[lightest] += 1
        load[lightest] += 1
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def head_size(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or int(config.hidden_size // config.num_attention_heads)


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))
