"""Launch: the section `launch:` of a run's YAML, which says on how many hosts and GPUs it runs, and who starts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lightrl.checks.bounds import check_bounds
from lightrl.launch.allocation import Part, parse_allocation
from lightrl.trajectory import JsonMapping

LauncherName = Literal["local", "torchrun", "slurm", "kubernetes", "ray"]


@dataclass(frozen=True)
class Recover:
    """Recovery from a failed process of the run.

    Args:
        retries: how often everything is ended and started again, from the newest checkpoint.
    """

    retries: int = 0

    def __post_init__(self) -> None:
        check_bounds(0, retries=self.retries)


@dataclass(frozen=True)
class Launch:
    """The places of a run's trainer and servers; `lightrl launch` reads it, `lightrl fit` leaves it alone.

    Args:
        launcher: who starts the processes.
        nodes: hosts.
        gpus_per_node: GPUs of each host, or with `accelerator: cpu` how many ranks and servers it takes. None is what
            this machine has, or what the run needs on one host.
        allocation: AReaL's string instead of `ranks`, `servers` and `tp`, such as `sglang.d4t2+d2p2t1`.
        ranks: of the trainer; None is `trainer.devices` times `trainer.num_nodes`.
        servers: SGLang servers; None is what the run's SGLangEngine starts by itself.
        tp: GPUs of each server; None is the engine's.
        placement: servers `separate` from the trainer's GPUs, or `colocated` on them.
        gpu_memory_gb: of each GPU, in 1e9 bytes; a model that cannot fit is then refused. None checks nothing.
        hosts: their names or addresses, for torchrun; the others name their own.
        port: of the trainer's store; servers and weight receivers use the 64 above. None chooses one.
        time_limit: of a job, as Slurm writes it: minutes, `hours:minutes:seconds` or `days-hours:minutes:seconds`.
        warning_s: how long before the time limit the run is asked to save its checkpoint and end.
        setup: shell lines before each process, such as `module load cuda`.
        container: the image for Kubernetes; for the others the command before each process, such as
            `apptainer exec --nv run.sif`.
        options: further ones of the launcher: sbatch's by name, such as `{partition: gpu}`, Kubernetes' `namespace`
            and `runtime`, or Ray's `address`.
        server_options: with Slurm, sbatch's for the hosts that have servers alone, where these differ from the ranks';
            the job is then a heterogeneous one.
        recover: what happens when a process fails.
    """

    launcher: LauncherName = "local"
    nodes: int = 1
    gpus_per_node: int | None = None
    allocation: str | None = None
    ranks: int | None = None
    servers: int | None = None
    tp: int | None = None
    placement: Literal["separate", "colocated"] = "separate"
    gpu_memory_gb: float | None = None
    hosts: list[str] = field(default_factory=list)
    port: int | None = None
    time_limit: str | None = None
    warning_s: int = 300
    setup: list[str] = field(default_factory=list)
    container: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    server_options: dict[str, str] = field(default_factory=dict)
    recover: Recover = Recover()

    @classmethod
    def of(cls, section: JsonMapping) -> Launch:
        """Builds the settings from the section as the parser gives it."""
        return cls(**{**section, "recover": Recover(**(section.get("recover") or {}))})

    def __post_init__(self) -> None:
        check_bounds(1, nodes=self.nodes, gpus_per_node=self.gpus_per_node, ranks=self.ranks, tp=self.tp)
        check_bounds(0, servers=self.servers, warning_s=self.warning_s)
        if self.port is not None and not 1024 <= self.port <= 65535 - 64:
            raise ValueError(f"launch.port must be from 1024 to {65535 - 64}, got {self.port}.")
        if self.allocation is not None and (self.ranks, self.servers, self.tp) != (None, None, None):
            raise ValueError("Set launch.allocation, or launch.ranks, servers and tp, not both.")
        if self.launcher == "local" and self.nodes > 1:
            raise ValueError(
                f"launch.nodes={self.nodes} needs a launcher that reaches other hosts: slurm, ray, torchrun or "
                "kubernetes. local only starts processes on this machine."
            )
        if self.server_options and self.launcher != "slurm":
            raise ValueError(f"launch.server_options are Slurm's, but launch.launcher is {self.launcher}.")
        if self.hosts and len(self.hosts) != self.nodes:
            raise ValueError(f"launch.hosts must name all {self.nodes} nodes, got {len(self.hosts)}.")
        if self.launcher == "kubernetes" and self.container is None:
            raise ValueError("launcher: kubernetes needs launch.container, the image with lightrl and SGLang.")


@dataclass(frozen=True)
class Layout:
    """How many ranks and servers, and how the model is split."""

    ranks: int
    servers: int = 0
    tp: int = 1  # a server's
    placement: Literal["separate", "colocated"] = "separate"
    trainer_pp: int | None = None  # None: as the strategy says
    trainer_tp: int | None = None


def layout_of(launch: Launch, *, ranks: int, servers: int = 0, tp: int = 1) -> Layout:
    """The launch's layout; `ranks`, `servers` and `tp` are the run's own, which it uses where the launch says nothing.

    Raises:
        ValueError: if the allocation string cannot be read, or has parts that lightrl cannot train or serve.
    """
    if launch.allocation is not None:
        return _layout_of_parts(launch.allocation, parse_allocation(launch.allocation))
    return Layout(
        ranks=ranks if launch.ranks is None else launch.ranks,
        servers=servers if launch.servers is None else launch.servers,
        tp=tp if launch.tp is None else launch.tp,
        placement=launch.placement,
    )


def _layout_of_parts(text: str, groups: Sequence[Sequence[Part]]) -> Layout:
    def refused(why: str) -> ValueError:
        return ValueError(f"launch.allocation={text!r} is understood, but {why}.")

    parts = [part for group in groups for part in group]
    served = [part for part in parts if part.is_served]
    trained = [part for part in parts if part.num_gpus and not part.is_served]
    if not trained:
        raise refused("nothing in it trains. Use lightrl serve for servers alone, lightrl test for an evaluation")
    if len(served) > 1:
        raise refused("lightrl has one group of servers")
    if (
        len({part.num_gpus for part in trained}) > 1
        or sum(any(part in trained for part in group) for group in groups) > 1
    ):
        raise refused(
            "its trained models are on different GPUs. Give one part for all of them here, and in the model's section "
            "`mesh: {first_rank: …, num_ranks: …}` to each role that has ranks of its own"
        )
    model = trained[0]
    if {part.backend for part in served} - {"sglang"} or any(part.pp > 1 for part in served):
        raise refused("lightrl's servers are SGLang's, with d and t")
    for letter, size in (("c", model.cp), ("e", model.ep * model.expert_tp)):
        if size > 1:
            raise refused(f"lightrl's strategies split a model by d, p and t, not by {letter}")
    (servers,) = served or [Part("sglang", dp=0)]
    is_colocated = any(servers in group and model in group for group in groups)
    return Layout(
        model.num_gpus, servers.dp, servers.tp, "colocated" if is_colocated else "separate", model.pp, model.tp
    )
