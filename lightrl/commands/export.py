"""lightrl export: a Hugging Face folder from a checkpoint, without the run's configuration, its data or a GPU."""

from __future__ import annotations

import argparse
import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrl.commands.cli import reported
from lightrl.models import ModelSpec
from lightrl.models.model_folder import (
    HEAD_STAYS_BEHIND,
    ModelDescription,
    check_model_folder,
    parse_descriptions,
    replaced_folder,
)
from lightrl.strategies import META_FILE, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


def export_checkpoint(
    checkpoint: Path, to: Path, *, role: str = "policy", tokenizer: str | None = None, merged: bool = False
) -> None:
    """Writes a role's model as a Hugging Face folder that `from_pretrained` loads bit-equal.

    With LoRA it is a folder in peft's form, adapters only, or with `merged` the whole model. A critic that is a head on
    the policy's body is written with the body, as a model of its own.

    Args:
        checkpoint: a file, or the folder of a sharded one; the number of processes that saved it does not matter.
        to: the folder; an earlier export in it is replaced, anything else is refused.
        role: whose model.
        tokenizer: a hub name, a folder, or the dotted path of a function; what the checkpoint names if None.
        merged: with LoRA, adapters merged into the model that they belong to, which is loaded for it.

    Raises:
        ValueError: if it is no checkpoint of lightrl's, has no such role, or `to` holds something else.
    """
    check_model_folder(to, asked_by="lightrl export")
    meta, state = _read(checkpoint)
    descriptions = parse_descriptions(meta.get("models"))
    if not descriptions:
        raise ValueError(
            f"Checkpoint {str(checkpoint)!r} does not describe its models, expected one that this release saved. "
            "Export with the callback HuggingFaceExport instead."
        )
    if role not in descriptions:
        raise ValueError(
            f"Checkpoint {str(checkpoint)!r} has no role {role!r}, expected one of {sorted(descriptions)}. Choose with "
            "--role."
        )
    description: ModelDescription = descriptions[role]
    tensors = state(f"{description.body or role}.")
    if description.body is not None:
        tensors = description.with_head(tensors, state("value_head.")["weight"])
    source = tokenizer or description.tokenizer
    with replaced_folder(to) as folder:
        description.save(tensors, folder, merged=merged)
        if source is not None:
            ModelSpec(config={"model_type": "any"}, tokenizer=source).load_tokenizer().save_pretrained(folder)
    log.info("Exported the %s of %s to %s.", role, checkpoint, to)
    if any(other.body == role for other in descriptions.values()):
        log.info(HEAD_STAYS_BEHIND)


def _read(checkpoint: Path) -> tuple[dict[str, Any], Any]:
    """All but the weights; and a function from a prefix to the weights below it, by their names without it."""
    import torch

    if not checkpoint.exists():
        raise ValueError(f"Checkpoint {str(checkpoint)!r} does not exist, expected a file or a folder. Mend the path.")
    file = checkpoint / META_FILE if checkpoint.is_dir() else checkpoint
    if not file.is_file():
        raise ValueError(
            f"Checkpoint {str(checkpoint)!r} has no {META_FILE}, expected a whole one. It was not saved to its end: "
            "take an earlier one."
        )
    try:
        meta: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(
            f"{str(file)!r} is no checkpoint ({error}), expected one that lightrl saved. Take an earlier one."
        ) from error
    if checkpoint.is_dir():
        return meta, lambda prefix: read_tensors(checkpoint, f"state_dict.{prefix}")
    state: dict[str, Tensor] = meta["state_dict"]
    return meta, lambda prefix: {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def run(args: Sequence[str]) -> int:
    """`lightrl export CKPT --to FOLDER`.

    Args:
        args: without the command's name.

    Returns:
        0 done, 2 something to mend in the call.
    """
    parser = argparse.ArgumentParser(
        prog="lightrl export",
        description="Makes a Hugging Face folder of a checkpoint, for serving, evaluation or the next stage.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, help="a .ckpt file, or the folder of a sharded checkpoint")
    parser.add_argument("--to", type=Path, required=True, help="the folder; an earlier export in it is replaced")
    parser.add_argument("--role", default="policy", help="whose model: policy (default), critic, reward_model, ...")
    parser.add_argument("--merged", action="store_true", help="of a LoRA run: the whole model, adapters merged into it")
    parser.add_argument("--tokenizer", help="a hub name or folder, instead of the one the checkpoint names")

    def export(callbacks: Sequence[Any]) -> int:
        given = parser.parse_args(list(args))
        export_checkpoint(given.checkpoint, given.to, role=given.role, tokenizer=given.tokenizer, merged=given.merged)
        return 0

    return reported(export)
