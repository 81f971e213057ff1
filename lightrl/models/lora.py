"""LoRA: small trained adapters on a frozen model, through `peft`; merged where whole parameters are needed.

peft replaces linear layers by ones that hold the frozen weight W and the adapters A, B, and compute
(W + scaling · B A) x. Source: LoRA, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightrl.models.model_spec import check_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "default"  # peft's name of the only adapter
_HEAD = "score"  # the head of critics and reward models is trained itself, without an adapter

# What leaves the trainer: weights with the adapters in them, weights without them, or the adapters alone.
Part = Literal["merged", "base", "adapters"]

# Settings of peft that change the weights in other ways than by B A → their value when off.
_OFF: dict[str, object] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "lora_bias": False,
    "megatron_config": None,  # peft then imports the module that `megatron_core` names
    "modules_to_save": None,
    "use_dora": False,
}


@dataclass(frozen=True)
class LoRA:
    """Adapters to train instead of a model's own weights.

    Args:
        rank: of the adapters, the inner dimension of B A.
        alpha: the adapters are scaled by `alpha / rank`.
        target_modules: names of the linear layers that get adapters; `all-linear` is all but the output head.
        adapter: a folder in peft's form with adapters to start from, whose rank, alpha and layers replace those given
            here; None for fresh ones, which change nothing yet.
    """

    rank: int = 16
    alpha: int = 32
    target_modules: str | tuple[str, ...] = "all-linear"
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank must be at least 1, got {self.rank}.")
        if self.alpha <= 0:
            raise ValueError(f"lora.alpha must be above 0, got {self.alpha}.")
        if self.adapter is not None and not (Path(self.adapter) / "adapter_config.json").is_file():
            raise ValueError(
                f"lora.adapter={self.adapter!r} must be a folder in peft's form, but has no adapter_config.json. Leave "
                "it out for fresh adapters."
            )

    def add_to(self, model: PreTrainedModel, *, seed: int = 0) -> None:
        """Freezes the model and adds trained adapters; the head of a critic or reward model is trained too.

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
            raise ImportError("lora needs peft: pip install lightrl[lora].") from error
        model.requires_grad_(False)
        if self.adapter is not None:
            config = LoraConfig.from_pretrained(self.adapter)
            for name, value in _OFF.items():
                if getattr(config, name, value) != value:
                    raise ValueError(
                        f"lora.adapter={self.adapter!r} must have {name}={value!r}, that is only A and B, got "
                        f"{getattr(config, name)!r}. Merge that adapter into its model, and start from the result."
                    )
            config.inference_mode = False
            config.lora_dropout = 0.0
        else:
            targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
            config = LoraConfig(
                r=self.rank,
                lora_alpha=self.alpha,
                lora_dropout=0.0,
                target_modules=targets,
                exclude_modules=[_HEAD] if hasattr(model, _HEAD) else None,
            )
        model.add_adapter(config, _ADAPTER)
        read = adapter_reader(self, seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_adapter(name) or name.startswith(f"{_HEAD}."))
            if is_adapter(name) and not parameter.is_meta:
                with torch.no_grad():
                    parameter.copy_(read(name, parameter.shape))
        model.eval()


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
    weight = torch.zeros(shape)
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


def merged_parameters(
    model: torch.nn.Module, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Iterator[tuple[str, Tensor]]:
    """The parameters under their Hugging Face names, adapters merged into the weights they belong to.

    One at a time, so it needs the memory of one merged weight besides the model's.

    Args:
        model: with or without adapters.
        whole: maps a shard to its whole tensor; called once per parameter, in the same order on every rank.
    """
    parameters = dict(model.named_parameters())
    for name, sources in exported_parameters(model).items():
        yield name, merge(model, name, [whole(parameters[source]) for source in sources])


def exported_parameters(model: torch.nn.Module, part: Part = "merged") -> dict[str, list[str]]:
    """Maps each exported Hugging Face name to the parameters that it is made of: one, or W, A and B."""
    names = [name for name, _ in model.named_parameters()]
    if part == "adapters":
        return {name: [name] for name in names if is_adapter(name)}
    sources = {base_name(name): [name] for name in names if not is_adapter(name)}
    if part == "merged":
        for down in (name for name in names if ".lora_A." in name):
            layer_name = down.partition(".lora_A.")[0]
            sources[f"{layer_name}.weight"] += [down, down.replace(".lora_A.", ".lora_B.")]
    return sources


def merge(model: torch.nn.Module, name: str, tensors: Sequence[Tensor]) -> Tensor:
    """The exported tensor from its whole parameters; merges as peft does: in the adapters' dtype, then cast."""
    if len(tensors) == 1:
        return tensors[0]
    weight, down, up = (tensor.detach() for tensor in tensors)
    layer: Any = model.get_submodule(name.removesuffix(".weight"))
    change: Tensor = up @ down * layer.scaling[_ADAPTER]
    return weight + change.to(weight.dtype)


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def base_name(name: str) -> str:
    """The Hugging Face name of a parameter outside adapters."""
    return name.replace(".base_layer.", ".")


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
