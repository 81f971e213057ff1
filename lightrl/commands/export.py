"""lightrl export: turns a checkpoint into a Hugging Face folder, without the run's configuration, its data or a GPU."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightrl.commands.console import reported
from lightrl.commands.hub import Hub, write_card
from lightrl.models import ModelSpec
from lightrl.models.model_folder import (
    HEAD_STAYS_BEHIND,
    ModelDescription,
    check_model_folder,
    parse_descriptions,
    replaced_folder,
    save_tokenizer,
)
from lightrl.strategies import META_FILE, load_plain, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from lightrl.trajectory import JsonObject

log = logging.getLogger(__name__)


def export_checkpoint(
    checkpoint: Path,
    to: Path,
    *,
    role: str = "policy",
    tokenizer: str | None = None,
    merged: bool = False,
    run_code_of_checkpoint: bool = False,
    push: str | None = None,
) -> None:
    """Writes a role's model as a Hugging Face folder that `from_pretrained` loads bit-equal.

    A LoRA model becomes a folder with adapters only, in peft's format, or with `merged` the whole model. A critic that
    is a head on the policy's body is written with the body, as a model of its own.

    Args:
        checkpoint: a file, or the folder of a sharded one, from any number of processes.
        to: the folder; an earlier export there is replaced, anything else is refused.
        role: the model to export.
        tokenizer: a hub name, a folder, or the dotted path of a function; None takes the checkpoint's.
        merged: merge LoRA adapters into their base model, which is loaded for that.
        run_code_of_checkpoint: import and run what the checkpoint names beyond transformers' own classes: a model
            class, a tokenizer function, a base model's remote code.
        push: a repository of the hub that the folder is uploaded to, with a model card of the run.

    Raises:
        ValueError: if it is not a checkpoint of lightrl, lacks the role, names code to run, `to` has other files, or
            the hub refuses.
    """
    check_model_folder(to, asked_by="lightrl export")
    meta, state = _read(checkpoint)
    descriptions = parse_descriptions(meta.get("models"))
    if not descriptions:
        raise ValueError(
            f"Checkpoint {str(checkpoint)!r} does not describe its models, so this release did not save it. Use the "
            "callback HuggingFaceExport instead."
        )
    if role not in descriptions:
        raise ValueError(
            f"Checkpoint {str(checkpoint)!r} has no role {role!r}. Set --role to one of {sorted(descriptions)}."
        )
    description: ModelDescription = descriptions[role]
    if tokenizer is not None:
        description = replace(description, tokenizer=None)
    code = [] if run_code_of_checkpoint else description.code_named()
    if code:
        raise ValueError(
            f"Checkpoint {str(checkpoint)!r} names code that an export would run: {', '.join(code)}. If it is your own "
            "code, pass --run_code_of_checkpoint; a tokenizer can also be named with --tokenizer."
        )
    tensors = state(f"{description.body or role}.")
    if description.body is not None:
        tensors = description.with_head(tensors, state("value_head.")["weight"])
    source = tokenizer or description.tokenizer
    hub = None if push is None else Hub(push)
    with replaced_folder(to) as folder:
        description.save(tensors, folder, merged=merged)
        if source is not None:
            save_tokenizer(ModelSpec(config={"model_type": "any"}, tokenizer=source).load_tokenizer(), folder)
        if hub is not None:
            base = json.loads(description.config).get("_name_or_path")
            write_card(folder, repo=hub.repo, checkpoint=checkpoint, role=role, base=base)
    log.info("Exported the %s of %s to %s.", role, checkpoint, to)
    if any(other.body == role for other in descriptions.values()):
        log.info(HEAD_STAYS_BEHIND)
    if hub is not None:
        hub.upload(to, f"The {role} of {checkpoint.name}, exported by lightrl")


def _read(checkpoint: Path) -> tuple[JsonObject, Callable[[str], dict[str, Tensor]]]:
    """Everything but the weights, and a function from a prefix to the weights below it, named without it."""
    if not checkpoint.exists():
        raise ValueError(f"Checkpoint {str(checkpoint)!r} does not exist.")
    file = checkpoint / META_FILE if checkpoint.is_dir() else checkpoint
    if not file.is_file():
        raise ValueError(f"Checkpoint {str(checkpoint)!r} has no {META_FILE}: it is incomplete. Use an earlier one.")
    meta = load_plain(file, mmap=True)
    if checkpoint.is_dir():
        return meta, lambda prefix: read_tensors(checkpoint, f"state_dict.{prefix}")
    state: dict[str, Tensor] = meta["state_dict"]
    return meta, lambda prefix: {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def run(args: Sequence[str]) -> int:
    """Runs `lightrl export` with these arguments; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="lightrl export",
        description="Turns a checkpoint into a Hugging Face folder, for serving, evaluation or the next stage.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path, help="a .ckpt file, or the folder of a sharded checkpoint")
    parser.add_argument("--to", type=Path, required=True, help="the folder; an earlier export there is replaced")
    parser.add_argument("--role", default="policy", help="policy (default), critic, reward_model, ...")
    parser.add_argument("--push", metavar="REPO", help="upload it to the hub too, with a model card; needs a token")
    parser.add_argument("--merged", action="store_true", help="merge LoRA adapters into their base model")
    parser.add_argument("--tokenizer", help="a hub name, a folder, or package.function; default: the checkpoint's")
    parser.add_argument(
        "--run_code_of_checkpoint",
        action="store_true",
        help="import and run what the checkpoint names: a model class, a tokenizer function, remote code",
    )

    def export(callbacks: Sequence[object]) -> int:
        export_checkpoint(**vars(parser.parse_args(list(args))))
        return 0

    return reported(export)
