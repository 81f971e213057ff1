"""RunFacts: what the planner must know of a run, read from its parsed configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightrl.checks.disk_errors import check_local
from lightrl.launch.memory import PlannedRun
from lightrl.models import RoleMesh

_GPUS_ASSUMED = "trainer.accelerator is auto: the hosts are assumed to have GPUs. Set it to cpu if they have none."


@dataclass(frozen=True)
class RunFacts:
    """A run's own settings of ranks, servers and models."""

    ranks: int = 1  # trainer.devices · trainer.num_nodes
    servers: int = 0  # its SGLangEngine starts them
    tp: int = 1  # each server's
    strategy: str | None = None  # class name; None if the YAML leaves it to the trainer
    trainer_pp: int = 1
    trainer_tp: int = 1
    on_cpu: bool = False
    assumed: str = ""  # what that is if the accelerator is auto, for the plan's notes
    engine: str | None = None  # class name
    has_urls: bool = False  # the servers run already
    transport: str = "disk"
    weight_folder: str | None = None
    meshes: Mapping[str, RoleMesh] = field(default_factory=dict)  # role → mesh
    root: str = "."  # trainer.default_root_dir
    planned: PlannedRun | None = None  # sizes of its models, from which memory follows; None if they are not known
    unknown: str = ""  # why not


def facts_of(settings: Mapping[str, Any]) -> RunFacts:
    """Reads the settings of `lightrl fit` as the parser gives them.

    Raises:
        ValueError: if the trainer's devices are not a number that is known before the run.
    """
    trainer = settings["trainer"]
    kind, strategy = _class(trainer.get("strategy"))
    engine_kind, engine = _class(trainer.get("engine"))
    _, model = _class(settings.get("model"))
    check_local(default_root_dir=trainer.get("default_root_dir"))
    return RunFacts(
        ranks=num_devices(trainer.get("devices")) * int(trainer.get("num_nodes") or 1),
        servers=int(engine.get("servers") or 0),
        tp=int(engine.get("tp") or 1),
        strategy=None if kind in (None, "auto") else kind,
        trainer_pp=int(strategy.get("pp") or 1),
        trainer_tp=int(strategy.get("tp") or 1),
        on_cpu=trainer.get("accelerator") == "cpu",
        assumed=_GPUS_ASSUMED if trainer.get("accelerator") in (None, "auto") else "",
        engine=engine_kind,
        has_urls=engine.get("urls") is not None,
        transport=engine.get("transport") or "disk",
        weight_folder=engine.get("weight_folder"),
        meshes=dict(_meshes(model)),
        root=str(trainer.get("default_root_dir") or "."),
    )


def _class(value: Any) -> tuple[str | None, Mapping[str, Any]]:
    """Class name and arguments of `{class_path: …, init_args: …}` or of a bare name."""
    if not isinstance(value, Mapping):
        return (None if value is None else str(value).rpartition(".")[2]), {}
    return str(value.get("class_path", "")).rpartition(".")[2], value.get("init_args") or {}


def _fields(value: Any) -> Mapping[str, Any]:
    """A role's or a model's, which may be given as a class with its arguments."""
    if not isinstance(value, Mapping):
        return {}
    return value.get("init_args") or {} if "class_path" in value else value


def _meshes(model: Mapping[str, Any]) -> Iterator[tuple[str, RoleMesh]]:
    for name, value in model.items():
        if mesh := _fields(_fields(value).get("mesh")):
            yield name, RoleMesh(**mesh)


def num_devices(devices: Any) -> int:
    """Ranks per host; `auto` is one, since the launch says how many there are."""
    if devices in (None, "auto"):
        return 1
    text = str(devices).strip("[] ")
    if text.isdigit() and int(text) > 0 and not isinstance(devices, list):
        return int(text)
    if isinstance(devices, list) or "," in text:
        return len([part for part in text.split(",") if part.strip()])
    raise ValueError(f"lightrl launch needs a number of trainer.devices, or launch.ranks, got devices={devices!r}.")
