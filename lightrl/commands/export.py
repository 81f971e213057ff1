"""lightrl export: turns a checkpoint into a Hugging Face folder, and can upload it. It needs no GPU and no data."""

from __future__ import annotations

import argparse
import csv
import json
import logging
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from lightrl import __version__
from lightrl.checks.bounds import check_bounds
from lightrl.checks.printable import count_text
from lightrl.checks.user_code import user_code
from lightrl.commands.console import reported
from lightrl.commands.inspect import Run
from lightrl.models import ModelSpec
from lightrl.models.model_folder import (
    HEAD_STAYS_BEHIND,
    ModelDescription,
    check_model_folder,
    parse_descriptions,
    replaced_folder,
    save_tokenizer,
)
from lightrl.strategies import load_plain, read_rest, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

    State = Callable[[str], dict[str, Tensor]]  # name prefix → its tensors, by names without the prefix

    from lightrl.trajectory import JsonObject

log = logging.getLogger(__name__)

_CURVE = ("val/accuracy_fraction", "val/reward", "rollout/accuracy_fraction", "rollout/reward", "val/loss")
_PACKAGES = ("torch", "transformers", "lightning")
_DATA = re.compile(r"data\.(train|validation|test)(\.(source|name|split|columns.*|arguments.*))?$")
_IMAGE = "learning_curve.png"
_MODEL_FILES = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]


def export_checkpoint(
    checkpoint: Path,
    to: Path,
    *,
    earlier: Sequence[Path] = (),
    decay: float | None = None,
    role: str = "policy",
    tokenizer: str | None = None,
    merged: bool = False,
    run_code_of_checkpoint: bool = False,
    push: str | None = None,
) -> None:
    """Writes a role's model as a Hugging Face folder that `from_pretrained` loads bit for bit.

    The folder of a LoRA model has only the adapters, in peft's format, or the whole model if `merged` is true. A critic
    that is a head on the policy's body becomes a separate model with its own copy of the body.

    Args:
        checkpoint: a file, or the folder of a sharded checkpoint, saved by any number of processes.
        to: the folder to write. An earlier export there is replaced; any other content is refused.
        earlier: checkpoints of the same model, oldest first; averages their weights and this checkpoint's, in float32.
        decay: from 0 to 1. For each later checkpoint, average = decay · average + (1 - decay) · weights. None weighs
            all checkpoints equally.
        role: the model to export.
        tokenizer: a hub name, a folder, or the dotted path to a function; None uses the one that the checkpoint names.
        merged: load the base model and merge the LoRA adapters into it.
        run_code_of_checkpoint: import and run code that the checkpoint names: a model class outside transformers, a
            tokenizer function, or the remote code of a base model.
        push: a hub repository to which the folder is uploaded, with a model card about the run.

    Raises:
        ValueError: if lightrl did not write the checkpoint; if it lacks the role or names code to run; if checkpoints
            to average are of different models; if `to` has other files; or if the hub refuses the upload.
    """
    check_bounds(0, 1, decay=decay)
    check_model_folder(to, asked_by="lightrl export")
    meta, state = _read(checkpoint)
    descriptions = parse_descriptions(meta.get("models"), checkpoint)
    if not descriptions:
        raise ValueError(
            f"Checkpoint {str(checkpoint)!r} does not describe its models: a different release saved it. Use the "
            "HuggingFaceExport callback instead."
        )
    if role not in descriptions:
        roles = sorted(descriptions)
        raise ValueError(f"Checkpoint {str(checkpoint)!r} has no role {role!r}. Set --role to one of {roles}.")
    description: ModelDescription = descriptions[role]
    if tokenizer is not None:
        description = replace(description, tokenizer=None)
    code = [] if run_code_of_checkpoint else description.code_named()
    if code:
        raise ValueError(
            f"Checkpoint {str(checkpoint)!r} names code that an export would run: {', '.join(code)}. If it is your own "
            "code, pass --run_code_of_checkpoint; a tokenizer can also be named with --tokenizer."
        )
    states = [*(_state_of(other, role, descriptions[role], checkpoint) for other in earlier), state]
    tensors = averaged((read(f"{description.body or role}.") for read in states), decay)
    if description.body is not None:
        heads = averaged((read("value_head.") for read in states), decay)
        tensors = description.with_head(tensors, heads["weight"])
    source = tokenizer or description.tokenizer
    hub = None if push is None else Hub(push)
    with replaced_folder(to) as folder:
        description.save(tensors, folder, merged=merged)
        if source is not None:
            save_tokenizer(ModelSpec(config={"model_type": "any"}, tokenizer=source).load_tokenizer(), folder)
        if hub is not None:
            base = json.loads(description.config).get("_name_or_path")
            write_card(folder, repo=hub.repo, checkpoint=checkpoint, role=role, base=base)
    average = f", averaged over {count_text(len(states), 'checkpoint')}" if earlier else ""
    log.info("Exported the %s from %s%s to %s.", role, checkpoint, average, to)
    if not merged:
        description.check_added(tensors, f"the adapters in {to}")
    if any(other.body == role for other in descriptions.values()):
        log.info(HEAD_STAYS_BEHIND)
    if hub is not None:
        hub.upload(to, f"The {role} from {checkpoint.name}, exported by lightrl")


def averaged(states: Iterable[dict[str, Tensor]], decay: float | None) -> dict[str, Tensor]:
    """Averages tensors by name, in float32 and one model at a time; raises ValueError if names or shapes differ."""
    average: dict[str, Tensor] = {}
    latest: dict[str, Tensor] = {}
    for number, latest in enumerate(states, 1):
        if number == 1:
            average = {name: value.float() for name, value in latest.items()}
            continue
        if _shapes(latest) != _shapes(average):
            raise ValueError("The checkpoints to average differ in the names or shapes of their weights.")
        for name, value in latest.items():
            average[name] = average[name].lerp(value.float(), 1 / number if decay is None else 1 - decay)
    return {name: average[name].to(value.dtype) for name, value in latest.items()}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def _state_of(other: Path, role: str, description: ModelDescription, checkpoint: Path) -> State:
    meta, state = _read(other)
    if parse_descriptions(meta.get("models"), other).get(role) != description:
        raise ValueError(
            f"{str(other)!r} and {str(checkpoint)!r} cannot be averaged: they do not have the same {role}. Pass "
            "checkpoints from one run, or from runs with the same model."
        )
    return state


def _read(checkpoint: Path) -> tuple[JsonObject, State]:
    """Returns the metadata, and a function that returns the weights below a name prefix, with the prefix removed."""
    if not checkpoint.exists():
        raise ValueError(f"Checkpoint {str(checkpoint)!r} does not exist.")
    if checkpoint.is_dir():
        return read_rest(checkpoint), lambda prefix: read_tensors(checkpoint, f"state_dict.{prefix}")
    meta = load_plain(checkpoint, mmap=True)
    state: dict[str, Tensor] = meta["state_dict"]
    return meta, lambda prefix: {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


class Hub:
    """A model repository on the hub, created as private if it does not exist; raises ValueError if the hub refuses."""

    def __init__(self, repo: str) -> None:
        from huggingface_hub import HfApi

        self.repo = repo
        self._api = HfApi()
        with user_code(self._refusal):
            self._api.create_repo(repo, private=True, exist_ok=True)

    def upload(self, folder: Path, message: str) -> None:
        """Uploads the files in a folder, overwriting files with the same names; removes files from an older model."""
        with user_code(self._refusal):
            self._api.upload_folder(
                repo_id=self.repo, folder_path=folder, commit_message=message, delete_patterns=_MODEL_FILES
            )
        log.info("Pushed %s to %s/%s.", folder, self._api.endpoint, self.repo)

    def _refusal(self, error: BaseException) -> ValueError:
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

        hub = f"The hub {self._api.endpoint}"
        if isinstance(error, HFValidationError):
            return ValueError(f"--push={self.repo!r} must be a repository such as me/my-model: {error}")
        if isinstance(error, OfflineModeIsEnabled):
            return ValueError(f"--push {self.repo} needs {hub.lower()}, but HF_HUB_OFFLINE is set. Unset it.")
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            reason = error.server_message or error.response.reason_phrase
            login = " Log in with a token that may write there: hf auth login, or HF_TOKEN." * (status in (401, 403))
            return ValueError(f"{hub} refused to write {self.repo} with HTTP status {status}: {reason}.{login}")
        return ValueError(f"{hub} does not answer, so {self.repo} was not pushed: {error!r}. Check HF_ENDPOINT.")


def run_of(checkpoint: Path) -> Run | None:
    """Returns the run that wrote a checkpoint: the nearest folder above it with a config.yaml, or None."""
    for folder in list(checkpoint.absolute().parents)[:3]:
        if (folder / "config.yaml").is_file():
            return Run(folder, folder.name)
    return None


def write_card(folder: Path, *, repo: str, checkpoint: Path, role: str, base: str | None) -> None:
    """Writes `README.md` into an exported folder, and copies the image of the run's learning curve if there is one."""
    run = run_of(checkpoint)
    settings = {} if run is None else run.settings()
    data = {name: value for name, value in settings.items() if _DATA.match(name)}
    head = {"library_name": "transformers", "tags": ["lightrl", "reinforcement-learning"]}
    head |= {"base_model": base} if base and re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists() else {}
    lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in head.items()), "---", "", f"# {repo}", ""]
    lines += [f"The {role} of a lightrl run, from the checkpoint `{checkpoint.name}`.", ""]
    lines += [path.read_text("utf-8") for path in folder.glob("README.txt")]  # says that the base was quantized
    if run is None:
        log.warning("Found no config.yaml above %s, so the model card has neither settings nor a curve.", checkpoint)
    else:
        lines += _curve_lines(run.folder, folder)
        lines += ["## Data", "", *_table("setting", "value", data)] if data else []
        lines += ["## Settings", "", *_table("setting", "value", settings)]
    versions = {"lightrl": __version__} | {name: version(name) for name in _PACKAGES}
    versions["python"] = platform.python_version()
    lines += ["## Package versions at export", "", *_table("package", "version", versions)]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _curve_lines(run: Path, folder: Path) -> list[str]:
    """Returns Markdown with the first, best and last value of each curve; copies and embeds the image of the curves."""
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in _CURVE}
    if (run / "metrics.csv").is_file():
        with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                for name, curve in curves.items():
                    if row.get(name):
                        curve.append((int(row["step"]), float(row[name])))
    lines = ["| metric | first | best | last |", "|---|--:|--:|--:|"]
    for name, curve in curves.items():
        if curve:
            best = (min if name.endswith("loss") else max)(curve, key=lambda point: point[1])
            cells = [f"{value:.4g} (iteration {step})" for step, value in (curve[0], best, curve[-1])]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    lines = [*lines, ""] if len(lines) > 2 else []
    if (run / _IMAGE).is_file():
        shutil.copyfile(run / _IMAGE, folder / _IMAGE)
        lines += [f"![the run's curve]({_IMAGE})", ""]
    return ["## Curve", "", *lines] if lines else []


def _table(left: str, right: str, rows: Mapping[str, str]) -> list[str]:
    cells = ((name, " ".join(value.split()).replace("|", "\\|")) for name, value in rows.items())
    return [f"| {left} | {right} |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells), ""]


def run(args: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="lightrl export",
        description="Turns a checkpoint into a Hugging Face folder, for serving, evaluation or the next stage.",
        allow_abbrev=False,
    )
    checkpoint = "a .ckpt file, or the folder of a sharded checkpoint; several, oldest first, are averaged"
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help=checkpoint)
    parser.add_argument("--to", type=Path, required=True, help="the folder; an earlier export there is replaced")
    decay = "average = DECAY · average + (1 - DECAY) · next checkpoint; default: equal weights"
    parser.add_argument("--decay", type=float, help=decay)
    parser.add_argument("--role", default="policy", help="policy (default), critic, reward_model, ...")
    parser.add_argument("--push", metavar="REPO", help="upload the folder to the hub, with a model card; needs a token")
    parser.add_argument("--merged", action="store_true", help="merge LoRA adapters into their base model")
    parser.add_argument("--tokenizer", help="a hub name, a folder, or package.function; default: the checkpoint's")
    parser.add_argument(
        "--run_code_of_checkpoint",
        action="store_true",
        help="import and run code that the checkpoint names: a model class, a tokenizer function, remote code",
    )

    def export(callbacks: Sequence[object]) -> int:
        options = vars(parser.parse_args(list(args)))
        *earlier, checkpoint = options.pop("checkpoints")
        export_checkpoint(checkpoint, earlier=earlier, **options)
        return 0

    return reported(export)
