"""What is wrong with a model's config, weights or tokenizer, in one message that names the setting or the folder."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightrl.checks.user_code import user_code

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

_LONGEST_PROBLEM = 600  # letters; transformers lists all families that it knows
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
# Families that read in both directions, unless their config says is_decoder.
_ENCODERS = {
    "albert", "bert", "big_bird", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra",
    "ernie", "megatron-bert", "modernbert", "rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
}  # fmt: skip


def loading(source: str, fix: str) -> AbstractContextManager[None]:
    """What transformers raises inside becomes an OSError, or else a ValueError, that names the source.

    Args:
        source: the setting and its value, for the message.
        fix: what to do.
    """

    def named(error: BaseException) -> Exception:
        problem = (str(error) or type(error).__name__).strip()
        cut = "..." if len(problem) > _LONGEST_PROBLEM else ""
        text = f"{source} cannot be loaded: {problem[:_LONGEST_PROBLEM].rstrip('.')}{cut}. {fix}"
        return OSError(text) if isinstance(error, OSError) else ValueError(text)

    return user_code(named)


def check_given(values: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Checks a config for random weights against its family.

    Raises:
        ValueError: if a name is nearly one that the family has and is not given, or a size is below 1.
    """
    known = {*config.to_dict(), *config.attribute_map}
    default = set(type(config)().to_dict()) | set(config.attribute_map)
    for name in values:
        near = [] if name in default else difflib.get_close_matches(name, default - set(values), n=1, cutoff=0.85)
        if near and not (near[0] in name or name in near[0]):
            raise ValueError(f"config has {name!r}, which {config.model_type} does not read. Did you mean {near[0]}?")
    for name in _SIZES:
        if isinstance(values.get(name), int) and values[name] < 1:
            raise ValueError(f"config must have {name} >= 1, got {values[name]}.")
    if "vocab_size" in known and "vocab_size" not in values:
        log.warning("config has no vocab_size: it is %s, the default of %s.", config.vocab_size, config.model_type)


def check_family(config: PretrainedConfig, source: str) -> None:
    """Raises ValueError for a family that cannot generate from left to right."""
    if config.is_encoder_decoder or (config.model_type in _ENCODERS and not getattr(config, "is_decoder", False)):
        raise ValueError(
            f"{source} is a {config.model_type}, which does not generate from left to right. Use a decoder such as "
            "Qwen3 or Llama."
        )


def check_pointers(folder: Path) -> None:
    """Raises ValueError if a file of weights is what Git LFS leaves in its place."""
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        with file.open("rb") as content:
            if content.read(35) == b"version https://git-lfs.github.com/":
                raise ValueError(f"'{file}' is a pointer of Git LFS, not the weights. Run `git lfs pull`.")


def check_loaded(source: str, model: PreTrainedModel, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Checks that a checkpoint has all weights of its config, and that they are numbers.

    Raises:
        ValueError: if a weight is missing, or holds NaN or infinity.
    """
    if missing:
        first = sorted(missing)[0]
        raise ValueError(
            f"{source} lacks {len(missing)} weights of its config, for example {first!r}, which would be random. Copy "
            "all of its files, or use the config.json that belongs to them."
        )
    if unexpected:
        first = sorted(unexpected)[0]
        log.warning("%s has %d weights that its config does not use, such as %r.", source, len(unexpected), first)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"{source} has NaN or infinity in weight {name!r}. Use an intact checkpoint.")
