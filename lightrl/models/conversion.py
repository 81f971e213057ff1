"""Conversion between the names and layouts of checkpoints and servers and those of a model's modules.

transformers fuses the experts of a mixture into one parameter and renames parts of models with a vision tower. Both
directions use its functions. These are semi-private: SEMI_PRIVATE lists those that lightrl imports.

    folder, servers                                 module
    mlp.experts.0.gate_proj.weight [I, H] … E  ◄─►  mlp.experts.gate_up_proj [E, 2I, H]
    mlp.experts.0.up_proj.weight   [I, H] … E
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightrl.models.model_spec import ModelSpec, check_loaded
from lightrl.models.tuning import tuning_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Names of exported parameters: as in the model's modules, or as in its checkpoint.
Names = Literal["module", "checkpoint"]

_RULES = "lightrl_conversions"  # attribute of a model: the rules for its names
NEEDED = "5.23"  # release of transformers
# Functions and classes that lightrl uses beyond transformers' documented interface, by module.
SEMI_PRIVATE = {
    "transformers.conversion_mapping": ("get_model_conversion_mapping",),
    "transformers.core_model_loading": (
        "PrefixChange",
        "convert_and_load_state_dict_in_model",
        "revert_weight_conversion",
    ),
    "transformers.distributed.expert_parallel": ("apply_expert_parallelism",),
    "transformers.distributed.pipeline_parallel": ("PipelineIdentityLayer",),
    "transformers.modeling_utils": ("LoadStateDictConfig",),
}


def semi_private(name: str) -> Any:
    """Returns the function or class of transformers; raises ImportError with the needed release if it is missing."""
    module = next(module for module, names in SEMI_PRIVATE.items() if name in names)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        import transformers

        raise ImportError(
            f"lightrl needs {module}.{name} of transformers >= {NEEDED}, got {transformers.__version__}. Install that "
            "release."
        ) from error


def conversions(model: PreTrainedModel) -> list[Any]:
    """Returns the rules between checkpoint and module names; called before sharding, which renames a model's class."""
    rules: list[Any] | None = vars(model).get(_RULES)
    if rules is None:
        rules = semi_private("get_model_conversion_mapping")(model, add_legacy=False)
        setattr(model, _RULES, rules)
    return rules


def keep_first_axis(model: PreTrainedModel) -> bool:
    """Whether a slice of a parameter along the first axis needs only the same slice of its checkpoint's tensors."""
    for rule in conversions(model):
        for operation in getattr(rule, "operations", ()):
            kind = type(operation).__name__
            is_apart = kind == "MergeModulelist" or (kind == "Concatenate" and operation.dim > 0)
            if kind == "Transpose":
                is_apart = 0 not in (operation.dim0, operation.dim1)
            if not is_apart or len(rule.target_patterns) > 1:
                return False
    return True


def checkpoint_tensors(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Returns the checkpoint's tensors for one parameter, by name: views of `tensor`, or of one copy of its parts.

    Args:
        name: of the parameter in the model's base.
        tensor: the whole parameter, not a shard.

    Raises:
        ValueError: if one tensor of the model's checkpoint holds several parameters.
    """
    if getattr(model, "_weight_conversions", None) is None:  # a model that was not loaded has no prefix to restore
        prefix = semi_private("PrefixChange")
        model._weight_conversions = [one for one in conversions(model) if not isinstance(one, prefix)]
    for rule in model._weight_conversions or ():
        if hasattr(rule, "operations") and len(rule.target_patterns) > 1:
            raise ValueError(
                f"{type(model).__name__} cannot be sent to servers: its checkpoint joins {rule.target_patterns} in one "
                f"tensor, {rule.source_patterns[0]!r}, but parameters are sent one at a time. Use LocalEngine."
            )
    tensors: dict[str, Tensor] = semi_private("revert_weight_conversion")(model, {name: tensor.detach()})
    return tensors


def exported_tensors(model: PreTrainedModel, names: Names, name: str, sources: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns the tensors to export for a name of `Tuning.sources`, from its whole sources."""
    tuning = tuning_of(model)
    tensor = tuning.merge(model, name, sources)
    return {name: tensor} if names == "module" or tuning.adds(name) else checkpoint_tensors(model, name, tensor)


class _Slice:
    """A tensor in a file; only the indexed part is read."""

    def __init__(self, content: Any, on_tensor: Callable[[], None]) -> None:
        self._content = content
        self._on_tensor = on_tensor

    def get_shape(self) -> Any:
        self._on_tensor()  # each rank asks once, even if it holds no part of the tensor
        return self._content.get_shape()

    def __getitem__(self, index: Any) -> Any:
        return self._content[index]


def load_parts(
    model: PreTrainedModel,
    spec: ModelSpec,
    *,
    device: torch.device,
    on_tensor: Callable[[], None] = lambda: None,
    renamed: Mapping[str, str] | None = None,
    is_whole: bool = True,
) -> None:
    """Reads a checkpoint into a model, replacing its parameters; reads only this rank's shards of sharded ones.

    Args:
        model: on `device`; weights that its tuning has added stay unchanged.
        spec: has files, see `checkpoint_files`.
        on_tensor: called once for each sharded tensor of the checkpoint, even if this rank reads nothing of it.
        renamed: maps a parameter's name to the end of the name of the checkpoint's tensor for it.
        is_whole: False if the model is only a part, so that the checkpoint has other weights too.

    Raises:
        ValueError: if a weight is missing, does not have the config's shape, is not finite, or is tied but has
            different values.
    """
    from safetensors import safe_open

    opened: list[Any] = [safe_open(file, framework="pt") for file in checkpoint_files(spec)]
    slices = {name: _Slice(file.get_slice(name), on_tensor) for file in opened for name in file.keys()}  # noqa: SIM118
    for name, end in (renamed or {}).items():
        shape, dtype = list(model.get_parameter(name).shape), spec.build_options["dtype"]
        names = [one for one in slices if one.endswith(end)]  # one may belong to another tower
        source = min(names, key=lambda one: list(slices[one].get_shape()) != shape, default=None)
        if source is not None:
            if name in slices and not torch.equal(*(slices[one][:].to(dtype) for one in (name, source))):
                raise _untied(spec, name)
            slices[name] = slices[source]
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    config = semi_private("LoadStateDictConfig")(
        dtype=spec.build_options["dtype"], device_map={"": device}, weight_mapping=conversions(model)
    )
    tuning = tuning_of(model)
    with tuning.base_modules(model), _local_shapes(model), _one_at_a_time(), without_bars():
        info, _ = semi_private("convert_and_load_state_dict_in_model")(model, slices, config)
        # A checkpoint may omit a tied weight's second name; a part may hold the weight only under that name.
        tied: dict[str, str] = (getattr(model, "all_tied_weights_keys", None) or {}) if is_whole else {}
        for name, source in tied.items():
            is_read = not {name, source} & info.missing_keys
            if is_read and not torch.equal(model.get_parameter(name), model.get_parameter(source)):
                raise _untied(spec, name)
        model._adjust_missing_and_unexpected_keys(info)  # names that the family may omit or ignore
        # With more ranks than experts some ranks hold none, and no rule makes an empty tensor.
        empty = {name for name, _ in model.named_parameters() if model.get_parameter(name).numel() == 0}
        missing = set(info.missing_keys) - empty - set(tied)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if info.mismatched_keys:
        name, shape, expected = sorted(info.mismatched_keys)[0]
        raise ValueError(
            f"Weight {name!r} of {spec.path!r} has shape {tuple(shape)} on this rank, but config.json says "
            f"{tuple(expected)}. Use a config and a checkpoint that belong together."
        )
    if errors := sorted(pair for pair in info.conversion_errors.items() if pair[0] not in empty):
        name, problem = errors[0]
        raise ValueError(f"Weight {name!r} of {spec.path!r} cannot be converted: {problem}. Use an intact checkpoint.")
    if is_whole:
        model.tie_weights()
    with tuning.base_modules(model):  # added weights have no values yet
        check_loaded(f"Model {spec.path!r}", model, missing, info.unexpected_keys if is_whole else ())


def _untied(spec: ModelSpec, name: str) -> ValueError:
    return ValueError(
        f"The config of {spec.path!r} ties its embedding to {name!r}, but the checkpoint has other values for it. Set "
        "tie_word_embeddings to false in its config.json."
    )


def checkpoint_files(spec: ModelSpec) -> list[Path]:
    """Returns a model's safetensors files, from a folder or the hub; empty if its tensors cannot be read one by one."""
    if spec.path is None or spec.options:
        return []
    from transformers.utils import cached_file

    def find(name: str) -> Path | None:
        path = cached_file(spec.path, name, _raise_exceptions_for_missing_entries=False)
        return None if path is None else Path(path)

    index = find("model.safetensors.index.json")
    names = {"model.safetensors"} if index is None else set(json.loads(index.read_text())["weight_map"].values())
    files = [find(name) for name in sorted(names)]
    return [file for file in files if file is not None]


@contextlib.contextmanager
def _local_shapes(model: PreTrainedModel) -> Iterator[None]:
    """Inside, `get_parameter` returns this rank's part. Some rules compare its shape with the tensor they read."""
    whole = model.get_parameter

    def part(name: str) -> Tensor:
        parameter: Any = whole(name)
        held: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        return held

    model.get_parameter = part
    try:
        yield
    finally:
        del model.get_parameter


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Inside, each tensor is read when it is needed; transformers' threads could read the whole model ahead."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Hides Hugging Face's progress bar for files, which would interrupt the run's progress bar."""
    from transformers.utils import logging as transformers_logging

    if not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
