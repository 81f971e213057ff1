"""LoRA: trains small adapters on a frozen model, using `peft`, and merges them where whole parameters are needed.

peft replaces each linear layer with one that holds the frozen weight W and the adapters A and B, and computes
(W + scaling · B A) x. Source: LoRA, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from lightrl.checks.bounds import check_bounds, check_positive
from lightrl.concurrency.owner import own_prefix
from lightrl.models.images import vision_kind
from lightrl.models.model_spec import check_files
from lightrl.models.moe import moe_blocks, router_of
from lightrl.models.precision import keep_float32
from lightrl.models.tuning import ATTRIBUTE, Part, ServedForm, Tuning, held_tensors, plain_weight, unwrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_ADAPTER = "default"  # the name that peft gives a sole adapter
_HEAD = "score"  # the head of critics and reward models is trained directly, without an adapter

# peft settings that can change the model beyond adding B A → their harmless values, the default first.
_HARMLESS: dict[str, Sequence[object]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # other values change W
    "megatron_config": (None,),  # otherwise peft imports the module that `megatron_core` names
    **dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_dora", "use_qalora"), (False,)),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication"), (None,)),
    **dict.fromkeys(("modules_to_save", "monteclora_config", "trainable_token_indices"), (None,)),
    **dict.fromkeys(("use_bdlora", "velora_config"), (None,)),
}


@dataclass(frozen=True)
class LoRA(Tuning):
    """Trains adapters instead of a model's weights.

    Args:
        rank: inner dimension of B A.
        alpha: the adapters are scaled by `alpha / rank`.
        target_modules: names of the linear layers that get adapters; `all-linear` excludes the output head, the routers
            and experts of MoE blocks, layers whose weights Mamba's kernels read directly, and the image tower of models
            other than Llava.
        target_parameters: names of other parameters that get adapters, for example the fused experts
            `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`, which get a pair A, B for each expert. The backward
            keeps a layer's experts with their adapters merged, so set the strategy's activation_checkpointing.
        adapter: a folder in peft's format with adapters to start from; its rank, alpha and layers replace the settings
            here. None makes new adapters, which leave the model unchanged until they are trained.
    """

    rank: int = 16
    alpha: int = 32
    target_modules: str | tuple[str, ...] = "all-linear"
    adapter: str | None = None
    target_parameters: tuple[str, ...] = ()

    kind: ClassVar[str] = "lora"
    keeps_base: ClassVar[bool] = True
    config_file: ClassVar[str] = "adapter_config.json"

    def __post_init__(self) -> None:
        check_bounds(1, **{"lora.rank": self.rank})
        check_positive(**{"lora.alpha": self.alpha})
        if self.adapter is not None and not (Path(self.adapter) / self.config_file).is_file():
            raise ValueError(
                f"lora.adapter={self.adapter!r} must be a folder in peft's format, but has no adapter_config.json. "
                "Omit it for new adapters."
            )

    def add_to(self, model: PreTrainedModel, *, seed: int = 0) -> None:
        """Freezes the model and adds trainable float32 adapters; a scalar head stays trainable and becomes float32.

        Args:
            model: if its parameters are on the meta device, the adapters' values come from `added_values` later.
            seed: new adapters depend only on this seed and on their names.

        Raises:
            ImportError: if peft is not installed.
            ValueError: if the model lacks the layers, or the folder's adapters do more than add B A.
        """
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise ImportError("lora needs peft: pip install peft.") from error
        model.requires_grad_(False)
        if self.adapter is not None:
            saved = json.loads((Path(self.adapter) / self.config_file).read_text(encoding="utf-8"))
            for name, values in _HARMLESS.items():
                if saved.get(name, values[0]) not in values:
                    raise ValueError(
                        f"lora.adapter={self.adapter!r} must have {name}={values[0]!r}, because only adapters that add "
                        f"B A to the model's weights can be trained, got {saved[name]!r}. Merge the adapter into "
                        "its model and start from the result."
                    )
            config = LoraConfig.from_pretrained(self.adapter)
            config.init_lora_weights = True  # the folder's weights replace the initial ones
            config.inference_mode = False
            config.lora_dropout = 0.0
            _adapt_layers_as_linear(config, model)
        else:
            targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
            config = LoraConfig(
                r=self.rank,
                lora_alpha=self.alpha,
                lora_dropout=0.0,
                target_modules=targets,
                target_parameters=list(self.target_parameters) or None,
                exclude_modules=_excluded_from_all_linear(model) or None,
            )
        with _targets_as_given():
            model.add_adapter(config, _ADAPTER)
        setattr(model, ATTRIBUTE, self)
        self._name_for_peft(model)
        self._check_targets(model)
        for name, module in model.named_modules():
            if name == _HEAD or name.endswith((".lora_A", ".lora_B")):
                keep_float32(module)
        initial_value = self.added_values(seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.adds(name) or name.startswith(f"{_HEAD}."))
            if self.adds(name) and not parameter.is_meta:
                with torch.no_grad():
                    parameter.copy_(initial_value(name, parameter.shape))
        model.eval()
        named = [(name, value) for name, value in model.named_parameters() if not self.adds(name)]
        sizes = {name: value.numel() * (2 if value.dtype == torch.uint8 else 1) for name, value in named}  # 4 bits each
        adapted = {sources[0] for sources in self.sources(model).values() if len(sources) > 1}
        num, total = sum(sizes[name] for name in adapted), sum(sizes.values())
        log.info("LoRA: adapters on %d of %d parameters (%.1f %%).", num, total, 100 * num / total)

    def _name_for_peft(self, model: PreTrainedModel) -> None:
        """Renames, in the model's peft config, the linear layers that peft would mistake for fused experts.

        peft treats every target that ends with a name such as `gate_proj` as experts that transformers 5 fuses. If the
        layer's weight is listed as a target parameter instead, peft makes the same adapter.
        """
        config: Any = model.peft_config[_ADAPTER]
        adapted = {name.partition(".lora_A.")[0] for name in self.sources(model, "added") if ".lora_A." in name}
        linear = {name for name in adapted if not hasattr(model.get_submodule(name), "parameter_name")}
        endings = {name.rpartition(".")[2] for name in linear}
        taken_endings = {ending for ending in endings if _is_mistaken_for_experts(ending, config, model)}
        taken = {name for name in linear if name.rpartition(".")[2] in taken_endings}
        if taken:
            config.target_modules = linear - taken
            config.target_parameters = sorted(
                {*(config.target_parameters or ()), *(f"{name}.weight" for name in taken)}
            )

    def _check_targets(self, model: PreTrainedModel) -> None:
        """Raises ValueError if a target is missing, tied or not linear, or a folder's adapters are for other layers."""
        for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
            for layer in (name.rpartition(".")[0] for name in pair):
                if hasattr(model.get_submodule(layer), "base_layer"):
                    raise ValueError(
                        f"lora has an adapter on {layer!r}, whose weight is tied to another layer's weight, so the two "
                        "would differ. Remove that layer from lora.target_modules."
                    )
        for name, module in model.named_modules():
            kind = type(getattr(module, "base_layer", None)).__name__
            if kind.startswith(("Embedding", "Conv")):
                raise ValueError(
                    f"lora has an adapter on {name!r} ({kind}), but only linear layers and experts can have one. "
                    "Remove that layer from lora.target_modules."
                )
        adapted = [name for name, sources in self.sources(model).items() if len(sources) > 1]
        for target in self.target_parameters if self.adapter is None else ():
            if not any(f".{name}".endswith(f".{target}") for name in adapted):
                raise ValueError(
                    f"lora.target_parameters has {target!r}, which {type(model).__name__} does not have. "
                    "Name experts' parameters, for example mlp.experts.down_proj."
                )
        if self.adapter is None:
            return
        from safetensors import safe_open

        with safe_open(Path(self.adapter) / "adapter_model.safetensors", framework="pt") as file:
            differing = {self.saved_name(name) for name in self.sources(model, "added")} ^ set(file.keys())
        if differing:
            raise ValueError(
                f"lora.adapter={self.adapter!r} must have adapters for this model's layers, but {len(differing)} "
                f"differ, for example {min(differing)!r}. Use an adapter that lightrl or peft made for this model."
            )

    def check_split(self, role: str, model: PreTrainedModel, modules: Collection[str] | None) -> None:
        for name in (name.partition(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name):
            name_in_layer = name.partition(".layers.")[2].partition(".")[2]
            if not name_in_layer or (modules is not None and name_in_layer not in modules):
                raise ValueError(
                    f"The {role} has a LoRA adapter on {name!r}, which Parallel3DStrategy does not split"
                    f"{' with tp' if name_in_layer else ''}. Remove it from lora.target_modules or "
                    "lora.target_parameters, or use FSDP2Strategy."
                )

    def split_experts(self, experts: torch.nn.Module, part: int) -> None:
        """Replaces what peft's wrappers do, which need all experts; ranks still hold the adapters of all experts.

        Each rank computes the gradients of its experts' adapters for the tokens of all ranks, so a sum over ranks, like
        that of any other adapter, adds each token once.
        """
        wrappers: list[Any] = [module for module in experts.modules() if hasattr(module, "parameter_name")]
        base = unwrapped(experts)
        for name in (wrapper.parameter_name for wrapper in wrappers):
            if base._parameters[name].dim() < 3:
                raise ValueError(f"ep divides 3-D parameters of experts. Remove {name!r} from lora.target_parameters.")
        forward = base.forward

        def forward_adapted(*args: Any, **kwargs: Any) -> Any:
            held = dict(base._parameters)
            for wrapper in wrappers:
                weight: Any = held[wrapper.parameter_name]
                here = slice(part * len(weight), (part + 1) * len(weight))
                pair = wrapper.lora_A[_ADAPTER].weight, wrapper.lora_B[_ADAPTER].weight
                if not wrapper.disable_adapters:
                    change = _change_of_experts(wrapper, *pair, here)
                    base._parameters[wrapper.parameter_name] = weight + change.to(weight.dtype)
            try:
                return forward(*args, **kwargs)
            finally:
                base._parameters.update(held)

        base.forward = forward_adapted
        for wrapper in wrappers:
            wrapper.forward = wrapper.base_layer.__call__

    def split_styles(self, name: str, module: torch.nn.Module, style: str) -> dict[str, str]:
        if not hasattr(module, "base_layer"):
            return {name: style}
        base, down, up = (f"{name}.{part}" for part in ("base_layer", f"lora_A.{_ADAPTER}", f"lora_B.{_ADAPTER}"))
        if style == "rowwise":
            return {base: style, down: style}
        return {base: style, up: style, down: "replicate"}  # every rank computes A x for the whole sequence

    def adds(self, name: str) -> bool:
        return ".lora_A." in name or ".lora_B." in name

    def added_values(self, seed: int) -> Callable[[str, torch.Size], Tensor]:
        """Returns a function that reads the `adapter` folder, or makes new values: B is 0, A is like a new `nn.Linear`.

        New values depend only on the seed and the name, so any process can make any of them.
        """
        if self.adapter is None:
            return lambda name, shape: _initial_adapter(name, shape, seed)
        from safetensors.torch import load_file

        check_files(Path(self.adapter))
        tensors = load_file(Path(self.adapter) / "adapter_model.safetensors")
        return lambda name, shape: tensors[self.saved_name(name)]

    def base_name(self, name: str) -> str:
        return re.sub(r"(\.base_layer)+\.", ".", name)

    @contextlib.contextmanager
    def base_modules(self, model: torch.nn.Module) -> Iterator[None]:
        wrapped = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent.named_children()
            if name != "base_layer" and hasattr(child, "base_layer")
        ]
        for parent, name, child in wrapped:
            setattr(parent, name, unwrapped(child))
        try:
            yield
        finally:
            for parent, name, child in wrapped:
                setattr(parent, name, child)

    @contextlib.contextmanager
    def base_only(self, model: torch.nn.Module) -> Iterator[None]:
        layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
        # peft's `enable_adapters(False)` also clears `requires_grad`, and gathered copies of sharded parameters would
        # keep it cleared.
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def sources(self, model: torch.nn.Module, part: Part = "whole") -> dict[str, list[str]]:
        """Maps each exported name to its tensor, or to W, A and B."""
        names = list(held_tensors(model))
        if part == "added":
            return {name: [name] for name in names if self.adds(name)}
        sources = {self.base_name(name): [name] for name in names if not self.adds(name)}
        if part == "whole":
            for down in (name for name in names if ".lora_A." in name):
                layer = down.partition(".lora_A.")[0]
                weight = getattr(model.get_submodule(layer), "parameter_name", "weight")
                sources[self.base_name(f"{layer}.{weight}")] += [down, down.replace(".lora_A.", ".lora_B.")]
        return sources

    def merge(self, model: torch.nn.Module, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Merges as peft does: computes the change in the adapters' dtype, then casts it."""
        weight = plain_weight(model, name, tensors[0])
        if len(tensors) == 1:
            return weight
        weight, down, up = weight.detach(), *(tensor.detach() for tensor in tensors[1:])
        module_name, _, parameter = name.rpartition(".")
        layer: Any = model.get_submodule(module_name)
        while getattr(layer, "parameter_name", parameter) != parameter:  # each adapted parameter has a wrapper
            layer = layer.base_layer
        if weight.dim() == 2:
            change = up @ down * layer.scaling[_ADAPTER]
        else:
            change = _change_of_experts(layer, down, up, slice(None))
        merged: Tensor = weight + change.to(weight.dtype)
        return merged

    def saved_name(self, name: str) -> str:
        """Returns the parameter's name in peft's files."""
        return "base_model.model." + name.replace(f".{_ADAPTER}.", ".")

    def served_form(self, model: PreTrainedModel, num_versions: int) -> ServedForm:
        if any(hasattr(module, "dequantized") for module in model.modules()):
            raise ValueError(
                "engine.adapters='served' would add the adapters to the servers' unquantized base, but the policy's "
                "base is quantized. Set engine.adapters to merged."
            )
        if any(hasattr(module, "parameter_name") for module in model.modules() if hasattr(module, "lora_A")):
            raise ValueError(
                "engine.adapters='served' cannot serve adapters for lora.target_parameters. Set engine.adapters to "
                "merged, or remove lora.target_parameters."
            )
        downs = (name for name in self.sources(model, "added") if ".lora_A." in name)
        targets = sorted({name.partition(".lora_A.")[0].rpartition(".")[2] for name in downs})
        named = {"target_modules": targets, "target_parameters": None}  # replaces peft's paths
        config = json.loads(self.saved_config(model, None)) | named
        rank = config["r"]
        args = {
            "enable_lora": True,
            "max_lora_rank": rank,
            "lora_target_modules": targets,
            "max_loras_per_batch": num_versions + 1,  # SGLang counts the base as one more adapter
        }
        how_to_start = (
            f"Start the servers with --enable-lora --max-lora-rank {rank} --lora-target-modules {' '.join(targets)}, "
            "or set engine.adapters to merged."
        )
        return ServedForm(self, num_versions, config, args, how_to_start)

    def saved_config(self, model: PreTrainedModel, base: str | None) -> str:
        """Returns the content of `adapter_config.json`."""
        values = model.peft_config[_ADAPTER].to_dict()
        values = {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}
        values.update(base_model_name_or_path=base, inference_mode=True, task_type="CAUSAL_LM")
        return json.dumps(values, indent=2, sort_keys=True, default=str)

    def save(self, tensors: Mapping[str, Tensor], config: str, folder: Path) -> None:
        """Writes a folder in peft's format."""
        from safetensors.torch import save_file

        adapters = {
            self.saved_name(name): tensor.detach().cpu().contiguous()
            for name, tensor in tensors.items()
            if self.adds(name)
        }
        save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / self.config_file).write_text(config, encoding="utf-8")

    def check_saved(self, base: PreTrainedModel, tensors: Mapping[str, Tensor], config: str, name: str) -> None:
        from peft import PeftConfig, get_peft_model, set_peft_model_state_dict

        saved = {self.saved_name(key): torch.empty_like(value, device="meta") for key, value in tensors.items()}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # peft warns of missing adapters; `differing` lists them
                loaded = get_peft_model(base, PeftConfig.from_peft_type(**json.loads(config)), low_cpu_mem_usage=True)
                unused = set_peft_model_state_dict(loaded, saved, low_cpu_mem_usage=True).unexpected_keys
            named = ((key.replace(f".{_ADAPTER}.", "."), value.shape) for key, value in loaded.named_parameters())
            sent = {(key, value.shape) for key, value in saved.items()}
            differing = {*unused, *(key for key, _ in {pair for pair in named if ".lora_" in pair[0]} ^ sent)}
            problem = f"{len(differing)} of its adapters differ, for example {min(differing)}" if differing else ""
        except (RuntimeError, ValueError) as error:  # a target or a shape that the model does not have
            problem = str(error).splitlines()[-1].strip()
        if problem:
            raise ValueError(
                f"peft {version('peft')} would load {name} as a different model: {problem}. Export the whole model "
                "instead, with merged: true or lightrl export --merged."
            )

    def add_saved(self, model: PreTrainedModel, tensors: Mapping[str, Tensor], config: str) -> None:
        with tempfile.TemporaryDirectory(prefix=own_prefix("lightrl-model-"), ignore_cleanup_errors=True) as folder:
            self.save(tensors, config, Path(folder))
            LoRA(adapter=folder).add_to(model)


def _change_of_experts(layer: Any, down: Tensor, up: Tensor, part: slice) -> Tensor:
    """Returns what A [E r, in] and B [out, r E] add to some experts of [E, out, in], or [E, in, out] if transposed."""
    downs = down.reshape(layer.num_experts, -1, down.shape[1])[part]
    ups = up.reshape(len(up), -1, layer.num_experts)[..., part]
    is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)
    change = torch.einsum("ore,eri->eio" if is_transposed else "ore,eri->eoi", ups, downs)
    return change * float(layer.scaling[_ADAPTER])


def _adapt_layers_as_linear(config: Any, model: PreTrainedModel) -> None:
    """Reverts `_name_for_peft`: targets linear layers as modules again, instead of their weights as parameters."""
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    taken = linear.intersection(config.target_parameters or ())
    if taken and not isinstance(config.target_modules, str):
        config.target_modules = {*config.target_modules, *(name.removesuffix(".weight") for name in taken)}
        config.target_parameters = sorted(set(config.target_parameters) - taken)


def _is_mistaken_for_experts(target: str, config: Any, model: PreTrainedModel) -> bool:
    """Whether peft replaces this target with fused experts when it loads adapters."""
    conversion = _conversion_of_peft()
    if conversion is None:
        return False
    alone = copy.copy(config)
    alone.target_modules, alone.target_parameters = {target}, None
    try:
        conversion.convert_peft_config_for_transformers(alone, model, None)
    except ValueError:  # peft cannot replace this target alone
        return True
    return bool(alone.target_modules != {target})


def _excluded_from_all_linear(model: PreTrainedModel) -> list[str]:
    """Lists the modules that `all-linear` excludes; peft itself excludes a language model's output head."""
    names = [_HEAD] if hasattr(model, _HEAD) else []
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for block_name, block in moe_blocks(model).items():
        for child_name, child in block.named_children():
            if child is block.experts or child is router_of(block):
                path = f"{block_name}.{child_name}"
                names += [name for name in linear if name == path or name.startswith(f"{path}.")]
    for name, module in model.named_modules():
        # Mamba's kernels read these weights directly, so an adapter would have no effect.
        if hasattr(module, "time_step_limit"):
            names.append(f"{name}.out_proj")
        if hasattr(module, "dt_proj"):
            names.append(f"{name}.dt_proj")
    if hasattr(model.config, "vision_config") and vision_kind(model.config) != "plain":  # no adapters in the tower
        names += [name for name in linear if ".language_model." not in name and not name.startswith("lm_head")]
    return names


@contextlib.contextmanager
def _targets_as_given() -> Iterator[None]:
    """Makes peft use the targets' names as given; otherwise it mistakes any `gate_proj` for fused experts."""
    conversion = _conversion_of_peft()
    if conversion is None:
        yield
        return
    convert = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = convert


def _conversion_of_peft() -> Any:
    """Returns peft's module that converts the names of targets; None if this release of peft has none."""
    try:
        from peft.utils import transformers_weight_conversion
    except ImportError:
        return None
    return transformers_weight_conversion


def _initial_adapter(name: str, shape: torch.Size, seed: int) -> Tensor:
    weight = torch.zeros(shape, dtype=torch.float32)  # the default dtype may be bfloat16
    if ".lora_A." in name:
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        torch.nn.init.kaiming_uniform_(weight, a=5**0.5, generator=generator)
    return weight
