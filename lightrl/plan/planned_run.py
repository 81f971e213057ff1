"""Makes a PlannedRun from a run's module, data, and Trainer or TrainerSettings, for `plan`, `launch` and `doctor`.

`fit` uses it to choose the settings that depend on a GPU's memory. Models are built on the meta device, to count their
parameters; no real device is used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.plugins.precision import Precision
from transformers import PretrainedConfig

from lightrl.algorithms.supervised import SupervisedModule
from lightrl.callbacks import StalenessControl
from lightrl.callbacks.self_play import SelfPlay
from lightrl.data import PairBatch, TrajectoryDataModule
from lightrl.engines import LocalEngine, RolloutEngine
from lightrl.engines.engine import PlannedEngine
from lightrl.functional import can_compile
from lightrl.models import Role
from lightrl.models.muon import hidden_matrices
from lightrl.module import RLModule
from lightrl.plan import memory
from lightrl.plan.memory import NODE_RANKS, PlannedOpponent, PlannedRole, PlannedRun, UnknownMemory, num_devices
from lightrl.plan.sizes import ModelSize
from lightrl.strategies import FSDP2Strategy, Parallel3DStrategy, named_strategy
from lightrl.strategies.empty_model import empty_model
from lightrl.strategies.layouts.probes import may_be_compiled

log = logging.getLogger(__name__)

_ASSUMED_TOKENS = 1024  # per prompt or row, if the data sets no limit
_SIZES = (  # fields that a config must have
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip


@dataclass
class TrainerSettings:
    """The fields of a Trainer that a plan needs; a Trainer itself can be built only on a machine with its GPUs."""

    strategy: Any
    engine: RolloutEngine | None
    callbacks: Sequence[Any]
    precision: str
    num_devices: int
    num_nodes: int
    accumulate_grad_batches: int
    fit: None = field(default=None, repr=False)  # Lightning's CLI reads this attribute

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> TrainerSettings:
        """Reads the `trainer` section, whose objects are already built."""
        accelerator = section.get("accelerator") or "auto"
        is_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())
        count = section.get("devices")
        takes_all = count in (None, "auto", -1, "-1")
        num = max(1, torch.cuda.device_count() if is_gpu else 0) if takes_all else num_devices(count)
        callbacks, nodes = section.get("callbacks") or [], int(section.get("num_nodes") or 1)
        all_devices = [torch.device("cuda", index) if is_gpu else torch.device("cpu") for index in range(num)]
        named = section.get("strategy") or "auto"
        strategy: Any = named_strategy("FSDP2Strategy" if named == "auto" and num * nodes > 1 else named)
        if isinstance(strategy, str):
            strategy = SimpleNamespace(root_device=all_devices[0])  # stands in for Lightning's strategy
        strategy.parallel_devices, strategy.num_nodes = all_devices, nodes
        precision = str(section.get("precision") or ("bf16-mixed" if is_gpu else "32-true"))
        strategy.precision_plugin = _precision(precision)  # check_sizes reads it
        return cls(
            strategy=strategy,
            engine=section.get("engine"),
            callbacks=callbacks if isinstance(callbacks, list) else [callbacks],
            precision=precision,
            num_devices=num,
            num_nodes=nodes,
            accumulate_grad_batches=int(section.get("accumulate_grad_batches") or 1),
        )


def _precision(name: str) -> Precision:
    plugin = Precision()
    plugin.precision = cast("Any", name)
    return plugin


def planned(module: Any, trainer: Any, data: Any, *, reads_models: bool = True) -> PlannedRun:
    """Plans a run of an RLModule or a SupervisedModule.

    Args:
        trainer: a Trainer, or TrainerSettings.
        reads_models: False plans only batch sizes, for models whose configuration cannot be read here.

    Raises:
        UnknownMemory: for other modules, and if a model's configuration cannot be read here or lacks sizes.
        ValueError: if the models cannot be divided over the ranks.
    """
    if isinstance(module, RLModule):
        return planned_run(module, trainer, data, reads_models=reads_models)
    if isinstance(module, SupervisedModule):
        return planned_training(module, trainer, data, reads_models=reads_models)
    raise UnknownMemory(f"there is no estimate for a {type(module).__name__}.")


def use_estimate(module: Any, trainer: Any, data: Any, device_bytes: float, given: Collection[str]) -> None:
    """Sets and logs the settings that depend on a GPU's memory, except the paths in `given`, which the user has set."""
    strategy, engine = trainer.strategy, trainer.engine
    names = {path.rpartition(".")[2] for path in given}
    chosen: list[str] = []
    may_checkpoint = isinstance(strategy, FSDP2Strategy) and "activation_checkpointing" not in names
    may_cut = hasattr(module, "microbatch_tokens") and "microbatch_tokens" not in names
    try:
        run = planned(module, trainer, data)
    except ValueError as error:  # for example, a model's dimensions are unknown
        log.info("%s", error)
        return
    if not can_compile(strategy.root_device.type):
        run = replace(run, roles=tuple(replace(role, is_compiled=False) for role in run.roles))
    run = memory.suited(run, device_bytes, may_checkpoint=may_checkpoint, may_cut=may_cut)
    trainer.memory_estimate = memory.memory_line(run)
    if isinstance(strategy, FSDP2Strategy) and run.checkpoint_activations != strategy.activation_checkpointing:
        strategy.activation_checkpointing = run.checkpoint_activations
        chosen.append("trainer.strategy's activation_checkpointing is true")
    if may_cut and run.microbatch_tokens != module.microbatch_tokens:
        module.microbatch_tokens = run.microbatch_tokens
        chosen.append(f"model.microbatch_tokens is {run.microbatch_tokens}")
    if run.engine is not None and (run.engine.place == "rank 0" or (engine is not None and engine.is_colocated)):
        engine = trainer.engine = engine or LocalEngine()
        chosen.append(
            engine.take_memory(memory.key_value_capacity(run, device_bytes), memory.served_fraction(run, device_bytes))
        )
    log.info("%s", " ".join([trainer.memory_estimate, *(f"{setting}." for setting in chosen if setting)]))


def planned_run(module: RLModule, trainer: Any, data: Any, *, reads_models: bool = True) -> PlannedRun:
    """Plans a run with rollouts; see `planned`."""
    models = {name: role for name, role in module.models().items() if role.spec.url is None}
    trained = module.trained_roles()
    averages = set(module.saved_roles()) - set(trained)
    settings = _of_trainer(module, trainer, models, trained, averages, reads_models=reads_models)
    prompt_tokens, source = _bound(data, "max_prompt_tokens", module if reads_models else None)
    new_tokens = module.sampling.max_new_tokens
    context = (module.context_tokens if reads_models else None) or prompt_tokens + new_tokens
    controls = [item.max_staleness for item in trainer.callbacks if isinstance(item, StalenessControl)]
    is_recorded = isinstance(data, TrajectoryDataModule)
    engine = trainer.engine or LocalEngine()
    engine.trainer_precision = str(trainer.precision)
    opponents = [item for item in trainer.callbacks if isinstance(item, SelfPlay)]
    calls = module.data_flow(from_file=is_recorded).calls
    tasks = getattr(data, "tasks", None)
    sizes: Mapping[str, int] = getattr(tasks, "group_sizes", {})
    has_workflow = any(item.workflow is not None for item in (module, *(tasks or {}).values()))
    device, parameters = trainer.strategy.root_device, settings["roles"][0].parameters
    planned_engine = None if is_recorded else engine.planned(device, parameters)
    return PlannedRun(
        **settings,
        prompts=getattr(data, "batch_size", None),
        group_size=max(module.group_size, *sizes.values()) if sizes else module.group_size,
        num_minibatches=module.num_minibatches,
        update_epochs=module.update_epochs,
        microbatch_tokens=module.microbatch_tokens,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        longest=context if has_workflow else min(context, prompt_tokens + new_tokens),
        prompt_source="a workflow may fill the context" if has_workflow else source,
        max_staleness=controls[0] if controls else 0,
        num_scores=_num_scores(module),
        shares_gpus=trainer.engine is not None and trainer.engine.is_colocated,
        inferring=[call.role for call in calls if call.kind == "infer" and call.role and call.url is None],
        engine=planned_engine,
        opponent=_opponent(opponents[0], planned_engine, device, parameters) if opponents else None,
    )


def _opponent(
    callback: SelfPlay, engine: PlannedEngine | None, device: torch.device, parameters: int
) -> PlannedOpponent:
    """Returns SelfPlay's opponent, a LocalEngine on the trainer's device with the dtype of the policy's engine."""
    planned_engine = LocalEngine().planned(device, parameters)
    planned_engine = replace(planned_engine, width=planned_engine.width if engine is None else engine.width)
    return PlannedOpponent(planned_engine, callback.fraction, callback.pool_size)


def planned_training(module: SupervisedModule, trainer: Any, data: Any, *, reads_models: bool = True) -> PlannedRun:
    """Plans a module that trains on data: each batch is one microbatch, padded to its longest row."""
    settings = _of_trainer(module, trainer, module.planned_roles(), [module.trained_role], reads_models=reads_models)
    longest, source = _bound(data, "max_tokens", module if reads_models else None)
    rows, size = (2 if module.batch_type is PairBatch else 1), getattr(data, "batch_size", None)
    return PlannedRun(
        **settings,
        prompts=size,
        group_size=rows,
        num_minibatches=1,
        update_epochs=1,
        microbatch_tokens=longest,
        prompt_tokens=longest,
        new_tokens=0,
        longest=longest,
        prompt_source=source,
        batches_per_update=trainer.accumulate_grad_batches,
    )


def _of_trainer(
    module: RLModule | SupervisedModule,
    trainer: Any,
    models: Mapping[str, Role],
    trained: Collection[str],
    averages: Collection[str] = (),  # roles with averaged weights, in float32
    *,
    reads_models: bool,
) -> dict[str, Any]:
    """Returns a PlannedRun's fields for strategy and models; raises ValueError if the strategy cannot split a model."""
    strategy, precision = trainer.strategy, str(trainer.precision)
    if isinstance(strategy, FSDP2Strategy) and reads_models:
        try:
            strategy.check_sizes(module)
        except OSError as error:  # a model's configuration cannot be loaded
            raise UnknownMemory(error) from error
    is_split, is_3d = isinstance(strategy, FSDP2Strategy), isinstance(strategy, Parallel3DStrategy)
    world = trainer.num_devices * trainer.num_nodes
    is_half = precision in ("bf16-true", "16-true")
    return {
        "roles": tuple(
            _planned_role(
                _placed_role(name, role, world, strategy),
                role,
                module,
                strategy,
                is_trained=name in trained,
                is_half=is_half and name not in averages,
            )
            if reads_models
            else _placed_role(name, role, world, strategy)
            for name, role in models.items()
        ),
        "world": world,
        "layout": "3D" if is_3d else "FSDP2" if is_split else "whole",
        "is_mixed": precision in ("bf16-mixed", "16-mixed", "bf16", "16"),
        "checkpoint_activations": is_split and strategy.activation_checkpointing,
        "reduce_every_microbatch": is_split and strategy.reduce_every_microbatch,
        "keeps_gathered": is_split and not is_3d and not strategy.reshard_after_forward,
        "num_replicas": strategy.num_replicas if is_split else 1,
        "ep": strategy.ep if is_split else 1,
        "offloads": strategy.offload_to_cpu if is_split and strategy.root_device.type != "cpu" else (),
        "num_nodes": trainer.num_nodes,
        "gpus_per_node": trainer.num_devices if trainer.num_nodes > 1 else max(NODE_RANKS, trainer.num_devices),
        "stages_per_rank": strategy.stages_per_rank if is_3d else 1,
        "refusal": _refusals(module, strategy, precision),
    }


def _refusals(module: Any, strategy: Any, precision: str) -> Callable[[PlannedRun], str | None]:
    """Returns a function that returns why the strategy refuses a run's sizes, or None if it accepts them."""
    compiles = strategy.compile_layers if isinstance(strategy, FSDP2Strategy) else None
    is_3d, stages = isinstance(strategy, Parallel3DStrategy), dict[str, Any]()
    if is_3d:
        stages = {"schedule": strategy.schedule, "stages_per_rank": strategy.stages_per_rank}

    @functools.cache
    def refusal(layout: str, world: int, pp: int, tp: int, **options: Any) -> str | None:
        sizes = {"ep": options["ep"], "cp": options["cp"], **stages}
        other: Any = Parallel3DStrategy(pp=pp, tp=tp, **sizes) if layout == "3D" else FSDP2Strategy(**options)
        other.parallel_devices, other.num_nodes = [strategy.root_device] * world, 1
        other.precision_plugin = _precision(precision)
        try:
            other.check_sizes(module)
        except ValueError as error:
            return str(error)
        return None

    def of_run(run: PlannedRun) -> str | None:
        free = next((role for role in run.roles if role.mesh is None), run.roles[0])
        options = {"num_replicas": run.num_replicas, "cp": free.cp, "ep": run.ep, "compile_layers": compiles}
        return refusal(run.layout, run.world, free.pp, free.tp, **options, offload_to_cpu=tuple(run.offloads))

    return of_run


def _placed_role(name: str, role: Role, world: int, strategy: Any) -> PlannedRole:
    """Returns a role with its ranks, but without the size of its model."""
    is_3d, is_split = isinstance(strategy, Parallel3DStrategy), isinstance(strategy, FSDP2Strategy)
    split = (*((strategy.pp, strategy.tp) if is_3d else (1, 1)), strategy.cp if is_split else 1)
    pp, tp, cp = split if role.mesh is None else (role.mesh.pp, role.mesh.tp, 1)
    ranks = range(world) if role.mesh is None else role.mesh.ranks(world)
    size = ModelSize(PretrainedConfig(), (), 0)
    return PlannedRole(name, size, 0, ranks, role.mesh, pp, tp, cp, waits_on_host=role.offload)


def _moment_bytes(module: Any, model: torch.nn.Module, num_trained: int, dtype: torch.dtype) -> float | None:
    """Returns the optimizer state's bytes per trained parameter; None means AdamW's, also for unknown optimizers."""
    arguments: Any = getattr(module.configure_optimizers, "args", ())  # of the `optimizer` section; commands/cli.py
    if not arguments and getattr(module, "optimizer", None) == "muon":  # one number per parameter of a hidden matrix
        num_single = sum(item.numel() for item in hidden_matrices(model) if item.requires_grad)
        return dtype.itemsize * (2 - num_single / max(1, num_trained))
    weight = torch.nn.Parameter(torch.ones(64, 64, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    try:
        optimizer = instantiate_class(([weight],), arguments[1])
        with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(devices=()):
            optimizer.step()
    except Exception:  # noqa: BLE001  # the section names any class
        return None
    tensors = (item for item in optimizer.state[weight].values() if isinstance(item, torch.Tensor) and item.dim())
    return sum(item.nbytes for item in tensors) / weight.numel()


def _planned_role(
    placed: PlannedRole, role: Role, module: Any, strategy: Any, *, is_trained: bool, is_half: bool
) -> PlannedRole:
    """Adds the size of a role's model; raises UnknownMemory if the model's configuration cannot be read here."""
    try:
        role.spec.check_reachable()
        config = role.spec.load_config()
    except (OSError, ValueError) as error:
        raise UnknownMemory(error) from error
    if missing := [size for size in _SIZES if getattr(config.get_text_config(), size, None) is None]:
        raise UnknownMemory(f"the {placed.name}'s config ({config.model_type}) has no {missing[0]}.")
    model = empty_model(role)
    try:
        size = ModelSize.of(model)
    except ValueError as error:
        raise UnknownMemory(f"{placed.name}: {error}") from error
    trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
    compiles = strategy.compile_layers if isinstance(strategy, FSDP2Strategy) else None
    if compiles is None:  # assumes that torch.compile works; `use_estimate` checks the GPU
        is_3d = isinstance(strategy, Parallel3DStrategy)
        compiles = strategy.root_device.type == "cuda" and not is_3d and may_be_compiled(model)
    width = 2 if is_half else next(model.parameters()).element_size()
    trains_half = width == 2 and trained == size.parameters  # adapters are float32 on any base
    return replace(
        placed,
        size=size,
        trained=trained if is_trained else 0,
        is_compiled=compiles,
        in_4_bits=0 if role.spec.quantization is None else size.in_layers - size.expert_parameters - trained,
        width=width,
        moment_bytes=_moment_bytes(module, model, trained, torch.bfloat16 if trains_half else torch.float32),
    )


def _bound(data: Any, setting: str, module: RLModule | SupervisedModule | None) -> tuple[int, str]:
    """Returns the maximum number of tokens in a prompt or row, and its origin; the context of `module` may lower it."""
    given = getattr(data, setting, None)
    tokens, source = (_ASSUMED_TOKENS, f"assumed; set data.{setting}") if given is None else (given, f"data.{setting}")
    limit = None if module is None else module.max_prompt_tokens
    return (tokens, source) if limit is None or tokens < limit else (limit, "limited by the context")


def _num_scores(module: RLModule) -> int:
    """Returns the maximum number of float32 values per token, also counting advantages that may be per trajectory."""
    outputs = {key for call in module.model_calls() for key in call.outputs} - {"bootstrap_values"}
    topk = int(getattr(module, "teacher_topk", None) or 0)
    listed = {"teacher_topk_ids": 2 * topk, "teacher_topk_logprobs": topk}  # ids are int64, twice as large
    sampled = 3 * module.sampling.topk_logprobs  # behavior_topk_ids, which are also int64, and behavior_topk_logprobs
    return sum(listed.get(key, 1) for key in outputs) + sampled + len(module.advantage_keys)
