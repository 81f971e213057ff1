"""Writes Hugging Face model folders from checkpoints, completely or not at all.

A folder is written under a hidden name next to its destination and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import json
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from lightrl.checks.entry_points import entry_point
from lightrl.checks.files import is_disk_full, publish, restore, sync_files, write_problem, write_sums
from lightrl.concurrency.owner import own_mark, own_prefix, remove_left_behind
from lightrl.models.conversion import without_bars
from lightrl.models.images import save_processor
from lightrl.models.model_spec import ModelSpec, names_function, scalar_head
from lightrl.models.role import TUNINGS, Role
from lightrl.models.tuning import Tuning, whole_parameters

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Suffixes of the files that `save_pretrained` writes. A folder with other files is not replaced.
_SUFFIXES = frozenset({".json", ".safetensors", ".jinja", ".txt", ".model", ".bin", ".py"})

# Families whose scalar head has a bias in SGLang but not in transformers.
_BIASED_IN_SGLANG = frozenset({"qwen2", "qwen3"})

# Model classes whose import runs only transformers' code.
_OF_TRANSFORMERS = re.compile(r"transformers\.models\.\w+\.modeling_\w+\.\w+")

HEAD_STAYS_BEHIND = (
    "The export omits the critic's head on the policy's body, so a run that starts from it begins with a new head. "
    "Resuming from the checkpoint keeps the head. To export body and head as a separate model, use role critic."
)


@dataclass(frozen=True)
class ModelDescription:
    """A model without its weights, as plain data in a checkpoint, so that the checkpoint can be exported.

    Example:
        ModelDescription("transformers.Qwen3ForCausalLM", config='{"model_type": "qwen3", ...}',
                         generation_config=None, tokenizer="Qwen/Qwen3-0.6B")

    If the tuning keeps the base, the checkpoint holds only the added weights, and `base` is the model they belong to. A
    critic that is a head on another role's body is described as one model; `with_head` joins their tensors.
    """

    model_class: str  # dotted path
    config: str  # JSON
    generation_config: str | None  # JSON
    tokenizer: str | None  # as in ModelSpec; None if unknown
    tuning: str = ""  # a key of `TUNINGS`
    tuning_config: str | None = None  # JSON, see `Tuning.saved_config`; None if the checkpoint holds all weights
    base: str | None = None  # JSON, the ModelSpec of the base if the tuning keeps it
    body: str | None = None  # the role whose body this role's head uses; None if the model is complete

    @classmethod
    def of(cls, model: PreTrainedModel, role: Role) -> ModelDescription:
        """Describes a role's model, whose weights may be sharded or on the meta device."""
        kind = next(base for base in type(model).__mro__ if not base.__name__.startswith("FSDP"))  # FSDP2 wraps it
        generation_config = getattr(model, "generation_config", None)
        spec, tuning = role.spec, role.tuning
        base = json.dumps(asdict(replace(spec, seed=spec.random_seed))) if tuning.keeps_base else None
        return cls(
            model_class=f"{kind.__module__}.{kind.__name__}",
            config=model.config.to_json_string(use_diff=False),
            generation_config=None if generation_config is None else generation_config.to_json_string(use_diff=False),
            tokenizer=spec.tokenizer or spec.path,
            tuning=tuning.kind,
            tuning_config=tuning.saved_config(model, spec.path),
            base=base,
        )

    @classmethod
    def of_critic(cls, policy: PreTrainedModel, role: Role) -> ModelDescription | None:
        """Describes a critic's head on this policy's body; None if the family has no scalar head."""
        from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as KINDS

        if type(policy.config) not in KINDS:
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

    def code_named(self) -> list[str]:
        """Lists everything that building this model would run or load besides data and transformers' classes."""
        base = ModelSpec(**json.loads(self.base)) if self.base is not None else None
        function = self.tokenizer if self.tokenizer is not None and names_function(self.tokenizer) else None
        is_used = {
            f"the class {self.model_class}": not _OF_TRANSFORMERS.fullmatch(self.model_class),
            f"the tokenizer function {function}": function is not None,
            "trust_remote_code": base is not None and base.trust_remote_code,
            "options for from_pretrained": base is not None and bool(base.options),
        }
        return [name for name in is_used if is_used[name]]

    def with_head(self, body: Mapping[str, torch.Tensor], weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the tensors that `save` needs for a critic on another role's body.

        Args:
            body: the other role's weights; that role's own head is left out.
            weight: the critic's head, [1, hidden size].
        """
        prefix = f"{self._model_class().base_model_prefix}."
        return {**{name: value for name, value in body.items() if name.startswith(prefix)}, "score.weight": weight}

    def save(self, tensors: Mapping[str, torch.Tensor], folder: Path, *, merged: bool = False) -> None:
        """Writes the model to a folder in Hugging Face's format, or only the weights that its tuning added to the base.

        Args:
            tensors: the checkpoint's weights: all, or only the trained ones if the tuning keeps the base.
            folder: must exist.
            merged: always write the whole model; implied if a scalar head was trained.
        """
        tuning, config = self._tuning(), self.tuning_config
        if config is not None and not merged and all(tuning.adds(name) for name in tensors):
            tuning.save(tensors, config, folder)
            if json.loads(self.base or "{}").get("quantization"):
                (folder / "README.txt").write_text(entry_point("quantization").readme, encoding="utf-8")
        else:
            model = self.build(tensors)
            save_model(model, folder)
            save_processor(model.config, folder)

    def check_added(self, tensors: Mapping[str, torch.Tensor], name: str) -> None:
        """Raises ValueError if other tools would load a different model from the added weights that `save` writes."""
        tuning, config = self._tuning(), self.tuning_config
        if config is not None and all(map(tuning.adds, tensors)) and _OF_TRANSFORMERS.fullmatch(self.model_class):
            tuning.check_saved(self._without_weights(), tensors, config, name)  # builds only a class from transformers

    def build(self, tensors: Mapping[str, torch.Tensor]) -> PreTrainedModel:
        """Builds the model with these weights, without copying them; merges the tuning weights into the base.

        Args:
            tensors: keyed by the names in the model's `state_dict`; a tied weight may have only one of its names.

        Raises:
            ValueError: if a weight is missing, unknown or of the wrong shape.
        """
        import torch

        if any(self._tuning().adds(name) for name in tensors):
            tensors = self._merged(tensors)
        model = self._without_weights()
        dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        model.config.dtype = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
        try:
            unexpected = model.load_state_dict(dict(tensors), strict=False, assign=True).unexpected_keys
            problem = f"it has no {unexpected[0]!r}" if unexpected else ""
        except RuntimeError as error:
            problem = str(error)
        model.tie_weights()
        missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        if missing and not problem:
            problem = f"{missing[0]!r} is missing"
        if problem:
            raise ValueError(
                f"The weights do not fit {self.model_class}: {problem}. Export with the transformers release that the "
                "run used."
            )
        return model

    def _without_weights(self) -> PreTrainedModel:
        """Builds the model on the meta device."""
        import torch

        model_class = self._model_class()
        with tempfile.TemporaryDirectory(prefix=own_prefix("lightrl-model-"), ignore_cleanup_errors=True) as folder:
            (Path(folder) / "config.json").write_text(self.config, encoding="utf-8")
            config = model_class.config_class.from_pretrained(folder)
        config._attn_implementation = "eager"  # no forward is run, and other implementations may load code from the hub
        with torch.device("meta"):
            model: PreTrainedModel = model_class(config)
        if self.generation_config is not None:
            from transformers import GenerationConfig

            model.generation_config = GenerationConfig.from_dict(json.loads(self.generation_config))
        return model

    def _model_class(self) -> type[PreTrainedModel]:
        from transformers import PreTrainedModel

        module, _, name = self.model_class.rpartition(".")
        kind = getattr(importlib.import_module(module), name, None)
        if not isinstance(kind, type) or not issubclass(kind, PreTrainedModel):
            raise ValueError(f"model_class={self.model_class!r} is not a model class. The checkpoint is damaged.")
        return kind

    def _tuning(self) -> Tuning:
        if self.tuning not in TUNINGS:
            raise ValueError(f"tuning={self.tuning!r} must be one of {list(TUNINGS)}. The checkpoint is damaged.")
        return TUNINGS[self.tuning]()

    def _merged(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Loads the base, merges the added weights into it, and returns the merged weights."""
        assert self.tuning_config is not None
        assert self.base is not None
        model = replace(ModelSpec(**json.loads(self.base)), attn_implementation=None).load_model()
        self._tuning().add_saved(model, tensors, self.tuning_config)
        head = scalar_head(model)
        if head is not None:
            trained = {name: tensor for name, tensor in tensors.items() if name.startswith("score.")}
            head.load_state_dict({name.removeprefix("score."): tensor for name, tensor in trained.items()})
        return {name: tensor.detach() for name, tensor in whole_parameters(model)}


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Saves the model; if SGLang expects the scalar head to have a bias, also writes a zero bias in a separate file.

    transformers' Qwen2 and Qwen3 heads have no bias, and transformers warns about one in the model's own file. SGLang
    reads all files in a folder without an index, and initializes a missing bias randomly.
    """
    from safetensors.torch import save_file

    model.save_pretrained(folder)
    head = scalar_head(model)
    if head is None or "bias" in head.state_dict() or model.config.model_type not in _BIASED_IN_SGLANG:
        return
    bias = head.weight.new_zeros(1, device="cpu")
    save_file({"score.bias": bias}, folder / "score_bias.safetensors", metadata={"format": "pt"})


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Saves the tokenizer under the class name of transformers 4, which llama.cpp's converter requires."""
    tokenizer.save_pretrained(folder)
    for config in folder.glob("tokenizer_config.json"):
        text = config.read_text("utf-8")
        config.write_text(text.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'), "utf-8")


def check_model_folder(to: Path, *, asked_by: str, source: str = "") -> None:
    """Checks that an export may replace the content of a folder.

    Args:
        asked_by: the setting's name, for the message.
        source: the path that the model was loaded from.

    Raises:
        ValueError: if `to` is a file, holds files that are not from an export, or is `source`.
    """
    if to.exists() and not to.is_dir():
        raise ValueError(f"{asked_by} needs a folder, but to={str(to)!r} is a file.")
    if source and Path(source).is_dir() and Path(source).resolve() == to.resolve():
        raise ValueError(
            f"{asked_by} must not write to={str(to)!r}: the policy is loaded from that folder, so the run could not be "
            "repeated. Choose another folder."
        )
    files = sorted(to.iterdir()) if to.is_dir() else []
    foreign = [path.name for path in files if not path.is_file() or path.suffix not in _SUFFIXES]
    if foreign or (files and not any((to / tuning.config_file).exists() for tuning in TUNINGS.values())):
        raise ValueError(
            f"{asked_by} replaces the whole folder to={str(to)!r}, so it must be empty or an earlier export, but it "
            f"contains {(foreign or [files[0].name])[0]!r}. Choose another folder, or empty it."
        )


@contextlib.contextmanager
def replaced_folder(to: Path) -> Iterator[Path]:
    """Yields an empty folder that replaces `to` if the block succeeds; an exception leaves `to` unchanged."""
    place = to.absolute()
    restore(place)
    remove_left_behind(place.parent, ".*.unfinished-*")
    unfinished = place.with_name(f".{place.name}.unfinished-{own_mark()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        with without_bars():
            yield unfinished
        write_sums(unfinished)
        sync_files(unfinished)
        publish(unfinished, place)
    except (OSError, SafetensorError) as error:
        if not is_disk_full(error):
            raise
        raise OSError(
            f"The model could not be exported to {to}: {write_problem(error, place)}. An export needs space for a "
            "second copy of the model; the earlier export is intact. Free some space, or choose another folder."
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


Models = Mapping[str, tuple["PreTrainedModel", Role]]  # a module's models by role name


def keep_trained(checkpoint: dict[str, Any], models: Models, saved: Collection[str]) -> None:
    """Removes from a checkpoint the weights that a resume can reload, and adds descriptions of the models.

    Args:
        checkpoint: has `state_dict`, where names begin with the role's name.
        saved: the roles to keep: all their weights, or only the trained ones if the tuning keeps the base.
    """
    state = checkpoint["state_dict"]
    for name, (model, role) in models.items():
        trained_names = {f"{name}.{key}" for key, value in model.named_parameters() if value.requires_grad}
        for key in [key for key in state if key.startswith(f"{name}.")]:
            if name not in saved or (role.tuning.keeps_base and key not in trained_names):
                del state[key]
    descriptions = {name: ModelDescription.of(*pair) for name, pair in models.items() if name in saved}
    checkpoint["models"] = {name: dict(vars(description)) for name, description in descriptions.items()}


def fill_in(checkpoint: dict[str, Any], models: Models, saved: Collection[str]) -> None:
    """Copies the weights that `keep_trained` removed from a checkpoint back into it, before it is loaded.

    Copies nothing if the strategy loads the checkpoint itself. Raises ValueError if the quantization differs.
    """
    for name, (model, role) in models.items():
        base = json.loads(checkpoint.get("models", {}).get(name, {}).get("base") or "{}").get("quantization")
        if name in saved and base != (own := role.spec.quantization):
            raise ValueError(f"The {name} was trained with quantization={base!r}, got {own!r}. Set it to {base!r}.")
        if "state_dict" in checkpoint and (name not in saved or role.tuning.keeps_base):
            for key, value in model.state_dict(prefix=f"{name}.").items():
                checkpoint["state_dict"].setdefault(key, value)


def parse_descriptions(saved: Any, checkpoint: Path) -> dict[str, ModelDescription]:
    """Parses `checkpoint["models"]`, which maps roles to the fields of their descriptions; returns {} if there is none.

    Raises:
        ValueError: if the fields of a description, or of its base's ModelSpec, differ from this release's.
    """
    for role, values in (saved or {}).items():
        base = json.loads(values.get("base") or "{}")
        for kind, fields in ((ModelDescription, values), (ModelSpec, base)):
            parameters = inspect.signature(kind).parameters
            required = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
            different = sorted(fields.keys() - parameters.keys() | required - fields.keys())
            if different:
                raise ValueError(
                    f"Checkpoint {str(checkpoint)!r} was saved by a different release of lightrl: the field "
                    f"{different[0]!r} of the {role}'s {kind.__name__} differs from this release. Export it with the "
                    "release that saved it, or resume its run with this one and export the next checkpoint."
                )
    return {role: ModelDescription(**values) for role, values in (saved or {}).items()}
