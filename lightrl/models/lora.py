"""LoRA: small trained adapters on a frozen model, through `peft`; merged where whole parameters are needed.

peft replaces linear layers by ones that hold the frozen weight W and the adapters A, B, and compute
(W + scaling · B A) x. Source: LoRA, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightrl.checks.bounds import check_bounds, check_positive
from lightrl.models.images import image_kind
from lightrl.models.model_spec import check_files
from lightrl.models.moe import moe_blocks, router_of
from lightrl.models.precision import keep_float32

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_ADAPTER = "default"  # peft's name of the only adapter
_OUTPUT = "lm_head"  # peft itself leaves it out
_HEAD = "score"  # the head of critics and reward models is trained itself, without an adapter

# What leaves the trainer: weights with the adapters in them, weights without them, or the adapters alone.
Part = Literal["merged", "base", "adapters"]

# Settings of peft that change the model in other ways than by B A → their values where they do not, the default first.
_OFF: dict[str, Sequence[object]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change W
    "megatron_config": (None,),  # peft then imports the module that `megatron_core` names
    **dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_dora", "use_qalora"), (False,)),
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication"), (None,)),
    **dict.fromkeys(("modules_to_save", "monteclora_config", "trainable_token_indices"), (None,)),
    **dict.fromkeys(("use_bdlora", "velora_config"), (None,)),
}


@dataclass(frozen=True)
class LoRA:
    """Adapters to train instead of a model's own weights.

    Args:
        rank: of the adapters, the inner dimension of B A.
        alpha: the adapters are scaled by `alpha / rank`.
        target_modules: names of the linear layers that get adapters; `all-linear` is all but the output head, the
            routers and experts of a mixture, layers whose weights Mamba's kernels read, and the image tower of any
            model but a Llava.
        target_parameters: names of further parameters that get adapters, such as the experts' fused ones,
            `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`: a pair A, B for each expert.
        adapter: a folder in peft's form with adapters to start from, whose rank, alpha and layers replace those given
            here; None for fresh ones, which change nothing yet.
    """

    rank: int = 16
    alpha: int = 32
    target_modules: str | tuple[str, ...] = "all-linear"
    adapter: str | None = None
    target_parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_bounds(1, **{"lora.rank": self.rank})
        check_positive(**{"lora.alpha": self.alpha})
        if self.adapter is not None and not (Path(self.adapter) / "adapter_config.json").is_file():
            raise ValueError(
                f"lora.adapter={self.adapter!r} must be a folder in peft's form, but has no adapter_config.json. Leave "
                "it out for fresh adapters."
            )

    def add_to(self, model: PreTrainedModel, *, seed: int = 0) -> None:
        """Freezes the model and adds trained adapters, in float32; the head of a critic or reward model is trained too.

        Args:
            model: may have its parameters on the meta device; `adapter_reader` then has those of the adapters.
            seed: of fresh adapters, which depend on it and on their names only.

        Raises:
            ImportError: if peft is not installed.
            ValueError: if the model has no such layers, or the folder's adapters are more than B A.
        """
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise ImportError("lora needs peft: pip install peft.") from error
        model.requires_grad_(False)
        if self.adapter is not None:
            given = json.loads((Path(self.adapter) / "adapter_config.json").read_text(encoding="utf-8"))
            for name, values in _OFF.items():
                if given.get(name, values[0]) not in values:
                    raise ValueError(
                        f"lora.adapter={self.adapter!r} must have {name}={values[0]!r}, that is only A and B on the "
                        f"model's own weights, got {given[name]!r}. Merge that adapter into its model, and start from "
                        "the result."
                    )
            config = LoraConfig.from_pretrained(self.adapter)
            config.init_lora_weights = True  # the folder's weights replace them
            config.inference_mode = False
            config.lora_dropout = 0.0
        else:
            targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
            config = LoraConfig(
                r=self.rank,
                lora_alpha=self.alpha,
                lora_dropout=0.0,
                target_modules=targets,
                target_parameters=list(self.target_parameters) or None,
                exclude_modules=_without_adapters(model) or None,
            )
        with _targets_as_given():
            model.add_adapter(config, _ADAPTER)
        self._check_targets(model)
        for name, module in model.named_modules():
            if name == _HEAD or name.endswith((".lora_A", ".lora_B")):
                keep_float32(module)
        read = adapter_reader(self, seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_adapter(name) or name.startswith(f"{_HEAD}."))
            if is_adapter(name) and not parameter.is_meta:
                with torch.no_grad():
                    parameter.copy_(read(name, parameter.shape))
        model.eval()
        sizes = {name: value.numel() for name, value in model.named_parameters() if not is_adapter(name)}
        adapted = {sources[0] for sources in exported_parameters(model).values() if len(sources) > 1}
        num, total = sum(sizes[name] for name in adapted), sum(sizes.values())
        log.info("LoRA: adapters on %d of %d parameters (%.1f %%).", num, total, 100 * num / total)

    def _check_targets(self, model: PreTrainedModel) -> None:
        """Raises ValueError if a target does not exist, is tied or not linear, or a folder's adapters differ."""
        for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
            for layer in (name.rpartition(".")[0] for name in pair):
                if hasattr(model.get_submodule(layer), "base_layer"):
                    raise ValueError(
                        f"lora has an adapter of {layer!r}, whose weight is tied to another layer's and would differ "
                        "from it. Leave that layer out of lora.target_modules."
                    )
        for name, module in model.named_modules():
            kind = type(getattr(module, "base_layer", None)).__name__
            if kind.startswith(("Embedding", "Conv")):
                raise ValueError(
                    f"lora has an adapter of {name!r} ({kind}); only linear layers and experts can have one here. "
                    "Leave that layer out of lora.target_modules."
                )
        names = [name for name, _ in model.named_parameters() if is_adapter(name)]
        ends = {name for name, sources in exported_parameters(model).items() if len(sources) > 1}
        for target in self.target_parameters if self.adapter is None else ():
            if not any(f".{name}".endswith(f".{target}") for name in ends):
                raise ValueError(
                    f"lora.target_parameters has {target!r}, which {type(model).__name__} does not have. "
                    "Name those of experts, such as mlp.experts.down_proj."
                )
        if self.adapter is None:
            return
        from safetensors import safe_open

        with safe_open(Path(self.adapter) / "adapter_model.safetensors", framework="pt") as file:
            differing = {peft_name(name) for name in names} ^ set(file.keys())
        if differing:
            raise ValueError(
                f"lora.adapter={self.adapter!r} must have adapters of this model's layers, but {len(differing)} "
                f"differ, for example {min(differing)!r}. Use an adapter that lightrl or peft made for this model."
            )


def _without_adapters(model: PreTrainedModel) -> list[str]:
    """Names of the modules that `all-linear` leaves out besides the output head."""
    names = [_HEAD] if hasattr(model, _HEAD) else []
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for block_name, block in moe_blocks(model).items():
        for child_name, child in block.named_children():
            if child is block.experts or child is router_of(block):
                path = f"{block_name}.{child_name}"
                names += [name for name in linear if name == path or name.startswith(f"{path}.")]
    for name, module in model.named_modules():
        # Kernels of Mamba layers read these weights, so that an adapter would do nothing.
        if hasattr(module, "time_step_limit"):
            names.append(f"{name}.out_proj")
        if hasattr(module, "dt_proj"):
            names.append(f"{name}.dt_proj")
    if hasattr(model.config, "vision_config") and image_kind(model.config) != "plain":
        names += [name for name in linear if ".language_model." not in name and not name.startswith(_OUTPUT)]
    return names


@contextlib.contextmanager
def _targets_as_given() -> Iterator[None]:
    """Inside, peft takes names as they are: it reads `gate_proj` of any layer as that of fused experts."""
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # a release that does not
        yield
        return
    convert = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = convert


def adapter_reader(lora: LoRA, seed: int) -> Callable[[str, torch.Size], Tensor]:
    """Returns the adapters' weights by name and shape, from `lora.adapter` or fresh: A as a linear layer's, B zero.

    Fresh ones depend on seed and name only, so any process can make any of them.
    """
    if lora.adapter is None:
        return lambda name, shape: _fresh(name, shape, seed)
    from safetensors.torch import load_file

    check_files(Path(lora.adapter))
    tensors = load_file(Path(lora.adapter) / "adapter_model.safetensors")
    return lambda name, shape: tensors[peft_name(name)]


def _fresh(name: str, shape: torch.Size, seed: int) -> Tensor:
    weight = torch.zeros(shape, dtype=torch.float32)  # whatever the default is under bf16-true
    if ".lora_A." in name:
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        torch.nn.init.kaiming_uniform_(weight, a=5**0.5, generator=generator)
    return weight


def has_adapters(model: torch.nn.Module) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextlib.contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model computes as if without adapters: the reference policy, at no cost of memory."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    # peft's `enable_adapters(False)` also clears `requires_grad`, which would stick to the whole copy of a sharded
    # parameter.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged_parameters(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters under their Hugging Face names, adapters merged into the weights they belong to."""
    held = held_tensors(model)
    for name, sources in exported_parameters(model).items():
        yield name, merge(model, name, [held[source] for source in sources])


def held_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's parameters, and the buffers that belong to its weights, such as the bias of a router."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: value for name, value in model.state_dict().items() if name not in parameters}
    return {**dict(model.named_parameters()), **buffers}


def exported_parameters(model: torch.nn.Module, part: Part = "merged") -> dict[str, list[str]]:
    """Maps each exported Hugging Face name to the `held_tensors` that it is made of: one, or W, A and B."""
    names = list(held_tensors(model))
    if part == "adapters":
        return {name: [name] for name in names if is_adapter(name)}
    sources = {base_name(name): [name] for name in names if not is_adapter(name)}
    if part == "merged":
        for down in (name for name in names if ".lora_A." in name):
            sources[_adapted_name(model, down)] += [down, down.replace(".lora_A.", ".lora_B.")]
    return sources


def _adapted_name(model: torch.nn.Module, down: str) -> str:
    """The exported name of the weight that an adapter's A belongs to."""
    layer_name = down.partition(".lora_A.")[0]
    layer = model.get_submodule(layer_name)
    return base_name(f"{layer_name}.{getattr(layer, 'parameter_name', 'weight')}")


def merge(model: torch.nn.Module, name: str, tensors: Sequence[Tensor]) -> Tensor:
    """The exported tensor from its whole parameters; merges as peft does: in the adapters' dtype, then cast."""
    if len(tensors) == 1:
        return tensors[0]
    weight, down, up = (tensor.detach() for tensor in tensors)
    module_name, _, parameter = name.rpartition(".")
    layer: Any = model.get_submodule(module_name)
    while getattr(layer, "parameter_name", parameter) != parameter:  # each parameter of a module has its own wrapper
        layer = layer.base_layer
    scaling = layer.scaling[_ADAPTER]
    if weight.dim() == 2:
        change = up @ down * scaling
    else:  # A [E r, in], B [out, r E]; the weight is [E, out, in], or [E, in, out] if its module says so
        num_experts = weight.shape[0]
        pairs = up.reshape(up.shape[0], -1, num_experts), down.reshape(num_experts, -1, down.shape[1])
        is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)
        change = torch.einsum("ore,eri->eio" if is_transposed else "ore,eri->eoi", *pairs) * scaling
    merged: Tensor = weight + change.to(weight.dtype)
    return merged


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """The Hugging Face name of a parameter outside adapters."""
    return re.sub(r"(\.base_layer)+\.", ".", name)


@dataclass(frozen=True)
class AdapterShape:
    """The adapter settings that a server needs at its start, and with each adapter.

    Args:
        rank: of the adapters.
        target_modules: names of the layers that have adapters, such as `q_proj`.
        config: content of peft's `adapter_config.json`.
    """

    rank: int
    target_modules: tuple[str, ...]
    config: dict[str, Any]

    @classmethod
    def of(cls, model: torch.nn.Module) -> AdapterShape:
        """Reads the settings of a model's adapters; raises ValueError for a model without."""
        if not has_adapters(model):
            raise ValueError("engine.adapters='served' needs a policy with lora. Add lora to it, or set 'merged'.")
        if any(hasattr(module, "parameter_name") for module in model.modules() if hasattr(module, "lora_A")):
            raise ValueError(
                "engine.adapters='served' cannot serve adapters of lora.target_parameters. Set 'merged', or remove it."
            )
        names = [name for name, _ in model.named_parameters() if ".lora_A." in name]
        targets = {name.partition(".lora_A.")[0].rpartition(".")[2] for name in names}
        config = json.loads(adapter_config(model, None)) | {"target_modules": sorted(targets)}  # peft may have paths
        return cls(config["r"], tuple(sorted(targets)), config)

    def server_args(self, num_versions: int) -> dict[str, Any]:
        """SGLang's arguments for so many adapters at once."""
        return {
            "enable_lora": True,
            "max_lora_rank": self.rank,
            "lora_target_modules": list(self.target_modules),
            "max_loras_per_batch": num_versions + 1,  # SGLang counts requests without an adapter as one more
        }

    @property
    def how_to_serve(self) -> str:
        """The adapter's name in messages."""
        return (
            f"Start the servers with --enable-lora --max-lora-rank {self.rank} --lora-target-modules "
            f"{' '.join(self.target_modules)}, or set engine.adapters to merged."
        )


def peft_name(name: str) -> str:
    """The name of an adapter's parameter in peft's files."""
    return "base_model.model." + name.replace(f".{_ADAPTER}.", ".")


def adapter_config(model: PreTrainedModel, base: str | None) -> str:
    """The content of `adapter_config.json`.

    Args:
        model: with adapters.
        base: the model that the adapters belong to, a folder or a hub name.
    """
    values = model.peft_config[_ADAPTER].to_dict()
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in values.items()}
    values.update(base_model_name_or_path=base, inference_mode=True, task_type="CAUSAL_LM")
    return json.dumps(values, indent=2, sort_keys=True, default=str)


def save_adapter(tensors: Mapping[str, Tensor], config: str, folder: Path) -> None:
    """Writes a folder in peft's form.

    Args:
        tensors: of a model with adapters, by name; only those of adapters are written.
        config: of `adapter_config`.
        folder: must exist.
    """
    from safetensors.torch import save_file

    adapters = {
        peft_name(name): tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if is_adapter(name)
    }
    save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(config, encoding="utf-8")
