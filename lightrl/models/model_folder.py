"""Model folders in Hugging Face's form: what a checkpoint must say so that one can be made of it, and whole writes.

A folder is always whole: it is written beside its place, under a hidden name, and takes it when it is complete.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from lightrl.checks.disk_errors import is_disk_full, write_problem
from lightrl.models.lora import LoRA, adapter_config, is_adapter, merged_parameters, save_adapter
from lightrl.models.model_spec import ModelSpec, scalar_head
from lightrl.models.pictures import save_processor, sees_pictures
from lightrl.models.role import Role

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# What `save_pretrained` of models and tokenizers writes. A folder with anything else in it is no export to replace.
_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".txt", ".model", ".bin", ".py"})

# Families whose scalar head has a bias in SGLang and none in transformers.
_BIASED_IN_SGLANG = frozenset({"qwen2", "qwen3"})

HEAD_STAYS_BEHIND = (
    "The critic's head on the policy's body is not part of it: a run that starts there begins with a new head. A "
    "resume from the checkpoint keeps it, and role critic exports body and head as a model of its own."
)


@dataclass(frozen=True)
class ModelDescription:
    """All of a model but its weights, as plain data: travels in a checkpoint, so that the checkpoint can be exported.

    Example:
        ModelDescription("transformers.Qwen3ForCausalLM", config='{"model_type": "qwen3", ...}',
                         generation_config=None, tokenizer="Qwen/Qwen3-0.6B")

    With LoRA the checkpoint holds adapters only, and this says what they belong to. A critic that is a head on another
    role's body is described as the model of its own that `with_head` makes of the two.
    """

    model_class: str  # dotted path
    config: str  # JSON
    generation_config: str | None  # JSON
    tokenizer: str | None  # as in ModelSpec; None: no tokenizer is known
    adapter_config: str | None = None  # JSON, as in peft's folders; None: no adapters
    base: str | None = None  # JSON, the ModelSpec of the model without adapters
    body: str | None = None  # the role whose weights this one has, below its own head; None: they are its own

    @classmethod
    def of(cls, model: PreTrainedModel, role: Role) -> ModelDescription:
        """Of a role's model, whose weights may be sharded or on no device."""
        kind = next(base for base in type(model).__mro__ if not base.__name__.startswith("FSDP"))
        generation_config = getattr(model, "generation_config", None)
        spec = role.spec
        lora: dict[str, str] = {}
        if role.lora is not None:
            base = asdict(replace(spec, seed=spec.random_seed))
            lora = {"adapter_config": adapter_config(model, spec.path), "base": json.dumps(base)}
        return cls(
            model_class=f"{kind.__module__}.{kind.__name__}",
            config=model.config.to_json_string(use_diff=False),
            generation_config=None if generation_config is None else generation_config.to_json_string(use_diff=False),
            tokenizer=spec.tokenizer or spec.path,
            **lora,
        )

    @classmethod
    def of_critic(cls, policy: PreTrainedModel, role: Role) -> ModelDescription | None:
        """Of a critic that is a head on this policy's body; None if its family has no model with a scalar head."""
        from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as KINDS

        if sees_pictures(policy.config) or type(policy.config) not in KINDS:
            return None
        kind = KINDS[type(policy.config)]
        config = copy.deepcopy(policy.config)
        config.num_labels = 1
        return replace(
            cls.of(policy, role.with_scalar_head()),
            model_class=f"{kind.__module__}.{kind.__name__}",
            config=config.to_json_string(use_diff=False),
            generation_config=None,
            body="policy",
        )

    def with_head(self, body: Mapping[str, torch.Tensor], weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """What `save` takes for a critic on another role's body.

        Args:
            body: that role's weights; its own head is left out.
            weight: of the critic's head, [1, hidden size].
        """
        prefix = f"{self._model_class().base_model_prefix}."
        return {**{name: value for name, value in body.items() if name.startswith(prefix)}, "score.weight": weight}

    def save(self, tensors: Mapping[str, torch.Tensor], folder: Path, *, merged: bool = False) -> None:
        """Writes the model to a folder: in Hugging Face's form, or with LoRA in peft's, adapters only.

        Args:
            tensors: what a checkpoint has of it: all weights, or with LoRA those that are trained.
            folder: exists.
            merged: with LoRA, the whole model with the adapters merged into its weights. A critic or a reward model is
                always written so, for its head is trained too.
        """
        config = self.adapter_config
        if config is not None and not merged and all(is_adapter(name) for name in tensors):
            save_adapter(tensors, config, folder)
        else:
            save_model(self.build(tensors), folder)
            self._save_processor(folder)

    def _save_processor(self, folder: Path) -> None:
        """The image processor of a model that sees pictures, from where the model came from."""
        from transformers import AutoConfig

        values = json.loads(self.config)
        source = values.pop("_name_or_path", "")
        if "vision_config" in values:
            config = AutoConfig.for_model(values.pop("model_type"), **values)
            config.name_or_path = source
            save_processor(config, folder)

    def build(self, tensors: Mapping[str, torch.Tensor]) -> PreTrainedModel:
        """The model with these weights, which it takes over without a copy; adapters are merged into the base.

        Args:
            tensors: under the names of the model's `state_dict`; the second name of a shared weight may be missing.

        Raises:
            ValueError: if a weight is missing or has another name or shape.
        """
        import torch

        if self.adapter_config is not None and any(is_adapter(name) for name in tensors):
            tensors = self._merged(tensors)
        model_class = self._model_class()
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(self.config, encoding="utf-8")
            config = model_class.config_class.from_pretrained(folder)
            generation_config = None
            if self.generation_config is not None:
                from transformers import GenerationConfig

                (Path(folder) / "generation_config.json").write_text(self.generation_config, encoding="utf-8")
                generation_config = GenerationConfig.from_pretrained(folder)
        dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        config.dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
        with torch.device("meta"):
            model: PreTrainedModel = model_class(config)
        if generation_config is not None:
            model.generation_config = generation_config
        try:
            unexpected = model.load_state_dict(dict(tensors), strict=False, assign=True).unexpected_keys
            problem = f"there is no {unexpected[0]!r} in it" if unexpected else ""
        except RuntimeError as error:
            problem = str(error)
        model.tie_weights()
        missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if missing and not problem:
            problem = f"{missing[0]!r} is missing"
        if problem:
            raise ValueError(
                f"The weights do not fit {self.model_class}: {problem}. Export with the transformers release that the "
                "checkpoint was made with."
            )
        return model

    def _model_class(self) -> Any:
        module, _, name = self.model_class.rpartition(".")
        return getattr(importlib.import_module(module), name)

    def _merged(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights of the base, which comes from where it came from, with the adapters merged into it."""
        assert self.adapter_config is not None
        assert self.base is not None
        model = ModelSpec(**json.loads(self.base)).load_model()
        with tempfile.TemporaryDirectory() as folder:
            save_adapter(tensors, self.adapter_config, Path(folder))
            LoRA(adapter=folder).add_to(model)
        head = scalar_head(model)
        if head is not None:
            own = {name.removeprefix("score."): tensor for name, tensor in tensors.items() if name.startswith("score.")}
            head.load_state_dict(own)
        return {name: tensor.detach() for name, tensor in merged_parameters(model)}


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """`save_pretrained`; beside a scalar head that SGLang gives a bias, a bias of 0 in a file of its own.

    transformers' Qwen2 and Qwen3 heads have none and would report one in the model's file; SGLang reads all files of a
    folder without an index, and fills a bias that it does not find with a random number.
    """
    from safetensors.torch import save_file

    model.save_pretrained(folder)
    head = scalar_head(model)
    if head is None or "bias" in head.state_dict() or model.config.model_type not in _BIASED_IN_SGLANG:
        return
    bias = head.weight.new_zeros(1, device="cpu")
    save_file({"score.bias": bias}, folder / "score_bias.safetensors", metadata={"format": "pt"})


def check_model_folder(to: Path, *, asked_by: str, source: str = "") -> None:
    """Refuses a folder whose content an export must not replace.

    Args:
        to: where the export shall be.
        asked_by: the setting, for the message.
        source: where the model comes from.

    Raises:
        ValueError: if it is a file, holds something that is no export, or is `source`.
    """
    if to.exists() and not to.is_dir():
        raise ValueError(f"{asked_by} got to={str(to)!r}, a file, expected a folder. Name another one.")
    if source and Path(source).is_dir() and Path(source).resolve() == to.resolve():
        raise ValueError(
            f"{asked_by} got to={str(to)!r}, the folder that the policy is loaded from, expected another: it would be "
            "replaced, and the run could not be repeated. Name another folder."
        )
    found = sorted(to.iterdir()) if to.is_dir() else []
    foreign = [path.name for path in found if not path.is_file() or path.suffix not in _SUFFIXES]
    if foreign or (found and not any((to / name).exists() for name in ("config.json", "adapter_config.json"))):
        raise ValueError(
            f"{asked_by} got to={str(to)!r}, which holds {(foreign or [found[0].name])[0]!r}, expected an empty folder "
            "or an earlier export, since all in it is replaced. Name another folder, or empty it."
        )


@contextlib.contextmanager
def replaced_folder(to: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `to` when the block ends well; on an exception `to` stays as it was."""
    place = to.absolute()
    unfinished = place.with_name(f".{place.name}.unfinished-{os.getpid()}")
    replaced = place.with_name(f".{place.name}.replaced-{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        with _without_bars():
            yield unfinished
        # Two renames, for a folder cannot be renamed onto a full one; killed between, the old one is at `replaced`.
        if place.exists():
            place.rename(replaced)
        unfinished.rename(place)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not is_disk_full(error):
            raise
        raise OSError(
            f"The model could not be exported to {to}: {write_problem(error, place)}, expected room for a whole model "
            "beside the earlier export. Free some, or name another folder; the earlier export is still whole."
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


Models = Mapping[str, tuple["PreTrainedModel", Role]]  # a module's models, by the name of the role


def keep_trained(checkpoint: dict[str, Any], models: Models, saved: Collection[str]) -> None:
    """Takes out of a checkpoint what comes back from where it came from, and describes the models that stay in it.

    Args:
        checkpoint: with `state_dict`, whose names begin with those of the roles.
        models: all models of the module.
        saved: the roles that the checkpoint keeps; with LoRA, what is trained of them.
    """
    state = checkpoint["state_dict"]
    for name, (model, role) in models.items():
        kept = {f"{name}.{key}" for key, value in model.named_parameters() if value.requires_grad}
        for key in [key for key in state if key.startswith(f"{name}.")]:
            if name not in saved or (role.lora is not None and key not in kept):
                del state[key]
    checkpoint["models"] = describe({name: pair for name, pair in models.items() if name in saved})


def fill_in(checkpoint: dict[str, Any], models: Models, saved: Collection[str]) -> None:
    """Gives a checkpoint, which is about to be loaded, what `keep_trained` took out of it: the models' present state.

    One that the strategy has loaded by itself, tensor by tensor, is left as it is.
    """
    if "state_dict" not in checkpoint:
        return
    for name, (model, role) in models.items():
        if name not in saved or role.lora is not None:
            for key, value in model.state_dict(prefix=f"{name}.").items():
                checkpoint["state_dict"].setdefault(key, value)


def describe(models: Models) -> dict[str, dict[str, str | None]]:
    """What `checkpoint["models"]` holds: role → ModelDescription as plain data."""
    return {name: dict(vars(ModelDescription.of(model, role))) for name, (model, role) in models.items()}


def parse_descriptions(found: Any) -> dict[str, ModelDescription]:
    """The inverse of `describe`; empty for a checkpoint without descriptions."""
    return {role: ModelDescription(**values) for role, values in (found or {}).items()}


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Hugging Face's progress bar for writing files would break into the run's own."""
    from transformers.utils import logging as transformers_logging

    if not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
