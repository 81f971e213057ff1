"""Random models, their checkpoints, and what a server reads of one."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lightrl.models.conversion import checkpoint_tensors


def model_of(family: str, **settings: Any) -> PreTrainedModel:
    """A model of which all parameters are random, norms and biases too."""
    config = AutoConfig.for_model(family, pad_token_id=None, **settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def checkpoint_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Its parameters under the names of a checkpoint, which has each expert apart."""
    named = [checkpoint_tensors(model, name, tensor) for name, tensor in model.named_parameters()]
    return {name: tensor.detach() for tensors in named for name, tensor in tensors.items()}


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """What a server reads there."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
