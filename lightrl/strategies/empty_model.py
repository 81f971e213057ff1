"""Builds models on the meta device and loads their weights: each rank reads its shards, one tensor at a time.

A model may therefore be larger than one rank's memory. Buffers are allocated immediately: they are small, and
non-persistent ones (such as rotary embedding frequencies) would hold garbage if they were created on the meta device.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from lightrl.models import Role, new_model
from lightrl.models.conversion import checkpoint_files, keep_first_axis, load_parts
from lightrl.models.model_spec import check_files
from lightrl.models.tuning import held_tensors
from lightrl.strategies.ranks.planned_gather import box_of, part_at
from lightrl.strategies.ranks.processes import Ranks

log = logging.getLogger(__name__)

_ROLE = "lightrl_role"  # the attribute that holds the role of a model without weights
_MAX_BUFFER = 2**20  # elements


def empty_model(role: Role) -> PreTrainedModel:
    """Builds the role's model with buffers but without weights; `fill_model` loads the weights.

    Raises:
        ValueError: for a quantized checkpoint, or a tuning that needs whole parameters.
    """
    from transformers import AutoModelForSequenceClassification, GenerationConfig

    spec = role.spec
    config = spec.load_config()
    if any(getattr(part, "quantization_config", None) for part in (config, config.get_text_config())):
        raise ValueError(
            f"Model {spec.path or spec.config!r} is quantized, so ranks would read its weights without their scales. "
            "Use its unquantized checkpoint, or dequantize it and save it with save_pretrained."
        )
    make = new_model
    if spec.head == "scalar":
        make, config.num_labels = AutoModelForSequenceClassification.from_config, 1
    with torch.device("cpu"), _UninitializedOnMeta(), _parameters_on_meta(), torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = make(config, trust_remote_code=spec.trust_remote_code, **spec.build_options)
    if spec.path is not None:
        with contextlib.suppress(OSError):  # this file is optional
            model.generation_config = GenerationConfig.from_pretrained(spec.path)
    with _UninitializedOnMeta(), _parameters_on_meta():
        role.tuning.add_to(model)
    setattr(model, _ROLE, role)
    return model.eval()


def take_role(model: torch.nn.Module) -> Role | None:
    """Removes and returns the role of a model whose weights are not loaded yet; None if they are."""
    role: Role | None = vars(model).pop(_ROLE, None)
    return role


def fill_model(model: PreTrainedModel, role: Role, device: torch.device, ranks: Ranks) -> None:
    """Loads the weights of a sharded model that `empty_model` built; collective.

    Each rank of the model's mesh reads its shards from the checkpoint's files. Rank 0 creates random weights and the
    parameters that the tuning adds, and sends each rank its shards.
    """
    allocate(model, device)
    if ranks.is_main and role.spec.path is not None:
        check_files(Path(role.spec.path))
    has_files = bool(checkpoint_files(role.spec)) and keep_first_axis(model)
    if has_files:
        load_parts(model, role.spec, device=device, on_tensor=ranks.step)
    else:
        model.tie_weights()
    added = role.tuning.added_values(role.spec.random_seed)
    loaded: dict[str, Tensor] = {}
    if not has_files and ranks.is_main:
        if role.spec.path is not None:
            log.warning("Rank 0 loads all of %s into memory, because ranks cannot read parts of it.", role.spec.path)
        loaded = held_tensors(role.spec.load_model())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if role.tuning.adds(name):
                _fill(parameter, added(name, parameter.shape) if ranks.is_main else None)
            elif not has_files:
                _fill(parameter, loaded.pop(role.tuning.base_name(name)) if ranks.is_main else None)
            ranks.step()
        if not has_files:  # only buffers remain
            model.load_state_dict(ranks.broadcast_tensors(loaded), strict=False)


def allocate(model: torch.nn.Module, device: torch.device) -> None:
    """Moves a model from the meta device to `device`: parameters are uninitialized, buffers keep their values."""
    buffers = [
        (module, name, buffer.to(device))
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if not buffer.is_meta
    ]
    model.to_empty(device=device)
    for module, name, buffer in buffers:
        setattr(module, name, buffer)


def _fill(parameter: Tensor, whole: Tensor | None) -> None:
    """Distributes rank 0's whole tensor to a parameter's shards; `whole` is None on other ranks."""
    assert isinstance(parameter, DTensor), "fully_shard makes all parameters DTensors"
    device, shape, dtype = parameter.device_mesh.device_type, parameter.shape, parameter.dtype
    sent = torch.empty(shape, dtype=dtype, device=device) if whole is None else whole.to(device, dtype)
    placements = parameter.placements
    if all(placement.is_shard() or placement.is_replicate() for placement in placements):
        part = distribute_tensor(sent, parameter.device_mesh, placements).to_local()
    else:  # torch cannot cut experts divided over ranks into unequal shards
        everywhere = [Replicate()] * len(placements)
        part = part_at(distribute_tensor(sent, parameter.device_mesh, everywhere).to_local(), box_of(parameter))
    parameter.to_local().copy_(part)


class _UninitializedOnMeta(TorchFunctionMode):
    """Inside the context, `torch.empty` makes large tensors on the meta device, since some in DeepSeek-V3 take 30 GB.

    Small tensors are allocated, since they may be buffers that the constructor fills.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            tensor = func(*args, **{**kwargs, "device": "meta"})
            if tensor.numel() > _MAX_BUFFER:
                return tensor
        return func(*args, **kwargs)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside the context, parameters move to the meta device as modules register them; buffers stay allocated."""
    register = torch.nn.Module.register_parameter

    def register_on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
