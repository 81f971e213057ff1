"""Converts parameter names and layouts between checkpoints or servers and a model's modules, in both directions.

transformers fuses the experts of a MoE block into one parameter and renames parts of models with a vision tower. Its
semi-private functions convert in both directions; SEMI_PRIVATE lists those that lightrl imports.

    folder, servers                                 module
    mlp.experts.0.gate_proj.weight [I, H] … E  ◄─►  mlp.experts.gate_up_proj [E, 2I, H]
    mlp.experts.0.up_proj.weight   [I, H] … E
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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

_RULES = "lightrl_conversions"  # the attribute of a model that holds its conversion rules
NEEDED = "5.23"  # the oldest release of transformers that works
# Undocumented functions and classes in transformers that lightrl uses, by module.
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
    """Returns a name in SEMI_PRIVATE; raises ImportError with the required release if transformers lacks it."""
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
    """Returns transformers' conversion rules for a model. Call it once before sharding renames the model's class."""
    rules: list[Any] | None = vars(model).get(_RULES)
    if rules is None:
        rules = semi_private("get_model_conversion_mapping")(model, add_legacy=False)
        setattr(model, _RULES, rules)
    return rules


def keep_first_axis(model: PreTrainedModel) -> bool:
    """Whether all conversions are known to keep the first axis, so row i of a parameter needs only row i of a file."""
    for rule in conversions(model):
        for operation in getattr(rule, "operations", ()):
            kind = type(operation).__name__
            keeps_axis = kind == "MergeModulelist" or (kind == "Concatenate" and operation.dim > 0)
            if kind == "Transpose":
                keeps_axis = 0 not in (operation.dim0, operation.dim1)
            if not keeps_axis or len(rule.target_patterns) > 1:
                return False
    return True


def checkpoint_tensors(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Returns the checkpoint's tensors for one parameter, keyed by name: views of `tensor` or of one converted copy.

    Args:
        name: the parameter's name in the base.
        tensor: the whole parameter, not a shard.

    Raises:
        ValueError: if the model's checkpoint stores several parameters in one tensor.
    """
    if getattr(model, "_weight_conversions", None) is None:  # a model that was not loaded has no prefix to restore
        prefix = semi_private("PrefixChange")
        model._weight_conversions = [rule for rule in conversions(model) if not isinstance(rule, prefix)]
    for rule in model._weight_conversions or ():
        if hasattr(rule, "operations") and len(rule.target_patterns) > 1:
            raise ValueError(
                f"{type(model).__name__} cannot be sent to servers: its checkpoint puts {rule.target_patterns} in one "
                f"tensor, {rule.source_patterns[0]!r}, but parameters are sent one at a time. Use LocalEngine."
            )
    tensors: dict[str, Tensor] = semi_private("revert_weight_conversion")(model, {name: tensor.detach()})
    return tensors


def as_in_checkpoint(model: PreTrainedModel, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Converts the result of `whole_parameters` to a checkpoint's tensors; leaves added weights unchanged."""
    tuning = tuning_of(model)
    for name, tensor in pairs:
        yield from ({name: tensor} if tuning.adds(name) else checkpoint_tensors(model, name, tensor)).items()


class _Slice:
    """A tensor in a file; indexing reads only that part."""

    def __init__(self, content: Any, on_tensor: Callable[[], None]) -> None:
        self._content = content
        self._on_tensor = on_tensor

    def get_shape(self) -> Any:
        self._on_tensor()  # each rank calls this once, even if it holds no part of the tensor
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
    """Loads a checkpoint into a model, replacing its parameters. Reads only this rank's shards of sharded parameters.

    Args:
        model: already on `device`; weights added by its tuning stay unchanged.
        spec: a model with files; see `checkpoint_files`.
        on_tensor: called once for each sharded tensor of the checkpoint, even if this rank reads no part of it.
        renamed: parameter name → ending of its tensor's name in the checkpoint.
        is_whole: False if the model is only a stage of the checkpoint's model.

    Raises:
        ValueError: if a weight is missing, has a different shape than in the config, is not finite, or differs from
            the weight that it is tied to.
    """
    from safetensors import safe_open

    opened: list[Any] = [safe_open(file, framework="pt") for file in checkpoint_files(spec)]
    slices = {name: _Slice(file.get_slice(name), on_tensor) for file in opened for name in file.keys()}  # noqa: SIM118
    for name, ending in (renamed or {}).items():
        shape, dtype = list(model.get_parameter(name).shape), spec.build_options["dtype"]
        candidates = [key for key in slices if key.endswith(ending)]  # tensors of other towers differ in shape
        source = min(candidates, key=lambda key: list(slices[key].get_shape()) != shape, default=None)
        if source is not None:
            if name in slices and not torch.equal(*(slices[key][:].to(dtype) for key in (name, source))):
                raise _untied(spec, name)
            slices[name] = slices[source]
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    config = semi_private("LoadStateDictConfig")(
        dtype=spec.build_options["dtype"], device_map={"": device}, weight_mapping=conversions(model)
    )
    tuning = tuning_of(model)
    with tuning.base_modules(model), _local_shapes(model), _one_at_a_time(), without_bars():
        info, _ = semi_private("convert_and_load_state_dict_in_model")(model, slices, config)
        # A checkpoint may store a tied weight under only one of its names, and a stage may hold it under the other.
        tied: dict[str, str] = (getattr(model, "all_tied_weights_keys", None) or {}) if is_whole else {}
        for name, source in tied.items():
            is_read = not {name, source} & info.missing_keys
            if is_read and not torch.equal(model.get_parameter(name), model.get_parameter(source)):
                raise _untied(spec, name)
        model._adjust_missing_and_unexpected_keys(info)  # removes names that the family allows to be missing or extra
        # With more ranks than experts, some ranks hold none, and conversion rules do not create empty tensors.
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
        f"The config of {spec.path!r} ties its embedding to {name!r}, but in the checkpoint their values differ. Set "
        "tie_word_embeddings to false in its config.json."
    )


def checkpoint_files(spec: ModelSpec) -> list[Path]:
    """Returns a model's safetensors files, from a folder or the hub; empty if `load_parts` cannot read the model."""
    if spec.path is None or spec.options:
        return []
    from transformers.utils import cached_file

    find = functools.partial(cached_file, spec.path, _raise_exceptions_for_missing_entries=False)
    index = find("model.safetensors.index.json")
    names = {"model.safetensors"} if index is None else set(json.loads(Path(index).read_text())["weight_map"].values())
    return [Path(file) for name in sorted(names) if (file := find(name)) is not None]


@contextlib.contextmanager
def _local_shapes(model: PreTrainedModel) -> Iterator[None]:
    """Makes `get_parameter` return this rank's shard: some rules compare its shape with the tensor they read."""
    get_whole = model.get_parameter

    def get_shard(name: str) -> Tensor:
        parameter: Any = get_whole(name)
        shard: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        return shard

    model.get_parameter = get_shard
    try:
        yield
    finally:
        del model.get_parameter


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Makes transformers read each tensor only when needed; its threads could otherwise hold the whole model."""
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
    """Hides Hugging Face's progress bar for files, which would break the run's progress bar."""
    from transformers.utils import logging as transformers_logging

    if not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
