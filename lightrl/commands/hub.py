"""Uploads an exported folder to a hub, with a model card made from the run's records."""

from __future__ import annotations

import csv
import json
import logging
import platform
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from lightrl.checks.user_code import user_code
from lightrl.inspect.run_folder import Run

log = logging.getLogger(__name__)

_CURVE = ("val/accuracy_fraction", "val/reward", "rollout/accuracy_fraction", "rollout/reward", "val/loss")
_PACKAGES = ("lightrl", "torch", "transformers", "lightning")
_DATA = re.compile(r"data\.(train|validation|test)(\.(source|name|split|columns.*|arguments.*))?$")
_IMAGE = "learning_curve.png"
_MODEL_FILES = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]


class Hub:
    """A model repository, which is made, private, if it is not there.

    Raises:
        ValueError: if the hub does not answer or refuses; it is asked before anything is exported.
    """

    def __init__(self, repo: str) -> None:
        from huggingface_hub import HfApi

        self.repo = repo
        self._api = HfApi()
        with user_code(self._refusal):
            self._api.create_repo(repo, private=True, exist_ok=True)

    def upload(self, folder: Path, message: str) -> None:
        """Replaces the repository's files of the same names by those of a folder, and removes an older model's."""
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
        return ValueError(f"{hub} does not answer, so {self.repo} is not pushed: {error!r}. Check HF_ENDPOINT.")


def run_of(checkpoint: Path) -> Run | None:
    """The run that wrote a checkpoint: the nearest folder above it that has settings; None if it was moved."""
    for folder in list(checkpoint.absolute().parents)[:3]:
        if (folder / "config.yaml").is_file():
            return Run(folder, folder.name)
    return None


def write_card(folder: Path, *, repo: str, checkpoint: Path, role: str, base: str | None) -> None:
    """Writes `README.md`, and copies the run's curve, if there is one, into an exported folder."""
    run = run_of(checkpoint)
    settings = {} if run is None else run.settings()
    data = {name: value for name, value in settings.items() if _DATA.match(name)}
    head = {"library_name": "transformers", "tags": ["lightrl", "reinforcement-learning"]}
    head |= {"base_model": base} if base and re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists() else {}
    lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in head.items()), "---", "", f"# {repo}", ""]
    lines += [f"The {role} of a run of lightrl, from the checkpoint `{checkpoint.name}`.", ""]
    if run is None:
        log.warning("No config.yaml is above %s, so the model card has neither settings nor a curve.", checkpoint)
    else:
        lines += _curve_lines(run.folder, folder)
        lines += ["## Data", "", *_table("setting", "value", data)] if data else []
        lines += ["## Settings", "", *_table("setting", "value", settings)]
    versions = {name: version(name) for name in _PACKAGES} | {"python": platform.python_version()}
    lines += ["## Versions of the export", "", *_table("package", "version", versions)]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _curve_lines(run: Path, folder: Path) -> list[str]:
    """The run's first, best and last values of what it learned, and its image, which is copied."""
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
