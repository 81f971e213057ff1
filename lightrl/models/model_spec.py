"""ModelSpec: where a role's model and tokenizer come from, and how they are loaded."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightrl.models.pictures import auto_model, sees_pictures

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelSpec:
    """Where a role's model and tokenizer come from: a checkpoint, or a config for random weights.

    Args:
        path: a Hugging Face hub name or a local folder with weights.
        config: instead of `path`: the model's config, with `model_type`, for random weights.
        url: instead of `path`: of an SGLang server that has the model, for a teacher, a reference policy or a reward
            model, which must have the policy's tokens. The server's token is that of LIGHTRL_SERVER_TOKEN.
        tokenizer: a hub name, a local folder, or the dotted path of a function that returns one; `path` if None.
        dtype: of the weights, for example `float32` or `bfloat16`; float32 if None, which mixed precision expects.
        attn_implementation: as in transformers; None is its default.
        seed: of the random weights when `config` is given; None is that of `seed_everything`.
        trust_remote_code: runs the Python code of a hub repository; think before you say true.
        head: `vocabulary` for a language model; `scalar` for a critic or a reward model, one number per position, which
            `AutoModelForSequenceClassification` loads. A checkpoint without such a head gets one that says 0.
    """

    path: str | None = None
    config: dict[str, Any] | None = None
    url: str | None = None
    tokenizer: str | None = None
    dtype: str | None = None
    attn_implementation: str | None = None
    seed: int | None = None
    trust_remote_code: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of `from_pretrained`
    head: Literal["vocabulary", "scalar"] = "vocabulary"

    def __post_init__(self) -> None:
        if (self.path is None) + (self.config is None) + (self.url is None) != 2:
            raise ValueError(
                f"ModelSpec got path={self.path!r}, config={self.config!r} and url={self.url!r}, expected exactly one "
                "of them. Give path for a checkpoint, config for random weights, url for a server that has the model; "
                "null takes out what an earlier configuration file gave."
            )
        if self.config is not None and self.tokenizer is None:
            raise ValueError("ModelSpec has a config but no tokenizer, expected both. Add tokenizer=.")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError(
                f"ModelSpec's config has the keys {sorted(self.config)}, expected model_type among them. Add one, for "
                "example qwen3."
            )
        if self.dtype is not None and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(
                f"dtype={self.dtype!r}, expected a torch dtype such as float32 or bfloat16. Mend its name."
            )
        if self.path is not None and _looks_local(self.path) and not Path(self.path).is_dir():
            raise ValueError(
                f"Model folder {self.path!r} does not exist, expected a folder with config.json or a hub name. "
                "Mend the path, or export a model there first."
            )

    @classmethod
    def of(cls, model: str | ModelSpec) -> ModelSpec:
        """A ModelSpec as it is; a string as a path."""
        return model if isinstance(model, ModelSpec) else cls(path=model)

    @property
    def random_seed(self) -> int:
        """Of weights that no checkpoint gives: `seed`, or else that of `seed_everything`."""
        return int(os.environ.get("PL_GLOBAL_SEED", "0")) if self.seed is None else self.seed

    def load_config(self) -> PretrainedConfig:
        from transformers import AutoConfig

        self._check_is_here()
        if self.config is None:
            return AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        # Random weights know no end token: a family's default id would stand for some other token of this tokenizer.
        values = {"eos_token_id": None, **copy.deepcopy(self.config)}
        return AutoConfig.for_model(values.pop("model_type"), **values)

    def load_model(self) -> PreTrainedModel:
        """The model on the CPU, in `dtype`, in evaluation mode (no dropout: engine and trainer must agree)."""
        self._check_is_here()
        if self.head == "scalar":
            return self._load_scalar_model()
        dtype = getattr(torch, self.dtype or "float32")
        options = {"use_safetensors": True, **self.options} if self.config is None else dict(self.options)
        if self.attn_implementation is not None:
            options["attn_implementation"] = self.attn_implementation
        if self.config is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.random_seed)
                config = self.load_config()
                model = auto_model(config).from_config(config, dtype=dtype, **options)
        else:
            model = auto_model(self.load_config()).from_pretrained(
                self.path, dtype=dtype, trust_remote_code=self.trust_remote_code, **options
            )
        return model.eval()

    def _check_is_here(self) -> None:
        if self.url is not None:
            raise ValueError(
                f"url={self.url!r} stands where a model is loaded, expected path or config: only a teacher, a "
                "reference policy or a reward model of an RLModule can be behind a server. Give its path."
            )

    def _load_scalar_model(self) -> PreTrainedModel:
        """With a linear head `score` of one number; zeros, if the checkpoint has none."""
        from transformers import AutoModelForSequenceClassification

        if sees_pictures(self.load_config()):
            raise ValueError(
                "A model that sees pictures has no scalar head, expected a language model, or a critic on the policy's "
                "own body. Use critic='shared', or another reward."
            )
        body = replace(self, head="vocabulary").load_model() if self.config is not None else None
        options: dict[str, Any] = {"dtype": getattr(torch, self.dtype or "float32"), **self.options}
        if self.attn_implementation is not None:
            options["attn_implementation"] = self.attn_implementation
        if body is not None:  # random weights: the body is the one that a language model of this config and seed has
            config = self.load_config()
            config.num_labels = 1
            with torch.random.fork_rng(devices=[]):
                model = AutoModelForSequenceClassification.from_config(config, **options)
            is_fresh = True
        else:
            with torch.random.fork_rng(devices=[]):
                model, found = AutoModelForSequenceClassification.from_pretrained(
                    self.path,
                    num_labels=1,
                    use_safetensors=True,
                    trust_remote_code=self.trust_remote_code,
                    output_loading_info=True,
                    **options,
                )
            is_fresh = any(name.startswith("score.") for name in found["missing_keys"])
        head = scalar_head(model)
        if head is None:
            raise ValueError(
                f"{type(model).__name__} has no linear layer `score`, expected one for a critic or a reward model. Use "
                "a decoder such as Qwen3 or Llama."
            )
        if body is not None:
            model.base_model.load_state_dict(body.base_model.state_dict())
        if is_fresh:
            with torch.no_grad():
                for parameter in head.parameters():
                    parameter.zero_()
        return model.eval()

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer, PreTrainedTokenizerBase

        source = self.tokenizer or self.path
        assert source is not None
        make = _dotted(source) if self.tokenizer is not None and "/" not in source else None
        if make is None:
            return AutoTokenizer.from_pretrained(source, trust_remote_code=self.trust_remote_code)
        tokenizer = make()
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TypeError(
                f"tokenizer {source!r} returned {type(tokenizer).__name__}, expected a Hugging Face tokenizer."
            )
        return tokenizer


def scalar_head(model: PreTrainedModel) -> torch.nn.Linear | None:
    """The layer that makes one number of a position's hidden state; None for a language model."""
    head = getattr(model, "score", None)
    return head if isinstance(head, torch.nn.Linear) and head.out_features == 1 else None


def is_silent(model: PreTrainedModel) -> bool:
    """Whether the scalar head says 0 whatever it sees, as a fresh one does; False of a model without its weights."""
    head = scalar_head(model)
    return head is not None and not any(value.is_meta or bool(value.any()) for value in head.parameters())


def untrained_reward_model(spec: ModelSpec) -> ValueError:
    """The error about a reward model that judges nothing."""
    return ValueError(
        f"reward_model={spec.path or spec.config or spec.url!r} is a language model without a trained head, expected a "
        "reward model. Train one with RewardModel first, and give its export."
    )


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).exists()


def _dotted(name: str) -> Callable[[], Any] | None:
    """The function behind `package.module.function`; None if the name has another form or is a folder.

    Raises:
        ValueError: if there is no such module, or no such function in it.
    """
    module, _, attribute = name.rpartition(".")
    if not module or Path(name).exists() or not all(part.isidentifier() for part in name.split(".")):
        return None
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"tokenizer {name!r}: there is no module {error.name!r}, expected the dotted path of a function, a hub "
            "name with its owner (owner/name), or a folder. Mend the name, or start lightrl where the module is."
        ) from error
    if not callable(getattr(found, attribute, None)):
        raise ValueError(f"{name!r} is no function: {module} has no {attribute!r}. Mend the name.")
    make: Callable[[], Any] = getattr(found, attribute)
    return make
