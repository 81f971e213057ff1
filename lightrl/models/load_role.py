"""load_role: a role's model on the CPU, checked against the policy's tokens and against its purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrl.models.model_spec import ModelSpec, is_silent, untrained_reward_model
from lightrl.models.role import Role

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
import logging
from typing import TYPE_CHECKING

log = logging.getLogger(__name__)

MAX_OTHER_TOKENS = 0.01  # fraction of the policy's: reserved tokens differ by name within a family


def check_size(role: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if the policy's tokenizer has ids that the role's model has no embedding for."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ValueError(
            f"The policy's tokenizer has {len(tokenizer)} tokens but the vocabulary of the {role} has only {rows}. All "
            "models read the same tokens: use models and a tokenizer that belong together, or a larger vocab_size."
        )


def check_tokens(role: str, spec: ModelSpec, policy: ModelSpec, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compares the role's own tokenizer, if it has one, with the policy's.

    Raises:
        ValueError: if more than a few ids are other tokens there.
    """
    source = spec.tokenizer or spec.path
    if source == (policy.tokenizer or policy.path):
        return
    if spec.tokenizer is None and not _has_tokenizer(str(spec.path)):
        return
    theirs = {index: token for token, index in spec.load_tokenizer().get_vocab().items()}
    ours = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    others = [(index, token, theirs[index]) for index, token in ours if theirs.get(index, token) != token]
    if not others:
        return
    index, token, other = others[0]
    difference = f"{len(others)} of the policy's {len(ours)} ids, for example {other!r} at {index} instead of {token!r}"
    if len(others) <= MAX_OTHER_TOKENS * len(ours):
        log.warning("The tokenizer of the %s (%s) has other tokens at %s.", role, source, difference)
        return
    raise ValueError(
        f"The tokenizer of the {role} ({source}) has other tokens at {difference}, but all models read the same ids. "
        f"Use a {role} of the policy's family. If its model does read the policy's ids, set its tokenizer to "
        f"{policy.tokenizer or policy.path}."
    )


def _has_tokenizer(source: str) -> bool:
    """Whether a folder or hub repository has a tokenizer's files; without them Transformers makes an empty one."""
    from transformers.utils import cached_file

    file: object = cached_file(source, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False)
    return file is not None


def trainable_policy(policy: str | ModelSpec | Role) -> Role:
    """The policy's role.

    Raises:
        ValueError: if it is behind a server or frozen.
    """
    role = Role.of(policy)
    if role.spec.url is not None:
        raise ValueError(
            f"policy must have a path or config, got url={role.spec.url!r}: it is trained here. Servers that generate "
            "its rollouts belong to trainer.engine."
        )
    if role.frozen:
        raise ValueError(
            "policy must not be frozen: updates train it. Set its lr to 0 to keep its weights; frozen is for a critic."
        )
    return role


def load_role(
    name: str, role: Role, policy: Role, tokenizer: PreTrainedTokenizerBase, *, is_trained: bool
) -> PreTrainedModel:
    """The model of a role, without gradients if it is not trained.

    Args:
        name: of the role, such as `critic`.
        policy: the policy's role.
        tokenizer: the policy's.

    Raises:
        ValueError: if the model reads other tokens, is trained and has `offload`, or is an untrained reward model.
    """
    check_tokens(name, role.spec, policy.spec, tokenizer)
    model = role.load_model()
    check_size(name, model, tokenizer)
    if not is_trained:
        model.requires_grad_(False)
    elif role.offload:
        raise ValueError(
            f"Role {name!r} is trained, so offload must be false: updates need its model. Set offload for roles that "
            "are not trained."
        )
    if name == "reward_model" and is_silent(model):
        raise untrained_reward_model(role.spec)
    return model
