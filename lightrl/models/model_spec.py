"""ModelSpec: the source of a role's model and tokenizer, and how they are loaded."""

from __future__ import annotations

import contextlib
import copy
import difflib
import hashlib
import importlib
import inspect
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch

from lightrl.checks.annotations import StrOrObject
from lightrl.checks.bounds import check_choice, check_kind
from lightrl.checks.entry_points import entry_point
from lightrl.checks.files import SUMS_FILE, check_sums, write_sums
from lightrl.checks.user_code import user_code
from lightrl.models.images import auto_model, finish_model, vision_kind

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

LONGROPE_LENGTH = "original_max_position_embeddings"
# The name of a row's length limit in error messages.
CONTEXT = f"the model's context (with longrope, its {LONGROPE_LENGTH})"
_HUB_ANSWER_S = 5.0
_LONGEST_PROBLEM = 600  # characters; some of transformers' errors list all model families
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
# Families with bidirectional attention, unless their config says is_decoder.
_ENCODERS = {
    "albert", "bert", "big_bird", "camembert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra",
    "ernie", "megatron-bert", "modernbert", "rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
}  # fmt: skip

# Arguments of `from_pretrained` for reading weights that work both in one process and on several ranks.
_OPTIONS = ("key_mapping", "use_safetensors", "variant", "weights_only")


def loading(source: str, fix: str) -> AbstractContextManager[None]:
    """Context manager that turns transformers' exceptions into an OSError or a ValueError with `source` and `fix`.

    `source` is the setting and its value; `fix` tells the user what to do.
    """

    def named(error: BaseException) -> Exception:
        problem = (str(error) or type(error).__name__).strip()
        cut = "..." if len(problem) > _LONGEST_PROBLEM else ""
        is_out_of_memory = isinstance(error, MemoryError) or "can't allocate memory" in problem
        advice = "The machine has too little memory: use a smaller model." if is_out_of_memory else fix
        text = f"{source} cannot be loaded: {problem[:_LONGEST_PROBLEM].rstrip('.')}{cut}. {advice}"
        return OSError(text) if isinstance(error, OSError) else ValueError(text)

    return user_code(named)


def global_seed() -> int:
    """Returns the seed given to `seed_everything`, or 0 if it was not called."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def check_given(values: Mapping[str, object], config: PretrainedConfig) -> None:
    """Raises ValueError if a setting in the config looks misspelled, or a size is below 1."""
    fields = {*config.to_dict(), *config.attribute_map}
    default = set(type(config)().to_dict()) | set(config.attribute_map)
    for name in values:
        near = [] if name in default else difflib.get_close_matches(name, default - set(values), n=1, cutoff=0.85)
        if near and not (near[0] in name or name in near[0]):
            raise ValueError(f"config has {name!r}, which {config.model_type} does not read. Did you mean {near[0]}?")
    for name in _SIZES:
        size = values.get(name)
        if isinstance(size, int) and size < 1:
            raise ValueError(f"config must have {name} >= 1, got {size}.")
    heads, groups = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and groups > 0 and heads % groups:
        raise ValueError(f"num_attention_heads must be a multiple of num_key_value_heads={groups}, got {heads}.")
    if "vocab_size" in fields and "vocab_size" not in values:
        log.warning("config has no vocab_size: it is %s, the default of %s.", config.vocab_size, config.model_type)


def check_family(config: PretrainedConfig, source: str) -> None:
    """Raises ValueError for a family that cannot generate from left to right."""
    if config.is_encoder_decoder or (config.model_type in _ENCODERS and not getattr(config, "is_decoder", False)):
        raise ValueError(
            f"{source} is a {config.model_type}, which does not generate from left to right. Use a decoder such as "
            "Qwen3 or Llama."
        )


def check_outputs(config: PretrainedConfig, source: str) -> None:
    """Raises ValueError for a config that requests an auxiliary loss or unnamed outputs."""
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if getattr(part, "output_router_logits", False):
            raise ValueError(
                f"{source} has output_router_logits=true, which requests the MoE load-balancing loss. Set it to false "
                "in the model's config, and add the ExpertBalance callback."
            )
        if getattr(part, "return_dict", True) is False:
            raise ValueError(f"{source} has return_dict=false, but outputs are read by name. Set it to true.")


def check_files(folder: Path) -> None:
    """Raises ValueError if a file has changed since lightrl exported it, or is a Git LFS pointer instead of weights."""
    fix = f"Copy or export the folder again. If you changed this file on purpose, delete its line in {SUMS_FILE}."
    check_sums(folder, fix)
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        with file.open("rb") as content:
            if content.read(35) == b"version https://git-lfs.github.com/":
                raise ValueError(f"'{file}' is a Git LFS pointer, not the weights. Run `git lfs pull`.")


def check_loaded(source: str, model: PreTrainedModel, missing: Collection[str], unexpected: Collection[str]) -> None:
    """Raises ValueError if a checkpoint lacks a weight that its config needs, or a weight has NaN or infinity.

    If the checkpoint has no scalar head, the head is initialized to return 0.
    """
    head = scalar_head(model)
    if head is not None and "score.weight" in missing:
        for parameter in head.parameters():
            torch.nn.init.zeros_(parameter)
        missing = set(missing) - {"score.weight", "score.bias"}
        unexpected = set(unexpected) - {"lm_head.weight"}
    if missing:
        first = sorted(missing)[0]
        raise ValueError(
            f"{source} lacks {len(missing)} weights that its config needs, for example {first!r}. They would be "
            "random. Copy all of its files, or use the config.json that belongs to them."
        )
    if unexpected:
        first = sorted(unexpected)[0]
        log.warning("%s has %d weights that its config does not use, like %r.", source, len(unexpected), first)
    for name, parameter in model.named_parameters():
        shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # this rank's part
        if not shard.is_meta and not bool(torch.isfinite(shard).all()):
            raise ValueError(f"{source} has NaN or infinity in weight {name!r}. Use an intact checkpoint.")


@dataclass(frozen=True)
class ModelSpec:
    """The source of a role's model and tokenizer: a checkpoint, or a config for random weights.

    Args:
        path: a Hugging Face hub name or a local folder with weights.
        config: the model's config, with `model_type`, to start from random weights instead of a `path`.
        url: the SGLang server that runs the model, instead of a `path`: for a teacher, a reference policy or a reward
            model with the policy's vocabulary. The environment's LIGHTRL_SERVER_TOKEN is its token.
        tokenizer: a hub name, a local folder, or the dotted path to a function that returns one; `path` if None. In
            Python, also a tokenizer or a function: the tokenizer is saved in ~/.cache/lightrl, and this field becomes
            its folder, which other processes, checkpoints and exports can load.
        dtype: type of the weights, such as `float32` or `bfloat16`; None means float32, which mixed precision expects.
        attn_implementation: as in transformers; None means its default.
        seed: the seed for random weights with `config`; None means the seed from `seed_everything`.
        trust_remote_code: run Python code from the model's hub repository. Enable it only if you trust the owner.
        options: other arguments to `from_pretrained` for reading weights: key_mapping, use_safetensors, variant and
            weights_only. Everything else has a setting, or belongs in the model's folder.
        head: `vocabulary` for a language model; `scalar` for a critic or a reward model with one number per position,
            loaded with `AutoModelForSequenceClassification`. If the checkpoint has no such head, it starts at 0.
        quantization: `nf4` holds the linear layers, except the output head, in 4 bits, and frozen; see quantized.py.
    """

    path: str | None = None
    config: dict[str, Any] | None = None
    url: str | None = None
    tokenizer: StrOrObject | None = None
    dtype: str | None = None
    attn_implementation: str | None = None
    seed: int | None = None
    trust_remote_code: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    head: Literal["vocabulary", "scalar"] = "vocabulary"
    quantization: Literal["nf4"] | None = None

    def __post_init__(self) -> None:
        check_kind(str, path=self.path, url=self.url, dtype=self.dtype)
        if self.tokenizer is not None and not isinstance(self.tokenizer, str):
            object.__setattr__(self, "tokenizer", _saved_tokenizer(self.tokenizer))
        if (self.path is None) + (self.config is None) + (self.url is None) != 2:
            raise ValueError(
                "A model needs exactly one of path (a checkpoint), config (random weights) and url (a server), got "
                f"path={self.path!r}, config={self.config!r} and url={self.url!r}. To remove one that an earlier "
                "configuration file sets, set it to null."
            )
        if "" in (self.path, self.url, self.tokenizer):
            raise ValueError(f"A model's path, url or tokenizer must not be empty, got {self!r:.200}.")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("A model with a config also needs a tokenizer. Set tokenizer.")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError(f"A model's config needs model_type, for example qwen3, got {sorted(self.config)}.")
        if self.dtype is not None and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"dtype must be a torch dtype such as float32 or bfloat16, got {self.dtype!r}.")
        check_choice(("nf4", None), quantization=self.quantization)
        if self.quantization is not None and self.path is None:
            raise ValueError(f"quantization={self.quantization!r} needs a checkpoint with weights. Set path.")
        invalid = sorted(self.options if self.path is None else self.options.keys() - set(_OPTIONS))
        if invalid:
            raise ValueError(
                f"options may only have {', '.join(_OPTIONS)}, and only with path, got {invalid[0]!r}, which some "
                "strategies and tokenizers would ignore. Use the model's dtype, attn_implementation or "
                "trust_remote_code, or the trainer's devices; for other files in the repository, run `hf download … "
                "--local-dir FOLDER` and set path to that folder."
            )
        if self.path is not None and _looks_local(self.path) and not Path(self.path).is_dir():
            raise ValueError(
                f"Model folder {self.path!r} does not exist. Set path to a folder with config.json or a hub name, or "
                "export a model there first."
            )

    @classmethod
    def of(cls, model: str | ModelSpec) -> ModelSpec:
        """Makes a ModelSpec from a path; returns a ModelSpec unchanged."""
        return model if isinstance(model, ModelSpec) else cls(path=model)

    @property
    def random_seed(self) -> int:
        """The seed for weights that are not in a checkpoint: `seed`, or the seed from `seed_everything`."""
        return global_seed() if self.seed is None else self.seed

    def load_config(self) -> PretrainedConfig:
        from transformers import AutoConfig

        if self.url is not None:
            raise ValueError(
                f"This model is loaded in the trainer, so it needs path or config, got url={self.url!r}. Only a "
                "teacher, a reference policy or a reward model of an RLModule can run on a server."
            )
        if self.config is None:
            with loading(self._named, "It must be a hub name, or a folder with a complete config.json."):
                config = AutoConfig.from_pretrained(self.path, trust_remote_code=self.trust_remote_code)
        else:
            # No end token by default: the family's default id may be any token of this tokenizer.
            values = {"eos_token_id": None, **copy.deepcopy(self.config)}
            with loading(self._named, "Fix the config."):
                config = AutoConfig.for_model(values.pop("model_type"), **values)
                check_given(self.config, config)
        check_family(config, self._named)
        if self.quantization is not None:
            entry_point("quantization").check(config, self._named)
        parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
        names = [str(getattr(part, "_attn_implementation", None)) for part in parts]
        kernel = next((name for name in names if "/" in name), None)  # a hub repository
        if kernel is not None and self.attn_implementation is None:
            raise ValueError(
                f"The config of {self.path or self.config!r} names attention code on the hub, {kernel!r}, which would "
                "be downloaded and run. If you trust its owner, set attn_implementation to it; if not, use sdpa."
            )
        return config

    def check_reachable(self) -> None:
        """Raises OSError if the config must come from a hub that does not answer; the client would retry for 30 s."""
        from huggingface_hub import constants, try_to_load_from_cache

        hub = urlsplit(constants.ENDPOINT)
        if self.path is None or _looks_local(self.path) or constants.HF_HUB_OFFLINE or hub.scheme in getproxies():
            return
        if try_to_load_from_cache(self.path, "config.json"):
            return
        try:
            socket.create_connection((hub.hostname, hub.port or 443), timeout=_HUB_ANSWER_S).close()
        except OSError as error:
            raise OSError(
                f"{self._named} is not in the cache, and {constants.ENDPOINT} does not answer ({error}). Download the "
                "model first, or set path to a folder with it."
            ) from error

    def load_model(self) -> PreTrainedModel:
        """Loads the model on the CPU, in `dtype` and evaluation mode (dropout would make engine and trainer differ)."""
        with torch.device("cpu"):  # Lightning's default device would sample different weights
            return self._load_model()

    def _load_model(self) -> PreTrainedModel:
        from transformers import AutoModelForSequenceClassification

        if self.path is not None:
            check_files(Path(self.path))
        config, is_scalar = self.load_config(), self.head == "scalar"
        if is_scalar and vision_kind(config) == "plain":
            raise ValueError(
                "A Llava model cannot have a scalar head. Use critic='shared', which puts a head on the policy's body, "
                "or another reward."
            )
        tokens = getattr(config.get_text_config(), "max_position_embeddings", None)
        if self.path is not None and tokens is not None and context_tokens(config) != tokens:
            limit = f"{LONGROPE_LENGTH}, {context_tokens(config)} of {tokens} tokens"
            problem = "A longer row would change the logprobs of other rows"
            log.warning("%s uses longrope, so rows are limited to its %s. %s.", self._named, limit, problem)
        kind = AutoModelForSequenceClassification if is_scalar else auto_model(config)
        options = self.build_options
        missing: Collection[str]
        unexpected: Collection[str] = ()
        if self.config is not None:
            missing = {"score.weight"} if is_scalar else set()
            with loading(self._named, "Fix the config."), torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self.random_seed)
                model = auto_model(config).from_config(config, **options)
                if is_scalar:  # same body as a language model with this config and seed
                    body, config.num_labels = model.base_model.state_dict(), 1
                    model = kind.from_config(config, **options)
                    model.base_model.load_state_dict(body)
        else:
            options |= {"num_labels": 1} if is_scalar else {}
            fix = "Copy or download its files again, and use the config.json that belongs to them."
            load = kind.from_pretrained if self.quantization is None else entry_point("quantization").loader(kind)
            with loading(self._named, fix), torch.random.fork_rng(devices=[]):
                model, loading_info = load(
                    self.path,
                    trust_remote_code=self.trust_remote_code,
                    output_loading_info=True,
                    **{"use_safetensors": True, **self.options, **options},
                )
            missing, unexpected = loading_info["missing_keys"], loading_info["unexpected_keys"]
            if is_scalar and "score.weight" in missing:
                log.info("%s has no scalar head, so a new one starts at 0.", self._named)
        if is_scalar and scalar_head(model) is None:
            raise ValueError(
                f"A critic or a reward model needs a linear layer `score`, which {type(model).__name__} does not have. "
                "Use a decoder such as Qwen3 or Llama."
            )
        check_loaded(self._named, model, missing, unexpected)
        finish_model(model)
        return model.eval()

    @property
    def build_options(self) -> dict[str, Any]:
        """The arguments for transformers' constructors: dtype and attention."""
        attention = {} if self.attn_implementation is None else {"attn_implementation": self.attn_implementation}
        return {"dtype": getattr(torch, self.dtype or "float32"), **attention}

    @property
    def _named(self) -> str:
        """The model's name in messages."""
        return f"Model {self.path!r}" if self.config is None else f"A model with config={self.config!r:.200}"

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        source = self.tokenizer or self.path
        assert source is not None
        make = _import_function(source) if self.tokenizer is not None else None
        if make is None:
            fix = "It must have a tokenizer.json. Set tokenizer to a folder or a hub name that has one."
            with loading(f"The tokenizer of {source!r}", fix):
                return AutoTokenizer.from_pretrained(source, trust_remote_code=self.trust_remote_code)
        return _made_tokenizer(make, source)


def _made_tokenizer(make: Callable[[], object], source: object) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerBase

    with loading(f"tokenizer={source!r}", "It must be a function without arguments."):
        tokenizer = make()
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"tokenizer={source!r} must return a Hugging Face tokenizer, got {type(tokenizer).__name__}.")
    return tokenizer


def _saved_tokenizer(given: object) -> str:
    """Saves a tokenizer, or the one that a function returns, in a cache folder named by hash; returns the folder."""
    from transformers import PreTrainedTokenizerBase

    make = given if callable(given) and not isinstance(given, PreTrainedTokenizerBase) else lambda: given
    tokenizer = _made_tokenizer(make, given)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lightrl" / "tokenizers"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as place:
        part = Path(place) / "tokenizer"
        tokenizer.save_pretrained(part)
        write_sums(part)
        folder = cache / hashlib.sha256((part / SUMS_FILE).read_bytes()).hexdigest()[:16]
        if not folder.exists():
            with contextlib.suppress(OSError):  # another process has saved the same tokenizer
                part.rename(folder)
    return str(folder)


def context_tokens(config: PretrainedConfig) -> int | None:
    """Returns how many tokens a row may have, prompt and completion together; None if the config sets no limit.

    If any row of a batch exceeds the original length, longrope uses different factors for all rows of the batch.
    lightrl keeps all rows within that length, so that a row's logprobs do not depend on other rows.
    """
    text = config.get_text_config()
    tokens: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    if tokens is None or not any(settings.get("rope_type") == "longrope" for settings in ropes):
        return tokens
    originals = [getattr(text, LONGROPE_LENGTH, None), *(settings.get(LONGROPE_LENGTH) for settings in ropes)]
    return min(tokens, *(int(length) for length in originals if length))


def cache_argument(model: torch.nn.Module) -> str:
    """Returns the name of a model's KV cache argument and output (`cache` since transformers 5.24), or ""."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in accepted), "")


def scalar_head(model: PreTrainedModel) -> torch.nn.Linear | None:
    """Returns the layer that maps a hidden state to one number; None for a language model."""
    head = getattr(model, "score", None)
    return head if isinstance(head, torch.nn.Linear) and head.out_features == 1 else None


def is_silent(model: PreTrainedModel) -> bool:
    """Whether all weights of the scalar head are 0, as in a new head; False if they are not loaded."""
    head = scalar_head(model)
    return head is not None and not any(value.is_meta or bool(value.any()) for value in head.parameters())


def untrained_reward_model(spec: ModelSpec) -> ValueError:
    """Returns the error for a reward model whose head is not trained."""
    return ValueError(
        f"reward_model={spec.path or spec.config or spec.url!r} is a language model without a trained head. Train a "
        "reward model with RewardModel first, and use its export."
    )


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or Path(path).exists()


def names_function(tokenizer: str) -> bool:
    """Whether this is the dotted path to a function, not a folder or a hub name (owner/name)."""
    return "." in tokenizer and not Path(tokenizer).exists() and all(map(str.isidentifier, tokenizer.split(".")))


def _import_function(name: str) -> Callable[[], object] | None:
    """Imports `package.module.function`; returns None if the name is not such a path."""
    if not names_function(name):
        return None
    module, _, attribute = name.rpartition(".")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"tokenizer={name!r} must be the dotted path to a function, a hub name with its owner (owner/name), or a "
            f"folder, but there is no module {error.name!r}. Fix the name, or start lightrl in the module's folder."
        ) from error
    make: Callable[[], object] | None = getattr(imported, attribute, None)
    if not callable(make):
        raise ValueError(f"tokenizer={name!r} is not a function: {module} has no {attribute!r}.")
    return make
