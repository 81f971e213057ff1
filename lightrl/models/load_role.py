"""load_role: a role's model on the CPU, checked against the policy's tokens and against what the role is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrl.models.model_spec import is_silent, untrained_reward_model
from lightrl.models.role import Role
from lightrl.models.vocabulary import check_size, check_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


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
