"""Models without memory, and their weights: rank 0 reads one tensor at a time, every rank keeps its shard.

So a model that fits into no rank's memory can be trained. Buffers get memory from the start: they are small, and those
that are not saved (the angles of rotary embeddings) would be garbage if they were created on the meta device.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lightrl.models import ModelSpec, Role
from lightrl.models.images import sees_images
from lightrl.models.lora import adapter_reader, base_name, is_adapter
from lightrl.models.model_spec import check_files
from lightrl.strategies.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_ROLE = "lightrl_role"  # attribute of a model without weights: where to get them


def empty_model(role: Role) -> PreTrainedModel:
    """The role's model with its buffers but without its weights, which `fill_model` loads."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

    spec = role.spec
    config = spec.load_config()
    if sees_images(config):
        raise ValueError(
            f"Models with images (here {config.model_type!r}) can only be trained in one process so far. Set "
            "trainer.strategy to auto and trainer.devices to 1."
        )
    kind = AutoModelForCausalLM
    if spec.head == "scalar":
        kind, config.num_labels = AutoModelForSequenceClassification, 1
    with torch.device("cpu"), _parameters_on_meta(), torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = kind.from_config(
            config, trust_remote_code=spec.trust_remote_code, **spec.build_options
        )
    if spec.path is not None:
        with contextlib.suppress(OSError):  # it is optional
            model.generation_config = GenerationConfig.from_pretrained(spec.path)
    if role.lora is not None:
        with _parameters_on_meta():
            role.lora.add_to(model)
    setattr(model, _ROLE, role)
    return model.eval()


def take_role(model: torch.nn.Module) -> Role | None:
    """Returns the source of the weights of a model without memory, once; None if it has its weights."""
    role: Role | None = vars(model).pop(_ROLE, None)
    return role


def fill_model(model: torch.nn.Module, role: Role, device: torch.device, ranks: Ranks) -> None:
    """Gives a sharded model of `empty_model` its weights: one rank reads, every rank keeps its shards; collective.

    Args:
        device: of the shards.
        ranks: of the model's mesh, the first of which reads.
    """
    give_memory(model, device)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # type: ignore[operator]
    names = [base_name(name) for name, _ in model.named_parameters() if not is_adapter(name)]
    read = parameter_reader(role.spec, names) if ranks.is_main else None
    read_adapter = None if role.lora is None else adapter_reader(role.lora, role.spec.random_seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if read is None:
                whole = None
            elif read_adapter is not None and is_adapter(name):
                whole = read_adapter(name, parameter.shape)
            else:
                whole = read(base_name(name))
            _fill(parameter, whole)
            ranks.step()


def give_memory(model: torch.nn.Module, device: torch.device) -> None:
    """Moves a model without memory to a device: parameters uninitialized, buffers with their values."""
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
    """Distributes rank 0's tensor to the shards of a parameter."""
    shape, dtype = parameter.shape, parameter.dtype
    if whole is not None and whole.shape != shape:
        raise ValueError(
            f"A parameter of the checkpoint has shape {tuple(whole.shape)}, but config.json says {tuple(shape)}. Use a "
            "config and a checkpoint that belong together."
        )
    assert isinstance(parameter, DTensor), "fully_shard makes all of them DTensors"
    home = parameter.device_mesh.device_type
    sent = torch.empty(shape, dtype=dtype, device=home) if whole is None else whole.to(home, dtype)
    shard = distribute_tensor(sent, parameter.device_mesh, parameter.placements)
    parameter.to_local().copy_(shard.to_local())


def parameter_reader(spec: ModelSpec, names: list[str]) -> Callable[[str], Tensor]:
    """Reads parameters by name, from safetensors files if those hold all of them, otherwise from a model in memory."""
    files = _safetensors(spec)
    missing = [name for name in names if name not in files]
    if not missing:
        return lambda name: _read_tensor(files[name], name)
    if spec.path is not None:
        shares = f"{len(missing)} of {len(names)} are missing"
        advice = "so tensors cannot be read one by one. Rank 0 loads the whole model into memory"
        log.warning("%s lacks tensor %r (%s), %s.", spec.path, missing[0], shares, advice)
    parameters = dict(spec.load_model().named_parameters())
    return lambda name: parameters[name].detach()


def _safetensors(spec: ModelSpec) -> dict[str, Path]:
    """The file of each tensor; empty if the checkpoint has another form."""
    if spec.path is None or spec.options:
        return {}
    check_files(Path(spec.path))
    from safetensors import safe_open
    from transformers.utils import cached_file

    def find(name: str) -> Path | None:
        path = cached_file(spec.path, name, _raise_exceptions_for_missing_entries=False)
        return None if path is None else Path(path)

    index = find("model.safetensors.index.json")
    if index is not None:
        file_by_name: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = {name: find(name) for name in set(file_by_name.values())}
        return {name: path for name, file in file_by_name.items() if (path := files[file]) is not None}
    single = find("model.safetensors")
    if single is None:
        return {}
    with safe_open(single, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), single)


def _read_tensor(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        return cast(Tensor, tensors.get_tensor(name))


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, a parameter loses its memory as soon as a module registers it; buffers keep theirs."""
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
