"""Role: a model in a run, with its source, its training settings and its ranks; load_role loads it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from lightrl.checks.bounds import check_adamw, check_bounds
from lightrl.models.lora import LoRA
from lightrl.models.model_spec import ModelSpec, is_silent, untrained_reward_model
from lightrl.models.tuning import ALL_WEIGHTS, Tuning

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoleMesh:
    """The ranks of one role's model, and how they split it; dp is num_ranks / (pp · tp).

    Roles on different ranks run in parallel; roles that share a rank run one after another.

    Args:
        first_rank: the first of the role's ranks.
        num_ranks: the number of consecutive ranks; None takes all from `first_rank` on.
        pp: number of pipeline stages, as in Parallel3DStrategy; 1 under FSDP2Strategy.
        tp: number of tensor parallel ranks, as in Parallel3DStrategy; 1 under FSDP2Strategy.

    Example:
        Role("my/reward", mesh=RoleMesh(first_rank=4, num_ranks=2, tp=2))
    """

    first_rank: int = 0
    num_ranks: int | None = None
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        check_bounds(0, first_rank=self.first_rank)
        check_bounds(1, num_ranks=self.num_ranks, pp=self.pp, tp=self.tp)

    def ranks(self, world_size: int) -> range:
        """Returns the ranks of this mesh in a run of `world_size`; raises ValueError if they do not fit."""
        num = max(0, world_size - self.first_rank) if self.num_ranks is None else self.num_ranks
        if num == 0 or self.first_rank + num > world_size:
            raise ValueError(
                f"A role's mesh of first_rank={self.first_rank}, num_ranks={self.num_ranks} does not fit ranks 0 to "
                f"{world_size - 1} in this run. Change it, or increase trainer.devices or trainer.num_nodes."
            )
        if num % (self.pp * self.tp):
            raise ValueError(
                f"num_ranks in a role's mesh must be a multiple of pp * tp = {self.pp * self.tp}, got {num}. Change "
                "num_ranks, pp or tp."
            )
        return range(self.first_rank, self.first_rank + num)


@dataclass(frozen=True)
class Role:
    """A model in a run, for example the policy, the critic or a teacher.

    Args:
        model: its source: a hub name, a local folder, or a ModelSpec.
        lr: this role's learning rate, which may be 0; None means the module's.
        weight_decay: this role's weight decay; None means the module's.
        frozen: do not train this critic; the policy is always trained.
        lora: train small adapters instead of the weights; needs `pip install peft`.
        offload: keep the model in CPU memory between uses; only for roles that are not trained.
        mesh: the ranks that run this role's model; None means all ranks, as the strategy divides them.

    Example:
        Role("my/model", lora=LoRA(rank=8), lr=1e-5)
    """

    model: str | ModelSpec
    lr: float | None = None
    weight_decay: float | None = None
    frozen: bool = False
    lora: LoRA | None = None
    offload: bool = False
    mesh: RoleMesh | None = None

    def __post_init__(self) -> None:
        check_adamw(lr=self.lr, weight_decay=self.weight_decay)
        if self.spec.url is not None and self.mesh is not None:
            raise ValueError(f"The model at {self.spec.url} runs on its server's devices. Omit mesh.")
        if self.spec.quantization is not None and self.lora is None:
            raise ValueError(
                f"quantization={self.spec.quantization!r} needs lora to train anything. Add lora, or remove it."
            )

    @classmethod
    def of(cls, role: str | ModelSpec | Role) -> Role:
        """Makes a Role with default settings from a path or a ModelSpec; returns a Role unchanged."""
        if not isinstance(role, str | ModelSpec | Role):
            raise TypeError(
                f"A model must be a hub name, a folder, a ModelSpec or a Role, got {type(role).__name__}. If your "
                "module's __init__ gets it from YAML, annotate it there: `policy: str | ModelSpec | Role`."
            )
        return role if isinstance(role, Role) else cls(role)

    @property
    def spec(self) -> ModelSpec:
        """The source of the model."""
        return ModelSpec.of(self.model)

    def with_scalar_head(self) -> Self:
        return replace(self, model=replace(self.spec, head="scalar"))

    @property
    def tuning(self) -> Tuning:
        """The weights that training changes."""
        return ALL_WEIGHTS if self.lora is None else self.lora

    @property
    def initial(self) -> Self | None:
        """The role of the policy that training starts from; None if that policy is the adapters' base."""
        is_base = self.lora is not None and self.lora.adapter is None
        return None if is_base else replace(self, lr=None, weight_decay=None)

    def load_model(self) -> PreTrainedModel:
        """Loads the model and adds the tuning weights. Inside `models_made_by`, `make` builds unquantized models."""
        make = _MAKE.get()
        if make is not None and self.spec.quantization is None:  # only whole weights can be quantized
            return make(self)
        model = self.spec.load_model()
        self.tuning.add_to(model, seed=self.spec.random_seed)
        return model


TUNINGS: dict[str, type[Tuning]] = {tuning.kind: tuning for tuning in (Tuning, LoRA)}

# Replaces `Role.load_model` inside `models_made_by`.
_MAKE: ContextVar[Callable[[Role], PreTrainedModel] | None] = ContextVar("make_model", default=None)


@contextlib.contextmanager
def models_made_by(make: Callable[[Role], PreTrainedModel]) -> Iterator[None]:
    """Inside this context, `Role.load_model` returns `make(role)`. Strategies use it to build sharded models."""
    token = _MAKE.set(make)
    try:
        yield
    finally:
        _MAKE.reset(token)


MAX_OTHER_TOKENS = 0.01  # fraction of the policy's ids; within a family, names of reserved tokens may differ


def check_size(role: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if the role's model has too few embeddings for the policy's tokenizer."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(
            f"The policy's tokenizer has {len(tokenizer)} tokens, but the vocabulary of the {role} has only {rows}. "
            "All models read the same tokens. Use models and a tokenizer that belong together, or a larger vocab_size."
        )


def check_tokens(role: str, spec: ModelSpec, policy: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if the role's tokenizer and the policy's differ at more than MAX_OTHER_TOKENS of the ids."""
    from transformers.utils import cached_file

    source = spec.tokenizer or spec.path
    if source == (policy.tokenizer or policy.path):
        return
    config = "tokenizer_config.json"  # transformers makes an empty tokenizer for a model without this file
    if not spec.tokenizer and not cached_file(spec.path, config, _raise_exceptions_for_missing_entries=False):
        return
    role_tokens = {index: token for token, index in spec.load_tokenizer().get_vocab().items()}
    policy_tokens = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    differing = [(index, token) for index, token in policy_tokens if role_tokens.get(index, token) != token]
    if not differing:
        return
    index, token = differing[0]
    example = f"{role_tokens[index]!r} at {index} instead of {token!r}"
    difference = f"{len(differing)} of the policy's {len(policy_tokens)} ids, for example {example}"
    if len(differing) <= MAX_OTHER_TOKENS * len(policy_tokens):
        log.warning("The tokenizer of the %s (%s) has different tokens at %s.", role, source, difference)
        return
    raise ValueError(
        f"The tokenizer of the {role} ({source}) has different tokens at {difference}, but all models read the same "
        f"ids. Use a {role} of the policy's family. If its model does read the policy's ids, set its tokenizer to "
        f"{policy.tokenizer or policy.path}."
    )


def trainable_policy(policy: str | ModelSpec | Role) -> Role:
    """Returns the policy's role; raises ValueError if it has a url or is frozen."""
    role = Role.of(policy)
    if role.spec.url is not None:
        raise ValueError(
            f"policy must have a path or config, because it is trained here, got url={role.spec.url!r}. Servers that "
            "generate its rollouts belong in trainer.engine."
        )
    if role.frozen:
        raise ValueError(
            "policy must not be frozen: only a critic can be. To keep the policy's weights unchanged, set its lr to 0."
        )
    return role


def load_role(
    name: str, role: Role, policy: Role, tokenizer: PreTrainedTokenizerBase, *, is_trained: bool
) -> PreTrainedModel:
    """Loads and checks a role's model; freezes it if it is not trained.

    Args:
        name: the role's name, for example `critic`.
        tokenizer: the policy's tokenizer.
    """
    check_tokens(name, role.spec, policy.spec, tokenizer)
    model = role.load_model()
    check_size(name, model, tokenizer)
    if not is_trained:
        model.requires_grad_(False)
    elif role.offload:
        raise ValueError(
            f"Role {name!r} is trained, so its offload must be false. Set offload only for roles that are not trained."
        )
    if name == "reward_model" and not is_trained and is_silent(model):
        raise untrained_reward_model(role.spec)
    return model
