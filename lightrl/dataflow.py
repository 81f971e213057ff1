"""ModelCall: which model computes what from what. The loop's score phase is a list of them, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelCall:
    """One use of one model on the whole iteration's Experience.

    Example:
        ModelCall("reference_logprobs", role="reference", kind="infer",
                  inputs=("token_ids",), outputs=("reference_logprobs",))
    """

    name: str  # unique within a module
    role: str  # the key of `RLModule.models()`
    kind: Literal["generate", "infer", "train"]
    inputs: tuple[str, ...]  # fields of Experience that must be there
    outputs: tuple[str, ...]  # fields of Experience that it fills in
    microbatch_tokens: int | None = None  # None: the module's


def check_score_calls(calls: list[ModelCall], roles: set[str], available: set[str]) -> None:
    """Refuses a list that cannot be executed in order.

    Args:
        calls: the score phase.
        roles: of the module's models.
        available: Experience fields that the rollout phase fills in.

    Raises:
        ValueError: for a role that does not exist, an input that nothing before it gives, an output given twice, a name
            used twice, or a kind other than `infer`.
    """
    names: set[str] = set()
    keys = set(available)
    for call in calls:
        if call.name in names:
            raise ValueError(f"Two model calls are named {call.name!r}, expected distinct names. Rename one.")
        if call.role not in roles:
            raise ValueError(
                f"Model call {call.name!r} uses role {call.role!r}, expected one of {sorted(roles)}. Add the role to "
                "models() or mend its name."
            )
        if call.kind != "infer":
            raise ValueError(f"Model call {call.name!r} has kind {call.kind!r}, expected 'infer' in the score phase.")
        missing = [key for key in call.inputs if key not in keys]
        if missing:
            raise ValueError(
                f"Model call {call.name!r} needs {missing[0]!r}, which nothing before it gives; there are "
                f"{sorted(keys)}. "
                "Put the call that gives it first."
            )
        twice = [key for key in call.outputs if key in keys]
        if twice:
            raise ValueError(
                f"Model call {call.name!r} gives {twice[0]!r} a second time, expected a new key. Rename it."
            )
        names.add(call.name)
        keys.update(call.outputs)
